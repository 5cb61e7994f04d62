"""Cloche's server side: the node daemon, its keeper, and the rooms they are made of.

`api` speaks HTTP and knows one Backend; `node` implements it on one machine; `channel` talks to a sandbox's agent;
`keeper` starts and holds engine processes; `engines` know how each engine is driven.

Deliberately absent: anything that a caller imports (that is the package `cloche`), and any binary (`cloche-engine`).
"""
