"""A Dockerfile's bytes become typed instructions. What Cloche does not do is refused here, by name and line.

The parser is BuildKit's own (`apart`); it lets unknown instructions and options pass, so both are checked here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from cloche.wire.errors import error
from cloche_server.images.build import apart
from cloche_server.images.build.expand import BadExpansion, words
from cloche_server.images.build.instructions import (
    Arg,
    Cmd,
    Copy,
    Dockerfile,
    Entrypoint,
    Env,
    Expose,
    From,
    Healthcheck,
    Inline,
    Instruction,
    Label,
    Maintainer,
    Run,
    Shell,
    StopSignal,
    User,
    Volume,
    Workdir,
)
from cloche_server.images.build.problems import invalid, shown, unsupported

INSTRUCTIONS_MAX: Final = 1000
STAGE_NAME: Final = re.compile(r"[a-z][a-z0-9._-]{0,127}\Z")
_HEREDOC: Final = re.compile(r"(\d*)<<(-?)([^<]*)\Z")
_DIRECTIVE: Final = re.compile(r"#[ \t]*([a-zA-Z][a-zA-Z0-9]*)[ \t]*=[ \t]*(.+?)[ \t\r]*\Z")
_REMOTE: Final = re.compile(r"(?:https?|ftp|git|ssh)://|git@|github\.com/|.+\.git(?:#.*)?\Z", re.IGNORECASE)
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
_UNITS_NS: Final = {
    "ns": 1,
    "us": 1000,
    "µs": 1000,
    "ms": 1_000_000,
    "s": 10**9,
    "m": 60 * 10**9,
    "h": 3600 * 10**9,
}


@dataclass(frozen=True)
class Written:
    """One instruction as the parser gives it."""

    name: str
    line: int
    text: str
    is_json: bool
    value: tuple[str, ...]
    flags: tuple[str, ...]
    heredocs: tuple[tuple[str, str], ...]

    @property
    def head(self) -> tuple[int, str]:
        return self.line, self.text


@dataclass(frozen=True)
class Marker:
    """`<<NAME`: where a heredoc is used."""

    name: str
    expanded: bool
    chomped: bool


async def parse(data: bytes) -> Dockerfile:
    """The whole file. Errors: dockerfile_invalid, dockerfile_unsupported."""
    if len(data) > apart.DOCKERFILE_BYTES_MAX:
        raise error("dockerfile_invalid", f"The Dockerfile is longer than {apart.DOCKERFILE_BYTES_MAX} bytes.")
    for number, line in enumerate(data.split(b"\n"), start=1):
        if b"\0" in line:
            raise invalid(number, "a NUL byte.")
    try:
        data.decode()
    except UnicodeDecodeError as bad:
        raise invalid(data.count(b"\n", 0, bad.start) + 1, "it is not UTF-8.") from bad
    try:
        commands = await apart.dockerfile(data)
    except apart.NotParsed as bad:
        raise invalid(bad.line, f"{shown(str(bad))}.") from bad
    except apart.ParserDied as died:
        raise error("dockerfile_invalid", f"The Dockerfile's parser gave no answer ({died}).") from died
    return typed(commands, *directives(data.decode()))


def directives(text: str) -> tuple[str, tuple[str, ...]]:
    """The escape character, and notes."""
    escape, notes = "\\", []
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        found = _DIRECTIVE.match(line.strip())
        if found is None:
            break
        name, value = found[1].lower(), found[2]
        if name == "escape":
            escape = value
        elif name in ("syntax", "check"):
            notes.append(f"line {number}: the directive {name!r} is ignored; Cloche reads Dockerfiles itself.")
        else:
            break
    return escape, tuple(notes)


def typed(commands: list[dict[str, Any]], escape: str = "\\", notes: tuple[str, ...] = ()) -> Dockerfile:
    """Pure: from the parser's answer."""
    if len(commands) > INSTRUCTIONS_MAX:
        raise invalid(int(commands[INSTRUCTIONS_MAX]["line"]), f"more than {INSTRUCTIONS_MAX} instructions.")
    found: list[Instruction] = []
    noted = list(notes)
    for command in commands:
        written = _written(command)
        make = _MAKERS.get(written.name)
        if make is None:
            if written.name == "ONBUILD":
                raise unsupported(written.line, "ONBUILD")
            raise invalid(written.line, f"unknown instruction {shown(written.name, 40)}.")
        if written.heredocs and written.name not in ("RUN", "COPY", "ADD"):
            raise invalid(written.line, f"{written.name} takes no heredoc.")
        one = make(written)
        if not any(isinstance(each, From) for each in found) and not isinstance(one, From | Arg):
            raise invalid(written.line, f"{written.name} before the first FROM.")
        if isinstance(one, Healthcheck):
            noted.append(f"line {one.line}: HEALTHCHECK is kept in the image's config; Cloche does not run it.")
        found.append(one)
    if not any(isinstance(each, From) for each in found):
        raise invalid(1, "no FROM.")
    return Dockerfile(tuple(found), escape, tuple(noted))


