"""The clients that people use, unmodified, inside: they work where a rule allows it, and say why where none does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from cloche.client import Sandbox
from cloche.wire.egress import EgressRule
from tests.promises.egress.clients import CLIENTS, FILES, JAVA_PLACE, TRUST, Client, place_files
from tests.promises.egress.worlds import DATABASE, GRPC, WEB, World, database, grpc_service, needs_clients, needs_world
from tests.promises.nodes import ROOT, RealNode

pytestmark = [needs_world, needs_clients, pytest.mark.timeout(180)]

REFERENCE = ROOT / "docs" / "reference" / "refusals.md"
KNOW_A_PROXY = tuple(client for client in CLIENTS if not client.own_words)
KNOW_NONE = tuple(client for client in CLIENTS if client.own_words)
INTERCEPTED = tuple(client for client in CLIENTS if client.host != DATABASE)
IMAGE = {"image": "clients", "memory_mb": 1024, "cpus": 2}


def name_of(client: Client) -> str:
    return client.name


@pytest.fixture(scope="module")
def boxes(node: RealNode, earth: World) -> Iterator[tuple[Sandbox, Sandbox]]:
    """One that may reach the servers, and one that may reach nothing."""
    with ExitStack() as stack:
        stack.enter_context(grpc_service(earth))
        stack.enter_context(database(earth))
        rules = [client.rule.format(host=client.host) for client in CLIENTS]
        allowed = stack.enter_context(node.sandbox(**IMAGE, env=TRUST, egress=sorted(set(rules))))
        nothing = stack.enter_context(node.sandbox(**IMAGE, env=TRUST))
        for box in (allowed, nothing):
            place_files(box, earth)
        yield allowed, nothing


def works(box: Sandbox, client: Client, line: str) -> None:
    result = box.run(line.format(host=client.host), timeout_s=60)
    assert client.said in result.stdout, (result.stdout[-2000:], result.stderr[-2000:])
    assert not result.denials
    records = [record for record in box.egress.records() if record.command == result.command_id]
    assert {record.host for record in records} == {client.host}
    assert {record.verdict for record in records} >= {"allowed"}


@pytest.mark.req("NET-3")
@pytest.mark.parametrize("client", KNOW_A_PROXY, ids=name_of)
def test_a_client_with_proxy_support_works(boxes: tuple[Sandbox, Sandbox], client: Client) -> None:
    works(boxes[0], client, client.line)


@pytest.mark.req("NET-10")
@pytest.mark.parametrize("client", KNOW_NONE, ids=name_of)
def test_a_client_without_proxy_support_works(boxes: tuple[Sandbox, Sandbox], client: Client) -> None:
    works(boxes[0], client, client.line)


@pytest.mark.req("NET-2")
@pytest.mark.req("NET-7")
@pytest.mark.parametrize("client", CLIENTS, ids=name_of)
def test_a_refusal_is_readable(boxes: tuple[Sandbox, Sandbox], earth: World, client: Client) -> None:
    """Nothing arrives, the client says it in its own words, and the record says why and how to allow it."""
    earth.forget()
    result = boxes[1].run(client.line.format(host=client.host), timeout_s=60)
    printed = result.stdout + result.stderr
    assert [words for words in client.refused if words not in printed] == [], printed[-2000:]
    assert client.said not in result.stdout
    assert earth.requests() == []
    found = [record for record in boxes[1].egress.records() if record.host == client.host]
    assert {(record.verdict, record.code, record.rule) for record in found} == {("denied", "no_rule", "default")}
    assert all("cloche egress allow" in record.text for record in found)


@pytest.mark.req("NET-7")
def test_the_reference_shows_what_clients_print() -> None:
    """docs/reference/refusals.md has a row for each client, with the words that the test above has seen."""
    rows = {line.split("|")[1].strip(): line for line in REFERENCE.read_text().splitlines() if line.startswith("| ")}
    missing = [client.name for client in CLIENTS if client.name not in rows]
    assert missing == []
    wrong = [client.name for client in CLIENTS if not all(words in rows[client.name] for words in client.refused)]
    assert wrong == []


@pytest.fixture(scope="module")
def looked_into(node: RealNode, earth: World) -> Iterator[Sandbox]:
    """Its connections are intercepted; the test gives it no certificate, the product does."""
    rules = [EgressRule(host=WEB, intercept=True), EgressRule(host=GRPC, intercept=True)]
    with grpc_service(earth), node.sandbox(**IMAGE, egress=rules) as box:
        for name, text in FILES.items():
            box.files.write(f"/workspace/{name}", text)
        yield box


@pytest.mark.req("NET-5")
@pytest.mark.parametrize("client", INTERCEPTED, ids=name_of)
def test_a_client_works_while_its_requests_are_seen(looked_into: Sandbox, client: Client) -> None:
    line = client.line.replace(f"-Djavax.net.ssl.trustStore={JAVA_PLACE}", "")
    result = looked_into.run(line.format(host=client.host), timeout_s=60)
    assert client.said in result.stdout, (result.stdout[-2000:], result.stderr[-2000:])
    if client.name in ("curl, http", "openssl s_client"):
        return  # plain HTTP is seen by the gate itself; s_client sends no request
    records = [record for record in looked_into.egress.records() if record.command == result.command_id]
    assert [record for record in records if record.intercepted and record.method and record.path]
