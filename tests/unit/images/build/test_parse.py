"""Dockerfiles become instructions, or are refused by name and line. The parser runs in its own process, as in a build."""

import bz2
import gzip
import lzma
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from cloche.wire.errors import ClocheError
from cloche_server.images.build import apart
from cloche_server.images.build.instructions import (
    Cmd,
    Copy,
    Dockerfile,
    Entrypoint,
    Env,
    From,
    Healthcheck,
    Inline,
    Run,
    Volume,
    Workdir,
)
from cloche_server.images.build.parse import INSTRUCTIONS_MAX, marker, parse


async def one(line: str) -> object:
    return (await parse(f"FROM x\n{line}\n".encode())).instructions[1]


async def refusal(text: str | bytes) -> ClocheError:
    with pytest.raises(ClocheError) as caught:
        await parse(text if isinstance(text, bytes) else text.encode())
    return caught.value


@pytest.mark.req("IMG-2")
async def test_a_whole_file() -> None:
    text = """# syntax=docker/dockerfile:1
ARG BASE=debian
FROM --platform=linux/amd64 ${BASE} AS Build
ENV A=b C="d e" \\
    F=g
ENV old style value
# a comment
run --network=none echo hi \\
    # inside
    && echo there
WORKDIR /a b
VOLUME /b /c
CMD echo hi
ENTRYPOINT ["x", "y"]
"""
    found: Dockerfile = await parse(text.encode())
    arg, start, env, old, run, workdir, volume, cmd, entrypoint = found.instructions
    assert (arg.line, start.line, env.line, old.line, run.line) == (2, 3, 4, 6, 8)
    assert isinstance(start, From)
    assert (start.image, start.name) == ("${BASE}", "build")
    assert isinstance(env, Env)
    assert env.pairs == (("A", "b"), ("C", '"d e"'), ("F", "g"))
    assert isinstance(old, Env)
    assert old.pairs == (("old", "style value"),)
    assert isinstance(run, Run)
    assert run.argv == ("echo hi     && echo there",)
    assert run.in_shell
    assert isinstance(workdir, Workdir)
    assert workdir.path == "/a b"
    assert isinstance(volume, Volume)
    assert volume.paths == ("/b", "/c")
    assert isinstance(cmd, Cmd)
    assert (cmd.argv, cmd.in_shell) == (("echo hi",), True)
    assert isinstance(entrypoint, Entrypoint)
    assert (entrypoint.argv, entrypoint.in_shell) == (("x", "y"), False)
    assert found.escape == "\\"
    assert "syntax" in found.notes[0]


async def test_the_escape_directive() -> None:
    found = await parse(b"# escape=`\nFROM x\nRUN a `\n b\n")
    assert found.escape == "`"
    run = found.instructions[1]
    assert isinstance(run, Run)
    assert run.argv == ("a  b",)


@pytest.mark.parametrize(
    ("line", "argv", "script"),
    [
        ("RUN <<EOF\necho $X\nEOF", (), "echo $X\n"),
        ("RUN <<-EOF\n\techo a\n\t\tb\n\tEOF", (), "echo a\nb\n"),
        ("RUN <<EOF\n#!/bin/sh\nEOF", (), "#!/bin/sh\n"),
        ("RUN cat <<A >x && cat <<B\na\nA\nb\nB", ("cat <<A >x && cat <<B\na\nA\nb\nB",), None),
        ('RUN ["a", "b c"]', ("a", "b c"), None),
    ],
)
async def test_forms_of_run(line: str, argv: tuple[str, ...], script: str | None) -> None:
    run = await one(line)
    assert isinstance(run, Run)
    assert (run.argv, run.script) == (argv, script)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<<EOF", ("EOF", True, False)),
        ("<<-EOF", ("EOF", True, True)),
        ('<<"EOF"', ("EOF", False, False)),
        ("3<<'E F'", ("E F", False, False)),
        ("<<EOF cat", None),
        ("<<", None),
        ("a<<EOF", None),
    ],
)
def test_markers_of_heredocs(text: str, found: tuple[str, bool, bool] | None) -> None:
    at = marker(text)
    assert (None if at is None else (at.name, at.expanded, at.chomped)) == found


async def test_forms_of_copy() -> None:
    plain = await one("COPY --from=0 --chown=1:2 --chmod=755 --link a* b /c/")
    assert isinstance(plain, Copy)
    assert (plain.sources, plain.dest, plain.from_, plain.chown, plain.chmod) == (("a*", "b"), "/c/", "0", "1:2", "755")
    listed = await one('COPY ["a b", "c"]')
    assert isinstance(listed, Copy)
    assert listed.sources == ("a b",)
    here = await one("COPY <<A <<-'B' /x/\n$X\nA\n\tb\nB")
    assert isinstance(here, Copy)
    assert here.inline == (Inline("A", "$X\n", True), Inline("B", "b\n", False))


