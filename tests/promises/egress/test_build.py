"""A build's RUN steps reach what the build asked for, through the same gate, and nothing else."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloche.wire.errors import ClocheError
from cloche.wire.images import ImageEvent
from tests.promises.egress.test_vertical import policy, rule, web
from tests.promises.nodes import RealNode, real_node

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc for a static program")

FETCH = r"""
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
/* fetch URL FILE: asks the proxy of http_proxy, as any client does */
int main(int n, char **v) {
    char host[64], ask[512], answer[4096];
    int port, got, all = 0, s = socket(AF_INET, SOCK_STREAM, 0);
    const char *proxy = getenv("http_proxy");
    if (n < 3 || !proxy || sscanf(proxy, "http://%63[0-9.]:%d", host, &port) != 2) return 9;
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port)};
    inet_pton(AF_INET, host, &to.sin_addr);
    if (connect(s, (void *)&to, sizeof to)) return 8;
    const char *at = strstr(v[1], "//") + 2;
    snprintf(ask, sizeof ask, "GET %s HTTP/1.0\r\nHost: %.*s\r\n\r\n", v[1], (int)strcspn(at, "/"), at);
    write(s, ask, strlen(ask));
    while (all < (int)sizeof answer - 1 && (got = read(s, answer + all, sizeof answer - 1 - all)) > 0) all += got;
    answer[all] = 0;
    FILE *out = fopen(v[2], "w");
    fputs(answer, out);
    fclose(out);
    puts(answer);
    return strstr(answer, " 200 ") ? 0 : 7;
}
"""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with web() as number:
        yield number


@pytest.fixture(scope="module")
def node(port: int) -> Iterator[RealNode]:
    with real_node(policy=policy(port)) as made:
        yield made


@pytest.fixture
def context(tmp_path: Path, port: int) -> Path:
    (tmp_path / "fetch.c").write_text(FETCH)
    subprocess.run(["gcc", "-static", "-O1", "-w", "-o", "fetch", "fetch.c"], cwd=tmp_path, check=True)
    run = f'RUN ["/fetch", "http://web.example:{port}/built", "/out"]'
    (tmp_path / "Dockerfile").write_text(f"FROM scratch\nCOPY fetch /fetch\n{run}\n")
    return tmp_path


@pytest.mark.req("NET-2")
def test_a_step_reaches_nothing_unless_the_build_asks(node: RealNode, context: Path) -> None:
    said: list[ImageEvent] = []
    with node.client() as client, pytest.raises(ClocheError) as failed:
        client.images.build(context, on_event=said.append)
    assert failed.value.code == "build_failed"
    text = "".join(event.text or "" for event in said)
    assert "403" in text
    assert "no_rule" in text


@pytest.mark.req("NET-3")
def test_a_step_reaches_what_the_build_asked_for_and_is_cached_as_ever(
    node: RealNode, context: Path, port: int
) -> None:
    asked = [rule(port)]
    with node.client() as client:
        first: list[ImageEvent] = []
        view = client.images.build(context, name="localhost/fetched:1", egress=asked, on_event=first.append)  # type: ignore[arg-type]
        again: list[ImageEvent] = []
        same = client.images.build(context, egress=asked, on_event=again.append)  # type: ignore[arg-type]
    assert same.digest == view.digest
    assert [event.cached for event in again if event.kind == "step" and event.cached is not None][-1] is True
    assert "HTTP_PROXY" not in view.config.env
    with node.sandbox(image="localhost/fetched:1") as box:
        assert box.files.read("/out").endswith(b"hello from /built")


@pytest.mark.req("NET-3")
def test_the_command_line_asks_too(node: RealNode, context: Path, port: int) -> None:
    done = node.cloche("image", "build", "-q", "--allow", f"web.example:{port}", str(context))
    assert done.returncode == 0, done.stderr
