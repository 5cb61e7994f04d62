"""A Dockerfile of the usual kind: what it makes is what buildah makes, the second time costs nothing, and no step gets out."""

import re
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloche.wire.errors import ClocheError
from cloche.wire.images import ImageEvent, ImageView
from tests.promises import build_base
from tests.promises.build_base import NAME, Buildah
from tests.promises.nodes import RealNode, real_node

pytestmark = pytest.mark.skipif(not build_base.can_run(), reason="needs root, gcc and buildah on Debian")

HEREDOC = """RUN <<EOF
set -e
mkdir -p /out/bin /out/etc
cp hello /out/bin/
ln -s hello /out/bin/hi
echo "made with $CFLAGS" > /out/etc/flags
chmod 4750 /out/bin/hello
rm notes.txt
EOF
"""
PLAIN = """RUN set -e; mkdir -p /out/bin /out/etc; cp hello /out/bin/; ln -s hello /out/bin/hi; \\
    echo "made with $CFLAGS" > /out/etc/flags; chmod 4750 /out/bin/hello; rm notes.txt
"""
DOCKERFILE = f"""ARG BASE={NAME}
FROM ${{BASE}} AS build
ARG GREETING=nobody
ENV CFLAGS="-O1 -Wall"
WORKDIR /src
COPY src/ .
RUN gcc $CFLAGS -DGREETING="\\"$GREETING\\"" -o hello hello.c && ./hello > built
{HEREDOC}
FROM ${{BASE}}
ENV APP=/app PATH=/app/bin:$PATH
COPY --from=build --chown=1000:1001 /out $APP
COPY --from=build /src/built /app/etc/
RUN rm -rf /usr/include/linux /usr/bin/cpp && mkdir -m 1777 /var/shared && chown 1000 /app
USER app
WORKDIR /app/work
RUN id -u > me && id -g >> me && ../bin/hello > greeting && echo "${{GREETING:-not here}}" >> greeting
COPY --chown=app:app conf/*.txt conf/
ADD more.tar.gz /more/
LABEL kind=test
CMD ["hello"]
"""
SOURCE = """#include <stdio.h>
int main(void) { puts(GREETING); return 0; }
"""
REACH = """#include <arpa/inet.h>
#include <stdlib.h>
#include <sys/socket.h>
int main(int n, char **v) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(atoi(v[2]))};
    inet_pton(AF_INET, v[1], &to.sin_addr);
    return connect(socket(AF_INET, SOCK_STREAM, 0), (void *)&to, sizeof to) ? 7 : 0;
}
"""
WALK = r"""
keep() { find / \( -path /proc -o -path /sys -o -path /dev -o -path /.cloche -o -path /run/cloche -o -path /etc/hosts \
  -o -path /etc/hostname -o -path /etc/machine-id -o -path /etc/resolv.conf \) -prune -o "$@"; }
keep -type d -printf '%y %m %U:%G %p\n' -o -type f -printf '%y %m %U:%G %s %p\n' -o -printf '%y %m %U:%G %p -> %l\n'
keep -type f -exec sha256sum {} +
"""


