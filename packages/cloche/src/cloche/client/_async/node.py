"""One node: its sandboxes as a list, and what it says about itself."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING
from urllib.parse import quote

from cloche.client._async.transport import REQUEST_TIMEOUT_S, AsyncTransport, new_key
from cloche.client._target import Target
from cloche.wire import commands as wire_commands
from cloche.wire.errors import ClocheError, error
from cloche.wire.images import ImageEvent
from cloche.wire.nodes import DiskUse, EventList, Killed, NodeView, Pruned
from cloche.wire.sandboxes import CreateSandbox, SandboxList
from cloche.wire.sandboxes import Sandbox as SandboxView

if TYPE_CHECKING:
    from cloche.client._async.approvals import AsyncApprovals
    from cloche.client._async.commands import AsyncCommand
    from cloche.client._async.images import AsyncImages
    from cloche.client._async.sandbox import AsyncSandbox
    from cloche.client._async.secrets import AsyncSecrets


class AsyncNode:
    """Connections to one node. `target` None: the one that `choose_target` finds."""

    def __init__(self, target: Target | None = None, *, request_timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        self._transport = AsyncTransport(target, request_timeout_s=request_timeout_s)

    @property
    def target(self) -> Target:
        return self._transport.target

    @property
    def transport(self) -> AsyncTransport:
        return self._transport

    @property
    def images(self) -> AsyncImages:
        from cloche.client._async.images import AsyncImages

        return AsyncImages(self._transport)

    @property
    def secrets(self) -> AsyncSecrets:
        from cloche.client._async.secrets import AsyncSecrets

        return AsyncSecrets(self._transport)

    @property
    def approvals(self) -> AsyncApprovals:
        from cloche.client._async.approvals import AsyncApprovals

        return AsyncApprovals(self._transport)

    async def create(
        self, request: CreateSandbox, *, key: str | None = None, on_event: Callable[[ImageEvent], object] | None = None
    ) -> AsyncSandbox:
        """A new sandbox. With the same `key` a repeat answers with the first one's.

        An image that is not on the node is pulled first, with your own credentials for its registry (`request.pull` says
        whether); `on_event` is called with each step of that.
        """
        if request.pull == "always":
            image = request.image or (await self.info()).default_image
            if image is not None:
                await self.images.pull(image, on_event=on_event)
        try:
            return await self._create(request.model_copy(update={"pull": "never"}), key or new_key())
        except ClocheError as refused:
            image = request.image or refused.detail.get("image")  # the node's default has a name that only it knows
            if refused.code != "image_not_found" or request.pull == "never" or not _is_name(image):
                raise
        await self.images.pull(str(image), on_event=on_event)
        return await self._create(request.model_copy(update={"pull": "never"}), key or new_key())

    async def _create(self, request: CreateSandbox, key: str) -> AsyncSandbox:
        from cloche.client._async.sandbox import AsyncSandbox

        body = request.model_dump_json(exclude_unset=True, by_alias=True).encode()
        answer = await self._transport.request("POST", "/v1/sandboxes", content=body, key=key)
        return AsyncSandbox(self, SandboxView.model_validate_json(answer.body), kills_at_exit=True)

    async def connect(self, sandbox: str) -> AsyncSandbox:
        """By id, a unique prefix of it, or name. Never changes how long it lives."""
        from cloche.client._async.sandbox import AsyncSandbox

        answer = await self._transport.request("GET", f"/v1/sandboxes/{path_part(sandbox)}")
        return AsyncSandbox(self, SandboxView.model_validate_json(answer.body))

    async def list(self, *, include_ended: bool = False, usage: bool = False) -> builtins.list[AsyncSandbox]:
        from cloche.client._async.sandbox import AsyncSandbox

        query = {"all": include_ended, "usage": usage}
        answer = await self._transport.request("GET", "/v1/sandboxes", query=query)
        return [AsyncSandbox(self, view) for view in SandboxList.model_validate_json(answer.body).sandboxes]

    async def find_command(self, command: str) -> AsyncCommand:
        """A command of any sandbox that you may see, by id or a unique prefix of it."""
        from cloche.client._async.commands import AsyncCommand

        answer = await self._transport.request("GET", f"/v1/commands/{path_part(command)}")
        return AsyncCommand(self._transport, wire_commands.Command.model_validate_json(answer.body))

    async def kill_all(self) -> int:
        """Ends all of your sandboxes; how many there were."""
        answer = await self._transport.request("DELETE", "/v1/sandboxes")
        return Killed.model_validate_json(answer.body).sandboxes

    async def info(self) -> NodeView:
        return NodeView.model_validate_json((await self._transport.request("GET", "/v1/node")).body)

    async def disk_use(self) -> DiskUse:
        return DiskUse.model_validate_json((await self._transport.request("GET", "/v1/node/disk")).body)

    async def prune(self) -> Pruned:
        """Removes what is kept of ended sandboxes."""
        answer = await self._transport.request("POST", "/v1/node/prune", key=new_key())
        return Pruned.model_validate_json(answer.body)

    async def events(self, sandbox: str | None = None, *, after: int = 0, limit: int = 100) -> EventList:
        query = {"sandbox": sandbox, "after": after, "limit": limit}
        return EventList.model_validate_json((await self._transport.request("GET", "/v1/events", query=query)).body)

    async def aclose(self) -> None:
        await self._transport.aclose()

    async def __aenter__(self) -> AsyncNode:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.target}>"


def _is_name(image: object) -> bool:
    """Something that a registry can be asked for; a bare digest is of no registry."""
    return isinstance(image, str) and not image.startswith("sha256:")


def path_part(name: str) -> str:
    """A caller's word as one part of a path: it can't name another route."""
    quoted = quote(name, safe="")
    if quoted.strip(".") == "":
        raise error("invalid_request", "An id or name must not be empty.")
    return quoted
