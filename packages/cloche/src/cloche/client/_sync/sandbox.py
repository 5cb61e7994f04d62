# Made by tools/unasync.py from packages/cloche/src/cloche/client/_async/sandbox.py: edit that one.
"""A sandbox, as an object."""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

from pydantic import ValidationError

from cloche.client._requests import invalid, request_body
from cloche.client._results import Result, escaped
from cloche.client._sync.commands import Commands
from cloche.client._sync.egress import Egress
from cloche.client._sync.files import Files
from cloche.client._sync.node import Node
from cloche.client._sync.ports import PortConnection, Ports
from cloche.wire import defaults
from cloche.wire.commands import OnFull
from cloche.wire.egress import Asked
from cloche.wire.ends import End
from cloche.wire.ids import short
from cloche.wire.sandboxes import CreateSandbox, Extend
from cloche.wire.sandboxes import Sandbox as SandboxView

MIB = 1024 * 1024


class Sandbox:
    """One agent session with a kernel of its own. As a context manager, one that was created here is killed at the end."""

    def __init__(self, node: Node, view: SandboxView, *, kills_at_exit: bool = False) -> None:
        self._node = node
        self._owns_node = False
        self._kills_at_exit = kills_at_exit
        self.view = view
        """What was last heard about it; `info()` asks anew."""
        self.commands = Commands(node.transport, view.id)
        self.files = Files(node.transport, view.id)
        self.ports = Ports(node.transport, view.id)
        self.egress = Egress(node.transport, view.id)

    @classmethod
    def create(
        cls,
        image: str | None = None,
        *,
        ttl_s: float = defaults.TTL_S,
        idle_timeout_s: float | None = None,
        name: str | None = None,
        env: Mapping[str, str] | None = None,
        cpus: float | None = None,
        memory_mb: int | None = None,
        disk_mb: int | None = None,
        processes: int | None = None,
        user: str | None = None,
        workdir: str | None = None,
        labels: Mapping[str, str] | None = None,
        isolation: Literal["gvisor", "microvm", "any"] = "any",
        egress: Sequence[Asked] = (),
        secrets: Sequence[str] = (),
        node: Node | None = None,
        **more: Any,
    ) -> Sandbox:
        """Starts a sandbox. `image` None: the node's default. `more`: any other field of `CreateSandbox`.

        `egress` is what it may reach: `"api.example.com"`, `"*.example.com:8443"`, `"preset:python-packages"`,
        `"ask:hooks.example.com"`, or an `EgressRule`. `secrets` names what the operator has bound: inside, a variable of
        that name holds a placeholder. An image that is not on the node is pulled first. Without `node` the usual one is
        asked.
        """
        limits = {
            "cpus": cpus,
            "memory_bytes": None if memory_mb is None else memory_mb * MIB,
            "disk_bytes": None if disk_mb is None else disk_mb * MIB,
            "processes": processes,
        }
        fields: dict[str, Any] = {
            "image": image,
            "ttl_s": ttl_s,
            "idle_timeout_s": idle_timeout_s,
            "name": name,
            "user": user,
            "workdir": workdir,
        }
        fields |= {"env": dict(env or {}), "labels": dict(labels or {}), "isolation": isolation}
        fields |= {"egress": builtins.list(egress), "secrets": builtins.list(secrets)}
        fields["limits"] = {key: value for key, value in limits.items() if value is not None}
        try:
            request = CreateSandbox.model_validate({**fields, **more})
        except ValidationError as raised:
            raise invalid(raised) from None
        return cls._with_node(node, lambda chosen: chosen.create(request))

    @classmethod
    def connect(cls, sandbox: str, *, node: Node | None = None) -> Sandbox:
        """A sandbox that is there already: by id, a unique prefix of it, or name. Leaving the block leaves it running."""
        return cls._with_node(node, lambda chosen: chosen.connect(sandbox))

    @classmethod
    def list(
        cls, *, include_ended: bool = False, usage: bool = False, node: Node | None = None
    ) -> builtins.list[Sandbox]:
        """Yours that run; with `include_ended` also those that are over and still remembered."""
        chosen = Node() if node is None else node
        return chosen.list(include_ended=include_ended, usage=usage)

    @classmethod
    def _with_node(cls, node: Node | None, make: Any) -> Sandbox:
        if node is not None:
            box: Sandbox = make(node)
            return box
        own = Node()
        try:
            box = make(own)
        except BaseException:
            own.close()
            raise
        box._owns_node = True
        return box

    @property
    def id(self) -> str:
        return self.view.id

    @property
    def ended(self) -> End | None:
        """How it ended, as far as was last heard."""
        return self.view.ended

    def run(
        self,
        command: str | builtins.list[str],
        *,
        check: bool = False,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout_s: float | None = None,
        stdin: str | bytes | None = None,
        merge_stderr: bool = False,
        output_bytes_max: int = defaults.OUTPUT_BYTES_MAX,
        on_full: OnFull = "end",
    ) -> Result:
        """Runs it to its end. Text is a shell's line, a list is a program and its arguments.

        A program that fails is a result like any other, unless `check` is set; then it raises `CommandFailed`.
        """
        result = self.commands.run(
            command,
            cwd=cwd,
            env=env,
            user=user,
            timeout_s=timeout_s,
            stdin=stdin,
            merge_stderr=merge_stderr,
            output_bytes_max=output_bytes_max,
            on_full=on_full,
        )
        return result.check() if check else result

    def info(self) -> SandboxView:
        """Asks the node."""
        answer = self._node.transport.request("GET", f"/v1/sandboxes/{self.id}")
        return self._heard(answer.body)

    def wait(self, timeout_s: float) -> SandboxView:
        """The view when it has ended, at the latest after `timeout_s` (of at most 300)."""
        answer = self._node.transport.request(
            "GET", f"/v1/sandboxes/{self.id}", query={"wait_s": timeout_s}, timeout_s=timeout_s + 30
        )
        return self._heard(answer.body)

    def extend(self, ttl_s: float) -> SandboxView:
        """Lets it live at least this long from now; never shortens."""
        body = request_body(Extend, ttl_s=ttl_s)
        answer = self._node.transport.request("POST", f"/v1/sandboxes/{self.id}/extend", content=body)
        return self._heard(answer.body)

    def kill(self) -> SandboxView:
        """Ends it, and returns when everything of it is gone. A second time answers the same."""
        answer = self._node.transport.request("DELETE", f"/v1/sandboxes/{self.id}")
        return self._heard(answer.body)

    def connect_port(self, port: int) -> PortConnection:
        """A connection to 127.0.0.1:`port` inside."""
        return self.ports.connect(port)

    def _heard(self, body: bytes) -> SandboxView:
        self.view = SandboxView.model_validate_json(body)
        return self.view

    def close(self) -> None:
        """Closes the connections; the sandbox goes on."""
        if self._owns_node:
            self._node.close()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._kills_at_exit:
                self.kill()
        finally:
            self.close()

    def __repr__(self) -> str:
        view = self.view
        name = f" {view.name!r}" if view.name else ""
        left = f", ends in {view.ends_in_s:.0f} s" if view.ends_in_s is not None and view.ended is None else ""
        why = f" ({view.ended.reason.value})" if view.ended else ""
        return f"<{type(self).__name__} {short(view.id)}{name} {escaped(view.image)} {view.state.value}{why}{left}>"
