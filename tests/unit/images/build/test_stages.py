"""Which stages there are, what they are built on, and which a build needs."""

import pytest

from cloche.wire.errors import ClocheError
from cloche_server.images.build.parse import parse
from cloche_server.images.build.stages import Origin, Plan, plan

THREE = """ARG TAG=12
FROM debian:${TAG} AS build
RUN make
FROM build AS test
RUN check
FROM scratch
COPY --from=build /a /a
COPY --from=0 /b /b
COPY --from=docker.example/tool:1 /c /c
"""


async def planned(text: str, target: str | None = None, **args: str) -> Plan:
    return plan(await parse(text.encode()), args=args, target=target)


@pytest.mark.req("IMG-2")
async def test_stages_and_where_they_start() -> None:
    found = await planned(THREE)
    build, test, last = found.stages
    assert build.base == Origin("image", image="debian:12")
    assert test.base == Origin("stage", stage=0)
    assert last.base == Origin("scratch")
    assert list(last.copies.values()) == [
        Origin("stage", stage=0),
        Origin("stage", stage=0),
        Origin("image", image="docker.example/tool:1"),
    ]


@pytest.mark.parametrize(
    ("target", "index", "needed"), [(None, 2, (0, 2)), ("TEST", 1, (0, 1)), ("build", 0, (0,)), ("1", 1, (0, 1))]
)
async def test_only_what_the_target_needs(target: str | None, index: int, needed: tuple[int, ...]) -> None:
    found = await planned(THREE, target)
    assert (found.target, found.needed) == (index, needed)


async def test_the_callers_arguments_beat_the_defaults() -> None:
    assert (await planned(THREE, TAG="13")).stages[0].base.image == "debian:13"
    assert (await planned("FROM ${X:-scratch}")).stages[0].base == Origin("scratch")
    chained = await planned("ARG A=1\nARG B=x$A\nFROM i:$B", A="2")
    assert chained.stages[0].base.image == "i:x2"


async def test_our_own_platform_is_accepted() -> None:
    for text in ("linux/amd64", "linux/x86_64", "amd64", "$BUILDPLATFORM", "$TARGETOS/$TARGETARCH"):
        assert (await planned(f"FROM --platform={text} x")).stages[0].base.image == "x"


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("FROM --platform=linux/arm64 x", "dockerfile_unsupported", "line 1: FROM --platform=linux/arm64"),
        ("FROM $X", "dockerfile_invalid", "line 1: FROM $X: the name is empty"),
        ("FROM a AS x\nFROM b AS X", "dockerfile_invalid", "line 2: the name 'x'"),
        ("FROM a\nCOPY --from=0 a b", "dockerfile_invalid", "line 2: --from=0"),
        ("FROM a AS x\nCOPY --from=x a b", "dockerfile_invalid", "cannot copy from itself"),
        ("FROM a\nCOPY --from=$X a b", "dockerfile_invalid", "--from takes no variables"),
        ("FROM a${X#y}", "dockerfile_unsupported", "line 1: the substitution ${X#"),
        ("FROM 'a", "dockerfile_invalid", "line 1: a single quote"),
    ],
)
async def test_what_is_refused(text: str, code: str, says: str) -> None:
    with pytest.raises(ClocheError) as caught:
        await planned(text)
    assert caught.value.code == code
    assert says in caught.value.message


async def test_a_target_that_is_not_there() -> None:
    with pytest.raises(ClocheError, match="No stage is called"):
        await planned(THREE, "nope")
