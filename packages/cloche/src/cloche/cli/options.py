"""Options in Docker's grammar, and the requests that they make.

`run [IMAGE] -- CMD`: what stands behind `--` is the command and never an option of ours. Without `--`, Docker's
own form works too: the first word is the image, the rest the command. What Docker has and a sandbox must not
have (`-v`, `-p`, `--privileged`, …) is answered with what to use instead, exit code 2.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from cloche.cli.units import DURATION, SIZE

if TYPE_CHECKING:
    from cloche.wire.commands import FirstCommand, Terminal
    from cloche.wire.sandboxes import CreateSandbox

F = TypeVar("F", bound=Callable[..., Any])
_BEHIND: Final = "cloche.behind_dashes"

_COPY: Final = (
    "a sandbox sees no directory of the host. Copy in and out instead: cloche create, "
    "cloche cp ./data ID:/workspace/data, cloche exec ID -- CMD, cloche cp ID:/workspace/out ./out"
)
_PORT: Final = "nothing inside listens on the host. Forward a port while you need it: cloche port ID PORT"
_NETWORK: Final = "a sandbox has no network interface. Name what it may reach instead: --allow HOST, --preset NAME"
_ISOLATION: Final = "no option lowers a sandbox's isolation. Inside, `--user root` works, without capabilities"
_DETACH: Final = "use cloche create [IMAGE] -- CMD; it prints the id, and cloche logs -f ID follows it"

INSTEAD: Final[dict[tuple[str, ...], str]] = {
    ("-v", "--volume"): _COPY,
    ("--mount",): _COPY,
    ("-p", "--publish"): _PORT,
    ("--network", "--net"): _NETWORK,
    ("--privileged",): _ISOLATION,
    ("--cap-add",): _ISOLATION,
    ("--device",): _ISOLATION,
    ("--security-opt",): _ISOLATION,
    ("-d", "--detach"): _DETACH,
}
_FLAGS: Final = frozenset({"--privileged", "--detach"})


class DashCommand(click.Command):
    """A command that keeps what stands behind `--` away from the option parser."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            split = args.index("--")
            ctx.meta[_BEHIND] = args[split + 1 :]
            args = args[:split]
        return super().parse_args(ctx, args)


def behind_dashes() -> list[str] | None:
    """What stood behind `--`; None when there was no `--`."""
    found: list[str] | None = click.get_current_context().meta.get(_BEHIND)
    return found


def image_and_command(words: tuple[str, ...]) -> tuple[str | None, list[str]]:
    """IMAGE and CMD from `[IMAGE] -- CMD` or `IMAGE CMD`."""
    behind = behind_dashes()
    if behind is None:
        return (words[0] if words else None), list(words[1:])
    if len(words) > 1:
        raise click.UsageError(f"{words[1]!r} stands before `--`; only the image's name may stand there")
    return (words[0] if words else None), behind


def target_and_command(words: tuple[str, ...]) -> tuple[str, list[str]]:
    """ID and CMD from `ID -- CMD` or `ID CMD`."""
    target, argv = image_and_command(words)
    if target is None:
        raise click.UsageError("which sandbox? Give its id or name: cloche exec ID -- CMD")
    if not argv:
        raise click.UsageError("which command? cloche exec ID -- CMD")
    return target, argv


def _refuse(names: tuple[str, ...], answer: str) -> Callable[[F], F]:
    def callback(_ctx: click.Context, _param: click.Parameter, value: Any) -> None:
        if value:
            raise click.UsageError(f"{names[0]}: {answer}")

    is_flag = bool(_FLAGS.intersection(names))
    return click.option(
        *names, is_flag=is_flag, multiple=not is_flag, hidden=True, expose_value=False, callback=callback
    )


def refuse_unsafe(function: F) -> F:
    """Adds Docker's options that are answered instead of obeyed."""
    return _apply(function, [_refuse(names, answer) for names, answer in INSTEAD.items()])


def _apply(function: F, decorators: list[Callable[[F], F]]) -> F:
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


def command_options(function: F) -> F:
    """What a command in a sandbox can be given."""
    return _apply(
        function,
        [
            click.option(
                "-e",
                "--env",
                "env",
                multiple=True,
                metavar="NAME[=VALUE]",
                help="Set a variable; without a value, pass yours.",
            ),
            click.option(
                "--env-file",
                multiple=True,
                type=click.Path(dir_okay=False, path_type=Path),
                help="Read variables from a file.",
            ),
            click.option("-w", "--workdir", metavar="DIR", help="Working directory inside."),
            click.option("-u", "--user", metavar="USER", help="User inside: a name, UID or UID:GID."),
        ],
    )


def terminal_options(function: F) -> F:
    return _apply(
        function,
        [
            click.option("-i", "--interactive", is_flag=True, help="Pass stdin, byte for byte."),
            click.option("-t", "--tty", is_flag=True, help="Give the command a terminal."),
        ],
    )


def sandbox_options(function: F) -> F:
    """What a new sandbox can be given."""
    return _apply(
        function,
        [
            click.option("--name", help="A name to use instead of the id."),
            click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", help="Label the sandbox."),
            click.option("-m", "--memory", type=SIZE, help="Memory limit (512m)."),
            click.option("--cpus", type=float, help="CPU limit (1)."),
            click.option("--disk", type=SIZE, help="Limit of the writable layer (2g)."),
            click.option("--pids", "--pids-limit", type=int, help="Limit of processes (256)."),
            click.option(
                "--isolation",
                type=click.Choice(["gvisor", "microvm", "any"]),
                help="The isolation class to have at least.",
            ),
            click.option(
                "--privileges", type=click.Choice(["none", "package-install"]), help="What commands may do inside."
            ),
            click.option("--noexec-tmp", is_flag=True, help="Nothing in /tmp can be executed."),
            click.option("--idle-timeout", type=DURATION, help="End it when nothing ran for this long."),
            click.option("--retain", type=DURATION, help="Keep output and end this long after the end (24h)."),
        ],
    )


