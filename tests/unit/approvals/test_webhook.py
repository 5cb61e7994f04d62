"""The organisation's server is told: signed, bounded, with a token that answers this one question once."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
import socket
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from cloche.wire.approvals import Answer
from cloche.wire.errors import ClocheError
from cloche_server.approvals.asking import Approvals
from cloche_server.approvals.queue import Verdict
from cloche_server.approvals.webhook import HEADER, IN_FLIGHT_MAX, Webhook, signature
from tests.unit.approvals.questions import ALICE, BOX, EVIL, question
from tests.unit.secrets.room import Server

KEY = b"k" * 32
APPROVE = Answer(answer="approve")


class Hooked:
    def __init__(self, url: str, **fields: Any) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.hook = Webhook(
            url,
            KEY,
            self._spawn,
            lambda kind, _id, detail: self.told.append((kind, detail)),
            backoff_s=(0.01,) * 3,
            **fields,
        )
        self.approvals = Approvals(announcer=lambda: self.hook, scope_s_max=lambda: 60.0)

    def _spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self.tasks.append(task)
        return task

    async def ask(self, timeout_s: float = 30.0, **fields: Any) -> asyncio.Task[Verdict]:
        task = asyncio.ensure_future(self.approvals.ask(question(**fields), timeout_s=timeout_s))
        await asyncio.sleep(0)
        return task


async def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < end, "it did not come"
        await asyncio.sleep(0.01)


def token_of(body: bytes) -> str:
    path = json.loads(body)["answer"]["path"]
    assert re.fullmatch(r"/v1/approvals/answers/[A-Za-z0-9_-]{43}", path)
    return str(path.rpartition("/")[2])


@pytest.mark.req("POL-3")
async def test_it_is_told_signed_and_its_token_answers_once() -> None:
    with Server((204, b"")) as server:
        hooked = Hooked(server.url)
        task = await hooked.ask()
        await wait_until(lambda: bool(server.seen))
        method, _, headers, body = server.seen[0]
        assert (method, headers["content-type"]) == ("POST", "application/json")
        fields = dict(part.split("=") for part in headers[HEADER.lower()].split(","))
        expected = hmac.new(KEY, f"{fields['t']}.".encode() + body, hashlib.sha256).hexdigest()
        assert fields["v1"] == expected
        assert abs(int(fields["t"]) - time.time()) < 60
        shown = json.loads(body)["approval"]
        assert (shown["host"], shown["address"], shown["state"]) == ("hooks.example.com", "203.0.113.7", "waiting")
        answered = hooked.approvals.answer_by_token(token_of(body), APPROVE)
        assert answered.answered_by == "webhook"
        assert await task == Verdict(True, "webhook", "approved")
        with pytest.raises(ClocheError) as raised:
            hooked.approvals.answer_by_token(token_of(body), APPROVE)
        assert raised.value.code == "approval_not_found"


def test_the_receiver_in_the_documentation_accepts_what_we_sign_and_nothing_else() -> None:
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "approvals.md").read_text()
    code = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def is_ours" in block)
    names: dict[str, Any] = {}
    exec(code, names)
    now = int(time.time())
    good = signature(KEY, now, b"body")
    assert names["is_ours"](KEY, good, b"body")
    assert not names["is_ours"](KEY, good, b"other")
    assert not names["is_ours"](b"x" * 32, good, b"body")
    assert not names["is_ours"](KEY, signature(KEY, now - 3600, b"body"), b"body")


def test_a_signature_says_when_and_of_what() -> None:
    assert signature(KEY, 5, b"body") != signature(KEY, 6, b"body")
    assert signature(KEY, 5, b"body") != signature(b"x" * 32, 5, b"body")


@pytest.mark.req("POL-3")
async def test_a_token_ends_with_its_question_and_is_kept_only_as_a_hash() -> None:
    with Server((204, b"")) as server:
        hooked = Hooked(server.url)
        task, other = await hooked.ask(), await hooked.ask(host="other.example", sandbox="another")
        await wait_until(lambda: len(server.seen) == 2)
        tokens = {json.loads(body)["approval"]["host"]: token_of(body) for _, _, _, body in server.seen}
        assert not [each for each in tokens.values() if each.encode() in repr(vars(hooked.approvals)).encode()]
        hooked.approvals.void(BOX, "its policy changed")
        assert (await task).reason == "void"
        for wrong in (tokens["hooks.example.com"], "x" * 43, ""):
            with pytest.raises(ClocheError) as raised:
                hooked.approvals.answer_by_token(wrong, APPROVE)
            assert raised.value.code == "approval_not_found"
        assert not other.done()
        with pytest.raises(ClocheError, match="one action"):
            hooked.approvals.answer_by_token(tokens["other.example"], Answer(answer="approve", scope_s=5.0))
        hooked.approvals.answer_by_token(tokens["other.example"], Answer(answer="deny"))
        assert not (await other).approved
        assert hooked.approvals._tokens == {}


async def test_a_server_that_fails_is_tried_a_few_times_and_holds_nothing_up() -> None:
    with Server((503, b"")) as server:
        hooked = Hooked(server.url)
        task = await hooked.ask()
        (asked,) = (await hooked.approvals.list(ALICE)).approvals
        await wait_until(lambda: bool(hooked.told))
        assert len(server.seen) == 4
        assert hooked.told == [("approval.not_announced", {"why": "the server answered 503"})]
        hooked.approvals.answer(ALICE, asked.id, APPROVE)
        assert (await task).approved


async def test_a_server_that_is_silent_does_not_delay_an_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hooked = Hooked(f"http://127.0.0.1:{silent.getsockname()[1]}/")
        began = time.monotonic()
        task = await hooked.ask()
        (asked,) = (await hooked.approvals.list(ALICE)).approvals
        hooked.approvals.answer(ALICE, asked.id, APPROVE)
        assert (await task).approved
        assert time.monotonic() - began < 1.0
        for each in hooked.tasks:
            each.cancel()


async def test_a_question_that_is_over_is_told_to_nobody() -> None:
    with Server((503, b""), (204, b"")) as server:
        hooked = Hooked(server.url)
        task = await hooked.ask()
        task.cancel()
        await asyncio.gather(*hooked.tasks)
        assert len(server.seen) <= 1
        assert "approval.announced" not in [kind for kind, _ in hooked.told]


async def test_announcements_under_way_are_bounded() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=512) as silent:
        hooked = Hooked(f"http://127.0.0.1:{silent.getsockname()[1]}/")
        tasks = [await hooked.ask(sandbox=f"s{number % 4}") for number in range(IN_FLIGHT_MAX + 3)]
        assert len(hooked.tasks) == IN_FLIGHT_MAX
        assert [kind for kind, _ in hooked.told] == ["approval.not_announced"] * 3
        for each in [*tasks, *hooked.tasks]:
            each.cancel()


async def test_redirects_are_not_followed_and_no_proxy_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with Server((302, b"")) as server:
        hooked = Hooked(server.url)
        task = await hooked.ask()
        await wait_until(lambda: bool(hooked.told))
        assert {path for _, path, _, _ in server.seen} == {"/v1/token"}
        task.cancel()


async def test_what_a_guest_chose_arrives_harmless() -> None:
    with Server((204, b"")) as server:
        task = await Hooked(server.url).ask(path=EVIL, command_line=EVIL)
        await wait_until(lambda: bool(server.seen))
        shown = json.loads(server.seen[0][3])["approval"]
        assert shown["path"].isprintable()
        assert shown["command_line"].isprintable()
        task.cancel()


@pytest.mark.parametrize("url", ["http://198.51.100.7/x", "ftp://127.0.0.1/", "https://u:p@host.example/", "x", ""])
def test_only_https_or_this_machine(url: str) -> None:
    with pytest.raises(ClocheError) as raised:
        Hooked(url)
    assert raised.value.code == "policy_invalid"


def test_a_short_key_is_refused_and_no_key_is_shown() -> None:
    with pytest.raises(ClocheError, match="fewer"):
        Webhook("https://h.example/", b"short", lambda _work, _name: None)  # type: ignore[arg-type,return-value]
    assert "kkkk" not in repr(Hooked("https://h.example/").hook)
