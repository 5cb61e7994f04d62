"""What the operator's pip, npm, apt and cargo are configured to use, and what they use when nothing is configured.

Each tool is asked itself, in a subprocess with a time-out, or its own configuration files are read. Credentials in an
URL stay here: what goes into a sandbox has none.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from cloche.wire.egress import EgressRule
from cloche.wire.errors import ClocheError, error
from cloche_server.policy.apt_sources import uris_of
from cloche_server.policy.names import BadName, normal_host

ASK_S: Final = 20.0
OUTPUT_BYTES_MAX: Final = 1024 * 1024
HOSTS_MAX: Final = 64
FILE_BYTES_MAX: Final = 1024 * 1024
REPLACEMENTS_MAX: Final = 8
"""A source of cargo's can be replaced by one that is replaced."""

_PIP: Final = """
import json
from pip._internal.commands import create_command
from pip._internal.models.index import PyPI
options, _ = create_command("download").parse_args([])
files = PyPI.file_storage_domain if options.index_url == PyPI.simple_url else None
indexes = [] if options.no_index else [options.index_url, *options.extra_index_urls]
print(json.dumps({"indexes": indexes, "files": files, "links": options.find_links, "trusted": options.trusted_hosts}))
"""
"""pip's own parser: its files, its environment and its built-in default in one answer."""
_URL: Final = re.compile(r"https?://[^\s`'\"]+")
_DEAD_PROXY: Final = "http://127.0.0.1:9"
"""Nobody answers there: cargo names the URL that it could not reach, and asks nobody."""


