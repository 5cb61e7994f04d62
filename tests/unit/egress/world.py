"""A gate with everything real around it but the sandbox: channel, sockets, servers on loopback, a name server."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from pathlib import Path

import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

from cloche.wire.egress import EgressLimits, EgressRecord
from cloche_server.channel import Budget, Channel
from cloche_server.egress import sockets
from cloche_server.egress.gate import Gate
from cloche_server.egress.records import Records
from cloche_server.egress.resolver import HostResolver
from cloche_server.egress.services import Question, Services, Who
from cloche_server.policy.decide import effective
from cloche_server.policy.document import Organisation
from cloche_server.policy.presets import Preset
from tests.unit.egress.guest import Guest

MIB = 1 << 20
LOOPBACK = ip_address("127.0.0.1")
WHO = Who("sk3m9q", "ann", "default", "line1")


@dataclass
class Said:
    approved: bool
    by: str | None = "ann"
    reason: str = "denied"


class Person:
    """Answers what is asked, or lets it wait."""

    def __init__(self) -> None:
        self.asked: list[Question] = []
        self.answers: list[bool] = []
        self.voided: list[str] = []
        self.before_answer: Callable[[], None] = lambda: None
        self.cancelled = 0

    async def ask(self, question: Question, *, timeout_s: float) -> Said:
        self.asked.append(question)
        self.before_answer()
        if not self.answers:
            try:
                await asyncio.sleep(timeout_s)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            return Said(False, None, "timed_out")
        return Said(self.answers.pop(0))

    def void(self, sandbox: str, why: str) -> None:
        self.voided.append(sandbox)


class NoInterceptor:
    async def open(self, gate_side, who, target, *, tls, rule):
        from cloche.wire.errors import error

        raise error("interceptor_missing", "There is no interceptor in this test.")


def no_preset(name: str) -> Preset:
    raise AssertionError(name)


@dataclass
class World:
    gate: Gate
    guest: Guest
    channel: Channel
    person: Person
    journal: list[EgressRecord]
    organisation: Organisation
    budget: Budget
    tasks: set[asyncio.Task] = field(default_factory=set)

    def records(self, verdict: str | None = None) -> list[EgressRecord]:
        return [each for each in self.journal if verdict in (None, each.verdict)]

    def codes(self, verdict: str = "denied") -> list[str]:
        return [each.code for each in self.records(verdict)]

    async def until(self, condition, timeout_s: float = 10) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.002)

    def proxy(self, data: bytes = b"", slot: int = 1):
        stream = self.guest.open("proxy", slot=slot)
        if data:
            stream.send(data)
        return stream

    def connect_proxy(self, host: str, port: int):
        return self.proxy(f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())


@contextlib.asynccontextmanager
async def opened(
    tmp_path: Path,
    rules: list = (),
    *,
    ports: dict[int, None] | list[int] = (),
    organisation: Organisation | None = None,
    limits: EgressLimits | None = None,
    nameservers=None,
    placeholders=lambda: None,
    interception=None,
    intercept_hosts=(),
) -> AsyncIterator[World]:
    """`ports`: servers on 127.0.0.1 that the organisation's file excepts."""
    org = organisation or Organisation()
    org = replace(
        org,
        addresses=org.addresses | {(LOOPBACK, port) for port in ports},
        nameservers=nameservers,
    )
    journal: list[EgressRecord] = []
    tmp_path.mkdir(exist_ok=True)
    records = Records(tmp_path / "egress.jsonl", sandbox=WHO.sandbox, journal=journal.append)
    person, tasks = Person(), set()
    resolver = HostResolver(lambda: world.organisation.nameservers)

    def spawn(work, name):
        task = asyncio.get_running_loop().create_task(work, name=name)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    services = Services(
        organisation=lambda: world.organisation,
        resolver=resolver,
        approvals=person,
        interception=interception or NoInterceptor(),
        spawn=spawn,
    )
    policy = effective(org, list(rules), presets=no_preset, intercept_hosts=intercept_hosts)
    gate = Gate(
        WHO,
        policy,
        limits or EgressLimits(),
        records,
        services,
        command_of=lambda slot: f"command-{slot}",
        command_line_of=lambda command: f"run {command}",
        placeholders=placeholders,
    )
    ours, theirs = socket.socketpair()
    guest = Guest(theirs)
    budget = Budget(256 * MIB)
    channel = await Channel.fresh(ours, budget=budget, on_lost=lambda reason: None, guest_open=gate.guest_open)
    world = World(gate, guest, channel, person, journal, org, budget, tasks)
    try:
        yield world
    finally:
        await gate.close("the test is over")
        assert gate.open_count == {"talks": 0, "connections": 0, "slots": 0}
        await asyncio.sleep(0)
        assert not tasks, "no task is left"
        channel.close("the test is over")
        assert budget.bytes_used == 0, "every window is given back"
        guest.close()
        resolver.close()
        records.close()


class Server:
    """A TCP server on loopback, in the test's own loop: answers by `talk(reader, writer)`."""

    def __init__(self, port: int, server: asyncio.Server) -> None:
        self.port = port
        self.server = server
        self.accepted = 0
        self.open = 0


@contextlib.asynccontextmanager
async def serving(talk) -> AsyncIterator[Server]:
    async def counted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mine.accepted += 1
        mine.open += 1
        try:
            await talk(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            mine.open -= 1
            writer.close()

    server = await asyncio.start_server(counted, "127.0.0.1", 0, limit=1 << 20)
    mine = Server(server.sockets[0].getsockname()[1], server)
    try:
        yield mine
    finally:
        server.close()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65_536):
        writer.write(data)
        await writer.drain()


@contextlib.contextmanager
def nameserver(answers: dict[str, list[str] | Callable[[], list[str]]]) -> Iterator[tuple[tuple[str, int], list[str]]]:
    """A real name server; it tells what it was asked. An answer can be a function, asked each time."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("127.0.0.1", 0))
    asked: list[str] = []

    def serve() -> None:
        while True:
            data, peer = sock.recvfrom(4096)
            if data == b"stop":
                return
            query = dns.message.from_wire(data)
            question = query.question[0]
            name = question.name.to_text(omit_final_dot=True)
            response = dns.message.make_response(query)
            found = answers.get(name)
            if found is None:
                response.set_rcode(dns.rcode.NXDOMAIN)
            elif question.rdtype == dns.rdatatype.A:
                asked.append(name)
                texts = [each for each in (found() if callable(found) else found) if ":" not in each]
                if texts:
                    response.answer.append(dns.rrset.from_text(question.name, 1, "IN", "A", *texts))
            elif question.rdtype == dns.rdatatype.AAAA and not callable(found):
                texts = [each for each in found if ":" in each]
                if texts:
                    response.answer.append(dns.rrset.from_text(question.name, 1, "IN", "AAAA", *texts))
            sock.sendto(response.to_wire(), peer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    address = sock.getsockname()
    try:
        yield address, asked
    finally:
        sock.sendto(b"stop", address)
        thread.join(5)
        sock.close()


@contextlib.contextmanager
def dialled_instead(port: int) -> Iterator[None]:
    """Ports below 1024 and their like: the one function that connects is given another port, after every check."""
    real = sockets._connect
    sockets._connect = lambda address, _, timeout_s: real(address, port, timeout_s)  # type: ignore[assignment]
    try:
        yield
    finally:
        sockets._connect = real
