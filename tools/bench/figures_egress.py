"""The way out: what the gate costs, against the same client in bare gVisor with a veth and no gate.

Client and server are one static C program (`load.c`), the same on both sides; the server is on the host, at the address of
a veth pair that both sides dial. The client measures itself: neither side's start of a process is in a figure.
"""

import contextlib
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final, Self

from cloche.client import Sandbox
from cloche.wire.defaults import MIB
from cloche.wire.egress import EgressLimits, EgressRule
from tests.promises.egress.worlds import WEB, World, processes, world, world_node
from tests.promises.nodes import RealNode, real_node
from tools.bench import bare_network
from tools.bench.figure import figure

SOURCE: Final = Path(__file__).with_name("load.c")
NAME: Final = "server.test"
TUNNEL_PORT: Final = 8088
"""The rule for it says `tcp`: an opaque tunnel, as for TLS."""
HTTP_PORT: Final = 80
"""Plain HTTP: the gate reads every request's head."""
PROXY: Final = ("127.127.0.2", "3128")
INSIDE: Final = "/workspace/load"
LIMITS: Final = EgressLimits(connections=240, attempts_per_s=10_000)
MB: Final = 1_000_000


class Way:
    """A server, a sandbox of ours that may reach it, and a bare one beside it."""

    is_long = False
    has_bare = True

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cloche-load-")))
            folder.chmod(0o755)
            self.load = folder / "load"
            subprocess.run(["gcc", "-O2", "-static", "-Wall", "-o", str(self.load), str(SOURCE)], check=True)
            self.pair = stack.enter_context(bare_network.Pair())
            for port in (TUNNEL_PORT, HTTP_PORT):
                stack.enter_context(serving(self.load, self.pair.host, port))
            policy = f'version: 1\nhosts:\n  {NAME}: {self.pair.host}\naddresses: ["{self.pair.host}"]\n'
            self.node: RealNode = stack.enter_context(real_node(policy=policy))
            rules = [EgressRule(host=NAME, ports=[TUNNEL_PORT], protocol="tcp"), NAME]
            self.box: Sandbox = stack.enter_context(self.node.sandbox(egress=rules, egress_limits=LIMITS, cpus=2))
            self.box.files.write(INSIDE, self.load.read_bytes())
            self.box.run(["chmod", "755", INSIDE], check=True)
            if self.has_bare:
                self.raw = stack.enter_context(bare_network.NetworkedSandbox(self.pair, folder))
            self.prepare()
            self.stack = stack.pop_all()
        return self

    def prepare(self) -> None:
        """What a figure needs besides."""

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def inside(self, *words: object) -> dict[str, Any]:
        """By the gate."""
        result = self.box.run([INSIDE, *map(str, words)], timeout_s=300, check=True)
        said: dict[str, Any] = json.loads(result.stdout)
        return said

    def outside(self, *words: object) -> dict[str, Any]:
        """By the veth."""
        return self.raw.exec(f"{bare_network.TOOLS}/load", *map(str, words))


@contextlib.contextmanager
def serving(load: Path, address: str, port: int) -> Any:
    process = subprocess.Popen([str(load), "serve", address, str(port)], stdout=subprocess.PIPE)
    try:
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        yield
    finally:
        process.kill()
        process.wait()


# ------------------------------------------------------------------------------------ requests


class Requests(Way):
    """Keep-alive GETs of 1 kB through CONNECT tunnels, as TLS uses them."""

    connections = 16

    def seconds(self) -> float:
        return 3.0 if self.is_long else 1.0

    def ours(self) -> float:
        said = self.inside("get", self.connections, self.seconds(), NAME, TUNNEL_PORT, "/bytes/1000", *PROXY)
        return float(said["per_s"])

    def bare(self) -> float:
        said = self.outside("get", self.connections, self.seconds(), self.pair.host, TUNNEL_PORT, "/bytes/1000")
        return float(said["per_s"])


@figure("egress_requests", unit="per s, 16 connections", at_least=0.45, samples_ci=5)
class Requests16(Requests):
    """Goal 0.6."""


@figure("egress_requests_64", unit="per s, 64 connections", at_least=0.45, samples_ci=5)
class Requests64(Requests):
    """Goal 0.6."""

    connections = 64


@figure("egress_http", unit="per s, 16 connections", samples_ci=5)
class Forwarded(Requests):
    """The same as plain HTTP by the proxy: every request's head is read and judged. Stated."""

    def ours(self) -> float:
        asked = ("get", self.connections, self.seconds(), NAME, HTTP_PORT, "/bytes/1000", *PROXY, "forward")
        return float(self.inside(*asked)["per_s"])


@figure("gate_latency", unit="ms added, p50", at_most=1.0, samples_ci=5)
class Latency(Way):
    """One request after another on one connection: the median's difference between the gate and none."""

    def ours(self) -> float:
        rest = (1, 1.0, NAME, TUNNEL_PORT, "/bytes/1000", *PROXY)
        by_gate = self.inside("get", *rest)["p50_us"]
        by_veth = self.outside("get", 1, 1.0, self.pair.host, TUNNEL_PORT, "/bytes/1000")["p50_us"]
        return float(by_gate - by_veth) / 1000


# ------------------------------------------------------------------------------------ bulk


