"""What a command was refused, one line each, behind its own output: for the person at the end of a run (NET-7)."""

import sys
from typing import TYPE_CHECKING, Final

from cloche.cli import render
from cloche.wire.ids import short

if TYPE_CHECKING:
    from cloche.wire.commands import Command
    from cloche.wire.egress import EgressRecord

WORDS: Final = {
    "no_rule": "no rule (default: deny)",
    "denied_by_rule": "denied by a rule",
    "not_offered": "not offered by the organisation",
    "port_not_allowed": "port not in the rule",
    "method_not_allowed": "method not in the rule",
    "path_not_allowed": "path not in the rule",
    "needs_name": "address without a name",
    "address_refused": "address of this machine or a private network",
    "rate_limited": "too many attempts",
}
ALLOWABLE: Final = frozenset({"no_rule", "port_not_allowed", "needs_name"})
"""What one more rule for that host would allow."""


def show_denials(command: "Command", *, lives: bool) -> None:
    """On stderr. `lives`: the sandbox goes on, so that it can be let out now; else the next one can."""
    found: dict[tuple[str, int, str], EgressRecord] = {}
    for each in command.denials:
        found.setdefault((each.host, each.port, each.code), each)
    if not found:
        return
    one = len(found) == 1
    mark = render.styled(render.sign("✗", "x", sys.stderr), "31", sys.stderr)
    render.say(f"{mark} {len(found)} {'connection was' if one else 'connections were'} not allowed:")
    rows = [(target(each), _why(each), _fix(each, lives=lives)) for each in found.values()]
    for text in render.table_lines(("", "", ""), rows)[1:]:
        render.say(f"  {text}")


def target(record: "EgressRecord") -> str:
    """A name that was only looked up has no port yet."""
    host = f"[{record.host}]" if ":" in record.host else record.host
    return f"{host}:{record.port}" if record.port else host


def _why(record: "EgressRecord") -> str:
    if record.code == "not_approved":
        return record.text
    return WORDS.get(record.code, record.code.replace("_", " "))


def _fix(record: "EgressRecord", *, lives: bool) -> str:
    if record.verdict == "alert":
        return record.text
    if record.code == "not_approved":
        return "answer such questions: cloche approvals watch"
    host = record.host if record.port in (80, 443) else target(record)
    if record.code not in ALLOWABLE:
        return f"see: cloche policy explain {short(record.sandbox)} {target(record)}"
    if lives:
        return f"allow once: cloche egress allow {short(record.sandbox)} {host} --for 10m"
    return f"allow it: --allow {host}"
