"""`--compat`: buildah does the whole build, inside one sandbox, for Dockerfiles that `builder` refuses.

It needs no privilege beyond package-install: a user namespace inside gVisor gives buildah the capabilities that it wants, over nothing
but the sandbox. Base images go in as OCI layouts, the result comes out as one. There is no cache; the storage is a tmpfs, so the
room's memory holds the base images. It can do what the buildah of its image can (1.28 knows no heredocs).
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final, Protocol

from cloche.wire.errors import error
from cloche.wire.images import BuildOptions, ImageEvent, ImageView
from cloche_server.images.build import apart, ignore
from cloche_server.images.build.copying import tar_of
from cloche_server.images.build.making import GIB, BuildLimits
from cloche_server.images.build.problems import invalid, shown
from cloche_server.images.build.protocols import Converter, Room, Shelf, Workshop
from cloche_server.images.build.roomwork import Output
from cloche_server.images.build.sources import Sources, read_node
from cloche_server.images.build.stages import expanded, platform_args
from cloche_server.images.build.tree import Node

IMAGE: Final = "localhost/cloche-buildah"
"""With buildah, a shell, mount, uidmap's newuidmap, and util-linux's unshare."""
MEMORY_BYTES: Final = 4 * GIB
PLACE: Final = "/build"
FROMS_MAX: Final = 100
SECONDS_MAX: Final = 6 * 3600.0
FILES: Final = {
    "etc/containers/policy.json": b'{"default":[{"type":"insecureAcceptAnything"}]}',
    # All ids of the sandbox are the build's.
    "etc/subuid": b"root:0:65536\n",
    "etc/subgid": b"root:0:65536\n",
}
_SCRIPT: Final = """set -e
mount -t tmpfs -o mode=0700 storage /var/lib/containers
b() { buildah --root /var/lib/containers/storage --runroot /var/lib/containers/run --storage-driver overlay "$@"; }
"""
_ENTER: Final = ("unshare", "--user", "--mount", "--map-users=0,0,65536", "--map-groups=0,0,65536", "/bin/sh")


class Archives(Protocol):
    """Images as OCI layout tars, for the build's owner."""

    def export(self, name: str) -> AsyncIterator[bytes]:
        """A tar of an OCI layout; the image is there."""
        ...

    async def import_layout(self, data: AsyncIterator[bytes], name: str | None) -> ImageView:
        """One image; everything about it is checked as for any import."""
        ...


class CompatBuilder:
    """One for each build."""

    def __init__(
        self,
        workshop: Workshop,
        shelf: Shelf,
        converter: Converter,
        archives: Archives,
        *,
        on_event: Callable[[ImageEvent], None],
        platform: str = "linux/amd64",
        limits: BuildLimits | None = None,
        image: str = IMAGE,
    ) -> None:
        self._workshop = workshop
        self._shelf = shelf
        self._archives = archives
        self._say = on_event
        self._platform = platform
        self._limits = limits or BuildLimits(memory_bytes=MEMORY_BYTES)
        self._image = image
        self._sources = Sources(shelf, converter, self._limits.copied_bytes)

    async def build(self, context: int, options: BuildOptions) -> ImageView:
        """As `Builder.build`."""
        async with contextlib.AsyncExitStack() as closing:
            closing.callback(self._sources.close)
            tree = await self._sources.index(context, is_context=True)
            path = ignore.clean("/" + options.dockerfile).lstrip("/")
            data = await read_node(tree.resolve(path), apart.DOCKERFILE_BYTES_MAX)
            if data is None:
                raise error("dockerfile_invalid", f"There is no {shown(options.dockerfile, 100)!r} in the context.")
            names = base_names(await _commands(data), options.args, self._platform)
            tools = await self._shelf.base(self._image)
            for name in names:
                self._say(ImageEvent(kind="resolved", image=name, digest=(await self._shelf.base(name)).digest))
            room = await self._workshop.open(
                tools.root_file, disk_bytes=self._limits.disk_bytes, memory_bytes=self._limits.memory_bytes
            )
            closing.push_async_callback(room.close)
            await self._furnish(room, list(tree.below("")), names)
            await self._run(room, script(names, path, options))
            view = await self._archives.import_layout(room.get_tree(f"{PLACE}/out"), options.name)
        self._say(ImageEvent(kind="done", image=options.name, digest=view.digest, view=view))
        return view

    async def _furnish(self, room: Room, nodes: list[Node], names: list[str]) -> None:
        folders = ["build", "build/context", "build/out", "etc/containers", "var/lib/containers", "var/tmp"]
        folders += [f"build/base{number}" for number in range(len(names))]
        made = [Node(path, "dir", 0o755, 0, 0, 0) for path in _with_parents(folders)]
        for name, data in FILES.items():
            made.append(Node(name, "file", 0o644, 0, 0, 0, len(data), data=data))
        await room.put_tree("/", tar_of(made))
        await room.put_tree(f"{PLACE}/context", tar_of(nodes))
        for number, name in enumerate(names):
            await room.put_tree(f"{PLACE}/base{number}", self._archives.export(name))

    async def _run(self, room: Room, text: str) -> None:
        output = Output(lambda said: self._say(ImageEvent(kind="output", text=said)), self._limits.step.output_bytes)
        try:
            code = await room.run(
                [*_ENTER, "-c", text],
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "TMPDIR": "/var/tmp"},
                user="0",
                workdir=PLACE,
                stdin=None,
                on_output=output.take,
                timeout_s=SECONDS_MAX,
            )
        except TimeoutError as late:
            raise error("build_failed", f"buildah took longer than {SECONDS_MAX:g} s.") from late
        if code != 0:
            detail = {"exit_code": code, "output": output.tail}
            raise error("build_failed", f"buildah ended with exit code {code}.", detail=detail)


