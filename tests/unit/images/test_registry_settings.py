"""`registries.toml`: what it may say, and that errors name the file and the line."""

from pathlib import Path

import pytest

from cloche.wire.errors import ClocheError
from cloche_server.images.reference import DEFAULT_REGISTRY
from cloche_server.images.settings import (
    HostSettings,
    RegistrySettings,
    Timeouts,
    is_loopback_name,
    load_settings,
    parse_settings,
)

WHOLE = """
default_registry = "registry.example"

[timeouts]
connect_s = 3
silence_s = 4.5
retries = 0

[registry."Registry.Example:5000"]
mirrors = ["https://mirror.example/prefix/", "http://127.0.0.1:5000"]
ca_file = "ca.pem"
insecure = true
redirects_to = ["Blobs.example:8443"]

[registry."[::1]:5000"]
insecure = true
"""


@pytest.mark.req("IMG-1")
def test_the_whole_file(tmp_path: Path) -> None:
    (tmp_path / "registries.toml").write_text(WHOLE)
    found = load_settings(tmp_path, {})
    assert found.default_registry == "registry.example"
    assert found.timeouts == Timeouts(connect_s=3, silence_s=4.5, retries=0)
    assert found.host("registry.example:5000") == HostSettings(
        mirrors=("https://mirror.example/prefix", "http://127.0.0.1:5000"),
        ca_file=tmp_path / "ca.pem",
        insecure=True,
        redirects_to=("blobs.example:8443",),
    )
    assert found.host("other.example") == HostSettings()


def test_where_it_is(tmp_path: Path) -> None:
    assert load_settings(tmp_path, {}) == RegistrySettings() == load_settings(None, {})
    assert RegistrySettings().default_registry == DEFAULT_REGISTRY
    (tmp_path / "registries.toml").write_text('default_registry = "config.example"')
    (tmp_path / "named.toml").write_text('default_registry = "named.example"')
    assert load_settings(tmp_path, {}).default_registry == "config.example"
    named = {"CLOCHE_REGISTRIES": str(tmp_path / "named.toml")}
    assert load_settings(tmp_path, named).default_registry == "named.example"
    with pytest.raises(ClocheError, match=r"missing\.toml: it cannot be read"):
        load_settings(tmp_path, {"CLOCHE_REGISTRIES": str(tmp_path / "missing.toml")})


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ("x = ]", None, "line 1"),
        ("\nmirror = 1", 2, "'mirror' is not known"),
        ("default_registry = 7", 1, "a text"),
        ('default_registry = "https://x.example"', 1, "HOST"),
        ("[timeouts]\nconnect = 1", 2, "'connect' is not known"),
        ("[timeouts]\nconnect_s = true", 2, "number"),
        ("[timeouts]\nconnect_s = -1", 2, "range"),
        ("[timeouts]\nsilence_s = 0", 2, "range"),
        ("[timeouts]\nsilence_s = nan", 2, "range"),
        ("[timeouts]\nsilence_s = inf", 2, "range"),
        ("[timeouts]\nretries = 1.5", 2, "whole number"),
        ("timeouts = 1", 1, "a table"),
        ("registry = []", 1, "a table"),
        ('[registry]\n"a.example" = 1', 2, "a table"),
        ('[registry."a.example/team"]\n', 1, "HOST"),
        ('[registry."team"]\n', 1, "HOST"),
        ('[registry."a.example"]\nskip_verify = true', 2, "'skip_verify' is not known"),
        ('[registry."a.example"]\ninsecure = "yes"', 2, "true or false"),
        ('[registry."a.example"]\nca_file = 1', 2, "a text"),
        ('[registry."a.example"]\nmirrors = "https://m.example"', 2, "a list"),
        ('[registry."a.example"]\nmirrors = [1]', 2, "a list of texts"),
        ('[registry."a.example"]\n\nmirrors = ["m.example"]', 3, "https://HOST"),
        ('[registry."a.example"]\nmirrors = ["ftp://m.example"]', 2, "https://HOST"),
        ('[registry."a.example"]\nmirrors = ["https://u:p@m.example"]', 2, "https://HOST"),
        ('[registry."a.example"]\nmirrors = ["https://m.example/?q"]', 2, "https://HOST"),
        ('[registry."a.example"]\nmirrors = ["https://m.example:99999"]', 2, "https://HOST"),
        ('[registry."a.example"]\nmirrors = ["https:///x"]', 2, "https://HOST"),
        ('[registry."a.example"]\nmirrors = [' + '"https://m.example",' * 17 + "]", 2, "16"),
        ('[registry."a.example"]\nredirects_to = ["https://x.example"]', 2, "HOST"),
    ],
)
def test_errors_name_the_file_and_the_line(text: str, line: int | None, word: str) -> None:
    with pytest.raises(ClocheError) as raised:
        parse_settings(text, Path("/etc/cloche/registries.toml"))
    assert raised.value.code == "invalid_request"
    assert raised.value.message.startswith("/etc/cloche/registries.toml" + (f", line {line}:" if line else ":"))
    assert word in raised.value.message


def test_a_file_that_is_too_long_or_not_text(tmp_path: Path) -> None:
    path = tmp_path / "registries.toml"
    for content, why in [(b"#" * (1024 * 1024 + 1), "more than"), (b"\xff", "not UTF-8")]:
        path.write_bytes(content)
        with pytest.raises(ClocheError, match=why):
            load_settings(tmp_path, {})


@pytest.mark.parametrize("name", ["localhost", "localhost:5000", "127.0.0.1", "127.1.2.3:80", "[::1]:5000"])
def test_loopback_may_be_plain(name: str) -> None:
    assert is_loopback_name(name)
    assert RegistrySettings().may_be_plain(name)


@pytest.mark.parametrize("name", ["localhost.example", "registry.example:5000", "10.0.0.1:5000", "127.0.0.1.example"])
def test_others_only_when_they_are_named(name: str) -> None:
    assert not RegistrySettings().may_be_plain(name)
    assert RegistrySettings(hosts={name: HostSettings(insecure=True)}).may_be_plain(name)
