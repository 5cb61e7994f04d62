"""The API as any HTTP client sees it: no SDK in between."""

from __future__ import annotations

from typing import Any

import httpx2

from tests.promises.nodes import RealNode


def ask(node: RealNode, method: str, path: str, *, key: str | None = None, body: Any = None) -> tuple[int, Any]:
    """(status, JSON)"""
    headers = {} if key is None else {"idempotency-key": key}
    with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(node.paths.api_socket)), timeout=60) as client:
        answer = client.request(method, f"http://cloche{path}", json=body, headers=headers)
        return answer.status_code, answer.json()
