"""Follows one stage from its base's config to its own: variables, user, directory, shell. Pure; nothing runs here.

Every instruction becomes a `Step`: what is to be done, with everything expanded, and the image's config after it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from cloche_server.images.build.expand import BadExpansion, UnsupportedExpansion, expand_document, words
from cloche_server.images.build.instructions import (
    Arg,
    Cmd,
    Copy,
    Entrypoint,
    Env,
    Expose,
    Healthcheck,
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
from cloche_server.images.build.stages import HIDDEN_ARGS, Stage, expanded

DEFAULT_SHELL: Final = ("/bin/sh", "-c")
DEFAULT_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PORT: Final = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?(?:/(tcp|udp|sctp))?\Z")
_CHMOD: Final = re.compile(r"0?[0-7]{1,4}\Z")
PORTS_MAX: Final = 2000


@dataclass(frozen=True)
class Config:
    """An image's config, as far as instructions change it. Lists and dicts are never changed in place."""

    env: dict[str, str] = field(default_factory=dict)
    user: str = ""
    workdir: str = "/"
    shell: tuple[str, ...] = ()
    cmd: tuple[str, ...] | None = None
    entrypoint: tuple[str, ...] | None = None
    labels: dict[str, str] = field(default_factory=dict)
    ports: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()
    stop_signal: str | None = None
    healthcheck: dict[str, Any] | None = None
    author: str | None = None


@dataclass(frozen=True)
class RunWork:
    """A command. `script` is one with its own interpreter (`#!`), to be put into a file and run."""

    argv: tuple[str, ...]
    env: dict[str, str]
    """All of it: the image's, and the stage's ARGs."""
    user: str
    workdir: str
    script: str | None = None


@dataclass(frozen=True)
class CopyWork:
    """COPY or ADD. `inline`: names and contents."""

    sources: tuple[str, ...]
    inline: tuple[tuple[str, str], ...]
    dest: str
    """Absolute; ends with a slash when it was written as a directory."""
    index: int
    """Of the instruction in its stage."""
    chown: str | None
    mode: int | None
    is_add: bool


@dataclass(frozen=True)
class DirectoryWork:
    """WORKDIR. Whoever is USER owns what is made, as with BuildKit and buildah."""

    path: str
    user: str


@dataclass(frozen=True)
class Step:
    """One instruction, ready to be done. `work` None: it only changes the config."""

    line: int
    text: str
    work: RunWork | CopyWork | DirectoryWork | None
    after: Config
    visible: dict[str, str]
    """Variables that the result may depend on: for the cache's key of a RUN."""


