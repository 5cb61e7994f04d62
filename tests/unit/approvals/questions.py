"""Questions as the gate asks them, and who may answer."""

from __future__ import annotations

from typing import Any

from cloche.wire.ids import DEFAULT_TENANT, new_id
from cloche_server.api.backend import Caller
from cloche_server.egress.services import Question

ALICE = Caller(DEFAULT_TENANT, "uid:1000")
BOB = Caller(DEFAULT_TENANT, "uid:1001")
ROOT = Caller(DEFAULT_TENANT, "uid:0", is_admin=True)
BOX = new_id("sandbox")
EVIL = "\x1b]52;c;aGk=\x07evil\u202e\r\n"


def question(**fields: Any) -> Question:
    plain: dict[str, Any] = {
        "sandbox": BOX,
        "owner": ALICE.owner,
        "tenant": ALICE.tenant,
        "rule": "egress[0]",
        "host": "hooks.example.com",
        "port": 443,
        "address": "203.0.113.7",
        "method": "POST",
        "path": "/deploy",
        "command": "c1",
        "command_line": "python3 agent.py",
    }
    return Question(**{**plain, **fields})
