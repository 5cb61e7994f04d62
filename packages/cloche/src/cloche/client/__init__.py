"""The caller's side: sandboxes, commands, files and ports as objects over the HTTP API.

Words used here:
    target      who is asked: CLOCHE_URL, the machine's node, or the user's own node, in that order
    node        one target's API, and the connections to it
    cursor      where a reader of output stands; with it, another connection goes on from exactly there
    chunk       a piece of output as it came: bytes, text, which of stdout and stderr, and the cursor after it
    result      a command that is over: what it printed and how it ended

The async code in `_async/` is written by hand; `_sync/` is made from it by `tools/unasync.py` and never edited. What
need not wait is in the shared modules beside them: `_target`, `_failures`, `_stream`, `_results`, `_extract`, `_pack`.
Deliberately absent: any other package's exception (all are `ClocheError`s), retries of what is not safe to repeat,
global state, threads (but for a port forward, which runs one), slow imports: names are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cloche.client._async.approvals import AsyncApprovals as AsyncApprovals
    from cloche.client._async.commands import AsyncCommand as AsyncCommand
    from cloche.client._async.commands import AsyncCommands as AsyncCommands
    from cloche.client._async.egress import AsyncEgress as AsyncEgress
    from cloche.client._async.files import AsyncFiles as AsyncFiles
    from cloche.client._async.images import AsyncImages as AsyncImages
    from cloche.client._async.node import AsyncNode as AsyncNode
    from cloche.client._async.ports import AsyncPortConnection as AsyncPortConnection
    from cloche.client._async.ports import AsyncPorts as AsyncPorts
    from cloche.client._async.sandbox import AsyncSandbox as AsyncSandbox
    from cloche.client._async.secrets import AsyncSecrets as AsyncSecrets
    from cloche.client._async.terminal import AsyncTerminal as AsyncTerminal
    from cloche.client._extract import Extractor as Extractor
    from cloche.client._forward import Forward as Forward
    from cloche.client._pack import Packer as Packer
    from cloche.client._results import Chunk as Chunk
    from cloche.client._results import CommandFailed as CommandFailed
    from cloche.client._results import Result as Result
    from cloche.client._sync.approvals import Approvals as Approvals
    from cloche.client._sync.commands import Command as Command
    from cloche.client._sync.commands import Commands as Commands
    from cloche.client._sync.egress import Egress as Egress
    from cloche.client._sync.files import Files as Files
    from cloche.client._sync.images import Images as Images
    from cloche.client._sync.node import Node as Node
    from cloche.client._sync.ports import PortConnection as PortConnection
    from cloche.client._sync.ports import Ports as Ports
    from cloche.client._sync.sandbox import Sandbox as Sandbox
    from cloche.client._sync.secrets import Secrets as Secrets
    from cloche.client._sync.terminal import Terminal as Terminal
    from cloche.client._target import Target as Target
    from cloche.client._target import choose_target as choose_target
    from cloche.client._target import user_socket_path as user_socket_path
    from cloche.client._target import user_state_dir as user_state_dir

_MODULES = {
    "Approvals": "_sync.approvals",
    "AsyncApprovals": "_async.approvals",
    "AsyncCommand": "_async.commands",
    "AsyncCommands": "_async.commands",
    "AsyncEgress": "_async.egress",
    "AsyncFiles": "_async.files",
    "AsyncImages": "_async.images",
    "AsyncNode": "_async.node",
    "AsyncPortConnection": "_async.ports",
    "AsyncPorts": "_async.ports",
    "AsyncSandbox": "_async.sandbox",
    "AsyncSecrets": "_async.secrets",
    "AsyncTerminal": "_async.terminal",
    "Chunk": "_results",
    "Command": "_sync.commands",
    "CommandFailed": "_results",
    "Commands": "_sync.commands",
    "Egress": "_sync.egress",
    "Extractor": "_extract",
    "Files": "_sync.files",
    "Forward": "_forward",
    "Images": "_sync.images",
    "Node": "_sync.node",
    "Packer": "_pack",
    "PortConnection": "_sync.ports",
    "Ports": "_sync.ports",
    "Result": "_results",
    "Sandbox": "_sync.sandbox",
    "Secrets": "_sync.secrets",
    "Target": "_target",
    "Terminal": "_sync.terminal",
    "choose_target": "_target",
    "user_socket_path": "_target",
    "user_state_dir": "_target",
}

__all__ = [
    "Approvals",
    "AsyncApprovals",
    "AsyncCommand",
    "AsyncCommands",
    "AsyncEgress",
    "AsyncFiles",
    "AsyncImages",
    "AsyncNode",
    "AsyncPortConnection",
    "AsyncPorts",
    "AsyncSandbox",
    "AsyncSecrets",
    "AsyncTerminal",
    "Chunk",
    "Command",
    "CommandFailed",
    "Commands",
    "Egress",
    "Extractor",
    "Files",
    "Forward",
    "Images",
    "Node",
    "Packer",
    "PortConnection",
    "Ports",
    "Result",
    "Sandbox",
    "Secrets",
    "Target",
    "Terminal",
    "choose_target",
    "user_socket_path",
    "user_state_dir",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"cloche.client.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'cloche.client' has no attribute {name!r}")
