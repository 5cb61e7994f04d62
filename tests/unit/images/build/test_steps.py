"""What every instruction comes to: variables, user, directory, shell, config."""

import pytest

from cloche.wire.errors import ClocheError
from cloche_server.images.build.parse import parse
from cloche_server.images.build.stages import plan
from cloche_server.images.build.steps import Config, CopyWork, DirectoryWork, Followed, RunWork, Step, config_of, follow

BASE = config_of(
    {
        "config": {
            "Env": ["PATH=/bin", "LANG=C", "broken"],
            "Cmd": ["sh"],
            "WorkingDir": "srv",
            "User": "web",
            "ExposedPorts": {"80/tcp": {}},
        }
    }
)


async def followed(text: str, **args: str) -> Followed:
    dockerfile = await parse(text.encode())
    order = plan(dockerfile, args=args)
    last = None
    for stage in order.stages:
        start = last if last is not None and stage.base.kind == "stage" else Followed((), BASE, {})
        last = follow(
            stage,
            start.config,
            args=args,
            global_args=order.globals,
            escape=dockerfile.escape,
            inherited=start.args,
        )
    assert last is not None
    return last


async def step(text: str, **args: str) -> Step:
    return (await followed(text, **args)).steps[-1]


async def run(text: str, **args: str) -> RunWork:
    work = (await step(text, **args)).work
    assert isinstance(work, RunWork)
    return work


async def copy(text: str) -> CopyWork:
    work = (await step(text)).work
    assert isinstance(work, CopyWork)
    return work


def test_a_base_config_of_strange_types_is_read_as_far_as_it_goes() -> None:
    assert BASE.env == {"PATH": "/bin", "LANG": "C"}
    assert (BASE.workdir, BASE.user, BASE.cmd, BASE.ports) == ("/srv", "web", ("sh",), ("80/tcp",))
    strange = config_of({"config": {"Env": 7, "Cmd": [1], "Labels": {"a": 1, "b": "c"}, "User": None}})
    assert (strange.env, strange.cmd, strange.labels, strange.user) == ({}, None, {"b": "c"}, "")
    assert config_of({"config": "no"}) == Config()


@pytest.mark.req("IMG-2")
@pytest.mark.parametrize(
    ("lines", "seen"),
    [
        ("ARG V=1", {"V": "1"}),
        ("ARG V", {}),
        ("ARG G", {"G": "global"}),
        ("ARG G=mine", {"G": "mine"}),
        ("ARG GIVEN=1", {"GIVEN": "told"}),
        ("ENV V=env\nARG V=arg", {"V": "env"}),
        ("ARG V=arg\nENV V=$V-env", {"V": "arg-env"}),
        ("ENV A=1\nENV A=2 B=$A", {"A": "2", "B": "1"}),
        ("ENV LANG=", {"LANG": ""}),
        ("ARG TARGETARCH", {"TARGETARCH": "amd64"}),
    ],
)
async def test_which_variables_a_command_sees(lines: str, seen: dict[str, str]) -> None:
    work = await run(f"ARG G=global\nFROM x\n{lines}\nRUN true", GIVEN="told")
    assert work.env == {"PATH": "/bin", "LANG": "C", **seen}


async def test_proxies_are_seen_and_not_part_of_the_key() -> None:
    found = await step("FROM x\nRUN true", HTTP_PROXY="http://p", other="x")
    assert isinstance(found.work, RunWork)
    assert found.work.env["HTTP_PROXY"] == "http://p"
    assert "other" not in found.work.env
    assert "HTTP_PROXY" not in found.visible


async def test_a_stage_on_a_stage_has_its_config_and_arguments() -> None:
    work = await run("FROM x AS a\nARG V=1\nENV E=2\nUSER u\nWORKDIR /w\nFROM a\nRUN true")
    assert (work.env["V"], work.env["E"], work.user, work.workdir) == ("1", "2", "u", "/w")
    alone = await run("FROM x AS a\nARG V=1\nFROM y\nRUN true")
    assert "V" not in alone.env