async def test_healthcheck_is_kept_with_a_note() -> None:
    found = await parse(b'FROM x\nHEALTHCHECK --interval=1m30s --retries=2 CMD ["a"]\n')
    check = found.instructions[1]
    assert isinstance(check, Healthcheck)
    assert (check.test, check.options) == (("CMD", "a"), (("Interval", 90_000_000_000), ("Retries", 2)))
    assert "line 2" in found.notes[0]


@pytest.mark.req("IMG-2")
@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("RUN --mount=type=cache,target=/x y", "RUN --mount"),
        ("RUN --network=host y", "RUN --network=host"),
        ("RUN --security=insecure y", "RUN --security"),
        ("ADD https://a.example/x /", "ADD of a remote source"),
        ("ADD git@a.example:x /", "ADD of a remote source"),
        ("ADD --checksum=sha256:a x /", "ADD --checksum"),
        ("COPY --parents a /", "COPY --parents"),
        ("ONBUILD RUN x", "ONBUILD"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name_and_line(line: str, name: str) -> None:
    refused = await refusal(f"FROM x\n\n{line}\n")
    assert refused.code == "dockerfile_unsupported"
    assert refused.message.startswith(f"line 3: {name} is not supported")
    assert refused.detail["line"] == 3


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("FROM x\nFOO bar", 2, "unknown instruction FOO"),
        ("FROM x\nENV a", 2, "ENV must have two arguments"),
        ("FROM x\nRUN a\nLABEL x=1 z\nRUN b", 3, "can't find = in"),
        ("FROM x\nRUN <<A\nA\n\nRUN <<EOF\nRUN <<B\n", 5, "unterminated heredoc"),
        ('FROM x\nRUN ["a", 1]', 2, "strings only"),
        ("RUN x", 1, "RUN before the first FROM"),
        ("ARG a", 1, "no FROM"),
        ("", 1, "no instructions"),
        ("FROM", 1, "FROM takes an image"),
        ("FROM a b", 1, "FROM takes an image"),
        ("FROM a AS -", 1, "not a name for a stage"),
        ("FROM x\nRUN", 2, "RUN without a command"),
        ("FROM x\nCOPY a", 2, "needs a source and a destination"),
        ("FROM x\nCOPY a b c", 2, "ends with '/'"),
        ("FROM x\nCOPY --frm=a b c", 2, "no option --frm"),
        ("FROM x\nCOPY --from b c", 2, "--from needs a value"),
        ("FROM x\nCOPY --chown=1 --chown=2 b c", 2, "given twice"),
        ("FROM x\nUSER", 2, "exactly one argument"),
        ("FROM x\nSHELL a", 2, "JSON list"),
        ("FROM x\nHEALTHCHECK FOO", 2, "HEALTHCHECK takes"),
        ("FROM x\nHEALTHCHECK --timeout=5 CMD a", 2, "not a duration"),
        ("FROM x\nRUN a\0b", 2, "NUL"),
    ],
)
async def test_what_is_wrong_is_refused_with_its_line(text: str, line: int, says: str) -> None:
    refused = await refusal(text)
    assert refused.code == "dockerfile_invalid"
    assert refused.detail["line"] == line
    assert refused.message.startswith(f"line {line}: ")
    assert says in refused.message


async def test_bytes_that_are_no_text_and_sizes() -> None:
    assert (await refusal(b"FROM x\n\nRUN \xff")).detail["line"] == 3
    assert "longer" in (await refusal(b"#" * (apart.DOCKERFILE_BYTES_MAX + 1))).message
    many = "FROM x\n" + "ENV a=b\n" * INSTRUCTIONS_MAX
    assert (await refusal(many)).detail["line"] == INSTRUCTIONS_MAX + 1
    assert "\x1b" not in (await refusal("FROM x\nF\x1b[31m")).message


async def test_a_parser_that_dies_takes_nobody_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "apart.py"
    broken.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    monkeypatch.setattr(apart, "__file__", str(broken))
    refused = await refusal("FROM x")
    assert refused.code == "dockerfile_invalid"
    assert "no answer" in refused.message


@pytest.mark.req("ISO-6")
@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
async def test_a_bomb_ends_at_its_limit(pack: Callable[[bytes], bytes]) -> None:
    raw = bytes(20_000_000) + b"end"
    with tempfile.TemporaryFile() as source:
        # Two members one after the other are one stream, as for gzip -d.
        packed = pack(raw) + pack(b"more")
        source.write(b"junk" + packed + b"junk")
        source.flush()

        async def unpacked(size: int, bytes_max: int) -> bytes:
            with tempfile.TemporaryFile() as output:
                await apart.decompress(source.fileno(), 4, size, output.fileno(), bytes_max)
                output.seek(0)
                return output.read()

        assert await unpacked(len(packed), len(raw) + 4) == raw + b"more"
        with pytest.raises(apart.NotUnpacked, match="larger"):
            await unpacked(len(packed), len(raw) + 3)
        with pytest.raises(apart.NotUnpacked, match="damaged"):
            await unpacked(len(packed) - 1, len(raw) + 4)
