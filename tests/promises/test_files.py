"""EXE-6, FS-1, FS-2: files and trees both ways, errors file by file, and paths that stay inside."""
# size: three requirements about the same calls; what they share is in trees.py and wires.py

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloche.client import Sandbox
from cloche.errors import (
    ClocheError,
    IsADirectory,
    NameTooLong,
    NoSpace,
    NotADirectory,
    NotEmpty,
    PathExists,
    PathLoop,
    PathNotFound,
    PermissionDenied,
)
from cloche.wire.files import WatchEvent
from tests.promises.nodes import RealNode, wait_until
from tests.promises.trees import ODD_NAMES, make_tree, tree_of
from tests.promises.wires import MIB, Wire, peak_of, sha256, written

GROWN_MAX = 64 * MIB


@pytest.fixture(scope="module")
def box(node: RealNode) -> Iterator[Sandbox]:
    with node.sandbox(ttl_s=3600) as made:
        yield made


@pytest.fixture
def folder(box: Sandbox, request: pytest.FixtureRequest) -> str:
    """A directory inside for one test."""
    path = f"/workspace/{request.node.name[:40]}"
    box.files.mkdir(path)
    return path


# -------------------------------------------------------------------- size


@pytest.mark.req("EXE-6")
@pytest.mark.timeout(900)
def test_a_large_file_both_ways(node: RealNode, seed: int, long_run: bool, tmp_path: Path) -> None:
    mib = 1024 if long_run else 64
    expected = sha256(written(mib, seed))
    with node.sandbox(disk_mb=mib + 512, memory_mb=512) as box, peak_of(node.pid) as peak:
        start = time.monotonic()
        assert box.files.write("/workspace/large", written(mib, seed)) == mib * MIB
        up = time.monotonic() - start
        inside = box.run("sha256sum < /workspace/large", check=True).stdout.split()[0]
        start = time.monotonic()
        digest = sha256(box.files.read_parts("/workspace/large"))
        down = time.monotonic() - start
        assert (
            box.files.read("/workspace/large", offset=5 * MIB - 3, length=11)
            == (b"".join(written(6, seed))[5 * MIB - 3 :][:11])
        )
        local = tmp_path / "large"
        assert node.cloche("cp", f"{box.id}:/workspace/large", str(local), timeout_s=600).returncode == 0
        with local.open("rb") as file:
            copied = sha256(iter(lambda: file.read(MIB), b""))
    assert (inside, digest, copied) == (expected, expected, expected)
    print(
        f"{mib} MiB: up {mib / up:.0f} MiB/s, down {mib / down:.0f} MiB/s; the daemon grew {peak.grown / MIB:.1f} MiB"
    )
    assert peak.grown < GROWN_MAX


@pytest.mark.req("EXE-6")
@pytest.mark.timeout(900)
def test_a_tree_both_ways(node: RealNode, seed: int, long_run: bool, tmp_path: Path) -> None:
    """By the SDK and by `cloche cp`: content, modes, links and odd names are the same afterwards."""
    count = 10_000 if long_run else 2_000
    local = tmp_path / "local"
    local.mkdir()
    make_tree(local, count, seed)
    expected = tree_of(local)
    with node.sandbox() as box, peak_of(node.pid) as peak:
        start = time.monotonic()
        sent = box.files.upload(local, "/workspace/sdk")
        up = time.monotonic() - start
        assert (sent.errors, sent.errors_more) == ([], 0)
        assert box.run("find /workspace/sdk -type f | tr -cd '\\n' | wc -c", check=True).stdout.strip() == str(
            count + 1 + len(ODD_NAMES) + 1  # one name has a line break in it
        )
        start = time.monotonic()
        got = box.files.download("/workspace/sdk", tmp_path / "sdk")
        down = time.monotonic() - start
        assert (got.errors, got.errors_more) == ([], 0)
        assert tree_of(tmp_path / "sdk") == expected
        done = node.cloche("cp", str(local), f"{box.id}:/workspace/cp")
        assert (done.returncode, done.stdout) == (0, b""), done.stderr
        done = node.cloche("cp", f"{box.id}:/workspace/cp", str(tmp_path / "cp"))
        assert (done.returncode, done.stdout) == (0, b""), done.stderr
        assert tree_of(tmp_path / "cp") == expected
    print(
        f"{count} files: up {count / up:.0f}/s, down {count / down:.0f}/s; the daemon grew {peak.grown / MIB:.1f} MiB"
    )
    assert peak.grown < GROWN_MAX


