"""The converter: the process that reads hostile archives, started by the keeper like an engine.

Words: *converter* is the program (`converter/` in the repository, Rust); a *worker* is one run of it, for one job; *mkfs*
is the static `mkfs.erofs` beside it, which the worker starts before it reads the first byte of an image.

It is no engine of sandboxes: it has no image and no guest, and nothing here implements `contract.Engine`. What it shares
with them is the keeper and its walls: a host uid of its own, a cgroup, namespaces, no capability. `images.worker` speaks to
it. Deliberately absent: a control socket, adoption (a daemon that starts ends what its predecessor left), any path.
"""
