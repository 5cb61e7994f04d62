"""Presets follow the operator's own tools. The tools are real; where they fetch from is what each test configures."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from cloche.wire.errors import ClocheError
from cloche_server.policy import operator_tools
from cloche_server.policy.apt_sources import uris_of
from cloche_server.policy.operator_tools import Preset, Tools
from cloche_server.policy.presets import KEPT_S, LISTS, Presets, read_list
from tests.unit.policy.policies import policy, to


def rows(preset: Preset) -> list[tuple[str | None, list[int] | None]]:
    return [(rule.host, rule.ports) for rule in preset.rules]


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """An environment in which no tool is configured."""
    home = tmp_path / "home"
    home.mkdir()
    kept = {key: value for key, value in os.environ.items() if not key.lower().startswith(("pip_", "npm_", "cargo_"))}
    rustup = os.environ.get("RUSTUP_HOME", str(Path.home() / ".rustup"))
    (home / "empty").write_text("")
    return kept | {
        "HOME": str(home),
        "PIP_CONFIG_FILE": os.devnull,
        "npm_config_globalconfig": str(home / "empty"),
        "CARGO_HOME": str(home / "cargo"),
        "RUSTUP_HOME": rustup,
    }


def test_pip_with_a_mirror(bare: dict[str, str], tmp_path: Path) -> None:
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\n"
        "index-url = https://robot:hunter2@Mirror.Example:8443/root/simple/\n"
        "extra-index-url = http://10.0.0.7/simple\n"
        "find-links = https://links.example/wheels\n    /opt/wheels\n"
        "trusted-host = 10.0.0.7\n"
    )
    preset = Tools(bare | {"PIP_CONFIG_FILE": str(config)}).pip()
    assert rows(preset) == [("mirror.example", [8443]), ("10.0.0.7", [80]), ("links.example", [443])]
    assert preset.env["PIP_INDEX_URL"] == "https://Mirror.Example:8443/root/simple/"
    assert preset.env["PIP_EXTRA_INDEX_URL"] == "http://10.0.0.7/simple"
    assert preset.env["PIP_TRUSTED_HOST"] == "10.0.0.7"
    assert "hunter2" not in repr(preset)


def test_pip_by_its_environment(bare: dict[str, str]) -> None:
    preset = Tools(bare | {"PIP_INDEX_URL": "https://mirror.example/simple"}).pip()
    assert rows(preset) == [("mirror.example", [443])]


def test_pip_with_nothing_configured(bare: dict[str, str]) -> None:
    """Its built-in index and the host that keeps its files, as pip itself has them."""
    preset = Tools(bare).pip()
    assert len(preset.rules) == 2
    assert all(rule.ports == [443] for rule in preset.rules)
    assert str(preset.rules[0].host) in preset.env["PIP_INDEX_URL"]
    assert policy(*preset.rules).connect(to(f"{preset.rules[1].host}:443")).code == "allowed"


def test_pip_without_an_index(bare: dict[str, str]) -> None:
    with pytest.raises(ClocheError, match="no-index") as refused:
        Tools(bare | {"PIP_NO_INDEX": "1"}).pip()
    assert refused.value.code == "preset_unavailable"


def test_no_pip(bare: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/none/python")
    with pytest.raises(ClocheError, match="no Python on the node has pip"):
        Tools(bare | {"PATH": "/none"}).pip()


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_npm(bare: dict[str, str], tmp_path: Path) -> None:
    config = tmp_path / "npmrc"
    config.write_text(
        "registry=https://npm.example:4873/team/\n@scope:registry=http://scope.example/\n"
        "//npm.example/:_authToken=hunter3\n"
    )
    preset = Tools(bare | {"npm_config_userconfig": str(config)}).npm()
    assert rows(preset) == [("npm.example", [4873]), ("scope.example", [80])]
    assert preset.env["npm_config_registry"] == "https://npm.example:4873/team/"
    assert "hunter" not in repr(preset)
    config.write_text("registry=https://user:hunter2@npm.example:4873/team/\n")
    with pytest.raises(ClocheError, match="keeps it to itself"):
        Tools(bare | {"npm_config_userconfig": str(config)}).npm()
    built_in = Tools(bare).npm()
    assert len(built_in.rules) == 1
    assert str(built_in.rules[0].host) in built_in.env["npm_config_registry"]


def test_no_npm(bare: dict[str, str]) -> None:
    with pytest.raises(ClocheError, match="npm does not answer") as refused:
        Tools(bare | {"PATH": "/none"}).npm()
    assert refused.value.fix == "Install npm on the node."


APT_LINES = """\
# deb http://commented.example/debian stable main
deb http://deb.example/debian bookworm main contrib # a comment
deb-src [arch=amd64 signed-by=/a/b.gpg] https://src.example:8443/debian bookworm main
deb [arch=amd64]https://tight.example/debian ./
deb cdrom:[Debian]/ bookworm main
deb file:/srv/mirror bookworm main
deb mirror+https://list.example/mirrors.txt bookworm main
rubbish
"""
APT_DEB822 = """\
Types: deb deb-src
URIs: http://one.example/debian
# a comment within
 https://two.example/debian
Suites: bookworm

Types: deb
Enabled: no
URIs: http://off.example/debian

