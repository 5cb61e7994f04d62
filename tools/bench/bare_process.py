"""Runs runsc bare: `python -I -S bare_process.py`, one JSON line in, one out. Standard library only.

A process of its own because a fork costs by the size of what is forked: the keeper is as small as this. The order
of what the child does is the keeper's (`keeper/spawn.py`), written down again so that neither can favour the other.

    {"argv": [...], "cgroups": [dir...], "meminfo": file, "host_id": n, "until": "output" | "exit"}
        a child in the cgroups, with a user namespace of two ids and a mount namespace, becomes argv.
        -> {"s": seconds from the fork to the first byte of its output, or to its exit; "status": ...}
    {..., "join": pid}      the same in the namespaces of that process's parent namespace (for `runsc exec`)
    {"kill": [pid...]}      ends and reaps these children
"""

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import sys
import time
from typing import Any, NoReturn

CLONE_NEWUSER, CLONE_NEWNS = 0x10000000, 0x20000
MS_BIND, MS_REC, MS_SLAVE = 0x1000, 0x4000, 0x80000
NS_GET_PARENT = 0xB702
PR_SET_CHILD_SUBREAPER = 36
NOBODY = 65534
libc = ctypes.CDLL(None, use_errno=True)


def check(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def put(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    os.write(fd, text.encode())
    os.close(fd)


def run(ask: dict[str, Any]) -> dict[str, Any]:
    joined = namespace_of(ask["join"]) if "join" in ask else -1
    ready, go, output = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
    began = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        become(ask, joined, ready[1], go[0], output[1])
    os.close(output[1])
    if joined < 0:
        assert os.read(ready[0], 1) == b"u"
        for name in ("uid_map", "gid_map"):
            put(f"/proc/{pid}/{name}", f"0 {ask['host_id']} 1\n{NOBODY} {ask['host_id'] + 1} 1\n")
        os.write(go[1], b"g")
    if ask["until"] == "output":
        said = os.read(output[0], 4096)
        seconds = time.perf_counter() - began
        _, status = os.waitpid(pid, 0)
    else:
        _, status = os.waitpid(pid, 0)
        seconds = time.perf_counter() - began
        said = os.read(output[0], 4096) if status else b""
    for fd in (*ready, *go, output[0], joined):
        if fd >= 0:
            os.close(fd)
    return {"s": seconds, "status": status, "said": said.decode(errors="replace")}


def become(ask: dict[str, Any], joined: int, ready: int, go: int, output: int) -> NoReturn:
    try:
        for directory in ask["cgroups"]:
            put(directory, "0")
        if joined >= 0:
            check(libc.setns(joined, CLONE_NEWUSER))
            check(libc.unshare(CLONE_NEWNS))
        else:
            check(libc.unshare(CLONE_NEWUSER | CLONE_NEWNS))
            os.write(ready, b"u")
            assert os.read(go, 1) == b"g"
        os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        if joined < 0:
            check(libc.mount(None, b"/", None, ctypes.c_ulong(MS_REC | MS_SLAVE), None))
            check(libc.mount(os.fsencode(ask["meminfo"]), b"/proc/meminfo", None, ctypes.c_ulong(MS_BIND), None))
        null = os.open("/dev/null", os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.closerange(3, 1 << 20)
        os.chdir("/")
        os.execve(ask["argv"][0], ask["argv"], {"PATH": "/usr/bin:/bin"})
    except BaseException as failure:  # the child must not unwind into its parent
        os.write(output, f"spawn: {failure!r}\n".encode())
    finally:
        os._exit(121)


def namespace_of(pid: int) -> int:
    """The two-id namespace: the parent of the one that the sentry made for itself."""
    own = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY)
    try:
        return fcntl.ioctl(own, NS_GET_PARENT)
    finally:
        os.close(own)


def kill(pids: list[int]) -> dict[str, Any]:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    return {}


def main() -> None:
    check(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
    for line in sys.stdin:
        ask = json.loads(line)
        answer = kill(ask["kill"]) if "kill" in ask else run(ask)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