def _written(command: dict[str, Any]) -> Written:
    return Written(
        name=str(command["cmd"]).upper(),
        line=int(command["line"]),
        text=str(command["original"]),
        is_json=bool(command["json"]),
        value=tuple(command["value"]),
        flags=tuple(command["flags"]),
        heredocs=tuple((each["name"], each["content"]) for each in command["heredocs"]),
    )


def marker(text: str) -> Marker | None:
    """`<<EOF`, `<<-EOF`, `<<"EOF"`, and nothing else beside it."""
    found = _HEREDOC.match(text)
    if found is None or not found[3]:
        return None
    try:
        plain = words(found[3], {})
        raw = words(found[3], {}, raw_quotes=True)
    except BadExpansion:
        return None
    if len(plain) != 1 or len(raw) != 1:
        return None
    return Marker(plain[0], _quotes(plain[0]) == _quotes(raw[0]), found[2] == "-")


def _quotes(word: str) -> int:
    return word.count("'") + word.count('"')


def _chomp(content: str) -> str:
    return re.sub(r"(?m)^\t+", "", content)


def _options(written: Written, *known: str) -> dict[str, str]:
    """`--name=value`. One that Docker knows and Cloche does not is `unsupported`; any other is a mistake."""
    found: dict[str, str] = {}
    for flag in written.flags:
        name, equals, value = flag.removeprefix("--").partition("=")
        if name in _UNSUPPORTED.get(written.name, ()):
            raise unsupported(written.line, f"{written.name} --{name}")
        if name not in known:
            raise invalid(written.line, f"{written.name} has no option --{shown(name, 40)}.")
        if name in found:
            raise invalid(written.line, f"--{name} is given twice.")
        if not equals and name != "link":
            raise invalid(written.line, f"--{name} needs a value.")
        found[name] = value if equals else "true"
    return found


_UNSUPPORTED: Final = {
    "RUN": ("mount", "security", "device"),
    "COPY": ("parents", "exclude"),
    "ADD": ("checksum", "keep-git-dir", "exclude", "unpack"),
}


def _from(written: Written) -> Instruction:
    options = _options(written, "platform")
    match written.value:
        case (image,):
            name = None
        case (image, word, name) if word.upper() == "AS":
            name = name.lower()
            if not STAGE_NAME.match(name):
                raise invalid(written.line, f"{shown(name, 60)!r} is not a name for a stage.")
        case _:
            raise invalid(written.line, "FROM takes an image, or an image AS a name.")
    return From(*written.head, image=image, name=name, platform=options.get("platform"))


def _arg(written: Written) -> Instruction:
    _options(written)
    pairs: list[tuple[str, str | None]] = []
    for each in written.value:
        name, equals, value = each.partition("=")
        if not name:
            raise invalid(written.line, "ARG without a name.")
        pairs.append((name, value if equals else None))
    return Arg(*written.head, pairs=tuple(_some(written, pairs)))


def _pairs(written: Written) -> tuple[tuple[str, str], ...]:
    _options(written)
    if not written.value or len(written.value) % 2:
        raise invalid(written.line, f"{written.name} takes names and values.")
    return tuple(zip(written.value[::2], written.value[1::2], strict=True))


def _some(written: Written, found: list[Any]) -> list[Any]:
    if not found:
        raise invalid(written.line, f"{written.name} needs at least one argument.")
    return found


def _one(written: Written) -> str:
    _options(written)
    if len(written.value) != 1 or not written.value[0]:
        raise invalid(written.line, f"{written.name} takes exactly one argument.")
    return written.value[0]


def _run(written: Written) -> Instruction:
    network = _options(written, "network").get("network", "default")
    if network not in ("none", "default"):
        raise unsupported(written.line, f"RUN --network={shown(network, 40)}", "only none and default.")
    if not written.value or not any(written.value):
        raise invalid(written.line, "RUN without a command.")
    if not written.heredocs:
        return Run(*written.head, argv=written.value, in_shell=not written.is_json)
    whole = marker(written.value[0])
    content = written.heredocs[0][1]
    if whole is not None and len(written.heredocs) == 1:
        return Run(*written.head, argv=(), in_shell=True, script=_chomp(content) if whole.chomped else content)
    text = written.value[0] + "".join(f"\n{content}{name}" for name, content in written.heredocs)
    return Run(*written.head, argv=(text,), in_shell=True)