@pytest.mark.req("EXE-6")
def test_cp_goes_where_cp_goes(node: RealNode, box: Sandbox, folder: str, tmp_path: Path) -> None:
    """A target that is a directory gets the copy inside it; otherwise the target becomes the copy."""
    (tmp_path / "one").write_bytes(b"one")
    (tmp_path / "tree" / "sub").mkdir(parents=True)
    (tmp_path / "tree" / "sub" / "two").write_bytes(b"two")
    for source, target in (("one", "one"), ("one", "renamed"), ("tree", "whole"), ("tree", "")):
        assert node.cloche("cp", str(tmp_path / source), f"{box.id}:{folder}/{target}").returncode == 0
    found = {entry.path.removeprefix(f"{folder}/") for entry in box.files.list(folder, depth=9)}
    assert found == {"one", "renamed", "whole", "whole/sub", "whole/sub/two", "tree", "tree/sub", "tree/sub/two"}
    (tmp_path / "here").mkdir()
    assert node.cloche("cp", f"{box.id}:{folder}/whole", str(tmp_path / "here")).returncode == 0
    assert (tmp_path / "here" / "whole" / "sub" / "two").read_bytes() == b"two"
    missing = node.cloche("cp", f"{box.id}:{folder}/missing", str(tmp_path / "x"))
    assert (missing.returncode, b"path_not_found" in missing.stderr) == (1, True)
    assert not (tmp_path / "x").exists()
    assert node.cloche("cp", str(tmp_path / "missing"), f"{box.id}:{folder}/x").returncode != 0


@pytest.mark.req("EXE-6")
def test_errors_come_file_by_file(node: RealNode, box: Sandbox, folder: str, tmp_path: Path) -> None:
    """What can be copied is; what cannot is named, with its reason."""
    box.run(
        f"cd {folder} && mkdir tree && cd tree && echo a > readable && echo b > closed && chmod 0 closed", check=True
    )
    box.run(f"cd {folder}/tree && mkdir shut && echo c > shut/in && chmod 0 shut && mkfifo pipe", check=True)
    got = box.files.download(f"{folder}/tree", tmp_path / "out")
    assert {(error.path, error.code) for error in got.errors} == {
        ("closed", "permission_denied"),
        ("shut/", "permission_denied"),
        ("pipe", "unsupported"),
    }
    assert (tmp_path / "out" / "readable").read_bytes() == b"a\n"
    assert not (tmp_path / "out" / "closed").exists()
    done = node.cloche("cp", f"{box.id}:{folder}/tree", str(tmp_path / "again"))
    assert done.returncode == 1
    assert b"permission_denied" in done.stderr
    assert b"closed" in done.stderr
    (tmp_path / "up").mkdir()
    for name in ("taken", "fresh"):
        (tmp_path / "up" / name).write_bytes(b"new")
    box.files.write(f"{folder}/in/taken", "old")
    sent = box.files.upload(tmp_path / "up", f"{folder}/in")
    assert [(error.path, error.code) for error in sent.errors] == [("taken", "path_exists")]
    assert (box.files.read(f"{folder}/in/taken"), box.files.read(f"{folder}/in/fresh")) == (b"old", b"new")
    assert box.files.upload(tmp_path / "up", f"{folder}/in", overwrite=True).errors == []
    assert box.files.read(f"{folder}/in/taken") == b"new"


# -------------------------------------------------------------------- one file at a time


