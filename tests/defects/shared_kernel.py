"""`runsc create` as a container runtime would do it: the agent becomes a process of the host's kernel.

    shared_kernel.py WORK-DIRECTORY AGENT SANDBOX

Planted in runsc's place by the defect ISO-1/shared-kernel. It leaves what the keeper looks for: a process named by a state
file, with a control socket that says yes to everything. Standard library only.
"""

import ctypes
import json
import os
import socket
import sys
import threading

MS_BIND, MS_REC = 0x1000, 0x4000
SHOWN = ("bin", "dev", "etc", "lib", "lib64", "proc", "tmp", "usr")
MADE = ("home", "workspace")

_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str | None, flags: int) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind)]
    if _libc.mount(*encoded, ctypes.c_ulong(flags), None) < 0:
        raise OSError(ctypes.get_errno(), f"mount on {target}")


def enter_root(root: str) -> None:
    """A root file system of the host's own directories."""
    os.mkdir(root)
    mount("root", root, "tmpfs", 0)
    for name in SHOWN:
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{root}/{name}")
        elif os.path.isdir(f"/{name}"):
            os.mkdir(f"{root}/{name}")
            mount(f"/{name}", f"{root}/{name}", None, MS_BIND | MS_REC)
    for name in MADE:
        os.mkdir(f"{root}/{name}", 0o777)
    os.chroot(root)
    os.chdir("/")


def answer(connection: socket.socket) -> None:
    while connection.recv(1 << 16):
        connection.sendall(b'{"success":true,"err":"","result":null}')


def serve(listener: socket.socket, agent: str, root: str) -> None:
    """The "sentry": starts the agent on the channel, which is our stdin."""
    os.setsid()
    if os.fork() == 0:
        program = os.open(agent, os.O_RDONLY)
        enter_root(root)
        os.execve(program, ["agent", "--no-mounts"], {"PATH": os.defpath})
    os.dup2(os.open("/dev/null", os.O_RDWR), 0)
    while True:
        threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()


def main(work: str, agent: str, sandbox: str) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{work}/s/runsc-{sandbox}.sock")
    listener.listen()
    pid = os.fork()
    if pid == 0:
        serve(listener, agent, f"{work}/f/root")
    with open(f"{work}/s/{sandbox}_sandbox:{sandbox}.state", "w") as state:
        json.dump({"sandbox": {"pid": pid}, "goferPid": 0}, state)


if __name__ == "__main__":
    main(*sys.argv[1:])
