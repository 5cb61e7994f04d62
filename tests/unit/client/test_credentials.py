"""Where a caller's own registry credentials come from, and whom they may be sent to."""

import base64
import json
from pathlib import Path

import pytest

from cloche.client._credentials import DEFAULT_REGISTRY, may_carry, registry_of, saved_credentials
from cloche.client._target import Target, parse_url


def encoded(text: str) -> dict[str, str]:
    return {"auth": base64.b64encode(text.encode()).decode()}


def write(path: Path, document: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ("python", (DEFAULT_REGISTRY, "library/python")),
        ("python:3.12-slim", (DEFAULT_REGISTRY, "library/python")),
        ("team/app", (DEFAULT_REGISTRY, "team/app")),
        ("registry.example/team/app:1", ("registry.example", "team/app")),
        ("registry.example:5000/app", ("registry.example:5000", "app")),
        ("localhost/app@sha256:ab", ("localhost", "app")),
    ],
)
def test_a_names_registry(image: str, expected: tuple[str, str]) -> None:
    assert registry_of(image) == expected


@pytest.mark.req("IMG-1")
def test_files_in_their_order_and_the_most_exact_entry_first(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    assert saved_credentials("registry.example/team/app", home) is None
    auths = {"registry.example": encoded("wide:1"), "registry.example/team": encoded("exact:2:3")}
    write(tmp_path / ".docker" / "config.json", {"auths": auths})
    found = saved_credentials("registry.example/team/app:1", home)
    assert found is not None
    assert (found.username, found.password) == ("exact", "2:3")
    assert saved_credentials("registry.example/other", home).username == "wide"  # type: ignore[union-attr]
    write(tmp_path / ".config" / "containers" / "auth.json", {"auths": {"registry.example": encoded("podman:p")}})
    assert saved_credentials("registry.example/other", home).username == "podman"  # type: ignore[union-attr]
    named = write(tmp_path / "named.json", {"auths": {"registry.example": encoded("named:n")}})
    environ = {**home, "REGISTRY_AUTH_FILE": str(named)}
    assert saved_credentials("registry.example/other", environ).username == "named"  # type: ignore[union-attr]
    assert saved_credentials("registry.example.evil/other", environ) is None


def test_the_default_registry_by_its_old_name(tmp_path: Path) -> None:
    old = f"https://index.{DEFAULT_REGISTRY}/v1/"
    write(tmp_path / ".docker" / "config.json", {"auths": {old: encoded("hub:h")}})
    assert saved_credentials("python", {"HOME": str(tmp_path)}).username == "hub"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"auths": 1}', '{"auths": {"r.example": {"auth": "!"}}}', '{"auths": {"r.example": 7}}']
)
def test_what_cannot_be_read_is_not_there(tmp_path: Path, text: str) -> None:
    path = tmp_path / ".docker" / "config.json"
    path.parent.mkdir()
    path.write_text(text)
    assert saved_credentials("r.example/app", {"HOME": str(tmp_path)}) is None


def test_a_helper_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helper = tmp_path / "bin" / "docker-credential-test"
    helper.parent.mkdir()
    helper.write_text('#!/bin/sh\nread server\necho "{\\"Username\\": \\"$server\\", \\"Secret\\": \\"s\\"}"\n')
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{helper.parent}:/usr/bin:/bin")
    write(tmp_path / ".docker" / "config.json", {"credHelpers": {"r.example": "test", "evil.example": "../x"}})
    home = {"HOME": str(tmp_path)}
    assert saved_credentials("r.example/app", home).username == "r.example"  # type: ignore[union-attr]
    assert saved_credentials("evil.example/app", home) is None
    assert saved_credentials("other.example/app", home) is None


@pytest.mark.req("IMG-1")
def test_a_password_is_never_sent_in_the_clear_over_a_network() -> None:
    assert may_carry(Target("user", "http://cloche", "/run/x.sock"))
    for url, may in [
        ("https://node.example", True),
        ("http://localhost:80", True),
        ("http://127.0.0.1:8000/x", True),
        ("http://[::1]:8000", True),
        ("http://node.example:8000", False),
        ("http://127.0.0.1.example", False),
    ]:
        assert may_carry(parse_url(url, None)) is may, url
