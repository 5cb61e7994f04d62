"""The stages of a Dockerfile: what each is built on, what it copies from, and which of them a build needs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from cloche.wire.errors import error
from cloche_server.images.build.expand import BadExpansion, UnsupportedExpansion, expand
from cloche_server.images.build.instructions import Arg, Copy, Dockerfile, From, Instruction
from cloche_server.images.build.problems import invalid, shown, unsupported

STAGES_MAX: Final = 100
HIDDEN_ARGS: Final = frozenset(
    name
    for each in ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY")
    for name in (each, each.lower())
)
"""Docker lets every RUN see these without ARG, and keeps them out of the cache's keys."""


@dataclass(frozen=True)
class Origin:
    """Where a stage starts, or where COPY --from reads: another stage, an image, nothing."""

    kind: Literal["stage", "image", "scratch"]
    stage: int = -1
    image: str = ""


@dataclass(frozen=True)
class Stage:
    """One FROM and what follows it."""

    index: int
    name: str | None
    line: int
    text: str
    base: Origin
    instructions: tuple[Instruction, ...]
    copies: Mapping[int, Origin]
    """By the index of the COPY in `instructions`."""


@dataclass(frozen=True)
class Plan:
    """The stages, the one to build, and the ones that it needs, in their order."""

    stages: tuple[Stage, ...]
    target: int
    needed: tuple[int, ...]
    globals: Mapping[str, str]
    """ARG before the first FROM, with the caller's values."""


def platform_args(platform: str) -> dict[str, str]:
    """What BuildKit sets; a stage sees one after its ARG."""
    os_name, _, machine = platform.partition("/")
    values = {"PLATFORM": platform, "OS": os_name, "ARCH": machine.partition("/")[0], "VARIANT": ""}
    return {side + name: value for side in ("TARGET", "BUILD") for name, value in values.items()}


def plan(
    dockerfile: Dockerfile, *, args: Mapping[str, str], target: str | None = None, platform: str = "linux/amd64"
) -> Plan:
    """Errors: dockerfile_invalid, dockerfile_unsupported."""
    known = dict(platform_args(platform))
    before: list[Arg] = []
    parts: list[tuple[From, list[Instruction]]] = []
    for each in dockerfile.instructions:
        if isinstance(each, From):
            parts.append((each, []))
        elif parts:
            parts[-1][1].append(each)
        elif isinstance(each, Arg):
            before.append(each)
    if len(parts) > STAGES_MAX:
        raise invalid(parts[STAGES_MAX][0].line, f"more than {STAGES_MAX} stages.")
    _global_args(before, known, args, dockerfile.escape)
    stages: list[Stage] = []
    for start, instructions in parts:
        stages.append(_stage(start, instructions, stages, known, dockerfile.escape, platform))
    chosen = _target(stages, target)
    return Plan(tuple(stages), chosen, needed(stages, chosen), known)


def _global_args(before: Sequence[Arg], known: dict[str, str], args: Mapping[str, str], escape: str) -> None:
    for each in before:
        for name, default in each.pairs:
            if name in args:
                known[name] = args[name]
            elif default is not None:
                known[name] = expanded(default, known, escape, each.line)


def expanded(word: str, env: Mapping[str, str], escape: str, line: int) -> str:
    """One word of a line."""
    try:
        return expand(word, env, escape)
    except UnsupportedExpansion as other:
        raise unsupported(line, f"the substitution {shown(str(other), 60)}") from other
    except BadExpansion as bad:
        raise invalid(line, f"{shown(str(bad))}.") from bad


def _stage(
    start: From,
    instructions: Sequence[Instruction],
    earlier: Sequence[Stage],
    known: Mapping[str, str],
    escape: str,
    platform: str,
) -> Stage:
    image = expanded(start.image, known, escape, start.line)
    if not image:
        raise invalid(
            start.line, f"FROM {shown(start.image, 60)}: the name is empty; a default for its ARG is missing."
        )
    if start.platform is not None:
        wanted = expanded(start.platform, known, escape, start.line)
        if _plain(wanted) != _plain(platform):
            raise unsupported(start.line, f"FROM --platform={shown(wanted, 60)}", f"this node builds {platform} only.")
    if start.name is not None and start.name in [each.name for each in earlier]:
        raise invalid(start.line, f"the name {start.name!r} is already a stage's.")
    base = Origin("scratch") if image == "scratch" else _named(image, earlier)
    copies: dict[int, Origin] = {}
    for index, each in enumerate(instructions):
        if isinstance(each, Copy) and each.from_ is not None:
            copies[index] = _source(each, each.from_, start, earlier)
    return Stage(len(earlier), start.name, start.line, start.text, base, tuple(instructions), copies)


def _plain(platform: str) -> str:
    aliases = {"x86_64": "amd64", "x86-64": "amd64", "aarch64": "arm64"}
    parts = platform.lower().split("/")
    if len(parts) == 1:
        parts = ["linux", parts[0]]
    parts[1] = aliases.get(parts[1], parts[1])
    if parts[1:] == ["arm64", "v8"]:
        parts.pop()
    return "/".join(parts)


def _named(image: str, earlier: Sequence[Stage]) -> Origin:
    for stage in earlier:
        if stage.name is not None and stage.name == image.lower():
            return Origin("stage", stage=stage.index)
    return Origin("image", image=image)


def _source(copy: Copy, name: str, start: From, earlier: Sequence[Stage]) -> Origin:
    if name.isdecimal():
        index = int(name) if len(name) < 6 else STAGES_MAX
        if index >= len(earlier):
            raise invalid(copy.line, f"--from={shown(name, 20)}: there is no earlier stage with that number.")
        return Origin("stage", stage=index)
    if name.lower() == start.name:
        raise invalid(copy.line, f"--from={shown(name, 60)}: a stage cannot copy from itself.")
    if "$" in name:
        raise invalid(copy.line, "--from takes no variables; give the image a stage of its own: FROM $X AS name.")
    return _named(name, earlier)


def _target(stages: Sequence[Stage], target: str | None) -> int:
    if target is None:
        return len(stages) - 1
    if target.isdecimal() and len(target) < 6 and int(target) < len(stages):
        return int(target)
    for stage in stages:
        if stage.name == target.lower():
            return stage.index
    raise error("dockerfile_invalid", f"No stage is called {shown(target, 60)!r}.", detail={"target": shown(target)})


def needed(stages: Sequence[Stage], target: int) -> tuple[int, ...]:
    """The target and all that it is built on or copies from."""
    found: set[int] = set()
    todo = [target]
    while todo:
        index = todo.pop()
        if index in found:
            continue
        found.add(index)
        origins = [stages[index].base, *stages[index].copies.values()]
        todo += [each.stage for each in origins if each.kind == "stage"]
    return tuple(sorted(found))
