"""COPY and ADD: what is chosen, where it goes, and the archive that carries it. Indexes are the real converter's."""

import io
import tarfile
from pathlib import Path

import pytest

from cloche.wire.errors import ClocheError
from cloche_server.images.build import copying, sources, users
from cloche_server.images.build.copying import Chosen, Owner, parents
from cloche_server.images.build.ignore import Ignore, kept
from cloche_server.images.build.tree import Node, Tree
from tests.unit.images import converter
from tests.unit.images.build.contexts import Packed, packed, written

pytestmark = pytest.mark.skipif(not converter.CONVERTER.exists(), reason="needs the converter (just setup)")

FILES = {
    "a.txt": "a",
    "b.txt": "b",
    "dir/c": "c",
    "dir/sub/d": "d",
    "dir/in": "-> c",
    "empty/": "",
    "link": "-> a.txt",
    "dlink": "-> dir",
    "abs": "-> /dir/sub",
    "up": "-> ../../../etc/passwd",
    "loop": "-> loop",
    "we ird[1]": "w",
}


@pytest.fixture
async def context(tmp_path: Path) -> Packed:
    return await packed(written(tmp_path, FILES))


def choose(tree: Tree, *names: str) -> Chosen:
    return copying.choose(tree, names, line=3, text="COPY ...")


def placed(chosen: Chosen, dest: str, *, existing: str = "/", is_directory: bool = False) -> list[str]:
    found = copying.place(
        chosen,
        dest,
        dest_is_directory=is_directory,
        existing=existing,
        owner=Owner(None, None),
        mode=None,
        now=0,
    )
    return [f"{node.path}/" if node.type == "dir" else node.path for node in found.nodes]


@pytest.mark.req("IMG-2")
@pytest.mark.parametrize(
    ("source", "files", "content"),
    [
        ("a.txt", ["a.txt"], []),
        ("./a.txt", ["a.txt"], []),
        ("/a.txt", ["a.txt"], []),
        ("../../a.txt", ["a.txt"], []),
        ("*.txt", ["a.txt", "b.txt"], []),
        ("?.txt", ["a.txt", "b.txt"], []),
        ("[b-c].txt", ["b.txt"], []),
        ("d*/s*/d", ["d", "d"], []),
        ("dir", [], ["c", "in", "sub", "sub/d"]),
        ("dir/", [], ["c", "in", "sub", "sub/d"]),
        ("dlink", [], ["c", "in", "sub", "sub/d"]),
        ("dlink/sub/d", ["d"], []),
        ("abs", [], ["d"]),
        ("link", ["link"], []),
        ("dir/in", ["in"], []),
        ("empty", [], []),
        ("nothing*", [], []),
        ("we ird[[]1]", ["we ird[1]"], []),
    ],
)
def test_what_a_source_names(context: Packed, source: str, files: list[str], content: list[str]) -> None:
    chosen = choose(context.tree, source)
    assert [match.name for match in chosen.files] == files
    assert [node.path for node in chosen.content] == content


def test_the_whole_context(context: Packed) -> None:
    for source in (".", "/", "./"):
        assert [node.path for node in choose(context.tree, source).content] == sorted(context.tree.paths)


@pytest.mark.parametrize("source", ["nope", "dir/nope", "a.txt/b", "up", "loop", "../../etc/passwd"])
def test_what_is_not_there_is_said_with_the_line(context: Packed, source: str) -> None:
    with pytest.raises(ClocheError, match=r"line 3: COPY \.\.\.: .* is not there") as caught:
        choose(context.tree, source)
    assert caught.value.code == "build_failed"


def test_a_source_that_is_ignored_is_said_to_be(context: Packed) -> None:
    tree = context.tree
    seen = kept(tree.paths, Ignore(b"dir\n!dir/sub"))
    nodes = [node for path in tree.paths if path in seen and (node := tree.get(path)) is not None]
    visible = Tree(nodes)
    assert [node.path for node in choose(visible, "dir").content] == ["sub", "sub/d"]
    with pytest.raises(ClocheError, match="dockerignore leaves it out"):
        copying.choose(visible, ["dir/c"], line=3, text="COPY ...", hidden=tree)


@pytest.mark.req("IMG-2")
@pytest.mark.parametrize(
    ("names", "dest", "options", "result"),
    [
        (("a.txt",), "/x", {}, ["x"]),
        (("a.txt",), "/x", {"is_directory": True, "existing": "/x"}, ["a.txt"]),
        (("a.txt",), "/x/", {}, ["x/", "x/a.txt"]),
        (("a.txt",), "/", {}, ["a.txt"]),
        (("a.txt",), "/p/q/x", {}, ["p/", "p/q/", "p/q/x"]),
        (("a.txt",), "/p/q/x", {"existing": "/p"}, ["q/", "q/x"]),
        (("link",), "/x/", {}, ["x/", "x/link"]),
        (("dir",), "/x", {}, ["x/", "x/c", "x/in", "x/sub/", "x/sub/d"]),
        (("dir",), "/x/", {"is_directory": True, "existing": "/x"}, ["c", "in", "sub/", "sub/d"]),
        (("a.txt", "dir"), "/x/", {}, ["x/", "x/a.txt", "x/c", "x/in", "x/sub/", "x/sub/d"]),
        (("empty",), "/x", {}, ["x/"]),
    ],
)
def test_where_it_goes(
    context: Packed, names: tuple[str, ...], dest: str, options: dict[str, str], result: list[str]
) -> None:
    assert placed(choose(context.tree, *names), dest, **options) == result  # type: ignore[arg-type]


