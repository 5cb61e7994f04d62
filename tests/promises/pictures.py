"""Small images for the promises, the registry that has them, and a node that asks that registry.

Their programs are compiled here, static, from `tool/`; nothing is downloaded but musl's packages. `Between` stands between
a node and its registry: it counts, slows down and cuts off.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from cloche.errors import ClocheError
from cloche.wire.images import Credentials
from cloche_server.images.reference import DEFAULT_REGISTRY
from tests.promises.nodes import ROOT, RealNode, real_node
from tests.promises.plants import PlantedNode, planted_node
from tests.unit.images.registries import PASSWORD, USER

SOURCES = Path(__file__).parent / "tool"
BUILD = ROOT / "build" / "pictures"
LOGIN = Credentials(username=USER, password=PASSWORD)
MIRROR_PREFIX = "library/"
"""Where the mirror of the default registry has what bare names mean."""
MUSL_LIBC = "lib/x86_64-linux-musl/libc.so"
PIECE_BYTES = 64 * 1024

Content = bytes | str | None
"""Of one name in a layer: a file's bytes, a link's target, or None for a directory."""


# ------------------------------------------------------------------------------------------- programs


@functools.cache
def program(name: str) -> bytes:
    """`tool` or `walk`, static."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / name
        argv = ["gcc", "-O2", "-static", "-Wall", "-Werror", "-o", str(out), str(SOURCES / f"{name}.c")]
        subprocess.run(argv, check=True)
        return out.read_bytes()


@functools.cache
def musl_files() -> dict[str, bytes]:
    """`tool` linked to musl's libc at run time, and that libc: from Debian's packages, which are not installed."""
    place = BUILD / "musl"
    if not (place / MUSL_LIBC).exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as folder:
            subprocess.run(["apt-get", "download", "musl", "musl-dev"], cwd=folder, check=True, capture_output=True)
            for package in Path(folder).glob("*.deb"):
                subprocess.run(["dpkg-deb", "-x", str(package), f"{folder}/tree"], check=True)
            shutil.rmtree(place, ignore_errors=True)
            os.rename(f"{folder}/tree", place)
    libraries, loader = place / "usr/lib/x86_64-linux-musl", "lib/ld-musl-x86_64.so.1"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "tool"
        begin = [str(libraries / name) for name in ("Scrt1.o", "crti.o")]
        include = ["-nostdinc", "-isystem", str(place / "usr/include/x86_64-linux-musl")]
        link = ["-nostdlib", "-pie", f"-Wl,-dynamic-linker,/{loader}"]
        end = [f"-L{(place / MUSL_LIBC).parent}", "-lc", str(libraries / "crtn.o")]
        argv = ["gcc", "-O2", "-fPIE", *include, *link, "-o", str(out), *begin, str(SOURCES / "tool.c"), *end]
        subprocess.run(argv, check=True)
        return {"tool": out.read_bytes(), loader: (place / MUSL_LIBC).read_bytes()}


def layer(entries: Mapping[str, Content], *, modes: Mapping[str, int] | None = None) -> bytes:
    """A tar, the same bytes each time."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in entries.items():
            info = tarfile.TarInfo(name)
            info.mode, info.mtime = (modes or {}).get(name, 0o755), 1_700_000_000
            if content is None:
                info.type = tarfile.DIRTYPE
            elif isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
            else:
                info.size = len(content)
            tar.addfile(info, io.BytesIO(content) if isinstance(content, bytes) else None)
    return out.getvalue()


# --------------------------------------------------------------------------------- between node and registry


@dataclass
class Asked:
    """One request that went through, and how many bytes of the answer's body."""

    method: str
    path: str
    range: str | None = None
    status: int = 0
    bytes: int = 0


