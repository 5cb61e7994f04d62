"""The one way out: the gate on the host.

A sandbox has no network. What wants out comes as a stream that its guest opens on its own channel; so the *gate*, one for each
sandbox, knows who asks. A stream becomes a *conversation* (HTTP proxy, SOCKS, a name's own address, a question for a name). A
conversation makes *attempts*; each goes through the *steps* in one list, in order: normalise, allow, approve, resolve, check, limit,
record, dial. What they let through becomes a *connection*: a *relay* moves its bytes; `forward` also reads the heads of plain HTTP.
An opaque connection is a *tunnel*. What the policy must see inside TLS goes through the *interceptor* (`intercepted`, `interception`).
A *slot* is the proxy address that one command was given. *Records* say what was tried and what came of it.

Sockets to the world are opened in `sockets` only, to an address that `check` has passed. Every byte of the guest, of a server and of a
name server is hostile: bounded in length, number and time.

Deliberately absent: caches of names, retries, proxies beyond ours, UDP, any knowledge of the node, the API, the engines; who
fulfils the protocols of `services` is the node's choice.
"""
