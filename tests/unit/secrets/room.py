"""A room of secrets in a temporary directory, who asks it, and what was told."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloche.wire.ids import DEFAULT_TENANT, new_id
from cloche.wire.secrets import SetSecret
from cloche_server.api.backend import Caller
from cloche_server.secrets.service import Secrets

ALICE = Caller(DEFAULT_TENANT, "uid:1000")
BOB = Caller(DEFAULT_TENANT, "uid:1001")
ROOT = Caller(DEFAULT_TENANT, "uid:0", is_admin=True)
VALUE = "ghp_planted-value-9f2c7e1b"
HEADER = {"kind": "header", "name": "Authorization", "format": "Bearer {}"}


def asked(source: dict[str, Any] | None = None, **fields: Any) -> SetSecret:
    plain: dict[str, Any] = {
        "source": source or {"kind": "value", "value": VALUE},
        "hosts": ["api.example.com"],
        "places": [HEADER],
    }
    return SetSecret.model_validate({**plain, **fields})


@dataclass
class Room:
    base: Path
    told: list[tuple[str, str | None, dict[str, Any]]] = field(default_factory=list)
    changed: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.secrets = self.open()

    @property
    def directory(self) -> Path:
        return self.base / "state" / "secrets"

    @property
    def config(self) -> Path:
        return self.base / "config"

    def open(self) -> Secrets:
        def told(kind: str, sandbox: str | None, _owner: str, _tenant: str, detail: dict[str, Any]) -> None:
            self.told.append((kind, sandbox, detail))

        secrets = Secrets(self.directory, self.config, told=told)
        secrets.changed = lambda sandbox, leases: self.changed.append((sandbox, leases))
        secrets.ended = self.ended.append
        return secrets

    def kinds(self) -> list[str]:
        return [kind for kind, _, _ in self.told]


def sandbox_and_lineage() -> tuple[str, str]:
    return new_id("sandbox"), new_id("lineage")


class _Answers(http.server.BaseHTTPRequestHandler):
    def _answer(self) -> None:
        server: Any = self.server
        size = int(self.headers.get("content-length") or 0)
        server.seen.append(
            (
                self.command,
                self.path,
                {name.lower(): text for name, text in self.headers.items()},
                self.rfile.read(size),
            )
        )
        status, body = server.answers.pop(0) if len(server.answers) > 1 else server.answers[0]
        self.send_response(status)
        if status in (301, 302):
            self.send_header("location", "/elsewhere")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = _answer  # noqa: N815

    def log_message(self, *_: object) -> None:
        return


class Server:
    """A real server on loopback that says what it is told to, the last answer again and again."""

    def __init__(self, *answers: tuple[int, bytes]) -> None:
        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
        self._http.answers = list(answers)  # type: ignore[attr-defined]
        self._http.seen = []  # type: ignore[attr-defined]
        self.seen: list[tuple[str, str, dict[str, str], bytes]] = self._http.seen  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/v1/token"

    def answer(self, *answers: tuple[int, bytes]) -> None:
        self._http.answers[:] = answers  # type: ignore[attr-defined]

    def __enter__(self) -> Server:
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()


def token(text: str) -> tuple[int, bytes]:
    return 200, json.dumps({"data": {"token": text}}).encode()


@contextmanager
def readable(path: Path, mode: int) -> Iterator[None]:
    before = path.stat().st_mode
    path.chmod(mode)
    try:
        yield
    finally:
        path.chmod(before)
