"""How the node's processes come to life, and how nothing privileged stays behind.

Words: the *launcher* is the short-lived process of `cloche up`; the *daemon* is the node's main process, an
ordinary user without capabilities; the *keeper* is its child inside one big user namespace; a *mode* is `machine`
(started by root for all users of the machine, runs as the system user `cloche`) or `user` (nobody but the caller);
the *range* is the block of host ids that sandboxes get theirs from; to *delegate* is to give a user cgroup
directories of its own; a *weaker* mark is a wall that the caller gave up by name (`--accept`).

`up` prepares and starts (the command line is `__main__`), `prepare` checks and names what is missing, `cgroup`
finds, makes and removes delegated directories, `ids` the ranges, `reach` lets the system user read an
installation in a closed home, `keepers` starts, replaces and watches keepers from within the daemon.

Deliberately absent: any fall-back to fewer walls. What is missing is an error with a name and a fix; only
`--accept` goes past it, and is shown in every sandbox's isolation report.
"""

from cloche_server.node.launch.cgroup import delegate, undelegate

__all__ = ["delegate", "undelegate"]
