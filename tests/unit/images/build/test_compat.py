"""What `--compat` gives to buildah: the images that a Dockerfile names, and a script in which every word is quoted."""

import shlex

import pytest

from cloche.wire.images import BuildOptions
from cloche_server.images.build import apart
from cloche_server.images.build.compat import base_names, script


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("FROM a", ["a"]),
        ("FROM scratch", []),
        ("ARG T=1\nFROM a:$T AS b\nFROM b\nFROM B\nCOPY --from=b x y", ["a:1"]),
        ("ARG T=1\nFROM a:$T\nCOPY --from=0 x y\nCOPY --from=c/d x y\nCOPY --from=c/d x y", ["a:1", "c/d"]),
        ("ARG GIVEN\nFROM a:${GIVEN}\nARG GIVEN=inside\nRUN --mount=type=cache,target=/x y", ["a:told"]),
    ],
)
async def test_the_images_that_go_in(text: str, names: list[str]) -> None:
    assert base_names(await apart.dockerfile(text.encode()), {"GIVEN": "told"}, "linux/amd64") == names


def test_every_word_of_a_stranger_is_quoted() -> None:
    evil = "x'; touch /evil; '$(id)`id`\n"
    options = BuildOptions(args={evil: evil, "A": "b c"}, target=evil)
    lines = script([evil], f"dir/{evil}", options)
    words = shlex.split(lines)
    assert words.count(evil) == 2, "the image and the target"
    assert f"{evil}={evil}" in words
    assert f"/build/context/dir/{evil}" in words
    assert "touch" not in words