async def _commands(data: bytes) -> list[dict[str, Any]]:
    try:
        return await apart.dockerfile(data)
    except apart.NotParsed as bad:
        raise invalid(bad.line, f"{shown(str(bad))}.") from bad
    except apart.ParserDied as died:
        raise error("dockerfile_invalid", f"The Dockerfile's parser gave no answer ({died}).") from died


def _with_parents(paths: list[str]) -> list[str]:
    found = {"/".join(path.split("/")[: end + 1]) for path in paths for end in range(path.count("/") + 1)}
    return sorted(found - {"etc", "var", "var/lib"})


def base_names(commands: list[dict[str, Any]], args: Mapping[str, str], platform: str) -> list[str]:
    """Images that the build reads: of FROM, and of COPY --from that is no stage."""
    env = dict(platform_args(platform))
    stages: set[str] = set()
    found: list[str] = []
    for command in commands:
        kind, line, value = str(command["cmd"]).upper(), int(command["line"]), list(command["value"])
        if kind == "ARG" and not stages and not found:
            for each in value:
                name, equals, default = each.partition("=")
                if name in args:
                    env[name] = args[name]
                elif equals:
                    env[name] = expanded(default, env, "\\", line)
        elif kind == "FROM" and value:
            image = expanded(value[0], env, "\\", line)
            if image.lower() not in stages and image != "scratch":
                found.append(image)
            stages.add(value[2].lower() if len(value) > 2 else "scratch")
        elif kind == "COPY":
            sources = [flag.removeprefix("--from=") for flag in command["flags"] if flag.startswith("--from=")]
            found += [each for each in sources if not each.isdecimal() and each.lower() not in stages]
    names = list(dict.fromkeys(found))
    if len(names) > FROMS_MAX:
        raise error("dockerfile_invalid", f"The Dockerfile names more than {FROMS_MAX} images.")
    return names


def script(names: list[str], dockerfile: str, options: BuildOptions) -> str:
    """What runs inside. Every word that somebody chose is quoted."""
    lines = [_SCRIPT]
    for number, name in enumerate(names):
        lines.append(f"b tag $(b pull -q oci:{PLACE}/base{number}) {shlex.quote(name)}\n")
    words = ["b", "bud", "--isolation", "chroot", "--layers=false", "--pull-never", "-t", "cloche-result"]
    words += ["-f", f"{PLACE}/context/{dockerfile}"]
    if options.target is not None:
        words += ["--target", options.target]
    for name, value in options.args.items():
        words += ["--build-arg", f"{name}={value}"]
    lines.append(shlex.join([*words, f"{PLACE}/context"]) + "\n")
    lines.append(f"b push -q cloche-result oci:{PLACE}/out:latest\n")
    return "".join(lines)
