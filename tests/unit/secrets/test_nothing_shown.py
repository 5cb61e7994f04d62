"""A planted value is looked for wherever something could show it; the same look finds a planted marker."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Iterable
from pathlib import Path

import httpx2
import pytest

from cloche.client import Node, Target
from cloche.wire.errors import ClocheError
from cloche_server.interceptor.forms import value_forms
from tests.unit.secrets.room import HEADER, VALUE, Server, token
from tests.unit.secrets.rooms_served import ServedRooms, rooms

PLACES = {"hosts": ["api.example.com"], "places": [HEADER]}
MINTED = "minted-value-77aa31c9"


def found(texts: Iterable[str | bytes], value: str = VALUE) -> list[str]:
    """Those that hold the value: as it is, in base64, percent, hex, escaped."""
    forms = value_forms(value.encode())
    data = [text.encode() if isinstance(text, str) else text for text in texts]
    return [str(text[:200]) for text in data if any(form in text for form in forms)]


def files_below(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in folder.rglob("*") if path.is_file()]


def target(served: ServedRooms) -> Target:
    return Target("user", "http://cloche", str(served.socket))


@pytest.mark.req("SEC-1")
def test_no_answer_error_log_journal_or_file_holds_a_value(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shown: list[str | bytes] = []
    wrong_bodies = [
        {"source": {"kind": "value", "value": VALUE}, "hosts": [], "places": [HEADER]},
        {"source": {"kind": "value", "value": [VALUE]}, **PLACES},
        {"source": {"kind": VALUE, "value": VALUE}, **PLACES},
        {"source": {"kind": "value", "value": VALUE, "more": VALUE}, **PLACES},
        {"source": {"kind": "value", "value": VALUE + "\n"}, **PLACES},
        {"source": {"kind": "value", "value": VALUE, "ttl_s": -1}, **PLACES},
        {"source": VALUE, **PLACES},
        VALUE,
        [VALUE],
    ]
    with (
        caplog.at_level(logging.DEBUG),
        rooms(tmp_path) as served,
        httpx2.Client(transport=httpx2.HTTPTransport(uds=str(served.socket)), base_url="http://x") as raw,
    ):
        good = {"source": {"kind": "value", "value": VALUE}, **PLACES}
        answers = [raw.put("/v1/secrets/TOKEN", json=good)]
        assert answers[0].status_code == 200
        for body in wrong_bodies:
            answers.append(raw.put("/v1/secrets/TOKEN", json=body))
            assert answers[-1].status_code == 400, body
        answers.append(raw.put("/v1/secrets/TOKEN", content=json.dumps(good).encode()[:-3]))
        answers += [raw.get("/v1/secrets"), raw.put("/v1/secrets/no-name", json=good), raw.get("/v1/secrets/TOKEN")]
        secrets = served.backend.secrets
        sandbox, lineage = "sloc" + "a" * 16, "lloc" + "b" * 16
        owner = answers[0].json()["owner"]
        leases = served.run(
            secrets.lease(owner, "tloc0000000000000000", ["TOKEN"], sandbox=sandbox, lineage=lineage)
        ).result(10)
        answers += [raw.get("/v1/secrets"), raw.get("/v1/events"), raw.get("/openapi.json")]
        shown += [repr(leases), str(leases[0]), repr(secrets), repr(secrets._holds), repr(vars(secrets._files))]
        answers.append(raw.delete("/v1/secrets/TOKEN"))
        for answer in answers:
            shown += [answer.content, str(answer.headers)]
        assert [answer.status_code for answer in answers[-4:]] == [200, 200, 200, 200]
    shown += [caplog.text, *files_below(tmp_path)]
    assert found(shown) == []
    journal = files_below(served.backend.state / "journal")
    assert b"secret.set" in journal[0], "what happened is written down all the same"
    assert b"secret.leased" in journal[0]
    served.backend.journal.write("marker", detail={"planted": VALUE})
    assert len(found(files_below(tmp_path))) == 1, "the same look does not find a planted marker"


@pytest.mark.req("SEC-1")
def test_what_a_source_says_is_in_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shown: list[str | bytes] = []
    with (
        caplog.at_level(logging.DEBUG),
        rooms(tmp_path) as served,
        Server(token(MINTED), (500, MINTED.encode())) as server,
    ):
        with Node(target(served)) as node:
            for source in (
                {
                    "kind": "http",
                    "url": f"{server.url}?key={MINTED}",
                    "field": "data.token",
                    "headers_from": {"X-Key": MINTED},
                },
                {"kind": "command", "argv": ["/bin/sh", "-c", f"echo {MINTED}; echo {MINTED} >&2; exit 3"]},
            ):
                view = node.secrets.set("TOKEN", source=source, **PLACES)
                shown += [view.model_dump_json(), repr(node.secrets.list())]
                for number in range(2):
                    ids = {"sandbox": f"sloc{number:016}", "lineage": f"lloc{number:016}"}
                    work = served.backend.secrets.lease(view.owner, "tloc0000000000000000", ["TOKEN"], **ids)
                    try:
                        shown.append(repr(served.run(work).result(10)))
                        served.backend.secrets.release(ids["sandbox"])
                    except ClocheError as failed:
                        shown += [str(failed), str(failed.detail), "".join(traceback.format_exception(failed))]
    assert len(shown) >= 8
    shown += [caplog.text, *files_below(tmp_path)]
    assert found(shown, MINTED) == []


def test_the_sdk_sends_a_value_and_shows_it_nowhere(tmp_path: Path) -> None:
    shown = []
    with rooms(tmp_path) as served, Node(target(served)) as node:
        view = node.secrets.set("TOKEN", VALUE, **PLACES)
        assert (view.name, view.source) == ("TOKEN", "value")
        shown += [repr(view), repr(node.secrets), repr(node.secrets.list())]
        for wrong in ({"hosts": []}, {"places": []}, {"methods": ["get"]}, {"paths": ["no slash"]}):
            with pytest.raises(ClocheError) as raised:
                node.secrets.set("TOKEN", VALUE, **{**PLACES, **wrong})
            shown += ["".join(traceback.format_exception(raised.value)), str(raised.value.detail)]
        with pytest.raises(ClocheError, match="either"):
            node.secrets.set("TOKEN", **PLACES)
        with pytest.raises(ClocheError, match="either"):
            node.secrets.set("TOKEN", VALUE, source={"kind": "file", "path": "/x"}, **PLACES)
        assert node.secrets.remove("TOKEN").name == "TOKEN"
        with pytest.raises(ClocheError) as missing:
            node.secrets.remove("TOKEN")
        assert missing.value.code == "secret_not_found"
    assert found(shown) == []


@pytest.mark.parametrize("form", value_forms(VALUE.encode()))
def test_the_look_finds_every_form(form: bytes) -> None:
    assert found([b"before " + form + b" after"])