uris:http://three.example/
"""


def test_apt(tmp_path: Path) -> None:
    (tmp_path / "sources.list").write_text(APT_LINES)
    parts = tmp_path / "sources.list.d"
    parts.mkdir()
    (parts / "a.sources").write_text(APT_DEB822)
    (parts / "b.list.save").write_text("deb http://saved.example/ x y\n")
    (parts / "c,d.list").write_text("deb http://badly-named.example/ x y\n")
    assert uris_of(tmp_path) == [
        "http://deb.example/debian",
        "https://src.example:8443/debian",
        "https://tight.example/debian",
        "https://list.example/mirrors.txt",
        "http://one.example/debian",
        "https://two.example/debian",
        "http://three.example/",
    ]
    preset = Tools({}, apt=tmp_path).apt()
    assert ("src.example", [8443]) in rows(preset)
    assert ("deb.example", [80]) in rows(preset)


def test_no_apt(tmp_path: Path) -> None:
    with pytest.raises(ClocheError, match="names no source"):
        Tools({}, apt=tmp_path / "none").apt()


def cargo_home(bare: dict[str, str], config: str, downloads: dict[str, str]) -> None:
    home = Path(bare["CARGO_HOME"])
    home.mkdir()
    (home / "config.toml").write_text(config)
    for host, dl in downloads.items():
        place = home / "registry" / "index" / f"{host}-0123456789abcdef"
        place.mkdir(parents=True)
        (place / "config.json").write_text(json.dumps({"dl": dl, "api": "x"}))


def test_cargo_with_a_mirror(bare: dict[str, str]) -> None:
    config = (
        '[source.crates-io]\nreplace-with = "one"\n[source.one]\nreplace-with = "two"\n'
        '[source.two]\nregistry = "sparse+https://index.example/"\n'
        '[registries.our-own]\nindex = "sparse+https://own.example/index/"\n'
    )
    downloads = {"index.example": "https://files.example/{crate}/{version}", "own.example": "https://own.example/dl"}
    cargo_home(bare, config, downloads)
    preset = Tools(bare).cargo()
    assert rows(preset) == [("index.example", [443]), ("own.example", [443]), ("files.example", [443])]
    assert preset.env == {"CARGO_REGISTRIES_OUR_OWN_INDEX": "sparse+https://own.example/index/"}


@pytest.mark.skipif(shutil.which("cargo") is None, reason="cargo is not installed")
def test_cargo_with_nothing_configured(bare: dict[str, str]) -> None:
    """It names its built-in index when it cannot reach it; where that keeps its files is known once it was used."""
    with pytest.raises(ClocheError, match="has not used") as refused:
        Tools(bare).cargo()
    assert "cargo fetch" in refused.value.fix
    index = refused.value.message.split("has not used ")[1].split(" yet")[0]
    cargo_home(bare, "", {index: "https://files.example/api"})
    assert rows(Tools(bare).cargo()) == [(index, [443]), ("files.example", [443])]


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ("not toml", "cannot be read"),
        ('[source.crates-io]\nreplace-with = "dir"\n[source.dir]\ndirectory = "/srv"', "not fetched over HTTP"),
        ('[source.crates-io]\nreplace-with = "a"\n[source.a]\nreplace-with = "a"', "not fetched over HTTP"),
    ],
)
def test_cargo_that_cannot_be_followed(bare: dict[str, str], config: str, why: str) -> None:
    cargo_home(bare, config, {})
    with pytest.raises(ClocheError, match=why) as refused:
        Tools(bare).cargo()
    assert refused.value.code == "preset_unavailable"


def test_a_tool_that_hangs_or_lies(bare: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_tools, "ASK_S", 0.2)
    npm = tmp_path / "npm"
    for body, why in (
        ("exec sleep 60", "does not answer"),
        ("exit 1", "does not answer"),
        ("echo not json", "not known"),
        ("echo '[]'", "not known"),
        ("echo '{}'", "names no registry"),
        ('echo \'{"registry": "ftp://x.example"}\'', "no http or https URL"),
        ('echo \'{"registry": "https://127.1/"}\'', "no http or https URL"),
        ('echo \'{"registry": "https://x.example:99999/"}\'', "no http or https URL"),
    ):
        npm.write_text(f"#!/bin/sh\n{body}\n")
        npm.chmod(0o755)
        with pytest.raises(ClocheError, match=why):
            Tools(bare | {"PATH": f"{tmp_path}:/bin:/usr/bin"}).npm()


@pytest.mark.parametrize("name", LISTS)
def test_reviewed_lists(name: str) -> None:
    preset = read_list(name)
    assert preset.rules
    made = policy(*preset.rules)
    assert all(made.connect(to(f"{rule.host}:443")).code == "allowed" for rule in preset.rules)
    assert all(made.connect(to(f"{rule.host}:80")).code == "port_not_allowed" for rule in preset.rules)


def test_a_tool_is_asked_once_in_a_while() -> None:
    now = 0.0
    asked = []

    class Counting(Tools):
        def npm(self) -> Preset:
            asked.append(now)
            return Preset("node-packages", (), {"a": "b"})

    presets = Presets(Counting({}), clock=lambda: now)
    for _ in range(3):
        presets("node-packages")
    now = KEPT_S + 1
    presets("node-packages")
    assert asked == [0.0, KEPT_S + 1]
    assert presets.env(["node-packages", "git-hosts"]) == {"a": "b"}


def test_an_unknown_preset_says_what_there_is() -> None:
    with pytest.raises(ClocheError, match="python-packages") as refused:
        Presets()("pyton-packages")
    assert refused.value.code == "preset_unavailable"
