"""Logins: where they are looked for, which wins, and that no password is ever shown."""

import base64
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from cloche.wire.errors import ClocheError
from cloche_server.images.auth import OLD_DEFAULT_SERVER, Credentials, Login
from cloche_server.images.reference import DEFAULT_REGISTRY

HOST = "registry.example:5000"
SECRET = "s3cret:with:colons"


def entry(user: str, password: str = SECRET) -> dict[str, str]:
    return {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}


class Home:
    """A user's directories, and the environment that names them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bin = root / "bin"
        self.bin.mkdir()
        self.environ = {"HOME": str(root / "home"), "PATH": f"{self.bin}:{os.environ['PATH']}"}
        self.docker = root / "home/.docker/config.json"
        self.podman = root / "home/.config/containers/auth.json"

    def write(self, path: Path, document: Any) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(document if isinstance(document, str) else json.dumps(document))
        return path

    def helper(self, name: str, script: str) -> None:
        path = self.write(self.bin / f"docker-credential-{name}", f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    async def find(self, host: str = HOST, repository: str = "team/app", **kw: Any) -> Login | None:
        return await Credentials(environ=self.environ, **kw).find(host, repository)

    async def user(self, host: str = HOST, repository: str = "team/app") -> str | None:
        login = await self.find(host, repository)
        return None if login is None else login.username

    async def failure(self, **kw: Any) -> ClocheError:
        with pytest.raises(ClocheError) as raised:
            await self.find(**kw)
        assert raised.value.code == "registry_denied"
        for text in (str(raised.value), repr(raised.value), repr(raised.value.__cause__), str(raised.value.detail)):
            assert SECRET not in text
        return raised.value


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


@pytest.mark.req("IMG-1")
async def test_every_place_and_their_order(home: Home, tmp_path: Path) -> None:
    assert await home.find() is None
    home.write(home.docker, {"auths": {HOST: entry("docker")}})
    assert await home.find() == Login("docker", SECRET)
    home.write(home.podman, {"auths": {HOST: entry("podman")}})
    assert await home.user() == "podman"
    home.environ["XDG_CONFIG_HOME"] = str(tmp_path / "xdg")
    assert await home.user() == "docker"
    home.write(tmp_path / "xdg/containers/auth.json", {"auths": {HOST: entry("xdg")}})
    assert await home.user() == "xdg"
    home.environ["XDG_RUNTIME_DIR"] = str(tmp_path / "run")
    home.write(tmp_path / "run/containers/auth.json", {"auths": {"other.example": entry("other")}})
    assert await home.user() == "xdg"  # a file that does not know the registry is passed by
    home.write(tmp_path / "run/containers/auth.json", {"auths": {HOST: entry("runtime")}})
    assert await home.user() == "runtime"
    home.environ["REGISTRY_AUTH_FILE"] = str(home.write(tmp_path / "named.json", {"auths": {HOST: entry("named")}}))
    assert await home.user() == "named"
    home.write(tmp_path / "named.json", {})
    assert await home.find() is None  # the named file alone counts


async def test_the_directory_of_docker_can_be_elsewhere(home: Home, tmp_path: Path) -> None:
    home.environ["DOCKER_CONFIG"] = str(tmp_path / "elsewhere")
    home.write(tmp_path / "elsewhere/config.json", {"auths": {HOST: entry("elsewhere")}})
    assert await home.user() == "elsewhere"


async def test_what_the_caller_gave_wins_but_not_for_a_mirror(home: Home) -> None:
    home.write(home.docker, {"auths": {HOST: entry("docker")}})
    given = Login("given", "own")
    mine = Credentials(given, environ=home.environ)
    assert mine.are_given
    assert await mine.find(HOST, "team/app") == given
    mirror = await mine.find(HOST, "team/app", is_mirror=True)
    assert mirror is not None
    assert mirror.username == "docker"
    assert await Credentials(given, environ=home.environ, use_files=False).find(HOST, "a", is_mirror=True) is None
    assert await Credentials.nobody().find(HOST, "team/app") is None


@pytest.mark.parametrize(
    ("repository", "user"),
    [("team/app/x", "app"), ("team/app", "app"), ("team/other", "team"), ("else", "host"), ("team-two/app", "host")],
)
async def test_the_narrowest_entry_wins(home: Home, repository: str, user: str) -> None:
    entries = {HOST: entry("host"), f"{HOST}/team": entry("team"), f"{HOST}/team/app": entry("app")}
    home.write(home.podman, {"auths": entries})
    assert await home.user(repository=repository) == user


@pytest.mark.parametrize("key", [f"https://{HOST}", f"http://{HOST}/v1/", f"https://{HOST}/v2/", HOST])
async def test_keys_as_old_versions_wrote_them(home: Home, key: str) -> None:
    home.write(home.docker, {"auths": {key: entry("old")}})
    assert await home.user() == "old"
    assert await home.user("registry.example") is None
    assert await home.user("evil.example") is None


@pytest.mark.parametrize("key", [DEFAULT_REGISTRY, OLD_DEFAULT_SERVER, f"index.{DEFAULT_REGISTRY}"])
async def test_all_names_of_the_default_registry(home: Home, key: str) -> None:
    home.write(home.docker, {"auths": {key: entry("hub")}})
    assert await home.user(DEFAULT_REGISTRY, "library/python") == "hub"


async def test_other_forms_of_an_entry(home: Home) -> None:
    home.write(home.docker, {"auths": {HOST: {"username": "plain", "password": SECRET}}})
    assert await home.find() == Login("plain", SECRET)
    home.write(home.docker, {"auths": {HOST: {**entry("u"), "identitytoken": SECRET}}})
    assert await home.find() == Login("u", "", SECRET)
    home.write(home.docker, {"auths": {HOST: {}}})  # what docker writes when a store has the login
    assert await home.find() is None
    home.write(home.docker, {"auths": None, "credHelpers": None, "credsStore": ""})
    assert await home.find() is None


@pytest.mark.req("IMG-1")
async def test_helpers(home: Home) -> None:
    # It answers what it was asked for, so that the question is seen too.
    home.helper("one", f'read server; echo "{{\\"Username\\":\\"one-$1-$server\\",\\"Secret\\":\\"{SECRET}\\"}}"')
    home.helper("store", f'echo \'{{"Username":"store","Secret":"{SECRET}"}}\'')
    home.helper("none", "echo 'credentials not found in native keychain'; exit 1")
    home.helper("token", f'echo \'{{"Username":"<token>","Secret":"{SECRET}"}}\'')
    auths = {HOST: entry("file")}
    for document, user in [
        ({"credHelpers": {HOST: "one"}, "credsStore": "store", "auths": auths}, f"one-get-{HOST}"),
        ({"credHelpers": {"other.example": "one"}, "credsStore": "store", "auths": auths}, "store"),
        ({"credHelpers": {HOST: "none"}, "credsStore": "store", "auths": auths}, "store"),
        ({"credsStore": "none", "auths": auths}, "file"),
        ({"credsStore": "none"}, None),
    ]:
        home.write(home.docker, document)
        assert await home.user() == user
    home.write(home.docker, {"credHelpers": {HOST: "token"}})
    assert await home.find() == Login("", "", SECRET)
    home.write(home.docker, {"credHelpers": {DEFAULT_REGISTRY: "one"}})
    assert await home.user(DEFAULT_REGISTRY) == f"one-get-{OLD_DEFAULT_SERVER}"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (f"echo {SECRET}; exit 3", "failed with status 3"),
        ("kill -9 $$", "failed with status -9"),
        ("echo hello", "something else than a login"),
        ("echo '[]'", "something else than a login"),
        ('echo \'{"Username":"x"}\'', "something else than a login"),
        ('echo \'{"Username":"x","Secret":7}\'', "something else than a login"),
        ("exec cat /dev/zero", "more than 131072 bytes"),
    ],
)
async def test_a_helper_that_fails(home: Home, script: str, why: str) -> None:
    home.helper("bad", script)
    home.write(home.docker, {"credsStore": "bad", "auths": {HOST: entry("file")}})
    failure = await home.failure()
    assert why in failure.message
    assert str(home.docker) in failure.message


async def test_a_helper_that_hangs_is_ended_with_its_children(home: Home, tmp_path: Path) -> None:
    home.helper("slow", f"sleep 600 & echo $! > {tmp_path}/child; wait")
    home.write(home.docker, {"credsStore": "slow"})
    began = time.monotonic()
    failure = await home.failure(helper_seconds=0.5)
    assert "did not answer in 0.5 s" in failure.message
    assert time.monotonic() - began < 10
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: not is_running(child))


@pytest.mark.parametrize("name", ["missing", "../bin/sh", "a b", "", "x\n", 7, "/bin/sh", "-x"])
async def test_a_helper_that_is_not_there_or_is_no_name(home: Home, name: Any) -> None:
    home.write(home.docker, {"credHelpers": {HOST: name}})
    assert str(home.docker) in (await home.failure()).message


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "7",
        "[" * 100_000,
        '{"auths": []}',
        '{"credHelpers": "x"}',
        json.dumps({"auths": {HOST: SECRET}}),
        json.dumps({"auths": {HOST: {"auth": SECRET}}}),
        json.dumps({"auths": {HOST: {"auth": 7}}}),
        json.dumps({"auths": {HOST: {"auth": base64.b64encode(b"nocolon").decode()}}}),
        json.dumps({"auths": {HOST: {"auth": base64.b64encode(b"\xff:\xfe").decode()}}}),
        json.dumps({"auths": {HOST: {"username": 1, "password": SECRET}}}),
        json.dumps({"auths": {HOST: {"identitytoken": ["x"]}}}),
        json.dumps({"auths": {HOST: {"username": "u", "password": "x" * 70_000}}}),
        json.dumps({"x": "y" * 1024 * 1024}),
    ],
)
async def test_a_file_that_is_wrong_is_named_and_not_passed_by(home: Home, text: str) -> None:
    home.write(home.podman, text)
    home.write(home.docker, {"auths": {HOST: entry("docker")}})
    assert str(home.podman) in (await home.failure()).message


async def test_a_wrong_entry_of_another_registry_does_no_harm(home: Home) -> None:
    home.write(home.podman, {"auths": {"other.example": {"auth": "%%%"}, HOST: entry("good")}})
    assert await home.user() == "good"


async def test_a_named_file_that_is_missing_and_one_that_cannot_be_read(home: Home, tmp_path: Path) -> None:
    home.environ["REGISTRY_AUTH_FILE"] = str(tmp_path / "missing.json")
    assert "missing.json" in (await home.failure()).message
    home.environ["REGISTRY_AUTH_FILE"] = str(tmp_path)
    assert "Is a directory" in (await home.failure()).message


def test_passwords_are_in_no_repr() -> None:
    login = Login("alice", SECRET, "token-" + SECRET)
    for thing in (login, Credentials(login), [login], {"x": login}):
        assert SECRET not in repr(thing)
        assert SECRET not in str(thing)
    assert base64.b64decode(login.basic.removeprefix("Basic ")).decode() == f"alice:{SECRET}"


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
