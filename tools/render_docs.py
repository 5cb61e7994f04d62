"""Renders docs/reference/ and SPECIFICATION.md's table of defaults from the code.

    python -m tools.render_docs            writes what has changed
    python -m tools.render_docs --check    writes nothing; exit code 1 when a page is not current

The pages are committed, so that they can be read without a checkout; a test compares them with the code.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
NOTE: Final = "<!-- Rendered from the code by tools/render_docs.py; do not edit. -->\n\n"
BEGIN: Final = "<!-- defaults: begin (tools/render_docs.py) -->"
END: Final = "<!-- defaults: end -->"

NOT_DEFAULTS: Final = ("MIB", "GIB")
MEANINGS: Final[dict[str, str]] = {
    "CPUS": "CPUs of a sandbox",
    "MEMORY_BYTES": "memory of a sandbox, without swap",
    "PROCESSES": "processes in a sandbox",
    "DISK_BYTES": "the writable layer",
    "OPEN_FILES": "open files of a process",
    "OUTPUT_BYTES_MAX": "output kept of a command; then it ends with `output_limit`",
    "RETAIN_S": "how long output and end are kept after the end",
    "RUN_TIMEOUT_S": "a command of `cloche run`",
    "TTL_S": "a sandbox of the SDK and of `cloche create`",
    "TTL_S_MAX": "the longest life of a sandbox",
    "IDLE_TIMEOUT_S": "end after this time without a command",
    "EGRESS": "what a sandbox may reach",
    "EGRESS_CONNECTIONS": "connections out of a sandbox at one time",
    "EGRESS_CONNECTIONS_MAX": "most connections that can be asked for",
    "EGRESS_ATTEMPTS_PER_S": "attempts to get out in a second, refused ones too",
    "APPROVAL_S": "how long a question waits for a person; then it is denied",
    "APPROVAL_SCOPE_S_MAX": "the longest scope of an approval, where the organisation's file enables scopes",
    "IMAGE": "the image",
    "CPUS_MAX": "most CPUs that can be asked for",
    "MEMORY_BYTES_MIN": "least memory that can be asked for",
    "MEMORY_BYTES_MAX": "most memory that can be asked for",
    "DISK_BYTES_MIN": "smallest writable layer that can be asked for",
    "DISK_BYTES_MAX": "largest writable layer that can be asked for",
    "PROCESSES_MAX": "most processes that can be asked for",
    "OUTPUT_BYTES_LIMIT": "most output that a command may ask to keep",
}


def shown(name: str, value: Any) -> str:
    """A default with its unit, which its name says."""
    from cloche.cli import units

    if value is None:
        return "none"
    if "BYTES" in name:
        return units.size(value)
    return (
        units.words(value)
        if name.endswith(("_S", "_S_MAX"))
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def defaults_table() -> str:
    from cloche.wire import defaults

    names = [name for name in vars(defaults) if name.isupper() and name not in NOT_DEFAULTS]
    rows = [f"| {MEANINGS[name]} | {shown(name, getattr(defaults, name))} | `{name}` |" for name in names]
    return "\n".join(["| what | default | in `wire/defaults.py` |", "|---|---|---|", *rows]) + "\n"


def defaults_page() -> str:
    text = "The one table of defaults. The node, the SDK and the command line read it from `wire/defaults.py`; none has others.\n\n"
    return "# Defaults\n\n" + NOTE + text + defaults_table()


def errors_page() -> str:
    from cloche.wire.ends import CLI_EXIT_CODES, EndReason
    from cloche.wire.errors import CLASSES, TABLE

    head = "| code | class | HTTP | exit code | retry helps | what to do |\n|---|---|---|---|---|---|\n"
    rows = "".join(
        f"| `{code}` | `{CLASSES[code].__name__}` | {kind.status} | {kind.exit_code} | {'yes' if kind.retryable else 'no'} | {_cell(kind.fix)} |\n"
        for code, kind in TABLE.items()
    )
    ends = "".join(f"| `{reason.value}` | {_end_code(reason, CLI_EXIT_CODES.get(reason))} |\n" for reason in EndReason)
    return (
        "# Errors and ends\n\n"
        + NOTE
        + "Every error has a code, and every code has a class in `cloche.errors`. Over HTTP it is RFC 9457 problem+json.\n"
        + "The command line prints `✗ code: what happened.`, a line of context and what to do, on stderr.\n\n"
        + head
        + rows
        + "\n## Ends\n\nEvery command and every sandbox ends with exactly one of these.\n\n"
        + "| end | exit code of `cloche run` and `exec` |\n|---|---|\n"
        + ends
    )


def _end_code(reason: Any, code: int | None) -> str:
    words = {
        "exited": "the program's own",
        "signalled": "128 + the signal's number",
        "not_started": "127, or 126 when it is there but cannot be executed, or not as that user",
    }
    return words.get(reason.value, str(code))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


ENVIRONMENT: Final = """`cloche VERB --help` prints the same. What the environment can say:

| variable | |
|---|---|
| `CLOCHE_URL` | the node to ask: `unix:///PATH`, `https://HOST`, `http://localhost:PORT`; else the machine's, else your own |
| `CLOCHE_API_KEY` | the key for a node that is asked over TCP |
| `CLOCHE_IMAGE` | the default image of a node, for `up` and for a node that `run` starts |
| `CLOCHE_ROOTFS` | a prebuilt root file system (`python.erofs`): the node's default image when it is there |
| `CLOCHE_REGISTRIES`, `CLOCHE_TRUST` | the node's files for registries and signatures: [images](../how-to/images.md) |
| `CLOCHE_INTERCEPTOR_PYTHON` | the Python that a node's interceptor runs with, where it does not find one: [egress](../how-to/egress.md) |
| `CLOCHE_DEBUG` | show where an error comes from |
| `NO_COLOR` | no colours |

Exit codes: the program's own from `run`, `exec` and `shell`; 2 for a command line that makes no sense; else [the table of errors](errors.md).
"""


def cli_page() -> str:
    import click

    from cloche.cli.main import VERBS, cli

    context = click.Context(cli, info_name="cloche")
    parts = ["# Command line\n\n" + NOTE + ENVIRONMENT]
    for name in VERBS:
        command = cli.get_command(context, name)
        assert command is not None
        parts.append(_verb(command, click.Context(command, info_name=name, parent=context)))
        if isinstance(command, click.Group):
            inner = click.Context(command, info_name=name, parent=context)
            for key in command.list_commands(inner):
                sub = command.get_command(inner, key)
                assert sub is not None
                parts.append(_verb(sub, click.Context(sub, info_name=key, parent=inner)))
    return "".join(parts)


def _verb(command: Any, context: Any) -> str:
    usage = command.get_usage(context).removeprefix("Usage: ")
    text = inspect.cleandoc(command.help or "")
    records = [
        record for param in command.get_params(context) if (record := param.get_help_record(context)) is not None
    ]
    options = "".join(f"| `{_cell(names)}` | {_cell(said)} |\n" for names, said in records if "--help" not in names)
    table = f"\n| option | |\n|---|---|\n{options}" if options else ""
    return f"\n## {context.command_path}\n\n```\n{re.sub(chr(10) + ' +', ' ', usage)}\n```\n\n{text}\n{table}"


PYTHON: Final = (
    "Sandbox", "Commands", "Command", "Files", "Ports", "PortConnection", "Terminal", "Result", "Chunk", "CommandFailed", "Node", "Images",
)  # fmt: skip


def python_page() -> str:
    from cloche import client

    head = (
        "# Python\n\n"
        + NOTE
        + "`from cloche import Sandbox`. A sandbox has `commands`, `files` and `ports`. `AsyncSandbox` is the same with `await`,\n"
        + "and `async with`; only the sync form is shown. Errors are `ClocheError`s: [the table](errors.md). Defaults: [one table](defaults.md).\n"
    )
    return head + "".join(_class(name, getattr(client, name)) for name in PYTHON)


def _class(name: str, found: type) -> str:
    lines = [f"- `{member}`" + (f": {doc}" if doc else "") for member, doc in _members(found)]
    return "\n".join(["", f"## {name}", "", inspect.cleandoc(found.__doc__ or ""), "", *lines]).rstrip() + "\n"


def _members(found: type) -> Iterator[tuple[str, str]]:
    """Public methods and properties that the class itself defines, in the order of the source."""
    for key, value in vars(found).items():
        if key.startswith(("_", "model_")):
            continue
        plain = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if inspect.isfunction(plain):
            yield f"{key}{_signature(plain)}", _first_line(plain.__doc__)
        elif isinstance(plain, property):
            yield key, _first_line(plain.__doc__)


def _signature(function: Callable[..., Any]) -> str:
    """As it stands in the source: annotations are text there."""
    signature = inspect.signature(function)
    parts: list[str] = []
    for name, parameter in signature.parameters.items():
        if name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not any(part.startswith("*") for part in parts):
            parts.append("*")
        parts.append(str(parameter.replace(annotation=parameter.empty, default=parameter.empty)) + _typed(parameter))
    return f"({', '.join(parts)}) -> {signature.return_annotation}".replace("builtins.", "")


def _typed(parameter: inspect.Parameter) -> str:
    default = parameter.default
    if default is parameter.empty:
        return f": {parameter.annotation}"
    return f": {parameter.annotation} = {getattr(default, 'name', None) or repr(default)}"


def _first_line(doc: str | None) -> str:
    return inspect.cleandoc(doc or "").split("\n")[0]


MARK: Final = re.compile(r"""mark\.req\(\s*["']([A-Z]+-\d+)["']""")
PROMISE: Final = re.compile(r"^(\d+\. .*?\(([A-Z]+-\d+)[^)]*\))(?: →.*?)?$", re.MULTILINE | re.DOTALL)
ROOMS: Final = ("promises", "contract", "unit")
TESTS_NAMED_MAX: Final = 3


def tests_by_requirement() -> dict[str, list[str]]:
    """Requirement → the files with a test that carries its mark, the promises' first."""
    found: dict[str, list[str]] = {}
    for room in ROOMS:
        for path in sorted((ROOT / "tests" / room).rglob("test_*.py")):
            for requirement in sorted(set(MARK.findall(path.read_text(encoding="utf-8")))):
                found.setdefault(requirement, []).append(str(path.relative_to(ROOT)))
    return found


def specification() -> str:
    """The page with its tests and its table of defaults filled in."""
    text = (ROOT / "SPECIFICATION.md").read_text(encoding="utf-8")
    tests = tests_by_requirement()

    def named(match: re.Match[str]) -> str:
        files = tests.get(match[2], [])[:TESTS_NAMED_MAX]
        if not files:
            return f"{match[1]} → **[no test]**"
        real = match[2].startswith("UX-") or any(name.startswith("tests/promises/") for name in files)
        return f"{match[1]} → {', '.join(f'`{name}`' for name in files)}{'' if real else ' **[no promise test]**'}"

    text = PROMISE.sub(named, text)
    before, _begin, rest = text.partition(BEGIN)
    _old, _end, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{defaults_table()}\n{END}{after}"


PAGES: Final[dict[str, Callable[[], str]]] = {
    "docs/reference/errors.md": errors_page,
    "docs/reference/cli.md": cli_page,
    "docs/reference/defaults.md": defaults_page,
    "docs/reference/python.md": python_page,
    "SPECIFICATION.md": specification,
}


def stale() -> dict[str, str]:
    """The pages that differ from the code, with what they should be."""
    found = {}
    for name, page in PAGES.items():
        path = ROOT / name
        text = page().rstrip() + "\n"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            found[name] = text
    return found


def main() -> int:
    found = stale()
    if "--check" in sys.argv[1:]:
        for name in found:
            print(f"{name} is not current: python -m tools.render_docs")
        return 1 if found else 0
    for name, text in found.items():
        (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / name).write_text(text, encoding="utf-8")
        print(f"wrote {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