@dataclass(frozen=True)
class Preset:
    """Rules, and what a tool inside needs in its environment to use the same servers as the operator's."""

    name: str
    rules: tuple[EgressRule, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    source: str = ""
    """Where it came from, for a person."""


class Tools:
    """The operator's tools. `environ` and `apt` are for tests: an environment, and where apt's sources are."""

    def __init__(self, environ: Mapping[str, str] | None = None, apt: Path = Path("/etc/apt")) -> None:
        self._environ = dict(os.environ if environ is None else environ)
        self._apt = apt

    def pip(self) -> Preset:
        name = "python-packages"
        for python in dict.fromkeys((sys.executable, self._which("python3"), self._which("python"))):
            answer = self._ask([python, "-c", _PIP]) if python else None
            if answer is not None:
                break
        else:
            raise _unavailable(name, "no Python on the node has pip", "Install pip for the node: python3-pip.")
        said = _object(name, answer)
        indexes = [each for each in said["indexes"] if each]
        links = [each for each in said["links"] if _URL.match(each)]
        files = [f"https://{said['files']}/"] if said["files"] else []
        if not indexes and not links:
            raise _unavailable(name, "pip on the node uses no index (no-index)", "Set an index-url for pip.")
        env = {}
        if indexes:
            env = {"PIP_INDEX_URL": _public(indexes[0]), "UV_DEFAULT_INDEX": _public(indexes[0])}
        if indexes[1:]:
            more = " ".join(_public(each) for each in indexes[1:])
            env |= {"PIP_EXTRA_INDEX_URL": more, "UV_INDEX": more}
        if said["trusted"]:
            env["PIP_TRUSTED_HOST"] = " ".join(said["trusted"])
        return Preset(name, _rules(name, [*indexes, *files, *links]), env, "pip on the node")

    def npm(self) -> Preset:
        name = "node-packages"
        npm = self._which("npm")
        env = {"npm_config_logs_max": "0", "npm_config_update_notifier": "false"}
        answer = self._ask([npm, "config", "list", "--json"], env=env) if npm else None
        if answer is None:
            raise _unavailable(name, "npm does not answer on the node", "Install npm on the node.")
        said = _object(name, answer)
        main = said.get("registry")
        scoped = [value for key, value in said.items() if key.endswith(":registry")]
        if not isinstance(main, str):
            fix = "Set one without a password in its URL (a token has a line of its own): npm config set registry URL"
            raise _unavailable(name, "npm names no registry, or keeps it to itself", fix)
        env = {"npm_config_registry": _public(main), "YARN_NPM_REGISTRY_SERVER": _public(main)}
        return Preset(name, _rules(name, [main, *map(str, scoped)]), env, "npm on the node")

    def apt(self) -> Preset:
        """Nothing for the environment: apt inside uses its image's sources, which must name the same hosts."""
        name = "debian"
        uris = uris_of(self._apt)
        if not uris:
            fix = "Run the node on a Debian or Ubuntu with apt sources, or name the mirror: --allow HOST"
            raise _unavailable(name, f"{self._apt} names no source that is fetched over HTTP", fix)
        return Preset(name, _rules(name, uris), {}, str(self._apt))

    def cargo(self) -> Preset:
        name = "rust-packages"
        home = Path(self._environ.get("CARGO_HOME") or Path(self._environ.get("HOME", "/")) / ".cargo")
        config = _cargo_config(home)
        index = _replaced(name, config) or self._cargo_index(name, home)
        named = {key: each for key, each in _named_registries(config).items() if _URL.match(each)}
        downloads = [url for each in (index, *named.values()) for url in self._cargo_downloads(name, home, each)]
        rules = _rules(name, [index, *named.values(), *downloads])
        env = {
            f"CARGO_REGISTRIES_{key.upper().replace('-', '_')}_INDEX": f"sparse+{_public(each)}"
            for key, each in named.items()
        }
        return Preset(name, rules, env, "cargo on the node")

    def _cargo_index(self, name: str, home: Path) -> str:
        """The built-in one: cargo names what it fails to reach."""
        cargo = self._which("cargo")
        with tempfile.TemporaryDirectory(prefix="cloche-cargo-") as directory:
            place = Path(directory)
            (place / "src").mkdir()
            (place / "src" / "lib.rs").write_text("")
            (place / "Cargo.toml").write_text('[package]\nname = "x"\nversion = "0.0.1"\n[dependencies]\nx1 = "1"\n')
            env = {"CARGO_HOME": directory + "/home", "CARGO_HTTP_PROXY": _DEAD_PROXY, "CARGO_NET_RETRY": "0"}
            rustup = {"RUSTUP_HOME": str(Path(self._environ.get("HOME", "/")) / ".rustup")} | self._environ
            env["RUSTUP_HOME"] = rustup["RUSTUP_HOME"]
            said = self._ask([cargo, "generate-lockfile"], cwd=place, env=env, failure=True) if cargo else None
        found = _URL.findall(said or "")
        if not found:
            raise _unavailable(name, "cargo does not answer on the node", "Install cargo on the node.")
        return str(found[0]).removesuffix("config.json")

    def _cargo_downloads(self, name: str, home: Path, index: str) -> list[str]:
        """Where crates of this index are fetched: its config.json, which cargo keeps. Of a git index nothing is known."""
        host = urlsplit(index).hostname or ""
        found = []
        for path in sorted((home / "registry" / "index").glob("*/config.json"))[:HOSTS_MAX]:
            said = _json_file(path)
            if path.parent.name.rpartition("-")[0] == host and isinstance(said.get("dl"), str):
                found.append(said["dl"].partition("{")[0])
        if not found:
            why = f"cargo on the node has not used {host} yet, so it is not known where its crates are"
            raise _unavailable(
                name, why, "Run `cargo fetch` of any project with a dependency once, as the node's user."
            )
        return found

    def _which(self, program: str) -> str | None:
        return shutil.which(program, path=self._environ.get("PATH", os.defpath))

    def _ask(
        self, argv: Sequence[str], *, cwd: Path = Path("/"), env: Mapping[str, str] | None = None, failure: bool = False
    ) -> str | None:
        """What it printed; None if it failed. With `failure` failing is what is asked for, and stderr what it says."""
        try:
            done = subprocess.run(
                argv,
                cwd=cwd,
                env={**self._environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=ASK_S,
                check=False,
                start_new_session=True,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        output = done.stderr if failure else done.stdout
        return None if (done.returncode != 0) != failure else output[:OUTPUT_BYTES_MAX].decode(errors="replace")


def _rules(name: str, urls: Iterable[str]) -> tuple[EgressRule, ...]:
    """One rule a host and port."""
    found: dict[tuple[str, int], EgressRule] = {}
    for url in urls:
        try:
            parts = urlsplit(url.removeprefix("sparse+"))
            host = normal_host(parts.hostname or "")[0]
            port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        except (BadName, ValueError, KeyError):
            raise _unavailable(
                name, "its tool names something that is no http or https URL", "Correct it there."
            ) from None
        host = f"[{host}]" if ":" in host else host
        found[host, port] = EgressRule(host=host, ports=[port], protocol="web")
    if len(found) > HOSTS_MAX:
        raise _unavailable(name, f"its tool names more than {HOSTS_MAX} hosts", "Name the hosts yourself: --allow HOST")
    return tuple(found.values())


def _public(url: str) -> str:
    """Without user and password."""
    parts = urlsplit(url.removeprefix("sparse+"))
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _object(name: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise _unavailable(name, "its tool answers in a way that is not known", "Name the hosts yourself: --allow HOST")
    return found


def _cargo_config(home: Path) -> dict[str, Any]:
    for path in (home / "config", home / "config.toml"):
        try:
            return tomllib.loads(path.read_bytes()[:FILE_BYTES_MAX].decode())
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            raise _unavailable("rust-packages", f"{path} cannot be read", f"Correct {path}.") from None
    return {}


def _replaced(name: str, config: dict[str, Any]) -> str | None:
    """The registry that the operator put in the place of the built-in one."""
    sources = _table(config, "source")
    source = "crates-io"
    for _ in range(REPLACEMENTS_MAX):
        table = _table(sources, source)
        if isinstance(table.get("replace-with"), str):
            source = table["replace-with"]
            continue
        found = table.get("registry") or _named_registries(config).get(source)
        if source == "crates-io":
            return None
        if isinstance(found, str) and found.removeprefix("sparse+").startswith(("http://", "https://")):
            return found.removeprefix("sparse+")
        break
    raise _unavailable(
        name, "cargo's source is replaced by one that is not fetched over HTTP", "Name the hosts yourself."
    )


def _named_registries(config: dict[str, Any]) -> dict[str, str]:
    tables = _table(config, "registries")
    rows = {key: _table(tables, key).get("index") for key in tables}
    return {key: each.removeprefix("sparse+") for key, each in rows.items() if isinstance(each, str)}


def _table(table: dict[str, Any], key: str) -> dict[str, Any]:
    found = table.get(key)
    return found if isinstance(found, dict) else {}


def _json_file(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes()[:FILE_BYTES_MAX])
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _unavailable(name: str, why: str, fix: str) -> ClocheError:
    return error("preset_unavailable", f"The preset {name} cannot be made: {why}.", detail={"preset": name}, fix=fix)
