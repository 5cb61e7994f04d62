"""The instructions of a Dockerfile, typed. Nothing is expanded yet."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Instruction:
    """What all have."""

    line: int
    text: str
    """As written, continued lines joined."""


@dataclass(frozen=True)
class From(Instruction):
    """The start of a stage."""

    image: str
    name: str | None
    platform: str | None


@dataclass(frozen=True)
class Arg(Instruction):
    """Names, with or without a default."""

    pairs: tuple[tuple[str, str | None], ...]


@dataclass(frozen=True)
class Env(Instruction):
    """Names and values."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Label(Instruction):
    """Names and values."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Run(Instruction):
    """`script`: the content of `RUN <<EOF`, which is all that it has."""

    argv: tuple[str, ...]
    in_shell: bool
    script: str | None = None


@dataclass(frozen=True)
class Inline:
    """A file whose content is in the Dockerfile."""

    name: str
    content: str
    expanded: bool


@dataclass(frozen=True)
class Copy(Instruction):
    """COPY and ADD."""

    sources: tuple[str, ...]
    inline: tuple[Inline, ...]
    dest: str
    from_: str | None = None
    chown: str | None = None
    chmod: str | None = None
    is_add: bool = False


@dataclass(frozen=True)
class Workdir(Instruction):
    """Absolute, or below the present one."""

    path: str


@dataclass(frozen=True)
class User(Instruction):
    """Name or uid, with or without a group."""

    user: str


@dataclass(frozen=True)
class Shell(Instruction):
    """What runs shell forms."""

    argv: tuple[str, ...]


@dataclass(frozen=True)
class Cmd(Instruction):
    """The arguments, or the command."""

    argv: tuple[str, ...]
    in_shell: bool


@dataclass(frozen=True)
class Entrypoint(Instruction):
    """The command."""

    argv: tuple[str, ...]
    in_shell: bool


@dataclass(frozen=True)
class Expose(Instruction):
    """Ports, with or without a protocol."""

    ports: tuple[str, ...]


@dataclass(frozen=True)
class Volume(Instruction):
    """Paths."""

    paths: tuple[str, ...]


@dataclass(frozen=True)
class StopSignal(Instruction):
    """Name or number."""

    signal: str


@dataclass(frozen=True)
class Healthcheck(Instruction):
    """`test` as in Docker's config: NONE, CMD or CMD-SHELL first. Times in nanoseconds."""

    test: tuple[str, ...]
    options: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Maintainer(Instruction):
    """The image's author."""

    name: str


@dataclass(frozen=True)
class Dockerfile:
    """All of it."""

    instructions: tuple[Instruction, ...]
    escape: str = "\\"
    notes: tuple[str, ...] = field(default=())
    """What was accepted and has no effect."""
