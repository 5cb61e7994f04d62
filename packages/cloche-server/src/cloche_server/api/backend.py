"""The one thing `api/` knows: a Backend. The node implements it; a fleet will implement the same.

Views in and out are `cloche.wire` models. Errors are `ClocheError`s. A `Caller` says who asks; an
implementation shows a caller only what is his (root and the node's own user see all).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from cloche.wire.commands import Command, Cursor, StartCommand, StdinState
from cloche.wire.egress import EgressRecord, EgressRecords, Explanation, Grant, GrantView
from cloche.wire.files import Entry, EntryList, MakeDirectory, Move, TreeResult, WatchEvent
from cloche.wire.images import BuildOptions, FsckReport, GcImages, GcResult, ImageEvent, ImageView, PullImage
from cloche.wire.nodes import DiskUse, EventList, NodeView, Pruned
from cloche.wire.sandboxes import CreateSandbox, Sandbox
from cloche_server.api.backend_approvals import ApprovalsBackend
from cloche_server.api.backend_secrets import SecretsBackend

Sandboxes = list[Sandbox]
Commands = list[Command]
ImageViews = list[ImageView]
Grants = list[GrantView]


@dataclass(frozen=True)
class Caller:
    """Who asks. `owner` is `uid:1000` for a local user, `key:NAME` for an API key."""

    tenant: str
    owner: str
    is_admin: bool = False


@dataclass(frozen=True)
class OutputChunk:
    """`fd` 1 or 2; `offset` is where `data` begins in the command's output."""

    generation: int
    offset: int
    fd: int
    data: bytes | memoryview


class Duplex(Protocol):
    """Two-way bytes: a connection to a port inside."""

    async def receive(self) -> bytes:
        """b"" at end of file."""
        ...

    async def send(self, data: bytes) -> None: ...

    async def send_eof(self) -> None: ...

    async def close(self) -> None: ...


