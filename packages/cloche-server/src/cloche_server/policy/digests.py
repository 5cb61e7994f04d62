"""The digest of an effective policy: equal exactly when every decision would be."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence

from cloche_server.policy.model import Rule


def digest_of(organisation: str, rules: Sequence[Rule], intercept_hosts: Collection[str]) -> str:
    content = [organisation, [_row(rule) for rule in rules], sorted(intercept_hosts)]
    return "sha256:" + hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()


def _row(rule: Rule) -> list[object]:
    methods = None if rule.methods is None else sorted(rule.methods)
    return [rule.id, rule.effect, rule.host, sorted(rule.ports), rule.tcp, methods, rule.paths, rule.intercept]
