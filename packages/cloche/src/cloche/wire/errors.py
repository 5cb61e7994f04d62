"""Every error that a caller can get: one flat table, one class a code.

`TABLE` maps a code to its HTTP status, CLI exit code, whether a retry can help, and the one-sentence fix. Outside
it is RFC 9457 problem+json (`Problem`); inside and in the SDK it is a `ClocheError`. No dependency's
exception reaches a caller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel, ConfigDict


@dataclass(frozen=True)
class ErrorKind:
    """One row of the table."""

    status: int
    exit_code: int
    retryable: bool
    fix: str


def _kind(status: int, fix: str, *, exit_code: int = 125, retryable: bool = False) -> ErrorKind:
    return ErrorKind(status, exit_code, retryable, fix)


TABLE: Final[dict[str, ErrorKind]] = {
    # the request
    "invalid_request": _kind(400, "Correct the field that the message names.", exit_code=2),
    "invalid_path": _kind(400, "Give an absolute path inside the sandbox.", exit_code=2),
    "unauthenticated": _kind(401, "Send the node's key: set CLOCHE_API_KEY."),
    "forbidden": _kind(403, "Ask the owner, or use your own sandbox: cloche ps"),
    "host_refused": _kind(421, "Ask it by a name in its list of allowed hosts."),
    "origin_refused": _kind(403, "Put the origin into the node's list of allowed origins."),
    "not_found": _kind(404, "See what there is: cloche ps --all"),
    "method_not_allowed": _kind(405, "See the routes: GET /openapi.json", exit_code=2),
    "ambiguous": _kind(409, "Give more characters of the id.", exit_code=2),
    "conflict": _kind(409, "Read the present state and try again."),
    "name_taken": _kind(409, "Choose another --name, or end the one that has it: cloche kill NAME"),
    "idempotency_conflict": _kind(409, "Use a new Idempotency-Key for a different request."),
    "too_large": _kind(413, "Send it in smaller parts."),
    "unsupported": _kind(501, "See docs/reference for what this engine can do."),
    # sandboxes and commands
    "sandbox_ended": _kind(410, "Create a new one; what it printed is still there: cloche logs ID"),
    "command_ended": _kind(409, "Start a new command."),
    "command_failed": _kind(409, "See what it printed: the result's stderr.", exit_code=1),
    "stdin_offset": _kind(409, "Send from the offset that the answer names."),
    "stdin_closed": _kind(409, "The command's stdin is closed; start a new command with stdin."),
    "no_stdin": _kind(409, "Start the command with stdin=True (cloche run -i)."),
    "no_terminal": _kind(409, "Start the command with a terminal (cloche run -t)."),
    "cursor_lost": _kind(410, "The oldest output was dropped; read from the offset that the answer names."),
    "cursor_ahead": _kind(416, "Read from an offset that exists."),
    "rolled_back": _kind(410, "The sandbox was restored; read from the new generation's start."),
    "image_not_found": _kind(404, "See which images are here: cloche image ls"),
    "isolation_unavailable": _kind(422, "Ask for a class that this node has: cloche doctor"),
    "overloaded": _kind(503, "Try again later, or end sandboxes that you do not need: cloche ps", retryable=True),
    "create_failed": _kind(500, "See why: cloche node logs", retryable=True),
    "guest_too_old": _kind(500, "Make the image anew with this version's agent."),
    "guest_too_new": _kind(500, "Upgrade the node: cloche up --replace"),
    # images
    "image_refused": _kind(422, "The image breaks a rule that the detail names; make it anew with another tool."),
    "image_too_large": _kind(413, "Use a smaller image, or raise the node's limits for images."),
    "image_corrupt": _kind(
        502, "Pull it again; if it stays so, the registry or the archive is damaged.", retryable=True
    ),
    "image_in_use": _kind(409, "End the sandboxes that run from it first: cloche ps"),
    "registry_unreachable": _kind(502, "Check the name, the mirror and the network of the node.", retryable=True),
    "registry_denied": _kind(403, "Log in to the registry (docker login, podman login), or check the name."),
    "signature_missing": _kind(403, "Use a signed image, or change the node's trust policy."),
    "signature_invalid": _kind(403, "Use an image signed by a key of the node's trust policy."),
    "store_busy": _kind(503, "Another node uses this image store; give this one its own: cloche up --store DIR"),
    "dockerfile_invalid": _kind(400, "Correct the line that the message names.", exit_code=2),
    "dockerfile_unsupported": _kind(
        422, "Change the line that the message names, or build with --compat.", exit_code=2
    ),
    "build_failed": _kind(422, "See what the step printed.", exit_code=1),
    # the way out, secrets, approvals
    "policy_refused": _kind(403, "Ask for less, or have the organisation's file (policy.yaml) offer it."),
    "policy_invalid": _kind(400, "Correct the rule that the message names.", exit_code=2),
    "preset_unavailable": _kind(422, "Name the hosts instead: --allow HOST, or configure the tool on the node."),
    "interceptor_missing": _kind(
        503, "See why it cannot be made: cloche doctor; rules without methods, paths and secrets need none."
    ),
    "egress_refused": _kind(403, "Allow it from outside: cloche egress allow ID HOST", exit_code=1),
    "grant_not_found": _kind(404, "See which grants hold: cloche egress grants ID", exit_code=1),
    "secret_not_found": _kind(404, "See which there are: cloche secret ls"),
    "secret_unavailable": _kind(502, "Set it again, or repair where it comes from: cloche secret set NAME --from …"),
    "approval_not_found": _kind(404, "See what waits: cloche approvals"),
    "approval_over": _kind(409, "It was answered, or its time is over; the program can try again."),
    "approval_scope_refused": _kind(403, "Approve this one action, or have the organisation's file enable scopes."),
    # inside the guest
    "path_not_found": _kind(404, "Look at what is there: cloche exec ID -- ls -la", exit_code=1),
    "permission_denied": _kind(403, "Ask as another user (user='root'), or change its mode.", exit_code=1),
    "path_exists": _kind(409, "Remove it first, or allow overwriting.", exit_code=1),
    "not_a_directory": _kind(409, "Name a directory.", exit_code=1),
    "is_a_directory": _kind(409, "Name a file, or use the tree calls.", exit_code=1),
    "not_empty": _kind(409, "Remove recursively.", exit_code=1),
    "no_space": _kind(507, "Create the sandbox with a larger disk: --disk 4g", exit_code=1),
    "read_only": _kind(403, "Write below /workspace or /tmp.", exit_code=1),
    "name_too_long": _kind(400, "Use a shorter name.", exit_code=1),
    "path_loop": _kind(400, "Name the file behind the links.", exit_code=1),
    "busy": _kind(409, "Close what uses it first.", exit_code=1),
    "connection_refused": _kind(502, "Start the server inside first, on 127.0.0.1.", exit_code=1, retryable=True),
    "transfer_aborted": _kind(500, "Try the transfer again.", exit_code=1, retryable=True),
    "no_such_user": _kind(400, "Use a user of the image, or UID:GID.", exit_code=126),
    "not_executable": _kind(400, "Make it executable, or name its interpreter.", exit_code=126),
    "command_not_found": _kind(400, "Check the program's name, and PATH inside the image.", exit_code=127),
    "guest_io": _kind(502, "The guest's file system failed; try in a new sandbox.", exit_code=1),
    # ends of a sandbox that cut a call short
    "host_failure": _kind(500, "See why: cloche node logs"),
    "protocol_error": _kind(500, "The guest broke the channel's contract and was ended; create a new sandbox."),
    "unresponsive": _kind(504, "The guest stopped answering and was ended; create a new sandbox."),
    # the node and its host
    "node_unavailable": _kind(503, "Start it: cloche up", retryable=True),
    "node_refused": _kind(403, "Ask the machine's administrator to let you use its node."),
    "node_busy": _kind(
        503, "Another daemon serves this state directory; replace it: cloche up --replace", retryable=True
    ),
    "engine_missing": _kind(500, "Install the engine: uv tool install 'cloche[server]'"),
    "engine_too_old": _kind(500, "The installed runsc has known escapes; upgrade it: uv tool upgrade cloche"),
    "server_missing": _kind(500, "Install the node: uv tool install 'cloche[server]', or set CLOCHE_URL."),
    "no_linux_kernel": _kind(
        500, "Run the node on Linux (a VM, WSL 2, a server) and set CLOCHE_URL: docs/how-to/macos-and-windows.md"
    ),
    "unsupported_architecture": _kind(500, "Use an x86_64 machine for the node and set CLOCHE_URL."),
    "userns_forbidden": _kind(500, "Allow user namespaces for Cloche: see cloche doctor"),
    "no_subuids": _kind(
        500, "Give yourself a range: sudo usermod --add-subuids 300000-365535 --add-subgids 300000-365535 $USER"
    ),
    "no_newuidmap": _kind(500, "Install it: sudo apt-get install uidmap"),
    "no_cgroup_delegation": _kind(
        500, "Delegate a cgroup: sudo cloche delegate $USER (or log in with systemd's user session)"
    ),
    "keeper_failed": _kind(500, "See why: cloche node logs"),
    "tls_required": _kind(500, "Give it a certificate and key, or listen on 127.0.0.1.", exit_code=2),
    "key_required": _kind(500, "Give it an API key, or listen on the unix socket only.", exit_code=2),
    "state_too_new": _kind(500, "This state directory was made by a newer version; upgrade, or: cloche reset --all"),
    "time_out": _kind(504, "Ask again, or give the request more time.", retryable=True),
    "internal": _kind(500, "This is a defect of Cloche; please report it with: cloche doctor --bundle"),
}


class ClocheError(Exception):
    """An error from the table: what happened (`message`), why (`detail`), and what to do (`fix`)."""

    code: str = "internal"

    def __init__(
        self,
        message: str,
        *,
        detail: dict[str, Any] | None = None,
        fix: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.detail: dict[str, Any] = dict(detail or {})
        self.fix = fix or TABLE[self.code].fix
        self.retry_after_s = retry_after_s

    @property
    def kind(self) -> ErrorKind:
        return TABLE[self.code]

    def __str__(self) -> str:
        return f"{self.code}: {self.message} {self.fix}"


class Problem(BaseModel):
    """RFC 9457."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    detail: str
    code: str
    fix: str
    retry_after_s: float | None = None
    context: dict[str, Any] = {}


