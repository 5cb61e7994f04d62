"""What a command finds inside: no capability, no way to the agent, nothing of the host. Asked from within, by hostile code."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloche.client import Sandbox
from cloche.wire.errors import ClocheError
from cloche_server.egress.environment import environment
from tests.promises.nodes import RealNode

CAPABILITY_SETS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
USERS = (None, "0:0")
PACKAGE_INSTALL = {"CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "FSETID": 4, "SETGID": 6, "SETUID": 7, "SETFCAP": 31}
REFUSED = {"EPERM", "EACCES", "ESRCH"}
HEAD = """
import ctypes, errno, json, os, signal, socket, time
libc = ctypes.CDLL(None, use_errno=True)
def tried(call):
    try: return call() or "done"
    except OSError as e: return errno.errorcode[e.errno]
def called(name, *arguments):
    ctypes.set_errno(0)
    return "done" if libc[name](*arguments) != -1 else errno.errorcode[ctypes.get_errno()]
def status(pid="self"):
    return dict(line.rstrip("\\n").split(":", 1) for line in open(f"/proc/{pid}/status") if ":" in line)
found = {}
"""


@pytest.fixture(scope="module")
def box(node: RealNode) -> Iterator[Sandbox]:
    with node.sandbox(env={"ASKED": "for"}) as made:
        yield made


def inside(box: Sandbox, script: str, **more: Any) -> dict[str, Any]:
    """Runs hostile Python in there; what it puts into `found` comes back."""
    result = box.run(["python3", "-c", HEAD + script + "\nprint(json.dumps(found))"], **more)
    assert result.exit_code == 0, result.stderr
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


@pytest.mark.req("ISO-8")
@pytest.mark.parametrize("user", USERS)
def test_no_capability_in_any_set_and_no_way_to_new_ones(box: Sandbox, user: str | None) -> None:
    found = inside(
        box,
        """