@pytest.mark.parametrize(
    ("lines", "argv"),
    [
        ("RUN a && b", ("/bin/sh", "-c", "a && b")),
        ('RUN ["a", "$B"]', ("a", "$B")),
        ('SHELL ["/bin/bash", "-ec"]\nRUN a', ("/bin/bash", "-ec", "a")),
        ("RUN <<EOF\na\nb\nEOF", ("/bin/sh", "-c", "a\nb\n")),
        ("RUN echo $A \\\n  b", ("/bin/sh", "-c", "echo $A   b")),
    ],
)
async def test_what_a_run_runs(lines: str, argv: tuple[str, ...]) -> None:
    assert (await run(f"FROM x\nENV A=no\n{lines}")).argv == argv


async def test_a_script_with_an_interpreter_is_a_file() -> None:
    assert (
        await run("FROM x\nRUN <<EOF\n#!/usr/bin/python3\nprint(1)\nEOF")
    ).script == "#!/usr/bin/python3\nprint(1)\n"


@pytest.mark.parametrize(
    ("lines", "path"),
    [("WORKDIR a", "/srv/a"), ("WORKDIR /a\nWORKDIR b/../c", "/a/c"), ("ENV D=/q\nWORKDIR $D/$E", "/q")],
)
async def test_directories(lines: str, path: str) -> None:
    found = await step(f"FROM x\n{lines}")
    assert found.work == DirectoryWork(path, "web")
    assert found.after.workdir == path


@pytest.mark.parametrize(
    ("dest", "found"),
    [("a", "/srv/a"), ("a/", "/srv/a/"), (".", "/srv/"), ("..", "/"), ("/", "/"), ("$LANG/x", "/srv/C/x")],
)
async def test_where_a_copy_goes(dest: str, found: str) -> None:
    assert (await copy(f"FROM x\nCOPY s {dest}")).dest == found


async def test_a_copy_is_expanded() -> None:
    work = await copy("FROM x\nENV U=7 F=f\nCOPY --chown=$U:8 --chmod=0640 $F <<A <<'B' /d/\n$U\nA\n$U\nB")
    assert (work.sources, work.chown, work.mode) == (("f",), "7:8", 0o640)
    assert work.inline == (("A", "7\n"), ("B", "$U\n"))


async def test_the_config_at_the_end() -> None:
    text = """FROM x
LABEL a=b "c d"='e f'
EXPOSE 80 81/udp 90-91
VOLUME ["/v"]
STOPSIGNAL SIGINT
USER me:us
SHELL ["/bin/bash", "-c"]
CMD run it
MAINTAINER somebody
HEALTHCHECK NONE
"""
    config = (await followed(text)).config
    assert config.labels == {"a": "b", "c d": "e f"}
    assert config.ports == ("80/tcp", "81/udp", "90/tcp", "91/tcp")
    assert (config.volumes, config.stop_signal, config.user) == (("/v",), "SIGINT", "me:us")
    assert config.cmd == ("/bin/bash", "-c", "run it")
    assert (config.author, config.healthcheck) == ("somebody", {"Test": ["NONE"]})


async def test_an_entrypoint_drops_the_bases_cmd_and_keeps_ours() -> None:
    assert (await followed('FROM x\nENTRYPOINT ["a"]')).config.cmd is None
    assert (await followed('FROM x\nCMD ["b"]\nENTRYPOINT ["a"]')).config.cmd == ("b",)


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("COPY --chmod=u+x a b", "dockerfile_unsupported", "--chmod=u+x"),
        ("ENV A=${B/x/y}", "dockerfile_unsupported", "the substitution"),
        ("ENV A=${B?}", "dockerfile_invalid", "B: is not set"),
        ("EXPOSE 70000", "dockerfile_invalid", "not a port"),
        ("EXPOSE 1-65535", "dockerfile_invalid", "more than"),
        ("COPY a $NOTHING", "dockerfile_invalid", "destination is empty"),
        ('ENV "$NOTHING"=a', "dockerfile_invalid", "name that is empty"),
    ],
)
async def test_what_is_refused_has_its_line(line: str, code: str, says: str) -> None:
    with pytest.raises(ClocheError) as caught:
        await followed(f"FROM x\n{line}")
    assert caught.value.code == code
    assert caught.value.message.startswith("line 2: ")
    assert says in caught.value.message


async def test_variables_cannot_grow_without_end() -> None:
    lines = ["FROM x", "ENV A=aaaaaaaaaaaaaaaa", *["ENV A=$A$A"] * 40]
    with pytest.raises(ClocheError, match="longer than"):
        await followed("\n".join(lines))
