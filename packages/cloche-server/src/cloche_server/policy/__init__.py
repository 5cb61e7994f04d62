"""What a sandbox may reach: rules, and decisions about them.

A *target* is a host and a port; a host is compared only in its one normal form (`names`). A *rule* says allow, ask or
deny of a host (a name, `*.suffix`, an address), ports, and perhaps methods and paths (`rules`, `paths`). The
*organisation's file* (`document`) has four tiers: deny, allow, offer, default. From it, a request's rules and the
*grants* of a running sandbox comes the effective *policy* (`decide`), which answers one connection or one request with a
*decision*: its effect, the rule, a code, a text for a person. A *preset* is a list of rules by name (`presets`).
`addresses` says which addresses nobody is let through to, whatever the name.

Pure but for two edges: `document.load` reads a file, and `operator_tools` asks the operator's pip, npm, apt and cargo.

Deliberately absent: name resolution, sockets, time (a grant ends when its owner takes it away), regular expressions as
rules, networks (CIDR) as exceptions, any knowledge of the gate, the node or the API.
"""