found["caps"] = {name: status()[name].strip() for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")}
found["no_new_privs"] = libc.prctl(39, 0, 0, 0, 0)
found["bounding"] = [n for n in range(64) if libc.prctl(23, n, 0, 0, 0) == 1]
found["ids"] = [os.getresuid(), os.getresgid(), os.getgroups()]
""",
        user=user,
    )
    assert {int(value, 16) for value in found["caps"].values()} == {0}, found["caps"]
    assert found["no_new_privs"] == 1
    assert found["bounding"] == []
    own = 1000 if user is None else 0
    assert found["ids"][:2] == [[own] * 3, [own] * 3], "the image's user, unless another was asked for"
    assert set(found["ids"][2]) <= {own}


@pytest.mark.req("ISO-8")
@pytest.mark.parametrize("user", USERS)
def test_the_agent_cannot_be_signalled_traced_or_read(box: Sandbox, user: str | None) -> None:
    found = inside(
        box,
        """
for number in (9, 15, 19, 1, 10, 11):
    found[f"kill {number}"] = tried(lambda: os.kill(1, number))
found["killpg"] = tried(lambda: os.killpg(1, 9))
found["tgkill"] = called("syscall", 234, 1, 1, 9)
found["pidfd"] = tried(lambda: signal.pidfd_send_signal(os.pidfd_open(1), 9))
found["attach"] = called("ptrace", 16, 1, 0, 0)
found["seize"] = called("ptrace", 0x4206, 1, 0, 0)
for name in ("mem", "environ", "maps", "auxv", "stack", "syscall"):
    found[name] = tried(lambda: open(f"/proc/1/{name}", "rb").read(1) and "read")
found["mem write"] = tried(lambda: open("/proc/1/mem", "r+b") and "opened")
for name in ("exe", "cwd", "root"):
    found[name] = tried(lambda: os.readlink(f"/proc/1/{name}"))
found["fd"] = tried(lambda: os.listdir("/proc/1/fd") and "listed")
found["fd 0"] = tried(lambda: os.open("/proc/1/fd/0", os.O_RDWR) and "opened")
found["getfd"] = called("syscall", 438, os.pidfd_open(1), 0, 0)
found["vm read"] = called("syscall", 310, 1, 0, 0, 0, 0, 0)
found["setns"] = called("setns", os.pidfd_open(1), 0x00020000)
found["limits"] = called("prlimit", 1, 7, ctypes.create_string_buffer(16), None)
found["alive"] = status(1)["State"].split()[0]
""",
        user=user,
    )
    assert found.pop("alive") in ("S", "R", "D"), found
    missing = {"ENOENT", "ENOSYS"}  # a file or call that this kernel has not got at all
    done = {deed: how for deed, how in found.items() if how not in REFUSED | missing}
    done.pop("vm read", None)  # nothing was asked to be read: looked at below
    assert done == {}
    assert box.run(["true"]).exit_code == 0, "the agent lives and answers"


@pytest.mark.req("ISO-8")
@pytest.mark.parametrize("user", USERS)
def test_the_agents_memory_is_out_of_reach(box: Sandbox, user: str | None) -> None:
    found = inside(
        box,
        """
class Vec(ctypes.Structure): _fields_ = [("base", ctypes.c_void_p), ("len", ctypes.c_size_t)]
buffer = ctypes.create_string_buffer(16)
local = Vec(ctypes.addressof(buffer), 16)
results = []
for base in (0x400000, 0x200000, 0x555555554000, 0x7ffffffde000):
    remote = Vec(base, 16)
    for name in ("process_vm_readv", "process_vm_writev"):
        results.append(called(name, 1, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0))
found["results"] = results
""",
        user=user,
    )
    assert set(found["results"]) <= REFUSED | {"ENOSYS"}, found


@pytest.mark.req("ISO-8")
def test_killing_everything_ends_only_the_command(box: Sandbox) -> None:
    for user in USERS:
        result = box.run("trap '' TERM; kill -9 -1; kill -9 1; kill -STOP 1; echo still here", user=user)
        assert str(result.ended) in ("signalled", "exited"), result
        assert box.run(["echo", "alive"]).stdout == "alive\n"


@pytest.mark.req("ISO-8")
def test_the_agents_own_user_is_never_given(node: RealNode, box: Sandbox) -> None:
    for user in ("64000", "64000:64000", "1000:64000", "64000:1000", "0:64000"):
        with pytest.raises(ClocheError) as command:
            box.run(["id"], user=user)
        with pytest.raises(ClocheError) as file:
            box.files.write("/tmp/x", b"x", user=user)
        with node.client() as client, pytest.raises(ClocheError) as create:
            Sandbox.create(node=client, user=user)
        assert {each.value.code for each in (command, file, create)} == {"no_such_user"}, user
    with node.sandbox(user="0:0") as named:  # where the image has a name for it, the agent knows
        assert named.run("echo own:x:64000:64000::/: >> /etc/passwd").ok
        assert str(named.run(["id"], user="own").ended) == "not_started"
        with pytest.raises(ClocheError):
            named.files.write("/tmp/x", b"x", user="own")
    found = inside(box, 'found["set"] = [tried(lambda: os.setuid(64000)), tried(lambda: os.setgid(64000))]', user="0:0")
    assert found["set"] == ["EPERM", "EPERM"], "not even root inside can become it"


@pytest.mark.req("ISO-8")
def test_privileges_are_exactly_the_named_ones_and_are_shown(node: RealNode) -> None:
    wanted = sum(1 << number for number in PACKAGE_INSTALL.values())
    with node.sandbox(privileges="package-install", user="0:0") as box:
        assert box.info().privileges == "package-install"
        shown = json.loads(node.cloche("ps", "--json").stdout)["sandboxes"]
        assert [one["privileges"] for one in shown if one["id"] == box.id] == ["package-install"]
        found = inside(
            box,
            """
found["caps"] = {name: status()[name].strip() for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")}
found["no_new_privs"] = libc.prctl(39, 0, 0, 0, 0)
found["mount"] = called("mount", b"tmpfs", b"/mnt", b"tmpfs", 0, None)
found["kill"] = tried(lambda: os.kill(1, 9))
found["chown"] = tried(lambda: (open("/tmp/f", "w"), os.chown("/tmp/f", 12, 12)) and "done")
""",
        )
        caps = {name: int(value, 16) for name, value in found["caps"].items()}
        assert {caps["CapPrm"], caps["CapEff"], caps["CapBnd"]} == {wanted}, {k: hex(v) for k, v in caps.items()}
        assert caps["CapInh"] in (0, wanted)
        assert caps["CapAmb"] in (0, wanted)
        assert (found["mount"], found["kill"], found["chown"]) == ("EPERM", "EPERM", "done")
        assert found["no_new_privs"] == 1
    with node.sandbox() as box:
        assert box.info().privileges == "none"


@pytest.mark.req("ISO-6")
@pytest.mark.req("FS-1")
def test_no_mount_is_the_hosts(node: RealNode, box: Sandbox) -> None:
    found = inside(box, 'found["mounts"] = [line.split() for line in open("/proc/mounts")]')
    mounts = {fields[1]: (fields[2], set(fields[3].split(","))) for fields in found["mounts"]}
    print(f"mounts inside: { {place: kind for place, (kind, _) in mounts.items()} }")
    kinds = {"overlay", "tmpfs", "proc", "sysfs", "devpts", "erofs", "devtmpfs", "dev", "none", "9p", "cgroup"}
    assert {kind for kind, _ in mounts.values()} <= kinds
    # The one bind (what makes runsc use a disk layer) is an empty, read-only directory.
    binds = {place: options for place, (kind, options) in mounts.items() if kind in ("9p", "none")}
    assert set(binds) <= {"/.cloche/placeholder"}
    assert all("ro" in options for options in binds.values())
    inner = inside(
        box,
        """
found["placeholder"] = os.listdir("/.cloche/placeholder") if os.access("/.cloche/placeholder", os.R_OK) else []
found["host"] = [p for p in HOST if os.path.exists(p)]
""".replace("HOST", repr([str(node.base), str(Path(__file__).parents[2]), "/.cloche/config.json", "/work"])),
    )
    assert inner == {"placeholder": [], "host": []}


@pytest.mark.req("FS-1")
def test_tmp_has_no_set_user_id_and_no_devices(box: Sandbox, node: RealNode) -> None:
    script = """
options = {line.split()[1]: line.split()[3].split(",") for line in open("/proc/mounts")}
found["tmp"] = options.get("/tmp", [])
found["shm"] = options.get("/dev/shm", [])
found["mode"] = oct(os.stat("/tmp").st_mode & 0o7777)
found["mknod"] = [tried(lambda: os.mknod(f"{d}/null", 0o20666, os.makedev(1, 3))) for d in ("/tmp", "/dev/shm", "/root")]
open("/tmp/id", "wb").write(open("/usr/bin/id", "rb").read())
os.chmod("/tmp/id", 0o6755)
found["euid"] = os.popen("/tmp/id -u").read().strip()
"""
    found = inside(box, script, user="0:0")
    assert {"nosuid", "nodev"} <= set(found["tmp"]), found
    assert "nosuid" in found["shm"], found
    assert found["mode"] == "0o1777"
    assert set(found["mknod"]) == {"EPERM"}, "no device can be made at all"
    assert box.run("/tmp/id -u").stdout == "1000\n", "a set-user-id file of root's gives nothing"
    with node.sandbox(noexec_tmp=True) as strict:
        ran = strict.run("cp /usr/bin/id /tmp/id && /tmp/id; grep ' /tmp ' /proc/mounts")
        assert "Permission denied" in ran.stderr, ran
        assert {"noexec", "nosuid", "nodev"} <= set(ran.stdout.split()[3].split(",")), ran


@pytest.mark.req("FS-1")
@pytest.mark.req("ISO-8")
@pytest.mark.parametrize("user", USERS)
def test_nothing_can_be_mounted_over_or_away(box: Sandbox, user: str | None) -> None:
    found = inside(
        box,
        """
places = [line.split()[1] for line in open("/proc/mounts")]
for place in places:
    path = place.encode()
    found[f"umount {place}"] = called("umount2", path, 2)
    found[f"remount {place}"] = called("mount", None, path, None, 32, None)
    found[f"remount exec {place}"] = called("mount", None, path, None, 32 | 0x1000, None)
found["tmpfs"] = called("mount", b"tmpfs", b"/tmp", b"tmpfs", 0, None)
found["bind"] = called("mount", b"/", b"/tmp", None, 4096, None)
found["proc"] = called("mount", b"proc", b"/proc", b"proc", 0, None)
found["pivot"] = called("syscall", 155, b"/tmp", b"/tmp")
found["chroot"] = called("chroot", b"/tmp")
found["sethostname"] = called("sethostname", b"x", 1)
found["reboot"] = called("reboot", 0x1234567)
found["module"] = called("syscall", 175, b"", 0, b"")
""",
        user=user,
    )
    done = {deed: how for deed, how in found.items() if how not in REFUSED | {"ENOSYS", "EINVAL"}}
    assert done == {}
    assert not [deed for deed, how in found.items() if how == "EINVAL" and deed in ("tmpfs", "bind", "umount /")]


@pytest.mark.req("FS-1")
def test_the_image_is_the_same_for_the_next_sandbox(node: RealNode) -> None:
    with node.sandbox(user="0:0") as first, node.sandbox(user="0:0") as second:
        wrote = first.run("echo mine > /etc/motd; echo evil > /usr/bin/id; rm /usr/bin/env; cat /usr/bin/id")
        assert wrote.stdout == "evil\n", "its own layer takes it"
        assert second.run("test -s /usr/bin/env && cat /etc/motd; id -u").stdout.endswith("0\n")
        assert "mine" not in second.run("cat /etc/motd").stdout
    with node.sandbox() as after:
        assert after.run("id -u").stdout == "1000\n"


@pytest.mark.req("EXE-1")
@pytest.mark.req("ISO-6")
def test_no_network_but_itself(box: Sandbox) -> None:
    found = inside(
        box,
        """
found["interfaces"] = [name for _, name in socket.if_nameindex()]
found["dev"] = [line.split(":")[0].strip() for line in open("/proc/net/dev") if ":" in line]
found["routes"] = open("/proc/net/route").read().splitlines()[1:]
began = time.monotonic()
for name, family, address in (
    ("ip", socket.AF_INET, ("8.8.8.8", 53)), ("metadata", socket.AF_INET, ("169.254.169.254", 80)),
    ("private", socket.AF_INET, ("10.0.0.1", 80)), ("ip6", socket.AF_INET6, ("2001:4860:4860::8888", 53)),
):
    found[name] = tried(lambda: socket.socket(family, socket.SOCK_STREAM).connect(address))
    found[name + " udp"] = tried(lambda: socket.socket(family, socket.SOCK_DGRAM).sendto(b"x", address) and "sent")
found["seconds"] = time.monotonic() - began
found["raw"] = tried(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1) and "made")
found["packet"] = tried(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3) and "made")
found["vsock"] = tried(lambda: socket.socket(40, socket.SOCK_STREAM).connect((2, 1)) and "connected")
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
server.accept()[0].sendall(b"own")
found["own"] = client.recv(3).decode()
""",
    )
    assert (set(found["interfaces"]), set(found["dev"])) == ({"lo"}, {"lo"})
    assert [line for line in found["routes"] if not line.startswith("lo")] == []
    unreachable = {"ENETUNREACH", "EHOSTUNREACH", "EADDRNOTAVAIL", "EAFNOSUPPORT"}
    for name in ("ip", "metadata", "private", "ip6"):
        assert {found[name], found[name + " udp"]} <= unreachable, (name, found)
    assert found["seconds"] < 2, "refused at once: no packet is waited for"
    assert found["raw"] in REFUSED | {"EPROTONOSUPPORT", "ESOCKTNOSUPPORT"}, found
    assert found["packet"] in REFUSED | {"EPROTONOSUPPORT", "EAFNOSUPPORT"}, found
    assert found["vsock"] not in ("connected", "done"), found
    assert found["own"] == "own", "its own loopback works"
    lookup = box.run(["python3", "-c", "import socket; socket.getaddrinfo('example.com', 80)"], timeout_s=20)
    assert "gaierror" in lookup.stderr


@pytest.mark.req("ISO-6")
def test_the_environment_is_what_was_set_and_nothing_else(node: RealNode, box: Sandbox) -> None:
    expected = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/home/user",
        "USER": "user",
        "LOGNAME": "user",
        "CLOCHE_SANDBOX_ID": box.id,
        "ASKED": "for",
        "OWN": "one",
        **environment(1, trust=False),
    }
    found = box.run(["env", "-0"], env={"OWN": "one"}).stdout.rstrip("\0").split("\0")
    assert dict(item.split("=", 1) for item in found) == expected
    daemon = Path(f"/proc/{node.pid}/environ").read_bytes().split(b"\0")
    hosts = {item.partition(b"=")[2].decode(errors="replace") for item in daemon if len(item) > 20}
    everything = box.run(
        "cat /proc/*/environ /proc/cmdline /proc/*/cmdline /proc/version /etc/hostname /etc/machine-id 2>/dev/null; hostname",
        user="0:0",
    ).stdout
    leaked = [value for value in hosts | {os.uname().nodename} if len(value) > 3 and value in everything]
    leaked = [value for value in leaked if value not in expected.values()]
    assert leaked == []


@pytest.mark.req("ISO-6")
def test_no_socket_device_or_secret_of_the_host(box: Sandbox) -> None:
    found = inside(
        box,
        """