@pytest.mark.req("EXE-6")
def test_list_stat_move_remove_mkdir(box: Sandbox, folder: str) -> None:
    files = box.files
    files.write(f"{folder}/a/b/c", b"12345", mode=0o640)
    entry = files.stat(f"{folder}/a/b/c")
    assert (entry.name, entry.type, entry.size, entry.mode & 0o7777, entry.user) == ("c", "file", 5, 0o640, "user")
    assert abs(entry.mtime_ns / 1e9 - time.time()) < 600
    box.run(f"ln -s a/b/c {folder}/link; mkfifo {folder}/fifo", check=True)
    assert (files.stat(f"{folder}/link").type, files.stat(f"{folder}/link", follow=False).target) == ("file", "a/b/c")
    assert {(found.name, found.type) for found in files.list(folder)} == {
        ("a", "dir"),
        ("link", "symlink"),
        ("fifo", "fifo"),
    }
    deep = [found.path.removeprefix(folder) for found in files.list(folder, depth=5)]
    assert sorted(deep) == ["/a", "/a/b", "/a/b/c", "/fifo", "/link"]
    files.write(f"{folder}/a/b/c", b"678", append=True)
    assert files.read_text(f"{folder}/a/b/c") == "12345678"
    files.mkdir(f"{folder}/m/n", mode=0o700)
    assert files.stat(f"{folder}/m/n").mode & 0o777 == 0o700
    files.mkdir(f"{folder}/m/n")  # as mkdir -p
    files.move(f"{folder}/a/b/c", f"{folder}/m/n/c")
    files.write(f"{folder}/other", "x")
    with pytest.raises(PathExists):
        files.move(f"{folder}/other", f"{folder}/m/n/c")
    files.move(f"{folder}/other", f"{folder}/m/n/c", overwrite=True)
    assert files.read(f"{folder}/m/n/c") == b"x"
    assert files.remove(f"{folder}/m", recursive=True) == 3
    assert files.remove(f"{folder}/link") == 1


@pytest.mark.req("EXE-6")
def test_each_mistake_has_its_name(box: Sandbox, folder: str) -> None:
    files = box.files
    files.write(f"{folder}/file", "x")
    files.mkdir(f"{folder}/dir/sub")
    box.run(f"cd {folder}; ln -s loop loop; ln -s gone dangling", check=True)
    mistakes = [
        (PathNotFound, lambda: files.read(f"{folder}/missing")),
        (PathNotFound, lambda: files.stat(f"{folder}/dangling")),
        (PathNotFound, lambda: files.write(f"{folder}/no/parents", "x", parents=False)),
        (IsADirectory, lambda: files.read(f"{folder}/dir")),
        (IsADirectory, lambda: files.write(f"{folder}/dir", "x")),
        (NotADirectory, lambda: files.read(f"{folder}/file/below")),
        (NotADirectory, lambda: files.list(f"{folder}/file")),
        (NotEmpty, lambda: files.remove(f"{folder}/dir")),
        (PathExists, lambda: files.mkdir(f"{folder}/dir", parents=False)),
        (PathLoop, lambda: files.read(f"{folder}/loop")),
        (NameTooLong, lambda: files.write(f"{folder}/{'n' * 256}", "x")),
        (PathNotFound, lambda: files.remove(f"{folder}/missing")),
    ]
    for number, (kind, act) in enumerate(mistakes):
        with pytest.raises(ClocheError) as raised:
            act()
        assert type(raised.value) is kind, (number, raised.value.code, raised.value.message)


@pytest.mark.req("EXE-6")
def test_a_file_appears_whole_or_not_at_all(node: RealNode, box: Sandbox, folder: str) -> None:
    def breaks_off() -> Iterator[bytes]:
        yield bytes(3 * MIB)
        raise OSError(errno.EIO, "the source broke")

    box.files.write(f"{folder}/kept", "before")
    with pytest.raises((OSError, ClocheError)):
        box.files.write(f"{folder}/kept", breaks_off())
    wait_until(lambda: [found.name for found in box.files.list(folder)] == ["kept"], 5, "no part of it is left")
    assert box.files.read(f"{folder}/kept") == b"before"


@pytest.mark.req("EXE-6")
def test_watch(box: Sandbox, folder: str) -> None:
    seen: list[WatchEvent] = []
    begun, enough = threading.Event(), threading.Event()

    def look() -> None:
        for event in box.files.watch(folder, recursive=True):
            begun.set()
            seen.append(event)
            if event.path.endswith("/last"):
                enough.set()
                return

    thread = threading.Thread(target=look, daemon=True)
    thread.start()

    def poke() -> bool:
        box.files.write(f"{folder}/first", "x")
        return begun.is_set()

    wait_until(poke, what="the watch has begun")
    script = (
        "mkdir sub && sleep 0.3 && echo 1 > sub/one && mv sub/one sub/two && rm sub/two && chmod 700 sub && touch last"
    )
    box.run(f"cd {folder} && {script}", check=True)
    assert enough.wait(20), seen
    thread.join(20)
    kinds = {(event.type, event.path.removeprefix(f"{folder}/")) for event in seen}
    assert {("created", "sub"), ("removed", "sub/two"), ("created", "last")} <= kinds, kinds
    assert [event for event in seen if event.type == "created" and event.path.endswith("sub") and event.dir]
    moved = [event for event in seen if event.type == "renamed"]
    assert [(event.source, event.path) for event in moved if event.path.endswith("two")] == [
        (f"{folder}/sub/one", f"{folder}/sub/two")
    ]