def _class_name(code: str) -> str:
    return "".join(part.capitalize() for part in code.split("_"))


CLASSES: Final[dict[str, type[ClocheError]]] = {
    code: type(_class_name(code), (ClocheError,), {"code": code, "__doc__": kind.fix, "__module__": __name__})
    for code, kind in TABLE.items()
}
"""One class per code, e.g. `CLASSES["sandbox_ended"]`; importable by name from `cloche.errors`."""

GUEST_CODES: Final[dict[str, str]] = {
    "not_found": "path_not_found",
    "permission_denied": "permission_denied",
    "exists": "path_exists",
    "not_a_directory": "not_a_directory",
    "is_a_directory": "is_a_directory",
    "not_empty": "not_empty",
    "no_space": "no_space",
    "read_only": "read_only",
    "too_large": "too_large",
    "invalid": "invalid_path",
    "name_too_long": "name_too_long",
    "loop": "path_loop",
    "busy": "busy",
    "refused": "connection_refused",
    "unsupported": "unsupported",
    "aborted": "transfer_aborted",
    "no_such_user": "no_such_user",
    "not_executable": "not_executable",
    "io": "guest_io",
}
"""The agent's codes (protocol/guest) → ours. An unknown one becomes `guest_io`."""


def error(code: str, message: str, **kw: Any) -> ClocheError:
    """The error of that code; an unknown code is a programmer's mistake."""
    return CLASSES[code](message, **kw)


def to_problem(err: ClocheError) -> Problem:
    kind = err.kind
    return Problem(
        type=f"urn:cloche:error:{err.code}",
        title=err.code.replace("_", " "),
        status=kind.status,
        detail=err.message,
        code=err.code,
        fix=err.fix,
        retry_after_s=err.retry_after_s,
        context=err.detail,
    )


def from_problem(problem: Problem) -> ClocheError:
    cls = CLASSES.get(problem.code, CLASSES["internal"])
    return cls(problem.detail, detail=problem.context, fix=problem.fix, retry_after_s=problem.retry_after_s)
