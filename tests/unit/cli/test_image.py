"""`cloche image`: what each verb sends and prints, and that nothing that others chose reaches the terminal raw."""

import json

import click
import pytest

from cloche.cli.image import VERBS
from cloche.cli.image import command as group
from cloche.cli.pulling import Layers
from cloche.wire.images import FsckProblem, ImageEvent, LostOnConversion
from tests.unit.cli.fake_images import DIGEST, make_view, pull_events

EVIL = "\x1b]52;c;aGk=\x07evil\u202e"


def test_every_verb_loads_and_says_the_same_in_both_lists() -> None:
    context = click.Context(group)
    for name, (_module, text) in VERBS.items():
        command = group.get_command(context, name)
        assert command is not None
        assert (command.name, bool(command.help), text.endswith(".")) == (name, True, True)


@pytest.mark.req("UX-4")
def test_pull_prints_the_digest_and_how_it_went(node, cloche) -> None:
    result = cloche("image", "pull", "--platform", "linux/amd64", "python:3.12-slim")
    assert (result.exit_code, result.stdout) == (0, f"{DIGEST}\n")
    assert node.images.asked == [("pull", ("python:3.12-slim", "linux/amd64"))]
    lines = result.stderr.splitlines()
    assert lines[0] == f"python:3.12-slim: {DIGEST}"
    assert lines[1:3] == ["python:3.12-slim: 1/2 layers, 1 MB", "python:3.12-slim: 2/2 layers, 2 MB"]
    assert lines[3] == "✓ image python:3.12-slim  41 MB"
    assert json.loads(cloche("image", "pull", "--json", "x").stdout)["digest"] == DIGEST


@pytest.mark.req("UX-1")
def test_run_says_once_that_it_pulled(node, cloche) -> None:
    assert cloche("run", "--", "true").stderr == "", "an image that is here is not worth a word"
    node.events = pull_events("python:3.12-slim", make_view())
    assert cloche("run", "--", "true").stderr == "✓ image python:3.12-slim  41 MB\n"


def test_ls_and_inspect(node, cloche) -> None:
    node.images.views = [
        make_view(names=["python:3.12-slim", "python:3"], in_use=2),
        make_view(names=[], private=True, signed_by=["release"]),
    ]
    lines = cloche("image", "ls").stdout.splitlines()
    assert lines[0].split() == ["IMAGE", "DIGEST", "PLATFORM", "SIZE", "ROOT", "USED", "SOURCE"]
    assert lines[1].startswith("python:3.12-slim  sha256:abababababab  linux/amd64  41 MB  120 MB  2 running ")
    assert [line.split()[0] for line in lines[1:]] == ["python:3.12-slim", "python:3", "-"]
    assert "registry, private" in lines[3]
    assert cloche("image", "ls", "-q").stdout == f"{DIGEST}\n{DIGEST}\n"
    assert len(json.loads(cloche("image", "ls", "--json").stdout)["images"]) == 2
    lost = LostOnConversion(xattrs=3, xattr_examples=["/usr/bin/ping: security.capability"])
    node.images.views = [make_view(lost=lost)]
    shown = cloche("image", "inspect", "python:3.12-slim").stdout
    assert "cmd         python3\n" in shown
    assert "user        root\n" in shown
    assert "lost        3 extended attributes\n" in shown
    assert "/usr/bin/ping: security.capability" in shown
    assert cloche("image", "inspect", "missing").exit_code == 125


def test_what_others_chose_is_shown_and_not_obeyed(node, cloche) -> None:
    config = make_view().config.model_copy(update={"env": {"X": EVIL}, "cmd": [EVIL], "labels": {EVIL: EVIL}})
    node.images.views = [make_view(names=[EVIL], platform=EVIL, signed_by=[EVIL], config=config, digest=EVIL)]
    node.images.problems = [FsckProblem(path=EVIL, what=EVIL)]
    node.images.output = EVIL
    commands = [("ls",), ("ls", "-q"), ("ls", "--json"), ("inspect", "x"), ("inspect", "--json", "x"), ("fsck",)]
    commands += [("pull", "x"), ("build", "."), ("rm", EVIL), ("gc",)]
    for arguments in commands:
        result = cloche("image", *arguments)
        text = result.stdout + result.stderr
        assert not any(char in text for char in "\x1b\x07\u202e"), arguments
        assert "evil" in text or arguments == ("gc",), arguments