# -------------------------------------------------------------------- names, users, paths


@pytest.mark.req("EXE-6")
@pytest.mark.req("FS-2")
def test_odd_names(node: RealNode, box: Sandbox, folder: str, tmp_path: Path) -> None:
    names = [os.fsdecode(name) for name in ODD_NAMES]
    for number, name in enumerate(names):
        box.files.write(f"{folder}/{name}", str(number))
        assert box.files.stat(f"{folder}/{name}").name == name
        assert box.files.read(f"{folder}/{name}") == str(number).encode()
    assert {entry.name for entry in box.files.list(folder)} == set(names)
    program = "import os,sys; sys.stdout.buffer.write(b'\\0'.join(sorted(os.listdir(os.fsencode(sys.argv[1])))))"
    inside = box.run(["python3", "-c", program, folder], check=True).stdout_bytes
    assert inside.split(b"\0") == sorted(ODD_NAMES)
    for name in names:
        box.files.move(f"{folder}/{name}", f"{folder}/moved", overwrite=True)
        box.files.move(f"{folder}/moved", f"{folder}/{name}")
    box.run(["python3", "-c", f"import os\nfor n in os.listdir('{folder}'): os.chmod('{folder}/'+n, 0)"], check=True)
    done = node.cloche("cp", f"{box.id}:{folder}", str(tmp_path / "out"))  # every one is an error that names it
    assert done.returncode == 1
    assert not set(done.stderr.decode()) & {"\x1b", "\x07", "\u202e", "\u200b", "\t", "\r"}
    assert done.stderr.count(b"\n") == len(names)
    for name in names:
        assert box.files.remove(f"{folder}/{name}") == 1


@pytest.mark.req("EXE-6")
@pytest.mark.req("FS-2")
def test_files_are_touched_as_the_images_user(box: Sandbox, folder: str) -> None:
    files = box.files
    for act in (
        lambda: files.read("/etc/shadow"),
        lambda: files.list("/root"),
        lambda: files.write("/etc/made-by-user", "x"),
        lambda: files.write("/usr/bin/python3", "x"),
        lambda: files.remove("/etc/passwd"),
        lambda: files.mkdir("/usr/made-by-user"),
        lambda: files.move("/etc/hostname", "/tmp/hostname"),
        lambda: files.upload(__file__, "/usr"),
    ):
        try:
            result = act()
            codes = [error.code for error in result.errors]  # a tree tells it file by file
        except ClocheError as raised:
            codes = [raised.code]
        assert codes in (["permission_denied"], ["read_only"]), codes
    assert b"root:" in files.read("/etc/shadow", user="root")
    files.write("/etc/roots", "x", user="root")
    assert files.stat("/etc/roots").user == "root"
    with pytest.raises(PermissionDenied):  # root inside has no capability: another's directory is closed to him too
        files.write(f"{folder}/roots", "x", user="root")
    files.write(f"{folder}/mine", "x")
    assert files.stat(f"{folder}/mine").user == "user"
    with pytest.raises(ClocheError) as unknown:
        files.read("/etc/passwd", user="nobody-of-that-name")
    assert unknown.value.code == "no_such_user"


@pytest.mark.req("FS-2")
def test_a_path_is_the_guests(node: RealNode, box: Sandbox, folder: str, tmp_path: Path) -> None:
    """Links and dots are resolved in the guest: what the host has under that name is never touched."""
    secret = tmp_path / "secret"
    secret.write_text("the host's")
    box.run(f"cd {folder}; ln -s /etc/passwd p; ln -s {secret} s; ln -s / root; ln -s /proc/1/root r", check=True)
    guests = box.run("cat /etc/passwd", check=True).stdout_bytes
    assert guests != Path("/etc/passwd").read_bytes()
    assert box.files.read(f"{folder}/p") == guests
    assert box.files.read(f"{folder}/root/etc/passwd") == guests
    assert box.files.read(f"{folder}/../../../../../../etc/passwd") == guests
    for path in (f"{folder}/s", str(secret), f"{folder}/root{secret}", f"{folder}/../../../..{secret}"):
        with pytest.raises(PathNotFound):
            box.files.read(path)
    with pytest.raises(ClocheError):
        box.files.write(f"{folder}/s/x", "x")
    before = sorted(tmp_path.iterdir())
    for number, path in enumerate(
        (f"{folder}/../../..{tmp_path}/made", f"{tmp_path}/made", f"{folder}/root{tmp_path}/made")
    ):
        box.files.write(path, str(number))  # /tmp is everybody's, in the guest
        assert box.files.read(f"{tmp_path}/made") == str(number).encode()
    assert sorted(tmp_path.iterdir()) == before
    for bad in ("", "a\0b"):
        response = Wire(node).ask(f"/v1/sandboxes/{box.id}/files?path={bad.replace(chr(0), '%00')}")
        assert response.status == 400


