"""Dockerfile builds: each step runs in a sandbox of its own stage, never on the host.

`parse` reads (in a process of its own), `stages` plans, `steps` follows the variables and the config, `cachekey` names what each step
makes, `context` chooses what is copied, `builder` does it through the protocols of `protocols`.

Deliberately absent: sockets, host paths, knowledge of the node.
"""
