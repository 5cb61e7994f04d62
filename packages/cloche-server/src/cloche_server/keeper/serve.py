"""Which code answers which verb.

One daemon at a time: the first to say hello holds the keeper, and another is told `busy` for as long as the first one's
pidfd says that it lives.
"""

from __future__ import annotations

import os
import socket
from typing import Any, Final

from cloche_server.engines.spec import WITH_ENVIRONMENT, SandboxSpec
from cloche_server.keeper import points, process, steps
from cloche_server.keeper.loop import Task
from cloche_server.keeper.peers import Peer, Peers, is_readable, log
from cloche_server.keeper.records import Record, boot_id
from cloche_server.keeper.sandboxes import House, Sandbox, cgroup_of
from cloche_server.keeper.verbs import (
    GENERATION,
    PAGE_MAX,
    Adopt,
    Attach,
    Boot,
    Hello,
    Kill,
    List,
    Refusal,
    Request,
    Seal,
    Stop,
    answer,
    refusal,
)

BOOTS_MAX: Final = 64


class Keeper:
    """All sandboxes, and what a peer may ask about them."""

    def __init__(self, house: House, listener: socket.socket, facts: dict[str, Any]) -> None:
        self._house = house
        self._facts = facts
        self._sandboxes: dict[str, Sandbox] = {}
        self._booting = 0
        self._recover()
        self._peers = Peers(house.loop, listener, self._answer_to)

    @property
    def is_empty(self) -> bool:
        return not self._sandboxes

    def _recover(self) -> None:
        """Take over what a predecessor left: hold what lives, undo what it had half done."""
        whole, other = self._house.records.read()
        for record in whole:
            sandbox = process.recover(record)
            self._sandboxes[record.id] = sandbox
            if record.phase != "live":
                self._house.loop.start(self._undo_found(sandbox))
        self._remove_stale(other)

    def _remove_stale(self, ids: list[str]) -> None:
        """Of an earlier boot of the machine, or without a record: no process of theirs can live."""
        for name in {*ids, *os.listdir(self._house.work)} - set(self._sandboxes):
            steps.remove_tree(f"{self._house.work}/{name}")
            if self._house.cgroups is not None:
                self._house.cgroups.child(name).remove()
            self._house.records.remove(name)

    def _undo_found(self, sandbox: Sandbox) -> Task:
        try:
            yield from steps.undo(self._house, sandbox)
        except OSError as error:
            log(f"{sandbox.id}: cannot be undone yet: {error}")
            return
        del self._sandboxes[sandbox.id]

    def _answer_to(self, peer: Peer, request: Request, fds: list[int]) -> None:
        try:
            if isinstance(request, Hello):
                self._hello(peer, request)
            elif not peer.greeted:
                raise Refusal("hello_first", "say hello first")
            elif isinstance(request, Boot):
                self._boot(peer, request)
            elif isinstance(request, List):
                self._list(peer, request)
            elif isinstance(request, Attach):
                self._attach(peer, request)
            elif isinstance(request, Adopt):
                self._adopt(peer, request, fds[0])
            elif isinstance(request, Seal):
                self._house.loop.start(self._seal(peer, request, self._live(request.sandbox)))
            elif isinstance(request, Kill):
                self._kill(peer, request)
            else:
                self._stop(peer, request)
        except Refusal as error:
            error.request = request.request
            raise

    def _hello(self, peer: Peer, request: Hello) -> None:
        if peer.greeted:
            raise Refusal("out_of_order", "hello was said already")
        if request.generation != GENERATION:
            raise Refusal("generation", f"this keeper speaks generation {GENERATION}")
        self._peers.hold(peer)
        peer.greeted = True
        self._peers.send(peer, answer(request.request, self._facts))

    def _live(self, name: str) -> Sandbox:
        found = self._sandboxes.get(name)
        if found is None:
            raise Refusal("not_found", f"{name} is not here")
        if found.record.phase != "live" or found.ending is not None:
            raise Refusal("not_live", f"{name} is {found.record.phase}")
        return found

    def _list(self, peer: Peer, request: List) -> None:
        live = sorted(name for name, sandbox in self._sandboxes.items() if sandbox.record.phase == "live")
        page = [name for name in live if name > request.after][:PAGE_MAX]
        more = bool(page) and page[-1] != live[-1]
        rows = [self._row(self._sandboxes[name]) for name in page]
        self._peers.send(peer, answer(request.request, {"sandboxes": rows, "more": more}))

    def _row(self, sandbox: Sandbox) -> dict[str, Any]:
        record = sandbox.record
        cgroup = cgroup_of(self._house, sandbox)
        return {
            "id": sandbox.id,
            "engine": record.engine,
            "pid": record.pid,
            "start_time": record.start_time,
            "boot_id": record.boot_id,
            # Inside id n is outside id base + n - 1; the engine's process has the second of the two.
            "host_uid": self._facts["id_base"] + sandbox.host_id,
            "cgroup": None if cgroup is None else cgroup.to_object(),
            "alive": sandbox.pidfd >= 0 and not is_readable(sandbox.pidfd),
            "channel": sandbox.channel is not None,
            "sealed": sandbox.helper_pidfd < 0,
        }

    # --------------------------------------------------------------------------- boot

    def _boot(self, peer: Peer, request: Boot) -> None:
        spec = request.spec
        if spec.id in self._sandboxes:
            raise Refusal("exists", f"{spec.id} is here already")
        if self._booting >= BOOTS_MAX:
            raise Refusal("overloaded", f"{BOOTS_MAX} sandboxes are being made already")
        sandbox = Sandbox(Record(spec.id, spec.tenant, spec.engine, self._free_slot(), boot_id()))
        self._sandboxes[spec.id] = sandbox
        self._booting += 1
        self._house.loop.start(self._boot_task(peer, request.request, sandbox, spec))

    def _free_slot(self) -> int:
        used = {sandbox.record.slot for sandbox in self._sandboxes.values()}
        for number in range(self._house.slots):
            slot = (self._house.first_slot + number) % self._house.slots
            if slot not in used:
                return slot
        raise Refusal("no_slot", f"all {self._house.slots} pairs of ids are in use")

    def _boot_task(self, peer: Peer, request: int, sandbox: Sandbox, spec: SandboxSpec) -> Task:
        try:
            yield from steps.boot(self._house, sandbox, spec)
            if sandbox.ending is not None:  # killed in the moment in which it became whole
                self._peers.send(peer, refusal(Refusal("not_live", f"{sandbox.id} was killed", request)))
                self._house.loop.start(self._kill_task(sandbox))
            else:
                self._send_attached(peer, request, sandbox)
        except Refusal as error:
            self._failed(peer, sandbox, Refusal(error.code, error.message, request))
        except Exception as error:  # also a defect in one boot must not end the keeper of all the others
            self._failed(peer, sandbox, Refusal("engine_failed", f"{type(error).__name__}: {error}", request))
        finally:
            self._booting -= 1

    def _failed(self, peer: Peer, sandbox: Sandbox, error: Refusal) -> None:
        """It was undone before the error came here. What could not be undone keeps its slot; `kill` tries again."""
        log(f"{sandbox.id}: boot failed: {error.code}: {error.message}")
        if sandbox.undone:
            del self._sandboxes[sandbox.id]
        else:
            sandbox.record = sandbox.record.changed(phase="ending")
        self._peers.send(peer, refusal(error))
        waiting, sandbox.ending = sandbox.ending or [], None
        for tell in waiting:
            tell(None if sandbox.undone else error)

    # ------------------------------------------------------------------- descriptors

    def _send_attached(self, peer: Peer, request: int, sandbox: Sandbox) -> None:
        if sandbox.channel is None:
            raise Refusal("no_channel", f"{sandbox.id} lost its channel with the last keeper")
        control = sandbox.control or process.connect_control(self._house, sandbox)
        sandbox.control = None
        fds = (sandbox.channel.fileno(), control.fileno(), sandbox.pidfd)
        self._peers.send(peer, answer(request, self._row(sandbox)), fds)
        control.close()
        if (
            sandbox.record.engine in WITH_ENVIRONMENT
        ):  # no daemon comes back to it: without this copy it ends with its own
            sandbox.channel.close()
            sandbox.channel = None

    def _attach(self, peer: Peer, request: Attach) -> None:
        sandbox = self._live(request.sandbox)
        if sandbox.pidfd < 0 or is_readable(sandbox.pidfd):
            raise Refusal("dead", f"{sandbox.id} is dead")
        self._send_attached(peer, request.request, sandbox)

    def _adopt(self, peer: Peer, request: Adopt, fd: int) -> None:
        sandbox = self._live(request.sandbox)
        if sandbox.channel is not None:
            raise Refusal("out_of_order", f"the channel of {sandbox.id} is here already")
        copy = os.dup(fd)
        try:
            sandbox.channel = socket.socket(fileno=copy)
        except OSError as error:
            os.close(copy)
            raise Refusal("wrong_descriptors", f"not a socket: {error.strerror}") from None
        self._peers.send(peer, answer(request.request, self._row(sandbox)))

    # ---------------------------------------------------------------------------- end

    def _seal(self, peer: Peer, request: Seal, sandbox: Sandbox) -> Task:
        try:
            yield from process.end_helper(self._house, sandbox)
            self._peers.send(peer, answer(request.request, {}))
        except OSError as error:
            self._peers.send(peer, refusal(Refusal("engine_failed", str(error), request.request)))

    def _kill(self, peer: Peer, request: Kill) -> None:
        sandbox = self._sandboxes.get(request.sandbox)
        if sandbox is None:
            raise Refusal("not_found", f"{request.sandbox} is not here")

        def tell(error: Refusal | None) -> None:
            if error is None:
                ended = {"oom_kills": sandbox.oom_kills, "status": sandbox.status}
                self._peers.send(peer, answer(request.request, ended))
            else:
                self._peers.send(peer, refusal(Refusal(error.code, error.message, request.request)))

        if sandbox.ending is not None:
            sandbox.ending.append(tell)
            return
        sandbox.ending = [tell]
        if sandbox.record.phase == "booting":
            process.kill_booting(sandbox)  # the boot sees its command die, undoes everything and tells who waits
        else:
            self._house.loop.start(self._kill_task(sandbox))

    def _kill_task(self, sandbox: Sandbox) -> Task:
        error = None
        try:
            sandbox.record = sandbox.record.changed(phase="ending")
            self._house.records.write(sandbox.record)
            points.reached("keeper.kill.recorded")
            yield from steps.undo(self._house, sandbox)
            del self._sandboxes[sandbox.id]
        except OSError as failure:
            log(f"{sandbox.id}: cannot be ended: {failure}")
            error = Refusal("engine_failed", str(failure))
        waiting, sandbox.ending = sandbox.ending or [], None
        for tell in waiting:
            tell(error)

    def _stop(self, peer: Peer, request: Stop) -> None:
        if request.purge and self._sandboxes:
            raise Refusal("out_of_order", f"{len(self._sandboxes)} sandboxes are here")
        self._peers.send(peer, answer(request.request, {}))
        self._house.loop.stop()