class Bulk(Way):
    """One large answer or body through one tunnel."""

    verb = "down"

    def size(self) -> int:
        return (1024 if self.is_long else 256) * MIB

    def ours(self) -> float:
        return float(self.inside(self.verb, self.size(), NAME, TUNNEL_PORT, *PROXY)["MB_per_s"])

    def bare(self) -> float:
        return float(self.outside(self.verb, self.size(), self.pair.host, TUNNEL_PORT)["MB_per_s"])


@figure("egress_down", unit="MB/s", at_least=0.3, samples_ci=5)
class Down(Bulk):
    """Goal 0.5."""


@figure("egress_up", unit="MB/s", at_least=0.3, samples_ci=5)
class Up(Bulk):
    """Goal 0.5."""

    verb = "up"


# ------------------------------------------------------------------------------------ idle tunnels

TUNNELS: Final = 1000
AT_ONCE: Final = 200
"""Of one sandbox; the agent takes at most 240."""


@figure("idle_tunnels", unit="kB each", at_most=100, samples_ci=1, samples_long=3, warm_up=False)
class IdleTunnels(Way):
    """What the daemon's memory grows by for each of 1,000 tunnels that are open and silent, of five sandboxes."""

    has_bare = False

    def ours(self) -> float:
        rules = [EgressRule(host=NAME, ports=[TUNNEL_PORT], protocol="tcp")]
        with contextlib.ExitStack() as stack:
            boxes = [
                stack.enter_context(self.node.sandbox(egress=rules, egress_limits=LIMITS, memory_mb=256))
                for _ in range(TUNNELS // AT_ONCE)
            ]
            for box in boxes:
                box.files.write(INSIDE, self.load.read_bytes())
                box.run(["chmod", "755", INSIDE], check=True)
            before = self.node.daemon_rss_bytes()
            for box in boxes:
                argv = [INSIDE, "hold", str(AT_ONCE), NAME, str(TUNNEL_PORT), *PROXY]
                held = box.commands.start(argv, stdin=True)
                assert next(iter(held.output())).text == "held\n"
            return (self.node.daemon_rss_bytes() - before) / TUNNELS / 1000


# ------------------------------------------------------------------------------------ interception


class Looked:
    """A sandbox whose requests are seen, in the tests' world, and the interceptor's process."""

    is_long = False

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self.world: World = stack.enter_context(world())
            self.node: RealNode = stack.enter_context(world_node(self.world))
            rules = [EgressRule(host=WEB, intercept=True)]
            self.box: Sandbox = stack.enter_context(
                self.node.sandbox(image="clients", egress=rules, egress_limits=LIMITS, cpus=2, memory_mb=1024)
            )
            self.get("--http1.1", 1)
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def get(self, version: str, count: int) -> float:
        """Requests/s: curl, 16 connections that are kept."""
        script = (
            f'began=$(date +%s.%N); curl -sS -Z --parallel-max 16 {version} -o /dev/null "https://{WEB}/bytes/1000?[1-{count}]"'
            ' >/dev/null 2>/tmp/said || cat /tmp/said; python3 -c "import time; print(time.time() - $began)"'
        )
        result = self.box.run(script, timeout_s=300, check=True)
        return count / float(result.stdout.split()[-1])


@figure("intercept_requests", unit="per s, HTTP/1.1 with TLS", samples_ci=3, samples_long=10)
class InterceptRequests(Looked):
    """Stated: 16 connections of curl, TLS on both sides of the interceptor, 1 kB answers."""

    def ours(self) -> float:
        return self.get("--http1.1", 2000 if self.is_long else 500)


STUCK: Final = """
import socket, ssl, sys, time
import h2.connection, h2.config
context = ssl.create_default_context()
context.set_alpn_protocols(["h2"])
s = context.wrap_socket(socket.create_connection((sys.argv[1], 443)), server_hostname=sys.argv[1])
c = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
c.initiate_connection()
for stream in (1, 3, 5, 7):
    c.send_headers(stream, [(":method", "GET"), (":path", "/bytes/1000000000"), (":scheme", "https"), (":authority", sys.argv[1])], end_stream=True)
s.sendall(c.data_to_send())
s.settimeout(5)
end = time.monotonic() + 5
while time.monotonic() < end:
    try: c.receive_data(s.recv(65536))   # and no window is ever opened again
    except TimeoutError: break
    s.sendall(c.data_to_send())
print("stuck")
"""


@figure("intercept_memory", unit="MB, most", at_most=100, samples_ci=1, samples_long=3, warm_up=False)
class InterceptMemory(Looked):
    """The most that the interceptor's process ever had: large bodies by HTTP/2 both ways, and a client that never opens
    its window. 1 GiB each way with --long, 128 MiB in CI."""

    def ours(self) -> float:
        size = (1024 if self.is_long else 128) * MIB
        self.unit = f"MB, {size // MIB} MiB each way"
        down = f"curl -sS --http2 -o /dev/null -w '%{{http_version}} %{{size_download}}' https://{WEB}/bytes/{size}"
        assert self.box.run(down, timeout_s=600, check=True).stdout == f"2 {size}"
        up = f"head -c {size} /dev/zero | curl -sS --http2 -T - -o /dev/null -w '%{{size_upload}}' https://{WEB}/echo"
        assert self.box.run(up, timeout_s=600, check=True).stdout == str(size)
        assert self.box.run(["python3", "-c", STUCK, WEB], timeout_s=60, check=True).stdout == "stuck\n"
        (pid,) = processes(self.node)
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        (most,) = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
        return int(most) * 1024 / MB
