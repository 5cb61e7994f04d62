"""Images of all kinds run: nothing but one program, no shell, a user of its own, another libc than ours."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.promises.nodes import RealNode
from tests.promises.pictures import MIRROR_PREFIX, layer, mirror, musl_files, picture_node, program, run_output
from tests.unit.images import registries
from tests.unit.images.pushing import push

pytestmark = [
    pytest.mark.req("IMG-4"),
    pytest.mark.skipif(not registries.can_run(), reason="needs docker-registry"),
    pytest.mark.timeout(240),
]

GIVEN = (".cloche", "dev", "etc", "proc", "run", "sys", "tmp", "workspace")
"""What every sandbox has."""
PASSWD = b"root:x:0:0:root:/root:/none\napp:x:1234:5678:An app:/home/app:/none\n"
GROUP = b"root:x:0:\napp:x:5678:\nmore:x:4321:app\n"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealNode]:
    with registries.running(tmp_path_factory.mktemp("registry")) as registry:
        tool = program("tool")

        def add(name: str, files: dict[str, bytes | str | None], config: dict[str, object], *env: str) -> None:
            push(registry, MIRROR_PREFIX + name, "1", [layer(files)], config, env=env)

        add("scratch", {"tool": tool}, {"Cmd": ["/tool", "hello"]})
        add("no-shell", {"usr": None, "usr/bin": None, "usr/bin/tool": tool}, {"Entrypoint": ["tool"]}, "PATH=/usr/bin")
        home = {"home": None, "home/app": None, "etc": None, "etc/passwd": PASSWD, "etc/group": GROUP}
        add(
            "user",
            {"tool": tool, **home},
            {"Entrypoint": ["/tool", "entry"], "Cmd": ["cmd"], "User": "app", "WorkingDir": "/home/app"},
            "PATH=/",
            "A=from the image",
        )
        add("musl", dict(musl_files()), {"Entrypoint": ["/tool"], "Cmd": ["musl"]})
        with picture_node(mirror(registry.url)) as made:
            yield made


def test_a_scratch_image_is_one_program(node: RealNode) -> None:
    assert run_output(node, "scratch:1") == "hello uid=0 cwd=/ A=-\n"
    assert run_output(node, "scratch:1", "/tool", "again") == "again uid=0 cwd=/ A=-\n"
    with node.client() as client:
        view = client.images.inspect("scratch:1")
    assert (view.layers, view.config.cmd, view.config.entrypoint, view.config.user) == (1, ["/tool", "hello"], [], None)
    with node.sandbox(image="scratch:1", memory_mb=64) as box:
        found = {entry.path for entry in box.files.list("/")}
        assert found == {f"/{name}" for name in ("tool", *GIVEN)}


def test_an_image_without_a_shell_says_so_and_runs_its_program(node: RealNode) -> None:
    assert run_output(node, "no-shell:1", "x").startswith("x uid=0 ")
    with node.sandbox(image="no-shell:1", memory_mb=64) as box:
        assert box.commands.run(["tool", "found", "by", "PATH"]).stdout.startswith("found by PATH ")
        line = box.commands.run("echo a shell's line")
        assert (line.ended, line.end.error_code) == ("not_started", "command_not_found")
        assert box.commands.run(["/usr/bin/tool", "still here"]).stdout.startswith("still here ")


@pytest.mark.req("IMG-1")
def test_an_image_s_user_directory_and_words_are_honoured(node: RealNode) -> None:
    assert run_output(node, "user:1") == "entry cmd uid=1234 cwd=/home/app A=from the image\n"
    assert run_output(node, "user:1", "mine") == "entry mine uid=1234 cwd=/home/app A=from the image\n"
    told = node.cloche("run", "-u", "0", "-w", "/", "-e", "A=mine", "--entrypoint", "/tool", "user:1")
    assert told.stdout == b"uid=0 cwd=/ A=mine\n"
    with node.sandbox(image="user:1", memory_mb=64) as box:
        assert (box.view.user, box.view.workdir) == ("app", "/home/app")
        assert box.commands.run(["/tool", "one"]).stdout == "one uid=1234 cwd=/home/app A=from the image\n"
        assert box.commands.run(["/tool", "two"], user="root", cwd="/").stdout == "two uid=0 cwd=/ A=from the image\n"


def test_a_program_of_another_libc_runs(node: RealNode) -> None:
    assert b"ld-musl" in musl_files()["tool"][:4096], "it asks for musl's loader"
    assert run_output(node, "musl:1") == "musl uid=0 cwd=/ A=-\n"
    with node.sandbox(image="musl:1", memory_mb=64) as box:
        assert box.commands.run(["/tool", "and", "again"]).stdout.startswith("and again uid=0 ")