def context(directory: Path) -> Path:
    for name in ("src", "conf", "packed/sub"):
        (directory / name).mkdir(parents=True)
    (directory / "src/hello.c").write_text(SOURCE)
    (directory / "src/notes.txt").write_text("not for the image")
    (directory / "src/secret").write_text("ignored")
    (directory / "conf/one.txt").write_text("1")
    (directory / "conf/two.txt").write_text("2")
    (directory / "conf/three.ini").write_text("not copied")
    (directory / "packed/sub/file").write_text("from the archive")
    subprocess.run(["tar", "-czf", "../more.tar.gz", "sub"], cwd=directory / "packed", check=True)
    (directory / ".dockerignore").write_text("# comment\n**/secret\nDockerfile*\n")
    (directory / "Dockerfile").write_text(DOCKERFILE)
    (directory / "reach.c").write_text(REACH)
    for path in directory.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return directory


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_base.layout(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def builder(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealNode]:
    place = tmp_path_factory.mktemp("store")
    for each in (place, *place.parents[:3]):
        each.chmod(0o755)
    with real_node(images=place / "images") as node:
        with node.client() as client:
            client.images.import_archive(base, name=NAME)
        yield node


class Told:
    """What a build says on its way."""

    def __init__(self) -> None:
        self.events: list[ImageEvent] = []

    def __call__(self, event: ImageEvent) -> None:
        self.events.append(event)

    @property
    def steps(self) -> list[ImageEvent]:
        return [each for each in self.events if each.kind == "step"]

    @property
    def output(self) -> str:
        return "".join(each.text or "" for each in self.events if each.kind == "output")


def build(node: RealNode, directory: Path, name: str | None, told: Told, **options: object) -> ImageView:
    with node.client(request_timeout_s=300) as client:
        return client.images.build(directory, name=name, on_event=told, **options)  # type: ignore[arg-type]


def walk(node: RealNode, image: str) -> dict[str, list[str]]:
    with node.sandbox(image=image, user="0:0", privileges="package-install") as box:
        done = box.run(["/bin/sh", "-c", WALK], timeout_s=120)
        assert done.exit_code == 0, done.stderr
        found: dict[str, list[str]] = {}
        for line in done.stdout.splitlines():
            path = re.sub(r" -> .*", "", line)[re.sub(r" -> .*", "", line).index("/") :]
            found.setdefault(path, []).append(line)
        return found


@pytest.mark.req("IMG-2")
def test_it_builds_what_buildah_builds_and_is_cached(builder: RealNode, base: Path, tmp_path: Path) -> None:
    place = context(tmp_path / "context")
    first, second = Told(), Told()
    started = time.monotonic()
    ours = build(builder, place, "localhost/ours:1", first, args={"GREETING": "hello there"})
    first_s = time.monotonic() - started
    started = time.monotonic()
    again = build(builder, place, "localhost/ours:2", second, args={"GREETING": "hello there"})
    second_s = time.monotonic() - started
    assert again.digest == ours.digest
    assert all(each.cached for each in second.steps), [each.step for each in second.steps if not each.cached]
    assert [each.number for each in second.steps] == list(range(1, len(second.steps) + 1))
    assert second_s <= 1.0, f"the second build took {second_s:.2f} s"
    print(f"first build {first_s:.2f} s, second {second_s:.2f} s")

    buildah = Buildah(tmp_path / "buildah")
    buildah.add_base(base)
    # buildah 1.28 does not know heredocs: it gets the same commands in a plain RUN.
    other = tmp_path / "Dockerfile.plain"
    other.write_text(DOCKERFILE.replace(HEREDOC, PLAIN))
    archive = buildah.build(place, other, tmp_path / "result.tar", GREETING="hello there")
    with builder.client(request_timeout_s=300) as client:
        client.images.import_archive(archive, name="localhost/theirs:1")
        theirs = client.images.inspect("localhost/theirs:1").config
    mine, expected = walk(builder, "localhost/ours:1"), walk(builder, "localhost/theirs:1")
    different = {
        path: (mine.get(path), expected.get(path)) for path in mine | expected if mine.get(path) != expected.get(path)
    }
    assert not different, "\n".join(f"{path}: {pair}" for path, pair in sorted(different.items())[:20])
    assert (ours.config.cmd, ours.config.user, ours.config.workdir) == (theirs.cmd, theirs.user, theirs.workdir)
    assert (ours.config.env, ours.config.labels["kind"]) == (theirs.env, "test")


@pytest.mark.req("IMG-2")
def test_a_changed_file_runs_only_what_depends_on_it(builder: RealNode, tmp_path: Path) -> None:
    place = context(tmp_path / "context")
    (place / "Dockerfile").write_text(
        f"FROM {NAME}\nRUN sleep 3 && date > /when\nCOPY conf /conf\nRUN cat /conf/* > /all\n"
    )
    build(builder, place, "localhost/part:1", Told())
    (place / "conf/one.txt").write_text("changed")
    told = Told()
    build(builder, place, "localhost/part:2", told)
    assert [each.cached for each in told.steps] == [True, False, False]
    one, two = walk(builder, "localhost/part:1"), walk(builder, "localhost/part:2")
    assert one["/when"] == two["/when"]
    assert one["/all"] != two["/all"]


@pytest.mark.req("ISO-6")
def test_a_step_reaches_neither_the_host_nor_the_network(builder: RealNode, tmp_path: Path) -> None:
    place = context(tmp_path / "context")
    secret = tmp_path / "secret-of-the-host"
    secret.write_text("the host's")
    program = tmp_path / "reach"
    subprocess.run(["gcc", "-o", program, place / "reach.c"], check=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert subprocess.run([program, "127.0.0.1", str(port)], check=False).returncode == 0, "it can be reached"
        addresses = ["127.0.0.1", "192.0.2.1", "169.254.169.254", _own_address()]
        for step, code in [
            *((f"./reach {address} {port}", 7) for address in addresses),
            (f"cat {secret}", 1),
            (f"ls {tmp_path}", 2),
        ]:
            text = f"FROM {NAME}\nWORKDIR /w\nCOPY reach.c .\nRUN gcc -o reach reach.c\nRUN {step}\n"
            (place / "Dockerfile").write_text(text)
            with pytest.raises(ClocheError) as caught:
                build(builder, place, None, Told())
            assert caught.value.code == "build_failed"
            assert (caught.value.detail["line"], caught.value.detail["exit_code"]) == (5, code), step


def _own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.2"
        return str(probe.getsockname()[0])


@pytest.mark.req("IMG-2")
@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("RUN echo on stdout; echo on stderr >&2; exit 3", "build_failed", "line 2: RUN echo on stdout"),
        ("RUN no-such-program", "build_failed", "exit code 127"),
        ('RUN ["no-such-program"]', "build_failed", "line 2"),
        ("COPY nope /", "build_failed", "'nope' is not there"),
        ("COPY src/secret /", "build_failed", "'src/secret' is not there"),
        ("USER nobody-here\nRUN true", "build_failed", "line 3"),
        ("RUN --mount=type=cache,target=/x true", "dockerfile_unsupported", "line 2: RUN --mount"),
        ("FROBNICATE x", "dockerfile_invalid", "line 2: unknown instruction FROBNICATE"),
    ],
)
def test_what_fails_is_told_with_its_line(builder: RealNode, tmp_path: Path, text: str, code: str, says: str) -> None:
    place = context(tmp_path / "context")
    (place / "Dockerfile").write_text(f"FROM {NAME}\n{text}\n")
    told = Told()
    with pytest.raises(ClocheError) as caught:
        build(builder, place, None, told)
    assert caught.value.code == code
    assert says in caught.value.message
    if "exit 3" in text:
        assert caught.value.detail["exit_code"] == 3
        assert set(caught.value.detail["output"].split("\n")) == {"on stdout", "on stderr", ""}
        assert "on stderr" in told.output


@pytest.mark.req("IMG-4")
def test_from_scratch_with_one_static_program(builder: RealNode, tmp_path: Path) -> None:
    place = context(tmp_path / "context")
    text = f"""FROM {NAME} AS build
COPY src/hello.c .
RUN gcc -static -DGREETING='"from scratch"' -o /hello hello.c
FROM scratch
COPY --from=build --chown=5:6 /hello /bin/hello
COPY <<-END /etc/message
\thi
\tEND
RUN ["/bin/hello"]
USER 5
ENTRYPOINT ["/bin/hello"]
"""
    (place / "Dockerfile").write_text(text)
    told = Told()
    build(builder, place, "localhost/tiny:1", told)
    assert "from scratch" in told.output
    with builder.sandbox(image="localhost/tiny:1") as box:
        assert box.run(["/bin/hello"]).stdout == "from scratch\n"
        assert box.files.read("/etc/message") == b"hi\n"
        about = box.files.stat("/bin/hello")
        assert (about.uid, about.gid) == (5, 6)