def _copy(written: Written) -> Instruction:
    is_add = written.name == "ADD"
    options = _options(written, "chown", "chmod", "link", *(() if is_add else ("from",)))
    if len(written.value) < 2:
        raise invalid(written.line, f"{written.name} needs a source and a destination.")
    *given, dest = written.value
    if marker(dest) is not None:
        raise invalid(written.line, f"{written.name}: a heredoc cannot be the destination.")
    contents = dict(written.heredocs)
    sources, inline = [], []
    for each in given:
        at = marker(each) if written.heredocs else None
        if at is None or at.name not in contents:
            sources.append(each)
            continue
        content = _chomp(contents[at.name]) if at.chomped else contents[at.name]
        if "/" in at.name or at.name in (".", ".."):
            raise invalid(written.line, f"{shown(at.name, 60)!r} is not the name of a file.")
        inline.append(Inline(at.name, content, at.expanded))
    for source in sources:
        if _REMOTE.match(source):
            raise unsupported(written.line, f"{written.name} of a remote source", f"{shown(source, 100)}.")
    if len(given) > 1 and not is_directory_form(dest):
        raise invalid(written.line, f"{written.name} of several sources needs a destination that ends with '/'.")
    if options.get("from") == "":
        raise invalid(written.line, "--from needs a value.")
    return Copy(
        *written.head,
        sources=tuple(sources),
        inline=tuple(inline),
        dest=dest,
        from_=options.get("from"),
        chown=options.get("chown"),
        chmod=options.get("chmod"),
        is_add=is_add,
    )


def is_directory_form(dest: str) -> bool:
    """Written as a directory, whatever is there."""
    return dest.endswith("/") or dest.rpartition("/")[2] in (".", "..")


def _shell(written: Written) -> Instruction:
    _options(written)
    if not written.is_json or not written.value:
        raise invalid(written.line, 'SHELL takes a JSON list: SHELL ["/bin/bash", "-c"].')
    return Shell(*written.head, argv=written.value)


def _cmd(written: Written) -> Instruction:
    _options(written)
    return Cmd(*written.head, argv=written.value, in_shell=not written.is_json and bool(written.value))


def _entrypoint(written: Written) -> Instruction:
    _options(written)
    return Entrypoint(*written.head, argv=written.value, in_shell=not written.is_json and bool(written.value))


def _list(written: Written) -> tuple[str, ...]:
    _options(written)
    if not all(written.value):
        raise invalid(written.line, f"{written.name} with an empty argument.")
    return tuple(_some(written, list(written.value)))


def _healthcheck(written: Written) -> Instruction:
    names = {
        "interval": "Interval",
        "timeout": "Timeout",
        "start-period": "StartPeriod",
        "start-interval": "StartInterval",
    }
    options = _options(written, *names, "retries")
    kind = written.value[0].upper() if written.value else ""
    if kind == "NONE" and len(written.value) == 1:
        return Healthcheck(*written.head, test=("NONE",))
    if kind != "CMD" or len(written.value) == 1:
        raise invalid(written.line, "HEALTHCHECK takes NONE, or CMD and a command.")
    found = [(names[name], _duration(written, value)) for name, value in options.items() if name in names]
    if "retries" in options:
        if not options["retries"].isdecimal() or len(options["retries"]) > 9:
            raise invalid(written.line, "--retries takes a number.")
        found.append(("Retries", int(options["retries"])))
    test = ("CMD" if written.is_json else "CMD-SHELL", *written.value[1:])
    return Healthcheck(*written.head, test=test, options=tuple(found))


def _duration(written: Written, text: str) -> int:
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text or len(text) > 40:
        raise invalid(written.line, f"{shown(text, 40)!r} is not a duration such as 30s.")
    return int(sum(float(number) * _UNITS_NS[unit] for number, unit in parts))


_MAKERS: Final[dict[str, Callable[[Written], Instruction]]] = {
    "FROM": _from,
    "ARG": _arg,
    "ENV": lambda written: Env(*written.head, pairs=_pairs(written)),
    "LABEL": lambda written: Label(*written.head, pairs=_pairs(written)),
    "RUN": _run,
    "COPY": _copy,
    "ADD": _copy,
    "WORKDIR": lambda written: Workdir(*written.head, path=_one(written)),
    "USER": lambda written: User(*written.head, user=_one(written)),
    "SHELL": _shell,
    "CMD": _cmd,
    "ENTRYPOINT": _entrypoint,
    "EXPOSE": lambda written: Expose(*written.head, ports=_list(written)),
    "VOLUME": lambda written: Volume(*written.head, paths=_list(written)),
    "STOPSIGNAL": lambda written: StopSignal(*written.head, signal=_one(written)),
    "HEALTHCHECK": _healthcheck,
    "MAINTAINER": lambda written: Maintainer(*written.head, name=_one(written)),
}
