"""The converter seen from the daemon: what a worker answers is checked, bounded in time and bytes, and it is always ended."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import json
import os
import platform
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import cloche_engine
from cloche.wire.errors import ClocheError
from cloche_server.images import worker
from cloche_server.images.worker import Converter, Entry, LayerFile, Limits, RootMade

pytestmark = [pytest.mark.req("IMG-2")]
STAND_IN = Path(__file__).with_name("stand_in.py")
LAYER = {"compression": "gzip", "size": 1, "digest": "sha256:" + "0" * 64, "diff_id": "sha256:" + "0" * 64}
QUICK = Limits(seconds=1)


class Process:
    """A worker without walls: a plain child of the test."""

    def __init__(self, argv: list[str]) -> None:
        self.channel, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(argv, stdin=theirs, stdout=subprocess.DEVNULL, stderr=self._errors)
        theirs.close()
        self.oom_kills = 0
        self.ended = False

    def last_words(self) -> str:
        self._errors.seek(0)
        return self._errors.read(65536).decode(errors="replace")

    async def kill(self) -> int:
        self._process.kill()
        await asyncio.to_thread(self._process.wait)
        self.channel.close()
        self._errors.close()
        self.ended = True
        return self.oom_kills


class Starter:
    def __init__(self, *argv: str, oom_kills: int = 0) -> None:
        self._argv = list(argv)
        self._oom_kills = oom_kills
        self.started: list[Process] = []
        self.asked: dict[str, int] = {}

    async def __call__(self, *, memory_bytes: int, disk_bytes: int) -> Process:
        self.asked = {"memory_bytes": memory_bytes, "disk_bytes": disk_bytes}
        made = Process(self._argv)
        made.oom_kills = self._oom_kills
        self.started.append(made)
        return made


def lying(how: str, text: str = "", **more: Any) -> Starter:
    return Starter(sys.executable, str(STAND_IN), how, text, **more)


@contextmanager
def files(count: int) -> Iterator[list[int]]:
    made = [os.open(tempfile.gettempdir(), os.O_TMPFILE | os.O_RDWR, 0o666) for _ in range(count)]
    try:
        yield made
    finally:
        for fd in made:
            os.close(fd)


async def image(start: Starter, limits: Limits = QUICK, layers: int = 1, progress: Any = None) -> Any:
    with files(3 + layers) as (output, scratch, agent, *blobs):
        given = [LayerFile(fd, **LAYER) for fd in blobs]  # type: ignore[arg-type]
        return await Converter(start, limits).image(given, output, scratch, agent, progress)


async def refused(start: Starter, limits: Limits = QUICK) -> ClocheError:
    with pytest.raises(ClocheError) as caught:
        await image(start, limits)
    assert [each.ended for each in start.started] == [True], "the worker lives on"
    return caught.value


async def test_a_job_goes_out_with_its_descriptors_in_order() -> None:
    start = lying("echo")
    seen: list[tuple[int, int]] = []
    with files(131) as fds:
        output, scratch, agent, *blobs = fds
        layers = [LayerFile(fd, **LAYER) for fd in blobs]  # type: ignore[arg-type]
        made = await Converter(start).image(layers, output, scratch, agent, lambda *each: seen.append(each))
        asked, inodes = json.loads(os.pread(scratch, 1 << 20, 0))
        assert inodes == [os.fstat(fd).st_ino for fd in fds]
    assert asked["job"] == "image"
    assert asked["layers"] == [LAYER] * 128
    assert asked["limits"]["seconds"] == 900
    assert seen == [(0, 5)]
    assert (made.root_bytes, made.root_sha256) == (4, "a" * 64)
    assert start.asked["memory_bytes"] == 1 << 30
    assert start.started[0].ended


async def test_an_image_without_layers_has_an_empty_one() -> None:
    with files(3) as (output, scratch, agent):
        await Converter(lying("echo"), QUICK).image([], output, scratch, agent)
        asked, inodes = json.loads(os.pread(scratch, 1 << 20, 0))
    digest = "sha256:" + hashlib.sha256(bytes(1024)).hexdigest()
    assert asked["layers"] == [{"compression": "none", "size": 1024, "digest": digest, "diff_id": digest}]
    assert len(inodes) == 4


async def test_more_layers_than_a_job_can_have() -> None:
    start = lying("echo")
    with pytest.raises(ClocheError) as caught:
        await image(start, layers=129)
    assert caught.value.detail["reason"] == "too_many_layers"
    assert start.started == []


@pytest.mark.parametrize("how", ["silent", "deaf"])
async def test_silence_ends(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "GRACE_S", 0.2)
    began = time.monotonic()
    bad = await refused(lying(how), Limits(seconds=0))
    assert (bad.code, bad.detail["reason"]) == ("image_too_large", "time")
    assert time.monotonic() - began < 10


async def test_a_death_is_told_with_its_last_words() -> None:
    bad = await refused(lying("dies"))
    assert (bad.code, bad.detail["reason"]) == ("image_refused", "converter_died")
    assert "luck" in bad.message
    assert bad.message.isprintable()


async def test_a_death_for_memory_says_so() -> None:
    bad = await refused(lying("dies", oom_kills=1))
    assert (bad.code, bad.detail["reason"]) == ("image_too_large", "memory")


@pytest.mark.parametrize("how", ["chatter", "endless", "grows"])
async def test_floods_are_cut_off(how: str) -> None:
    slowest = 0.0

    async def beat() -> None:
        nonlocal slowest
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0)
            slowest = max(slowest, time.perf_counter() - before)

    beating = asyncio.create_task(beat())
    bad = await refused(lying(how))
    beating.cancel()
    assert (bad.code, bad.detail["reason"]) == ("image_refused", "converter_failed")
    assert slowest < 1.0, "the loop stood still"


def done(**changes: Any) -> str:
    fields = {"root_bytes": 4, "root_sha256": "a" * 64, "entries": 1, "raw_bytes": 9, "lost": {}}
    return json.dumps({"done": {**fields, **changes}})


LIES = [
    "", "[]", "7", "{", "{}", '{"done":1,"refused":2}', '{"done":[]}', '{"finished":{}}', '{"progress":{"layer":-1,"bytes":1}}',
    '{"progress":{"layer":0,"bytes":1.5}}', '{"progress":7}', '{"refused":{"code":"none_of_ours","message":"x"}}',
    '{"refused":{"code":["too_large"],"message":"x"}}', '{"refused":{"code":"bad_name"}}', '{"refused":{"code":"bad_name","message":7}}',
    '{"refused":{"code":"bad_name","message":"x","layer":"0"}}', "[" * 60000, done(root_bytes=5), done(root_bytes=-4),
    done(root_bytes=True), done(root_sha256="A" * 64), done(root_sha256="a" * 63), done(entries=1 << 60), done(lost=None),
    done(lost={"X": 1}), done(lost={"xattrs": "many"}), done(lost={"examples": ["x"] * 21}), done(lost={"examples": [1]}),
    done(lost={f"{'k' * (n + 1)}": 1 for n in range(33)}),
]  # fmt: skip


@pytest.mark.parametrize("said", LIES, ids=range(len(LIES)))
async def test_lies_are_no_answers(said: str) -> None:
    bad = await refused(lying("says", said))
    assert (bad.code, bad.detail["reason"]) == ("image_refused", "converter_failed")
    assert bad.message.isprintable()


@pytest.mark.parametrize(
    ("code", "public"),
    [("too_large", "image_too_large"), ("too_many_entries", "image_too_large"), ("ratio", "image_too_large"),
     ("no_space", "image_too_large"), ("bad_digest", "image_corrupt"), ("bad_length", "image_corrupt"),
     ("bad_archive", "image_refused"), ("bad_link", "image_refused"), ("mkfs_failed", "image_refused")],
)  # fmt: skip
async def test_refusals_have_public_codes(code: str, public: str) -> None:
    body = {"code": code, "message": "no \x1b]0;x\x07", "layer": 3, "entry": "a\u202eb"}
    bad = await refused(lying("says", json.dumps({"refused": body})))
    assert bad.code == public
    assert bad.detail == {"reason": code, "layer": 3, "entry": "a\\u202eb"}
    assert bad.message.isprintable()


async def test_a_cancelled_job_ends_its_worker() -> None:
    start, under_way = lying("says", '{"progress":{"layer":0,"bytes":1}}'), asyncio.Event()
    task = asyncio.create_task(image(start, Limits(seconds=60), progress=lambda *_: under_way.set()))
    await under_way.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert start.started[0].ended


async def test_a_full_disk_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "DISK_RESERVE_BYTES", 1 << 60)
    start = lying("echo")
    with pytest.raises(ClocheError) as caught:
        await image(start)
    assert (caught.value.code, caught.value.detail["reason"]) == ("image_too_large", "no_space")
    assert start.started == []


async def index(start: Starter, source: bytes = b"0123456789", limits: Limits = QUICK) -> list[Entry]:
    with files(2) as (given, output):
        os.write(given, source)
        return await Converter(start, limits).index(given, output)


async def test_an_index_is_read_back() -> None:
    lines = [
        {"path": "", "type": "dir"},
        {},
        {"path": "d", "type": "dir", "sha256": None},
        {"path": "l", "type": "symlink", "link": "../x"},
    ]
    found = await index(lying("index", json.dumps(lines)))
    assert [(each.path, each.type, each.link) for each in found] == [
        ("", "dir", None),
        ("a", "file", None),
        ("d", "dir", None),
        ("l", "symlink", "../x"),
    ]


BAD_LINES: list[Any] = [
    {"path": "../a"}, {"path": "/a"}, {"path": "a//b"}, {"path": ""}, {"path": "."}, {"path": ".", "type": "dir"}, {"path": "a/.."}, {"path": "a\0b"}, {"path": 7},
    {"path": "x" * 5000}, {"type": "socket"}, {"mode": 1 << 20}, {"uid": -1}, {"gid": 1 << 32}, {"size": 10}, {"size": -1},
    {"offset": 1 << 60}, {"offset": -1}, {"type": "symlink"}, {"type": "hardlink", "link": "../../x"},
    {"type": "hardlink", "link": None}, {"sha256": "zz"}, {"mtime": "now"}, {"size": True},
]  # fmt: skip


@pytest.mark.parametrize("line", BAD_LINES, ids=str)
async def test_bad_lines_of_an_index(line: dict[str, Any]) -> None:
    with pytest.raises(ClocheError) as caught:
        await index(lying("index", json.dumps([line])))
    assert caught.value.detail["reason"] == "converter_failed"


@pytest.mark.parametrize("how", ["index-cut", "index-more", "index-flood", "index-none"])
async def test_an_index_that_lies_about_itself(how: str) -> None:
    with pytest.raises(ClocheError) as caught:
        await index(lying(how))
    assert caught.value.detail["reason"] == "converter_failed"


# --------------------------------------------------------------------------- the real converter

BINARIES = Path(cloche_engine.__file__).with_name("bin")
REAL = BINARIES / f"cloche-convert-{platform.machine()}"
needs_real = pytest.mark.skipif(not REAL.is_file(), reason="the converter was not built here (just setup)")


def real() -> Starter:
    return Starter(str(REAL), str(BINARIES / "mkfs.erofs"))


def archive(**members: bytes) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return made.getvalue()


def sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


async def converted(start: Starter, *raw: bytes, lie: dict[str, Any] | None = None) -> tuple[RootMade, bytes]:
    with files(3 + len(raw)) as (output, scratch, agent, *blobs):
        os.write(agent, b"#!agent")
        layers = []
        for fd, content in zip(blobs, raw, strict=True):
            packed = gzip.compress(content)
            os.write(fd, packed)
            told = {"compression": "gzip", "size": len(packed), "digest": sha256(packed), "diff_id": sha256(content)}
            layers.append(LayerFile(fd, **{**told, **(lie or {})}))
        made = await Converter(start).image(layers, output, scratch, agent)
        return made, os.pread(output, 1 << 30, 0)


@needs_real
async def test_a_real_conversion() -> None:
    start = real()
    made, root = await converted(start, archive(a=b"first"), archive(a=b"second", b=b"x" * 100_000))
    assert (len(root), sha256(root)) == (made.root_bytes, f"sha256:{made.root_sha256}")
    assert root[1024:1028] == bytes.fromhex("e2e1f5e0"), "EROFS"
    assert b"second" in root
    assert b"first" not in root
    assert made.entries >= 2
    assert start.started[0].ended


@needs_real
async def test_a_real_conversion_of_nothing() -> None:
    made, root = await converted(real())
    assert made.root_bytes == len(root)
    assert b"#!agent" in root


@needs_real
@pytest.mark.parametrize(
    ("lie", "code", "reason"),
    [
        ({"digest": "sha256:" + "0" * 64}, "image_corrupt", "bad_digest"),
        ({"diff_id": "sha256:" + "0" * 64}, "image_corrupt", "bad_digest"),
        ({"size": 7}, "image_corrupt", "bad_length"),
        ({"compression": "zstd"}, "image_refused", "bad_compression"),
    ],
    ids=str,
)
async def test_a_real_refusal(lie: dict[str, Any], code: str, reason: str) -> None:
    with pytest.raises(ClocheError) as caught:
        await converted(real(), archive(a=b"first"), lie=lie)
    assert (caught.value.code, caught.value.detail["reason"]) == (code, reason)


@needs_real
async def test_a_real_index() -> None:
    source = archive(a=b"first", b=b"second")
    found = await index(real(), source)
    assert [(each.path, each.type, each.size) for each in found] == [("a", "file", 5), ("b", "file", 6)]
    for each, content in zip(found, (b"first", b"second"), strict=True):
        assert source[each.offset : each.offset + each.size] == content
        assert each.sha256 == hashlib.sha256(content).hexdigest()


@needs_real
@pytest.mark.parametrize("compression", ["gzip", "none"])
async def test_a_real_layer_from_a_pipe(compression: str) -> None:
    source, target = os.pipe()
    feeding = asyncio.create_task(asyncio.to_thread(_feed, target, archive(**{"./a": b"first"})))
    with files(1) as (output,):
        made = await Converter(real()).upper(source, output, compression=compression)
        data = os.pread(output, 1 << 20, 0)
    await feeding
    os.close(source)
    assert (sha256(data), len(data)) == (made.digest, made.size)
    plain = gzip.decompress(data) if compression == "gzip" else data
    assert sha256(plain) == made.diff_id
    with tarfile.open(fileobj=io.BytesIO(plain)) as tar:
        assert [name.strip("./") for name in tar.getnames() if name.strip("./")] == ["a"]


def _feed(target: int, data: bytes) -> None:
    with open(target, "wb") as file:
        file.write(data)
