# Made by tools/unasync.py from tests/unit/client/test_async_images.py: edit that one.
"""Images of the SDK over real HTTP; `test_sync_images.py` is made from this file."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloche import ClocheError, Node, Sandbox
from cloche.wire.images import Credentials
from tests.unit.api.served import BadLine, Served, served


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    folder = tmp_path / "served"
    folder.mkdir()
    for name in ("REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "DOCKER_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with served(folder) as one:
        monkeypatch.setenv("CLOCHE_URL", one.url)
        yield one


@pytest.mark.req("UX-2")
@pytest.mark.req("IMG-1")
def test_pull_list_inspect_remove(node: Served) -> None:
    with Node() as client:
        events = []
        view = client.images.pull("python:3.12-slim", on_event=events.append)
        assert [event.kind for event in events] == ["resolved", *["layer"] * 4, "convert", "done"]
        assert [one.digest for one in client.images.list()] == [view.digest]
        assert (client.images.inspect(view.digest)).names == ["python:3.12-slim"]
        assert (client.images.remove("python:3.12-slim")).digest == view.digest
        with pytest.raises(ClocheError) as raised:
            client.images.inspect("python:3.12-slim")
        assert raised.value.code == "image_not_found"
        assert "Images" in repr(client.images)


@pytest.mark.req("UX-6")
def test_what_goes_wrong_early_or_late_is_one_error(node: Served) -> None:
    with Node() as client:
        for image, code in (
            ("missing", "image_not_found"),
            ("denied/x", "registry_denied"),
            ("broken", "image_corrupt"),
        ):
            with pytest.raises(ClocheError) as raised:
                client.images.pull(image)
            assert raised.value.code == code
            assert raised.value.fix
        with pytest.raises(ClocheError) as raised:
            client.images.pull("x" * 1000)
        assert raised.value.code == "invalid_request"


@pytest.mark.req("IMG-1")
def test_own_credentials_are_sent_for_their_registry_only(node: Served, tmp_path: Path) -> None:
    folder = tmp_path / "home" / ".docker"
    folder.mkdir(parents=True)
    folder.joinpath("config.json").write_text('{"auths": {"registry.example:5000": {"auth": "YW5uYTpwdw=="}}}')
    with Node() as client:
        client.images.pull("registry.example:5000/team/app:1")
        client.images.pull("other.example/team/app:1")
        given = Credentials(username="bob", password="secret")
        client.images.pull("other.example/team/app:2", credentials=given)
    sent = [pull.credentials for pull in node.backend.pulls]
    assert sent[0] is not None
    assert (sent[0].username, sent[0].password) == ("anna", "pw")
    assert sent[1] is None
    assert sent[2] == given
    assert "secret" not in repr(given)


@pytest.mark.req("IMG-1")
def test_a_sandbox_of_an_absent_image_pulls_it_first(node: Served) -> None:
    with Sandbox.create("app:absent") as box:
        assert box.view.image == "app:absent"
        assert box.view.image_digest is not None
    with Sandbox.create("app:absent"):
        pass
    assert [pull.image for pull in node.backend.pulls] == ["app:absent"], "the second one finds it here"
    with pytest.raises(ClocheError) as raised:
        Sandbox.create("other:absent", pull="never")
    assert raised.value.code == "image_not_found"
    with pytest.raises(ClocheError) as raised:
        Sandbox.create("sha256:0:absent")
    assert raised.value.code == "image_not_found", "a digest alone is of no registry"
    with Sandbox.create("app:absent", pull="always"):
        pass
    assert len(node.backend.pulls) == 2


@pytest.mark.req("EXE-3")
def test_a_lost_connection_asks_for_the_pull_again(node: Served, tmp_path: Path, seed: int) -> None:
    from cloche.client._target import parse_url

    with BadLine(tmp_path, node.socket, seed, 100, 4000) as line:
        with Node(parse_url(line.url, None)) as client:
            assert (client.images.pull("python:3.12-slim")).names == ["python:3.12-slim"]
        assert len(node.backend.pulls) == line.broken + 1


def test_archives_go_in_and_out(node: Served, tmp_path: Path) -> None:
    archive = tmp_path / "image.tar"
    archive.write_bytes(bytes(range(256)) * 20_000)
    layout = tmp_path / "layout"
    layout.joinpath("blobs").mkdir(parents=True)
    layout.joinpath("oci-layout").write_text("{}")
    layout.joinpath("blobs", "x").write_bytes(b"blob")
    with Node() as client:
        (view,) = client.images.import_archive(archive, name="mine:1")
        assert node.backend.archives["mine:1"] == archive.read_bytes()
        assert b"".join(list(client.images.export_parts(view.digest))) == archive.read_bytes()
        client.images.import_archive(layout, name="mine:2")
        with tarfile.open(fileobj=io.BytesIO(node.backend.archives["mine:2"])) as tar:
            assert tar.getnames() == ["blobs", "blobs/x", "oci-layout"]
        for wrong in (tmp_path / "none.tar", layout / "blobs"):
            with pytest.raises(ClocheError) as raised:
                client.images.import_archive(wrong)
            assert raised.value.code in ("path_not_found", "invalid_request")
        empty = tmp_path / "empty.tar"
        empty.touch()
        with pytest.raises(ClocheError) as raised:
            client.images.import_archive(empty)
        assert raised.value.code == "image_refused"


@pytest.mark.req("IMG-2")
def test_a_build_sends_its_context_without_what_is_ignored(node: Served, tmp_path: Path) -> None:
    context = tmp_path / "context"
    context.joinpath("src", "deep").mkdir(parents=True)
    context.joinpath("node_modules").mkdir()
    for name in ("Dockerfile", "src/a.py", "src/a.pyc", "src/deep/b.pyc", "node_modules/x", "secret.env", "keep.env"):
        context.joinpath(name).write_text(name)
    context.joinpath(".dockerignore").write_text(
        "node_modules\n**/*.pyc\n*.env\n!keep.env\nDockerfile\n.dockerignore\n"
    )
    events = []
    with Node() as client:
        view = client.images.build(context, name="app:1", args={"A": "b"}, target="x", on_event=events.append)
        outside = tmp_path / "Other"
        outside.write_text("FROM scratch")
        client.images.build(context, dockerfile=outside)
        client.images.build(context, dockerfile=context / "src" / "a.py")
        with pytest.raises(ClocheError) as raised:
            client.images.build(context, target="broken")
        assert raised.value.code == "build_failed"
        for wrong in (
            {"context": tmp_path / "none"},
            {"context": tmp_path},
            {"context": context, "dockerfile": "none"},
        ):
            with pytest.raises(ClocheError):
                client.images.build(**wrong)  # type: ignore[arg-type]
    assert view.names == ["app:1"]
    assert [event.kind for event in events] == ["step", "step", "output", "done"]
    options, body = node.backend.builds[0]
    assert (options.name, options.args, options.target, options.dockerfile) == ("app:1", {"A": "b"}, "x", "Dockerfile")
    with tarfile.open(fileobj=io.BytesIO(body)) as tar:
        files = {name for name in tar.getnames() if not tar.getmember(name).isdir()}
        assert {(member.uid, member.gid) for member in tar} == {(0, 0)}
    assert files == {"Dockerfile", ".dockerignore", "src/a.py", "keep.env"}
    assert node.backend.builds[1][0].dockerfile == ".cloche-dockerfile"
    with tarfile.open(fileobj=io.BytesIO(node.backend.builds[1][1])) as tar:
        found = tar.extractfile(".cloche-dockerfile")
        assert found is not None
        assert found.read() == b"FROM scratch"
        assert "src/a.py" in tar.getnames()
    assert node.backend.builds[2][0].dockerfile == "src/a.py"


def test_the_store(node: Served) -> None:
    with Node() as client:
        client.images.pull("a")
        assert (client.images.fsck()).images == 1
        assert (client.images.gc(max_bytes=0, max_age_s=60.0)).images == ["a"]
    assert node.backend.collected[0].max_age_s == 60.0