def test_owners_and_modes(context: Packed) -> None:
    chosen = choose(context.tree, "dir", "a.txt")

    def made(owner: Owner, mode: int | None) -> dict[str, Node]:
        found = copying.place(chosen, "/x/", dest_is_directory=False, existing="/", owner=owner, mode=mode, now=0)
        return {node.path: node for node in found.nodes}

    plain = made(Owner(None, None), None)
    assert {(node.uid, node.gid) for node in plain.values()} == {(0, 0)}, "a context is root's, whoever packed it"
    owned = made(Owner(5, 6), 0o640)
    assert {(node.uid, node.gid) for node in owned.values()} == {(5, 6)}, "new parents too"
    assert (owned["x"].mode, owned["x/a.txt"].mode, owned["x/sub"].mode) == (0o755, 0o640, 0o640)
    assert owned["x/in"].mode == plain["x/in"].mode, "a link has no mode"


async def archive_of(nodes: tuple[Node, ...]) -> bytes:
    return b"".join([piece async for piece in copying.tar_of(nodes)])


async def test_the_archive_carries_all_and_is_the_same_each_time(context: Packed) -> None:
    chosen = sources.with_files(choose(context.tree, "."), sources.inline([("here", "text\n")], 7))
    nodes = copying.place(
        chosen, "/x/", dest_is_directory=False, existing="/", owner=Owner(1, 2), mode=None, now=7
    ).nodes
    data = await archive_of(nodes)
    assert data == await archive_of(nodes)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        found = {member.name: member for member in archive}
        assert list(found) == [node.path for node in nodes]
        for name, text in FILES.items():
            member = found[f"x/{name}".rstrip("/")]
            assert (member.uid, member.gid) == (1, 2)
            if text.startswith("-> "):
                assert (member.issym(), member.linkname) == (True, text.removeprefix("-> "))
            elif not name.endswith("/"):
                reader = archive.extractfile(member)
                assert reader is not None
                assert reader.read() == text.encode()
        here = archive.extractfile("x/here")
        assert here is not None
        assert here.read() == b"text\n"


async def test_long_and_strange_names_survive(tmp_path: Path) -> None:
    name = "né\n" + "m" * 200
    written(tmp_path, {f"{'d' * 100}/{'e' * 100}/{name}": "x"})
    context = await packed(tmp_path)
    tree = context.tree
    data = await archive_of(choose(tree, ".").content)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        assert archive.getnames()[-1] == tree.paths[-1]


async def test_hard_links_are_their_files() -> None:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        first = tarfile.TarInfo("one")
        first.size = 3
        archive.addfile(first, io.BytesIO(b"abc"))
        second = tarfile.TarInfo("two")
        second.type, second.linkname = tarfile.LNKTYPE, "one"
        archive.addfile(second)
    tree = (await Packed(made.getvalue()).index()).tree
    one, two = tree.get("one"), tree.get("two")
    assert one is not None
    assert two is not None
    assert (two.type, two.offset, two.sha256) == ("file", one.offset, one.sha256)


def test_a_later_file_hides_a_directory() -> None:
    nodes = [Node("a/b", "file", 0o644, 0, 0, 0), Node("a", "file", 0o644, 0, 0, 0)]
    tree = Tree(nodes)
    assert tree.paths == ["a"]
    assert Tree(reversed(nodes)).paths == ["a", "a/b"], "and the other way round"


def test_parents_end_at_the_root() -> None:
    assert list(parents("/a/b")) == ["/a/b", "/a", "/"]


def test_archives_are_known_by_their_first_header() -> None:
    for kind in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        head = tarfile.TarInfo("x").tobuf(kind)[:512]
        assert sources.is_tar(head)
        assert not sources.is_tar(head[:200] + b"x" + head[201:])
    assert not sources.is_tar(bytes(512))
    assert not sources.is_tar(b"#!/bin/sh\n".ljust(512, b"x"))


PASSWD = b"root:x:0:0:root:/root:/bin/sh\napp:x:1000:1001::/home/app:/bin/sh\nbad\n"
GROUP = b"root:x:0:\nweb:x:33:app\n"


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("app", (1000, 1001)),
        ("app:web", (1000, 33)),
        ("app:7", (1000, 7)),
        ("5", (5, 5)),
        ("5:web", (5, 33)),
        ("root", (0, 0)),
        ("1000", (1000, 1000)),
    ],
)
def test_owners_by_name(text: str, ids: tuple[int, int]) -> None:
    assert users.resolve(text, PASSWD, GROUP) == ids


def test_an_image_without_users_has_a_root() -> None:
    assert users.resolve("root:root", b"", b"") == (0, 0)


@pytest.mark.parametrize("text", ["nobody", "bad", "app:nogroup", "", "4294967295", "-1", "1:", "99999999999"])
def test_an_owner_that_is_not_there(text: str) -> None:
    with pytest.raises(users.NoSuchUser):
        users.resolve(text, PASSWD, GROUP)