@pytest.mark.req("FS-2")
def test_links_out_of_a_tree_are_not_followed_here(box: Sandbox, folder: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    box.run(
        f"mkdir {folder}/t; cd {folder}/t; ln -s {outside} d; ln -s ../../outside e; ln -s {outside}/f f; ln -s in ok; echo x > in",
        check=True,
    )
    got = box.files.download(f"{folder}/t", tmp_path / "target")
    assert {error.path for error in got.errors} == {"d", "e", "f"}
    assert os.readlink(tmp_path / "target" / "ok") == "in"
    assert list(outside.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outside", "target"]


# -------------------------------------------------------------------- what a sandbox has to itself


@pytest.mark.req("FS-1")
def test_the_image_is_the_same_for_the_next_sandbox(node: RealNode) -> None:
    with node.sandbox() as one, node.sandbox() as two:
        before = two.run("sha256sum /etc/passwd /usr/bin/env; ls -a / /etc /tmp /workspace", check=True).stdout
        one.files.write("/etc/passwd", "changed", user="root")
        one.files.write("/etc/only-here", "x", user="root")
        one.files.remove("/usr/bin/env", user="root")
        one.files.write("/workspace/mine", "x")
        one.run("echo x > /tmp/mine; rm -rf /usr/share/doc", user="root")
        assert one.files.read("/etc/passwd") == b"changed"
        again = two.run("sha256sum /etc/passwd /usr/bin/env; ls -a / /etc /tmp /workspace", check=True).stdout
        assert again == before
    with node.sandbox() as three:
        after = three.run("sha256sum /etc/passwd /usr/bin/env; ls -a / /etc /tmp /workspace", check=True).stdout
        assert after == before


@pytest.mark.req("FS-1")
def test_the_writable_layer_has_a_limit(node: RealNode, seed: int) -> None:
    """The write that does not fit fails; the sandbox and what it holds live on."""
    rng = random.Random(seed)
    with node.sandbox(disk_mb=48) as box:
        box.files.write("/workspace/kept", "kept")
        with pytest.raises(NoSpace):
            box.files.write("/workspace/big", (rng.randbytes(MIB) for _ in range(80)))
        assert [entry.name for entry in box.files.list("/workspace")] == ["kept"]
        for place in ("/workspace", "/tmp", "/var/tmp"):
            done = box.run(f"dd if=/dev/zero of={place}/big bs=1M count=80")
            assert done.exit_code == 1
            assert "No space left" in done.stderr
            assert box.files.stat(f"{place}/big").size <= 48 * MIB
            box.files.remove(f"{place}/big")
        box.files.write("/workspace/after", rng.randbytes(20 * MIB))
        assert box.run("cat /workspace/kept", check=True).stdout == "kept"
        assert box.info().ended is None


@pytest.mark.req("FS-1")
def test_tmp_is_nosuid_and_nodev(node: RealNode) -> None:
    with node.sandbox() as box, node.sandbox(noexec_tmp=True) as strict:
        mounts = {
            line.split()[1]: set(line.split()[3].split(","))
            for line in box.files.read_text("/proc/mounts").splitlines()
        }
        assert {"nosuid", "nodev"} <= mounts["/tmp"], mounts["/tmp"]
        assert {"nosuid"} <= mounts["/dev/shm"]
        script = "cp /usr/bin/id /tmp/id && chmod 4755 /tmp/id && /tmp/id -u"
        assert box.run(script).stdout.strip() == "1000"
        assert box.run("mknod /tmp/null c 1 3 && echo x > /tmp/null", user="root").exit_code != 0
        refused = strict.run("cp /usr/bin/id /tmp/id && chmod 755 /tmp/id && /tmp/id -u")
        assert (refused.exit_code, "ermission denied" in refused.stderr) == (126, True)
