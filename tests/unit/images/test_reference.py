"""Names of images: Docker's own cases, and what a name must survive."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cloche.wire.errors import ClocheError
from cloche_server.images.reference import DEFAULT_REGISTRY, Reference, check_digest, parse, shown

HEX = "0123456789abcdef" * 4
DIGEST = f"sha256:{HEX}"
DEFAULT = DEFAULT_REGISTRY

# What is written → registry, repository, tag, digest. From the tests of Docker's reference package.
GOOD = {
    "python": (DEFAULT, "library/python", "latest", None),
    "python:3.12-slim": (DEFAULT, "library/python", "3.12-slim", None),
    "team/app": (DEFAULT, "team/app", "latest", None),
    "library/python": (DEFAULT, "library/python", "latest", None),
    f"{DEFAULT}/python": (DEFAULT, "library/python", "latest", None),
    f"index.{DEFAULT}/python": (DEFAULT, "library/python", "latest", None),
    f"index.{DEFAULT}/team/app:1": (DEFAULT, "team/app", "1", None),
    f"python@{DIGEST}": (DEFAULT, "library/python", None, DIGEST),
    f"python:3.12@{DIGEST}": (DEFAULT, "library/python", "3.12", DIGEST),
    "registry.example/app": ("registry.example", "app", "latest", None),
    "registry.example:5000/app": ("registry.example:5000", "app", "latest", None),
    "registry.example:5000/team/app:tag": ("registry.example:5000", "team/app", "tag", None),
    f"registry.example:5000/team/app@{DIGEST}": ("registry.example:5000", "team/app", None, DIGEST),
    "localhost/app": ("localhost", "app", "latest", None),
    "localhost:5000/app:1": ("localhost:5000", "app", "1", None),
    "LOCALHOST/app": ("localhost", "app", "latest", None),
    "Registry.Example/app": ("registry.example", "app", "latest", None),
    "localhost": (DEFAULT, "library/localhost", "latest", None),
    "127.0.0.1:5000/a/b/c/d": ("127.0.0.1:5000", "a/b/c/d", "latest", None),
    "[::1]:5000/app": ("[::1]:5000", "app", "latest", None),
    "[2001:db8::1]/app:1": ("[2001:db8::1]", "app", "1", None),
    "xn--n3h.com/myimage:xn--n3h.com": ("xn--n3h.com", "myimage", "xn--n3h.com", None),
    "b.gcr.example/test.example.com/my-app": ("b.gcr.example", "test.example.com/my-app", "latest", None),
    "foo_bar.example/app": None,
    "foo/foo_bar.com:8080": (DEFAULT, "foo/foo_bar.com", "8080", None),
    "foo__bar": (DEFAULT, "library/foo__bar", "latest", None),
    "foo--bar": (DEFAULT, "library/foo--bar", "latest", None),
    "foo---bar.baz/x": ("foo---bar.baz", "x", "latest", None),
    "a:b": (DEFAULT, "library/a", "b", None),
    "1": (DEFAULT, "library/1", "latest", None),
    HEX[:63]: (DEFAULT, f"library/{HEX[:63]}", "latest", None),
    f"team/{HEX}": (DEFAULT, f"team/{HEX}", "latest", None),
    "app:" + "t" * 128: (DEFAULT, "library/app", "t" * 128, None),
    "registry.example/" + "a/" * 127 + "a": ("registry.example", "a/" * 127 + "a", "latest", None),
}
BAD = [
    "", ":justtag", "@" + DIGEST, "/app", "app/", "a//b", "team//app", "-app", "app-", ".app", "app.", "_app", "app_",
    "a___b", "a..b", "a._b", "a.-b", "a-.b", "Python", "team/App", "registry.example/App", HEX, "app:", "app:-x",
    "app:.x", "app:" + "t" * 129, "app:ä", "ä", "app\n", "app:1\n", f"app@{DIGEST}\n", " app", "app ", "a b", "a\0b",
    f"app@sha256:{HEX[:63]}", f"app@sha256:{HEX}0", f"app@sha256:{HEX.upper()}", "app@sha256:", "app@", "app@" + HEX,
    f"app@sha512:{HEX * 2}", "app@md5:" + "0" * 32, f"app@{DIGEST}@{DIGEST}", f"app@{DIGEST}:tag",
    "https://registry.example/app", "registry.example:99999/app", "registry.example:0/app", "registry.example:/app",
    "registry.example:port/app", "-registry.example/app", "registry..example/app", "registry.example./app",
    "[::1/app", "[::g]/app", "[1::2::3]/app", "[fe80::1%eth0]/app", "::1/app", "user@registry.example/app", "..", "../app",
    "registry.example/../app", "registry.example/app?x", "registry.example/app#x", "registry.example/a%2fb",
    "registry.example/" + "a" * 256, "a" * 513, "app:1:2", "registry.example\\app", "foo.bar/", "١.example/app",
]  # fmt: skip


@pytest.mark.req("IMG-1")
@pytest.mark.parametrize("text", [text for text, means in GOOD.items() if means])
def test_a_name_means_what_docker_means(text: str) -> None:
    found = parse(text)
    assert (found.registry, found.repository, found.tag, found.digest) == GOOD[text]


@pytest.mark.parametrize("text", [*BAD, *(text for text, means in GOOD.items() if not means)])
def test_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(ClocheError) as raised:
        parse(text)
    assert raised.value.code == "invalid_request"
    assert raised.value.message.isprintable()


@pytest.mark.parametrize(
    ("text", "familiar"),
    [
        ("python", "python:latest"),
        (f"{DEFAULT}/library/python:3", "python:3"),
        ("team/app:1", "team/app:1"),
        ("library/a/b", "library/a/b:latest"),
        ("library/localhost", "localhost:latest"),
        (f"{DEFAULT}/foo.bar/app", f"{DEFAULT}/foo.bar/app:latest"),
        (f"{DEFAULT}/localhost/app", f"{DEFAULT}/localhost/app:latest"),
        ("registry.example/library/python", "registry.example/library/python:latest"),
        (f"python@{DIGEST}", f"python@{DIGEST}"),
        (f"python:3@{DIGEST}", f"python:3@{DIGEST}"),
    ],
)
def test_the_short_form(text: str, familiar: str) -> None:
    found = parse(text)
    assert found.familiar == familiar
    assert parse(familiar) == found


def test_another_default_registry_has_no_library() -> None:
    assert parse("python", default_registry="registry.example").name == "registry.example/python:latest"
    assert parse("registry.test/python", default_registry="registry.example").registry == "registry.test"


def test_pinned_and_tagged() -> None:
    found = parse("python:3")
    assert found.pinned(DIGEST).name == f"{DEFAULT}/library/python:3@{DIGEST}"
    assert found.pinned(DIGEST).tagged("x.sig") == Reference(DEFAULT, "library/python", "x.sig", None)
    with pytest.raises(ClocheError):
        found.pinned("sha256:abc")
    with pytest.raises(ClocheError):
        found.tagged("no/tag")


def test_another_algorithm_is_refused_by_name() -> None:
    with pytest.raises(ClocheError, match="sha512 are not supported"):
        check_digest("sha512:" + "0" * 128)


word = st.from_regex(r"[a-z0-9]{1,8}((\.|_|__|-{1,3})[a-z0-9]{1,8}){0,2}", fullmatch=True)
label = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,6}[a-z0-9])?", fullmatch=True)
host = st.one_of(
    st.builds(
        lambda parts, port: ".".join(parts) + port,
        st.lists(label, min_size=2, max_size=3),
        st.sampled_from(["", ":5000", ":1"]),
    ),
    st.sampled_from(["localhost", "localhost:65535", "[::1]", "[::1]:80", DEFAULT]),
)
reference = st.builds(
    Reference,
    host,
    st.lists(word, min_size=2, max_size=4).map("/".join),
    st.one_of(st.none(), st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,20}", fullmatch=True)),
    st.just(DIGEST),
)


@given(reference)
def test_every_reference_survives_both_of_its_forms(ref: Reference) -> None:
    assert parse(ref.name) == ref
    assert parse(ref.familiar) == ref


@given(st.text(max_size=80))
@example("a" * 600)
@example("[" * 100 + "/a")
def test_any_text_is_a_reference_or_refused(text: str) -> None:
    try:
        found = parse(text)
    except ClocheError:
        return  # anything else that is raised fails the test
    assert parse(found.name) == found
    assert parse(found.familiar) == found
    assert found.name.isascii()
    assert not any(part in ("", ".", "..") for part in found.repository.split("/"))


@given(st.text(max_size=300))
def test_shown_text_is_harmless(text: str) -> None:
    assert shown(text).isprintable()