class Backend(SecretsBackend, ApprovalsBackend, Protocol):
    """What can be asked of a node, or of a fleet."""

    async def create(self, caller: Caller, request: CreateSandbox, idempotency_key: str | None) -> Sandbox: ...

    async def list(self, caller: Caller, *, include_ended: bool, usage: bool) -> Sandboxes: ...

    async def get(self, caller: Caller, sandbox: str) -> Sandbox:
        """`sandbox` is an id, a unique prefix of one, or a name — here and below."""
        ...

    async def wait_ended(self, caller: Caller, sandbox: str, timeout_s: float) -> Sandbox:
        """The view, at the latest after `timeout_s`."""
        ...

    async def extend(self, caller: Caller, sandbox: str, ttl_s: float) -> Sandbox: ...

    async def kill(self, caller: Caller, sandbox: str) -> Sandbox:
        """Returns when everything of it is gone. A second kill answers with the same end."""
        ...

    async def kill_all(self, caller: Caller) -> int: ...

    async def start_command(
        self, caller: Caller, sandbox: str, request: StartCommand, idempotency_key: str | None
    ) -> Command: ...

    async def list_commands(self, caller: Caller, sandbox: str) -> Commands: ...

    async def get_command(self, caller: Caller, sandbox: str | None, command: str) -> Command:
        """With `sandbox` None the command is searched among all the caller may see."""
        ...

    async def wait_command(self, caller: Caller, sandbox: str, command: str, timeout_s: float) -> Command: ...

    def output(
        self, caller: Caller, sandbox: str, command: str, start: Cursor, *, follow: bool, fd: int | None
    ) -> AsyncIterator[OutputChunk]:
        """From `start` to what is there, or with `follow` to the end of the output. Raises cursor_lost, cursor_ahead, rolled_back."""
        ...

    async def write_stdin(
        self, caller: Caller, sandbox: str, command: str, offset: int, data: AsyncIterator[bytes], *, eof: bool
    ) -> StdinState:
        """Bytes below the confirmed offset are skipped; a gap is `stdin_offset`. Answers what the guest confirmed."""
        ...

    async def signal(self, caller: Caller, sandbox: str, command: str, signal: int) -> None: ...

    async def resize(self, caller: Caller, sandbox: str, command: str, rows: int, cols: int) -> None: ...

    async def kill_command(self, caller: Caller, sandbox: str, command: str) -> Command: ...

    def read_file(
        self, caller: Caller, sandbox: str, path: str, *, offset: int, length: int | None, user: str | None
    ) -> AsyncIterator[bytes]: ...

    async def write_file(
        self,
        caller: Caller,
        sandbox: str,
        path: str,
        data: AsyncIterator[bytes],
        *,
        mode: int | None,
        make_parents: bool,
        append: bool,
        user: str | None,
    ) -> int: ...

    async def stat(self, caller: Caller, sandbox: str, path: str, *, follow: bool, user: str | None) -> Entry: ...

    async def list_files(
        self, caller: Caller, sandbox: str, path: str, *, depth: int, user: str | None
    ) -> EntryList: ...

    async def make_directory(self, caller: Caller, sandbox: str, request: MakeDirectory) -> bool: ...

    async def move(self, caller: Caller, sandbox: str, request: Move) -> None: ...

    async def remove(self, caller: Caller, sandbox: str, path: str, *, recursive: bool, user: str | None) -> int: ...

    def watch(
        self, caller: Caller, sandbox: str, path: str, *, recursive: bool, user: str | None
    ) -> AsyncIterator[WatchEvent]: ...

    def read_tree(self, caller: Caller, sandbox: str, path: str, *, user: str | None) -> AsyncIterator[bytes]:
        """A tar stream whose last entry is `.cloche-result.json` (a pax-global-free plain file) with a TreeResult."""
        ...

    async def write_tree(
        self, caller: Caller, sandbox: str, path: str, data: AsyncIterator[bytes], *, overwrite: bool, user: str | None
    ) -> TreeResult: ...

    async def connect_port(self, caller: Caller, sandbox: str, port: int) -> Duplex: ...

    async def egress_records(self, caller: Caller, sandbox: str, *, after: int, limit: int) -> EgressRecords:
        """Oldest first; also of a sandbox that has ended, as long as it is remembered."""
        ...

    def follow_egress(self, caller: Caller, sandbox: str, *, after: int) -> AsyncIterator[EgressRecord]:
        """Until the sandbox has ended and everything was told."""
        ...

    async def grant_egress(self, caller: Caller, sandbox: str, request: Grant) -> GrantView: ...

    async def list_grants(self, caller: Caller, sandbox: str) -> Grants: ...

    async def revoke_grant(self, caller: Caller, sandbox: str, grant: str) -> Grants: ...

    async def explain_egress(self, caller: Caller, sandbox: str, *, target: str, method: str | None) -> Explanation: ...

    async def list_images(self, caller: Caller) -> ImageViews: ...

    async def inspect_image(self, caller: Caller, image: str) -> ImageView: ...

    def pull_image(self, caller: Caller, request: PullImage) -> AsyncIterator[ImageEvent]:
        """Here and below: the last event's kind is `done`; leaving the iteration gives the work up."""
        ...

    def import_image(self, caller: Caller, data: AsyncIterator[bytes], name: str | None) -> AsyncIterator[ImageEvent]:
        """Reads `data` to its end before the first event."""
        ...

    def export_image(self, caller: Caller, image: str) -> AsyncIterator[bytes]: ...

    def build_image(
        self, caller: Caller, context: AsyncIterator[bytes], options: BuildOptions
    ) -> AsyncIterator[ImageEvent]:
        """Reads `context` to its end before the first event."""
        ...

    async def remove_image(self, caller: Caller, image: str) -> ImageView: ...

    async def gc_images(self, caller: Caller, request: GcImages) -> GcResult: ...

    async def fsck_images(self, caller: Caller, *, repair: bool) -> FsckReport: ...

    async def node(self, caller: Caller) -> NodeView: ...

    async def disk_use(self, caller: Caller) -> DiskUse: ...

    async def prune(self, caller: Caller) -> Pruned:
        """Removes what is kept of ended sandboxes."""
        ...

    async def events(self, caller: Caller, sandbox: str | None, *, after: int, limit: int) -> EventList: ...