def test_build_sends_what_was_typed(node, cloche, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FROM_HERE", "yes")
    monkeypatch.delenv("NOT_HERE", raising=False)
    result = cloche(
        "image", "build", "-f", "Dockerfile.x", "-t", "app:1", "--build-arg", "A=b=c", "--build-arg", "FROM_HERE", "--build-arg",
        "NOT_HERE", "--target", "final", "--no-cache", "--memory", "1g", "--disk", "4g", str(tmp_path),
    )  # fmt: skip
    assert (result.exit_code, result.stdout) == (0, f"{DIGEST}\n")
    ((verb, (directory, fields)),) = node.images.asked
    assert (verb, directory, str(fields["dockerfile"])) == ("build", tmp_path, "Dockerfile.x")
    assert fields["args"] == {"A": "b=c", "FROM_HERE": "yes"}
    assert (fields["name"], fields["target"], fields["no_cache"], fields["compat"]) == ("app:1", "final", True, False)
    assert (fields["memory_bytes"], fields["disk_bytes"]) == (1 << 30, 4 << 30)
    assert "[1/2] FROM python:3.12-slim  (cached)" in result.stderr
    assert "[2/2] RUN \\x1b]0;make\\x07" in result.stderr
    assert cloche("image", "build", "-q", str(tmp_path)).stderr == ""
    assert cloche("image", "build", "--build-arg", "=x", str(tmp_path)).exit_code == 2


def test_import_and_export(node, cloche, tmp_path) -> None:
    archive = tmp_path / "a.tar"
    archive.write_bytes(b"x")
    assert cloche("image", "import", "-t", "x:1", str(archive)).stdout == f"{DIGEST}\n"
    assert node.images.asked[-1] == ("import", (archive, "x:1"))
    assert cloche("image", "import", str(tmp_path / "none")).exit_code == 2
    target = tmp_path / "out.tar"
    assert cloche("image", "export", "-o", str(target), "x:1").exit_code == 0
    assert target.read_bytes() == b"tar bytes"
    target.write_bytes(b"old")
    broken = cloche("image", "export", "-o", str(target), "broken")
    assert (broken.exit_code, target.read_bytes()) == (125, b"old"), "half an image never takes a file's place"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar", "out.tar"]
    assert cloche("image", "export", "x:1").stdout_bytes == b"tar bytes"


def test_rm_goes_on_after_one_that_stays(node, cloche) -> None:
    result = cloche("image", "rm", "a", "used", "b")
    assert (result.exit_code, result.stdout) == (125, "a\nb\n")
    assert result.stderr.startswith("✗ image_in_use: ")


def test_gc_and_fsck(node, cloche) -> None:
    result = cloche("image", "gc", "--max-size", "10g", "--older-than", "30d")
    assert node.images.asked == [("gc", (10 << 30, 30 * 86400.0))]
    assert result.stdout == "old:1\n"
    assert "1 image, 3 layers and manifests, 1 root file system: 5 MB" in result.stderr
    assert cloche("image", "fsck").exit_code == 0
    node.images.problems = [FsckProblem(path="blobs/sha256/ab", what="its bytes have another hash")]
    bad = cloche("image", "fsck")
    assert bad.exit_code == 1
    assert bad.stdout == "✗ blobs/sha256/ab: its bytes have another hash\n"
    assert cloche("image", "fsck", "--repair").exit_code == 0
    assert json.loads(cloche("image", "fsck", "--json").stdout)["problems"]


def test_layers_are_counted_once() -> None:
    layers = Layers()
    said = [("a", 0, 10), ("b", 0, 20), ("a", 10, 10), ("a", 10, 10), ("b", 5, 20), ("b", 20, 20), ("c", 0, 0)]
    events = [ImageEvent(kind="layer", digest=key, bytes_done=done, bytes_total=of, of=3) for key, done, of in said]
    assert [layers.note(event) for event in events] == [False, False, True, False, False, True, True]
    assert (layers.bytes_done, layers.bytes_total, layers.text) == (30, 30, "3/3 layers")
