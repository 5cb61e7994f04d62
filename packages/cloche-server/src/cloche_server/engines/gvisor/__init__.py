"""gVisor: the engine that runs everywhere, without KVM.

Words: *runsc* is gVisor's program, pinned by `cloche-engine`; the *sentry* is the process that is the guest's
kernel; the *gofer* is a helper that must exist while the sentry opens its disk layer and is ended right after
(`seal`); the *control socket* is the sentry's own RPC socket; the *placeholder* is an empty directory bound into
the guest only because runsc makes disk layers in the presence of a bind mount and not otherwise.

`command` is pure and on the standard library alone: the keeper imports it to build config.json and the command
line. `control` and `engine` run in the daemon. After `runsc create` no runsc command line is ever used: the
control socket, signals and pidfds do the rest.

Deliberately absent: `runsc exec`, `delete`, `state`, `wait` (each misreports from another namespace); networking
(the guest has loopback only); directfs; host directories of any kind.
"""