def config_of(document: Mapping[str, Any]) -> Config:
    """From an OCI config document, which came from a registry: wrong types are left out."""
    given = document.get("config")
    given = given if isinstance(given, dict) else {}
    env: dict[str, str] = {}
    for each in _texts(given.get("Env")) or ():
        name, equals, value = each.partition("=")
        if name and equals:
            env[name] = value
    return Config(
        env=env,
        user=_text(given.get("User")) or "",
        workdir=posixpath.normpath("/" + (_text(given.get("WorkingDir")) or "")).replace("//", "/"),
        shell=_texts(given.get("Shell")) or (),
        cmd=_texts(given.get("Cmd")),
        entrypoint=_texts(given.get("Entrypoint")),
        labels={name: value for name, value in _dict(given.get("Labels")).items() if isinstance(value, str)},
        ports=tuple(_dict(given.get("ExposedPorts"))),
        volumes=tuple(_dict(given.get("Volumes"))),
        stop_signal=_text(given.get("StopSignal")),
        healthcheck=_dict(given.get("Healthcheck")) or None,
        author=_text(document.get("author")),
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _texts(value: object) -> tuple[str, ...] | None:
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return tuple(value) or None
    return None


def _dict(value: object) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {}


@dataclass(frozen=True)
class Followed:
    """A stage: its steps, and what a stage that is built on it starts with."""

    steps: tuple[Step, ...]
    config: Config
    args: dict[str, str]


def follow(
    stage: Stage,
    base: Config,
    *,
    args: Mapping[str, str],
    global_args: Mapping[str, str],
    escape: str = "\\",
    inherited: Mapping[str, str] | None = None,
) -> Followed:
    """All steps of a stage. `inherited`: the ARGs of the stage that it is built on."""
    walk = _Walk(base, args, global_args, escape, dict(inherited or {}))
    steps = tuple(walk.step(index, each) for index, each in enumerate(stage.instructions))
    return Followed(steps, walk.config, walk.args)


class _Walk:
    def __init__(
        self,
        base: Config,
        given: Mapping[str, str],
        global_args: Mapping[str, str],
        escape: str,
        args: dict[str, str],
    ) -> None:
        self.config = base if "PATH" in base.env else replace(base, env={"PATH": DEFAULT_PATH, **base.env})
        self._given = given
        self._global = global_args
        self._escape = escape
        self.args = args
        self._cmd_is_ours = False

    @property
    def _env(self) -> dict[str, str]:
        """ENV beats ARG."""
        return {**self.args, **self.config.env}

    def step(self, index: int, each: Instruction) -> Step:
        work: RunWork | CopyWork | DirectoryWork | None = None
        visible: dict[str, str] = {}
        if isinstance(each, Run):
            visible = self._env
            work = self._run(each)
        elif isinstance(each, Copy):
            work = self._copy(index, each)
        elif isinstance(each, Workdir):
            path = posixpath.join(self.config.workdir, self._word(each.path, each.line) or "/")
            path = posixpath.normpath(path).replace("//", "/")
            self.config = replace(self.config, workdir=path)
            work = DirectoryWork(path, self.config.user)
        else:
            self._change(each)
        return Step(each.line, each.text, work, self.config, visible)

    def _word(self, word: str, line: int) -> str:
        return expanded(word, self._env, self._escape, line)

    def _run(self, each: Run) -> RunWork:
        shell = self.config.shell or DEFAULT_SHELL
        env = {**{name: value for name, value in self._given.items() if name in HIDDEN_ARGS}, **self._env}
        script = each.script if each.script is not None and each.script.startswith("#!") else None
        if script is not None:
            argv: tuple[str, ...] = ()
        elif each.in_shell:
            argv = (*shell, each.script if each.script is not None else " ".join(each.argv))
        else:
            argv = each.argv
        return RunWork(argv, env, self.config.user or "0", self.config.workdir, script)

    def _copy(self, index: int, each: Copy) -> CopyWork:
        dest = self._word(each.dest, each.line)
        if not dest:
            raise invalid(each.line, "the destination is empty.")
        is_directory = dest.endswith("/") or dest.rpartition("/")[2] in (".", "..")
        path = posixpath.normpath(posixpath.join(self.config.workdir, dest)).replace("//", "/")
        mode = None if each.chmod is None else self._word(each.chmod, each.line)
        if mode is not None and not _CHMOD.match(mode):
            raise unsupported(each.line, f"--chmod={shown(mode, 40)}", "give an octal number.")
        try:
            inline = [
                (one.name, expand_document(one.content, self._env) if one.expanded else one.content)
                for one in each.inline
            ]
        except UnsupportedExpansion as other:
            raise unsupported(each.line, f"the substitution {shown(str(other), 60)}") from other
        except BadExpansion as bad:
            raise invalid(each.line, f"{shown(str(bad))}.") from bad
        return CopyWork(
            sources=tuple(self._word(source, each.line) for source in each.sources),
            inline=tuple(inline),
            dest=path + ("/" if is_directory and path != "/" else ""),
            index=index,
            chown=None if each.chown is None else self._word(each.chown, each.line),
            mode=None if mode is None else int(mode, 8),
            is_add=each.is_add,
        )

    def _change(self, each: Instruction) -> None:
        if isinstance(each, Arg):
            self._declare(each)
        elif isinstance(each, Cmd | Entrypoint):
            self.config = self._start(each)
        elif isinstance(each, Env | Label):
            # All values of one ENV see what was before it.
            pairs = {self._word(name, each.line): self._word(value, each.line) for name, value in each.pairs}
            if any(not name or "=" in name for name in pairs):
                raise invalid(each.line, "a name that is empty, or has a '='.")
            if isinstance(each, Env):
                self.config = replace(self.config, env={**self.config.env, **pairs})
            else:
                self.config = replace(self.config, labels={**self.config.labels, **pairs})
        else:
            self.config = replace(self.config, **self._setting(each))

    def _setting(self, each: Instruction) -> dict[str, Any]:
        match each:
            case User():
                return {"user": self._word(each.user, each.line)}
            case Shell():
                return {"shell": each.argv}
            case Expose():
                return {"ports": self._ports(each)}
            case Volume():
                paths = [self._word(path, each.line) for path in each.paths]
                return {"volumes": tuple(dict.fromkeys([*self.config.volumes, *paths]))}
            case StopSignal():
                return {"stop_signal": self._word(each.signal, each.line)}
            case Healthcheck():
                return {"healthcheck": {"Test": list(each.test), **dict(each.options)}}
            case Maintainer():
                return {"author": each.name}
        raise AssertionError(f"no rule for {type(each).__name__}")

    def _start(self, each: Cmd | Entrypoint) -> Config:
        shell = self.config.shell or DEFAULT_SHELL
        argv = (*shell, " ".join(each.argv)) if each.in_shell else each.argv
        if isinstance(each, Cmd):
            self._cmd_is_ours = True
            return replace(self.config, cmd=argv)
        return replace(self.config, entrypoint=argv, cmd=self.config.cmd if self._cmd_is_ours else None)

    def _declare(self, each: Arg) -> None:
        for name, default in each.pairs:
            if name in self._given:
                self.args[name] = self._given[name]
            elif default is not None:
                self.args[name] = self._word(default, each.line)
            elif name in self._global:
                self.args[name] = self._global[name]

    def _ports(self, each: Expose) -> tuple[str, ...]:
        found = list(self.config.ports)
        for port in each.ports:
            try:
                values = words(port, self._env, self._escape)
            except UnsupportedExpansion as other:
                raise unsupported(each.line, f"the substitution {shown(str(other), 60)}") from other
            except BadExpansion as bad:
                raise invalid(each.line, f"{shown(str(bad))}.") from bad
            for value in values:
                parts = _PORT.match(value)
                if parts is None or int(parts[2] or parts[1]) > 65_535 or int(parts[2] or parts[1]) < int(parts[1]):
                    raise invalid(each.line, f"{shown(value, 40)!r} is not a port.")
                numbers = range(int(parts[1]), int(parts[2] or parts[1]) + 1)
                if len(numbers) > PORTS_MAX:
                    raise invalid(each.line, f"EXPOSE of more than {PORTS_MAX} ports.")
                found += [f"{number}/{parts[3] or 'tcp'}" for number in numbers]
        return tuple(dict.fromkeys(found))
