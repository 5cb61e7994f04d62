"""What changes a step's key, and what does not."""

import os
from pathlib import Path

import pytest

from cloche_server.images.build import cachekey, copying
from cloche_server.images.build.parse import parse
from cloche_server.images.build.protocols import LayerRef
from cloche_server.images.build.result import MERGED, NO_TIME, Past, document
from cloche_server.images.build.stages import plan
from cloche_server.images.build.steps import Config, CopyWork, follow
from tests.unit.images import converter
from tests.unit.images.build.contexts import packed, written

pytestmark = pytest.mark.skipif(not converter.CONVERTER.exists(), reason="needs the converter (just setup)")

DOCKERFILE = """FROM x
ARG V=1
ENV E=e
WORKDIR /w
COPY src dst/
RUN make
CMD run
"""
FILES = {"src/a": "a", "src/b": "b", "src/l": "-> a", "other": "o"}


async def keys(
    place: Path, text: str = DOCKERFILE, base: str = "sha256:base", platform: str = "linux/amd64", **args: str
) -> list[str]:
    """Of the steps that change files: WORKDIR, COPY, RUN."""
    tree = (await packed(place)).tree
    dockerfile = await parse(text.encode())
    order = plan(dockerfile, args=args, platform=platform)
    found = follow(order.stages[0], Config(), args=args, global_args=order.globals)
    key, made = cachekey.start(base, platform), []
    for step in found.steps:
        copied = None
        if isinstance(step.work, CopyWork):
            copied = cachekey.content(copying.choose(tree, step.work.sources, line=1, text=""))
        key = cachekey.after(key, step, copied)
        if step.work is not None:
            made.append(key)
    return made


def common(one: list[str], other: list[str]) -> int:
    """How many steps are the same; after the first that differs, all differ."""
    same = [a == b for a, b in zip(one, other, strict=True)]
    count = same.index(False) if False in same else len(same)
    assert not any(same[count:])
    return count


@pytest.mark.req("IMG-2")
@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("", "", 3),
        ("CMD run", "CMD walk", 3),
        ("RUN make", "RUN make all", 2),
        ("RUN make", "RUN  make", 3),
        ("RUN make", 'RUN ["make"]', 2),
        ("RUN make", "USER u\nRUN make", 2),
        ("RUN make", 'SHELL ["/bin/bash", "-c"]\nRUN make', 2),
        ("RUN make", "LABEL a=b\nRUN make", 3),
        ("RUN make", "# a comment\nRUN make", 3),
        ("COPY src dst/", "COPY src elsewhere/", 1),
        ("COPY src dst/", "COPY src /w/dst/", 3),
        ("COPY src dst/", "COPY --chown=1 src dst/", 1),
        ("COPY src dst/", "COPY --chmod=600 src dst/", 1),
        ("COPY src dst/", "ADD src dst/", 1),
        ("COPY src dst/", "COPY --link src dst/", 3),
        ("ENV E=e", "ENV E=f", 2),
        ("ARG V=1", "ARG V=2", 2),
        ("WORKDIR /w", "WORKDIR /w/", 3),
        ("WORKDIR /w", "WORKDIR /v", 0),
    ],
)
async def test_what_an_instruction_changes(tmp_path: Path, old: str, new: str, same: int) -> None:
    place = written(tmp_path, FILES)
    changed = DOCKERFILE.replace(old, new) if old else DOCKERFILE
    assert common(await keys(place), await keys(place, changed)) == same


async def test_arguments_bases_and_platforms(tmp_path: Path) -> None:
    place = written(tmp_path, FILES)
    plain = await keys(place)
    assert common(plain, await keys(place, V="2")) == 2
    assert common(plain, await keys(place, unused="2")) == 3
    assert common(plain, await keys(place, HTTP_PROXY="http://p")) == 3
    assert common(plain, await keys(place, base="sha256:other")) == 0
    assert common(plain, await keys(place, platform="linux/arm64")) == 0


@pytest.mark.req("IMG-2")
async def test_what_the_context_changes(tmp_path: Path) -> None:
    place = written(tmp_path, FILES)
    plain = await keys(place)

    async def same() -> int:
        return common(plain, await keys(place))

    os.utime(place / "src/a", (1, 1))
    (place / "other").write_text("changed, and not copied")
    os.chown(place / "src/a", os.getuid(), os.getgid())
    assert await same() == 3
    (place / "src/a").chmod(0o600)
    assert await same() == 1
    (place / "src/a").chmod(0o644)
    (place / "src/a").write_text("x")
    assert await same() == 1
    (place / "src/a").write_text("a")
    assert await same() == 3
    (place / "src/b").rename(place / "src/c")
    assert await same() == 1
    (place / "src/c").rename(place / "src/b")
    (place / "src/l").unlink()
    (place / "src/l").symlink_to("b")
    assert await same() == 1
    (place / "src/l").unlink()
    (place / "src/l").symlink_to("a")
    (place / "src/empty").mkdir()
    assert await same() == 1


def test_a_copy_from_a_stage_depends_on_the_stage_and_the_names() -> None:
    one = cachekey.origin("key", ["/a"])
    assert one == cachekey.origin("key", ("/a",))
    assert one not in (cachekey.origin("other", ["/a"]), cachekey.origin("key", ["/b"]))


def test_fields_do_not_run_into_each_other(tmp_path: Path) -> None:
    assert cachekey.origin("k", ["a", "b"]) != cachekey.origin("k", ["a,b"])
    assert cachekey.start("ab", "c") != cachekey.start("a", "bc")


def ref(name: str) -> LayerRef:
    return LayerRef(f"sha256:{name}", f"sha256:d{name}", 1)


def test_the_history_has_a_line_for_each_layer() -> None:
    past = [Past("2026-01-02T00:00:00Z", text, text.startswith("RUN")) for text in ("ENV a", "RUN b", "RUN c", "CMD d")]
    base = {"history": [{"created": "2025-01-01T00:00:00Z"}, {"empty_layer": True}, {"comment": "x"}]}
    layers = [ref("1"), ref("2"), ref("3")]
    made = document(base, 2, Config(cmd=("d",)), layers, past, "linux/amd64")
    assert made["rootfs"]["diff_ids"] == ["sha256:d1", "sha256:d2", "sha256:d3"]
    with_layer = [line for line in made["history"] if not line.get("empty_layer")]
    assert len(with_layer) == len(layers)
    assert [line.get("comment") for line in made["history"][3:]] == [None, MERGED, None, None]
    assert made["created"] == "2026-01-02T00:00:00Z"
    assert made["config"]["Cmd"] == ["d"]


def test_a_base_history_that_does_not_fit_is_replaced() -> None:
    made = document({"history": [{}]}, 2, Config(), [ref("1"), ref("2")], [], "linux/amd64")
    assert [line["created_by"] for line in made["history"]] == ["base image", "base image"]
    assert made["created"] == NO_TIME