paths = ["/var/run/docker.sock", "/run/docker.sock", "/run/containerd/containerd.sock", "/run/systemd/notify",
         "/run/dbus/system_bus_socket", "/run/secrets", "/var/run/secrets/kubernetes.io", "/dev/kvm", "/dev/vda",
         "/dev/mem", "/dev/kmsg", "/proc/kcore", "/proc/keys"]
found["there"] = [path for path in paths if tried(lambda: os.stat(path) and "there") == "there"]
found["dev"] = sorted(os.listdir("/dev"))
sockets = []
for top, directories, files in os.walk("/", followlinks=False):
    directories[:] = [d for d in directories if os.path.join(top, d) not in ("/proc", "/sys", "/usr")]
    for name in files:
        path = os.path.join(top, name)
        kind = tried(lambda: oct(os.lstat(path).st_mode & 0o170000))
        if kind in ("0o140000", "0o60000"): sockets.append(path)
found["sockets"] = sockets
found["unix"] = open("/proc/net/unix").read().splitlines()[1:] if os.path.exists("/proc/net/unix") else []
found["descriptors"] = [tried(lambda: os.readlink(f"/proc/self/fd/{fd}")) for fd in sorted(os.listdir("/proc/self/fd"))[3:]]
""",
        user="0:0",
    )
    print(f"/dev inside: {found['dev']}")
    assert found["sockets"] == []
    assert [path for path in found["there"] if path != "/proc/kcore"] == [], found["there"]
    assert not [path for path in found["unix"] if "/" in path.split()[-1]], found["unix"]
    assert len(found["descriptors"]) <= 1, "0, 1, 2 and the directory that is being listed"


@pytest.mark.req("ISO-8")
def test_a_user_namespace_inside_wins_nothing(box: Sandbox) -> None:
    found = inside(
        box,
        """
if os.fork() == 0:
    how = called("unshare", 0x10000000 | 0x00020000)
    found["unshare"] = how
    found["kill"] = tried(lambda: os.kill(1, 9))
    found["mem"] = tried(lambda: open("/proc/1/mem", "rb").read(1) and "read")
    found["umount"] = called("umount2", b"/tmp", 2)
    found["remount"] = called("mount", None, b"/", None, 32, None)
    print(json.dumps(found), flush=True)
    os._exit(0)
os.wait()
os._exit(0)
""",
    )
    assert {found["kill"], found["mem"]} <= REFUSED, found
    assert found["umount"] in REFUSED | {"EINVAL"}, found
    assert box.run("grep -c ' /tmp ' /proc/mounts").stdout == "1\n", "the others still have their /tmp"
