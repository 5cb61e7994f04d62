"""The entry point: which verbs there are, and how every failure leaves the process.

A verb's module is imported when it is typed and not before: `cloche --version` must not pay for HTTP and models.
"""

import errno
import os
import sys
from typing import Any, Final, NoReturn

import click

from cloche.cli.verbs import Table, Verbs
from cloche.cli.version import version_line

VERBS: Final[Table] = {
    "run": ("run", "Run a command in a new sandbox, and end the sandbox with it."),
    "create": ("create", "Create a sandbox that stays."),
    "exec": ("exec", "Run a command in a sandbox."),
    "shell": ("shell", "Open a shell in a sandbox (a new one without ID)."),
    "ps": ("ps", "List sandboxes."),
    "top": ("top", "Watch sandboxes."),
    "logs": ("logs", "Show what a command or a sandbox printed."),
    "cp": ("cp", "Copy files into or out of a sandbox."),
    "port": ("port", "Forward a local port to one inside."),
    "kill": ("kill", "End sandboxes."),
    "egress": ("egress", "Show what a sandbox tried to reach, and let it out a little more."),
    "policy": ("policy", "Say what a sandbox may reach, and by which rule."),
    "secret": ("secret", "Bind secrets to hosts; a value goes in and never comes out."),
    "approvals": ("approvals", "Answer what waits for a person."),
    "image": ("image", "Pull, build, list and remove images."),
    "df": ("df", "Show what the node keeps on disk."),
    "prune": ("prune", "Remove what is kept of ended sandboxes."),
    "up": ("up", "Start the node (as root: for all users of this machine)."),
    "down": ("down", "Stop the node."),
    "reset": ("reset", "End everything and remove all state of the node."),
    "node": ("node", "Look at the node itself."),
    "doctor": ("doctor", "Check what this host gives and lacks."),
    "delegate": ("delegate", "Let a user run an own node with limits (root)."),
    "version": ("version", "Show versions."),
    "completion": ("completion", "Print a shell's completion script."),
}

LOCAL_ERRORS: Final = {
    errno.ENOENT: "path_not_found",
    errno.EACCES: "permission_denied",
    errno.EPERM: "permission_denied",
    errno.EEXIST: "path_exists",
    errno.ENOTDIR: "not_a_directory",
    errno.EISDIR: "is_a_directory",
    errno.ENOSPC: "no_space",
    errno.EROFS: "read_only",
}
"""What a local file's error is called, so that scripts see the same words on both sides of `cp`."""


def _show_version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(version_line())
        ctx.exit()


@click.group(cls=Verbs, table=VERBS, package="cloche.cli", context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show the version."
)
def cli() -> None:
    """Sandboxes with a kernel of their own, for code that AI agents write."""


def run(arguments: list[str]) -> int:
    """Runs one command line; answers the exit code. Everything that can go wrong ends here."""
    try:
        result = cli.main(args=arguments, prog_name="cloche", standalone_mode=False)
        code = result if isinstance(result, int) else 0
        sys.stdout.flush()
    except click.exceptions.Exit as leave:
        code = leave.exit_code
    except click.Abort:
        code = 130
    except click.ClickException as usage:
        code = _usage(usage)
    except KeyboardInterrupt:
        code = 130
    except Exception as error:  # the last place: what nobody thought of must still end with a name and a code
        code = _failed(error)
    return code


def _usage(usage: click.ClickException) -> int:
    from cloche.cli.failure import show

    context = getattr(usage, "ctx", None)
    fix = f"See: {context.command_path} --help" if context else "See: cloche --help"
    show("invalid_request", usage.format_message(), [], fix)
    return usage.exit_code


def _failed(error: Exception) -> int:
    from cloche.cli.carry import ReaderLeft
    from cloche.cli.failure import show, show_error
    from cloche.wire.errors import TABLE, ClocheError

    if isinstance(error, ReaderLeft):
        # Point stdout elsewhere, or the interpreter complains at exit about what it could not write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    if os.environ.get("CLOCHE_DEBUG"):
        import traceback

        traceback.print_exc()
    if isinstance(error, ClocheError):
        return show_error(error)
    if isinstance(error, OSError) and error.filename is not None and error.errno in LOCAL_ERRORS:
        show(LOCAL_ERRORS[error.errno], f"{error.filename}: {error.strerror}", [], "Check the path on this machine.")
        return 1
    fix = TABLE["internal"].fix + " (CLOCHE_DEBUG=1 shows where)"
    show("internal", f"{type(error).__name__}: {error}", [], fix)
    return TABLE["internal"].exit_code


def main(arguments: list[str] | None = None) -> NoReturn:
    """The console script."""
    given: Any = sys.argv[1:] if arguments is None else arguments
    sys.exit(run(list(given)))