@dataclass
class Between:
    """Passes requests on. With `stop_at`, an answer stands still after so many bytes of a blob, until `go`."""

    url: str
    upstream: str
    asked: list[Asked] = field(default_factory=list)
    stop_at: int | None = None
    stopped: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)

    @property
    def host(self) -> str:
        return urlsplit(self.url).netloc

    def blobs(self, digest: str | None = None) -> list[Asked]:
        """Requests that brought a blob's bytes."""
        return [each for each in self.asked if each.method == "GET" and f"/blobs/{digest or ''}" in each.path]

    def wait_stopped(self) -> None:
        assert self.stopped.wait(60), "no blob came so far"

    def forget(self) -> None:
        self.asked.clear()


@contextlib.contextmanager
def between(upstream: str) -> Iterator[Between]:
    class Passing(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            asked = Asked(self.command, self.path, self.headers.get("range"))
            state.asked.append(asked)
            connection = http.client.HTTPConnection(urlsplit(state.upstream).netloc, timeout=60)
            try:
                self._pass(connection, asked)
            except OSError:
                self.close_connection = True  # the registry is gone, or who asked is
            finally:
                connection.close()

        def do_HEAD(self) -> None:
            self.do_GET()

        def _pass(self, connection: http.client.HTTPConnection, asked: Asked) -> None:
            names = ("accept", "authorization", "range", "user-agent")
            connection.request(
                asked.method, asked.path, headers={name: self.headers[name] for name in names if name in self.headers}
            )
            answer = connection.getresponse()
            asked.status = answer.status
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("connection", "date", "transfer-encoding"):
                    self.send_header(name, value)
            self.end_headers()
            while piece := answer.read(PIECE_BYTES):
                self.wfile.write(piece)
                asked.bytes += len(piece)
                if state.stop_at is not None and "/blobs/" in asked.path and asked.bytes >= state.stop_at:
                    state.stopped.set()
                    assert state.go.wait(120)
            if answer.length:
                self.close_connection = True  # it ended too early, so this one does

        def log_message(self, *_: object) -> None:
            """`asked` is the log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Passing)
    server.daemon_threads = True
    state = Between(f"http://127.0.0.1:{server.server_address[1]}", upstream)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield state
    finally:
        state.go.set()
        server.shutdown()
        server.server_close()
        thread.join()


# ------------------------------------------------------------------------------------------------ nodes


def mirror(url: str, *more: str) -> str:
    """registries.toml with this as the mirror of the default registry."""
    lines = [f'[registry."{DEFAULT_REGISTRY}"]', f'mirrors = ["{url}"]', *more]
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def asking(settings: str) -> Iterator[Path]:
    """Nodes that start in this block read these settings. Gives a directory that their user can read too."""
    folder = Path(tempfile.mkdtemp(prefix="cloche-registries-"))  # not pytest's, which only root may enter
    folder.chmod(0o755)
    (folder / "registries.toml").write_text(settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLOCHE_REGISTRIES", str(folder / "registries.toml"))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def picture_node(settings: str) -> Iterator[RealNode]:
    with asking(settings), real_node() as node:
        yield node


@contextlib.contextmanager
def planted_picture_node(settings: str) -> Iterator[PlantedNode]:
    with asking(settings), planted_node() as node:
        yield node


def refused(node: RealNode, image: str, credentials: Credentials | None = None) -> ClocheError:
    """The error of a pull that must fail."""
    with node.client() as client, pytest.raises(ClocheError) as caught:
        client.images.pull(image, credentials=credentials)
    return caught.value


def assert_whole(node: RealNode) -> None:
    """What `cloche image fsck` says, and that nothing lies about in the store."""
    done = node.cloche("image", "fsck", "--json")
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert json.loads(done.stdout)["problems"] == []
    assert left_in_tmp(node) == []


def left_in_tmp(node: RealNode) -> list[str]:
    """But for downloads that can go on."""
    tmp = node.paths.store / "tmp"
    return sorted(path.name for path in tmp.iterdir() if path.name != "partial")


def roots(node: RealNode) -> list[Path]:
    return sorted((node.paths.store / "roots").glob("*.erofs"))


def run_output(node: RealNode, image: str, *argv: str) -> str:
    done = node.cloche("run", image, *(("--", *argv) if argv else ()))
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout.decode()