def egress_options(function: F) -> F:
    """What a new sandbox, or a build's steps, may reach."""
    return _apply(
        function,
        [
            click.option(
                "--allow",
                multiple=True,
                metavar="HOST[:PORT]",
                help="Let it reach this host (*.HOST: all below); 443 and 80 without a port.",
            ),
            click.option(
                "--ask", multiple=True, metavar="HOST[:PORT]", help="A person is asked each time: cloche approvals"
            ),
            click.option("--preset", "presets", multiple=True, metavar="NAME", help="A named list: python-packages, …"),
        ],
    )


def secret_option(function: F) -> F:
    text = "Lend it a secret: inside, a variable of this name holds a placeholder."
    return click.option("--secret", "secrets", multiple=True, metavar="NAME", help=text)(function)


def egress_of(given: dict[str, Any]) -> list[str]:
    """The first rule that fits decides: what must be asked stands before what is allowed."""
    asked = [f"ask:{host}" for host in given.get("ask") or ()]
    return [*asked, *(given.get("allow") or ()), *(f"preset:{name}" for name in given.get("presets") or ())]


def pull_option(function: F) -> F:
    choice = click.Choice(["missing", "always", "never"])
    return click.option("--pull", type=choice, help="When to ask the registry for the image (missing).")(function)


def _words(_ctx: click.Context, _param: click.Parameter, value: str | None) -> list[str] | None:
    return None if value is None else [value] if value else []


def image_options(function: F) -> F:
    """What is different about the image's own words."""
    text = "Run this before CMD instead of the image's; empty: nothing."
    entrypoint = click.option("--entrypoint", metavar="PROGRAM", callback=_words, help=text)
    return _apply(function, [pull_option, entrypoint])


def environment(pairs: tuple[str, ...], files: tuple[Path, ...]) -> dict[str, str]:
    """Docker's rules: files first, `-e` wins; a name without a value takes the caller's, or is left out."""
    found: dict[str, str] = {}
    for path in files:
        for text in path.read_text(encoding="utf-8").splitlines():
            if text.strip() and not text.lstrip().startswith("#"):
                _set(found, text.lstrip())
    for pair in pairs:
        _set(found, pair)
    return found


def _set(found: dict[str, str], pair: str) -> None:
    name, equals, value = pair.partition("=")
    if not name:
        raise click.UsageError(f"{pair!r} is not NAME=VALUE")
    if equals:
        found[name] = value
    elif name in os.environ:
        found[name] = os.environ[name]


def labels_of(pairs: tuple[str, ...]) -> dict[str, str]:
    return {key: value for key, _equals, value in (pair.partition("=") for pair in pairs)}


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


def checked(model: Any, fields: dict[str, Any]) -> Any:
    """The request, or a usage error that names the option's field."""
    from pydantic import ValidationError

    try:
        return model(**_without_none(fields))
    except ValidationError as bad:
        first = bad.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise click.UsageError(f"{where}: {first['msg']}") from None


def create_request(image: str | None, given: dict[str, Any], command: "FirstCommand | None" = None) -> "CreateSandbox":
    """From the options of `sandbox_options`; what was not given keeps the table's default."""
    from cloche.wire.sandboxes import CreateSandbox, Limits

    limits = {
        "cpus": given.get("cpus"),
        "memory_bytes": given.get("memory"),
        "processes": given.get("pids"),
        "disk_bytes": given.get("disk"),
    }
    fields = {
        "image": image,
        "pull": given.get("pull"),
        "entrypoint": given.get("entrypoint"),
        "isolation": given.get("isolation"),
        "name": given.get("name"),
        "labels": labels_of(given.get("labels") or ()),
        "limits": checked(Limits, limits),
        "ttl_s": given.get("ttl"),
        "idle_timeout_s": given.get("idle_timeout"),
        "retain_s": given.get("retain"),
        "privileges": given.get("privileges"),
        "noexec_tmp": given.get("noexec_tmp"),
        "egress": egress_of(given),
        "secrets": list(given.get("secrets") or ()),
        "command": command,
    }
    request: CreateSandbox = checked(CreateSandbox, fields)
    return request


def command_request(argv: list[str], given: dict[str, Any], terminal: "Terminal | None" = None) -> "FirstCommand":
    """From the options of `command_options` and `terminal_options`."""
    from cloche.wire.commands import FirstCommand

    fields = {
        "argv": argv,
        "env": environment(given.get("env") or (), given.get("env_file") or ()),
        "cwd": given.get("workdir"),
        "user": given.get("user"),
        "timeout_s": given.get("timeout"),
        "stdin": bool(given.get("interactive")) or terminal is not None,
        "terminal": terminal,
    }
    request: FirstCommand = checked(FirstCommand, fields)
    return request


def start_fields(request: "FirstCommand") -> dict[str, Any]:
    """A request as the arguments of the SDK's `commands.start`."""
    fields = {name: getattr(request, name) for name in request.model_fields_set if name != "argv"}
    return {"command": request.argv, **fields}
