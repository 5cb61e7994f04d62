"""QEMU: a microVM by emulation. Experimental: it is here to keep the engine contract honest.

Words: a *microVM* is QEMU's `microvm` machine with Debian's stock kernel, started without firmware menus, disks
or network; the *VMM* is the QEMU process; the *monitor* is QEMU's control socket (QMP: JSON, one document a line);
the *carrier* is one virtio-serial port, whose host end is the same inherited socketpair as with every engine.

`command` is pure and on the standard library alone: the keeper imports it to build the command line. `monitor` and
`engine` run in the daemon. Everything that comes back on the monitor is a guest's word: bounded in bytes and time.

The kernel, the initramfs (the agent as /init, a few modules) come from `tools/build_microvm.sh`; the root image is
the same EROFS file that gVisor uses, below an overlay in the guest's own memory: so the disk limit is at
most half of that memory for now, and `isolation().weaker` says so.

Deliberately absent: KVM, PCI, ACPI tables from outside, a serial console, networking, snapshots, host directories.
"""
