"""Cloche: sandboxes for code that AI agents write, each with a kernel of its own.

    from cloche import Sandbox

    with Sandbox.create("python", ttl_s=600) as box:
        print(box.run("python3 -c 'print(6 * 7)'").stdout)

Words used here:
    sandbox     one agent session with a kernel of its own; it ends at its `ttl_s`, or when it is killed
    command     a program running inside; it outlives the connection that started it
    result      a command that is over: what it printed, its exit code, and how it ended

`AsyncSandbox` is the same with `await`. Every error is a `ClocheError` with a code, a reason and a fix; the classes are in
`cloche.errors`. Deliberately absent: anything that runs a sandbox (that is `cloche-server`), and imports that are slow: names are
loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cloche.client import AsyncNode as AsyncNode
    from cloche.client import AsyncSandbox as AsyncSandbox
    from cloche.client import Chunk as Chunk
    from cloche.client import CommandFailed as CommandFailed
    from cloche.client import Node as Node
    from cloche.client import Result as Result
    from cloche.client import Sandbox as Sandbox
    from cloche.wire.errors import ClocheError as ClocheError

__version__ = "0.1.0"

_CLIENT = frozenset({"AsyncNode", "AsyncSandbox", "Chunk", "CommandFailed", "Node", "Result", "Sandbox"})

__all__ = ["AsyncNode", "AsyncSandbox", "Chunk", "ClocheError", "CommandFailed", "Node", "Result", "Sandbox"]


def __getattr__(name: str) -> Any:
    if name in _CLIENT:
        from cloche import client

        return getattr(client, name)
    if name == "ClocheError":
        from cloche.wire.errors import ClocheError

        return ClocheError
    raise AttributeError(f"module 'cloche' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
