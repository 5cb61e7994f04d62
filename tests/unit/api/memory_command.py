"""A command in memory: it "prints" what its argv says (see `memory.py`)."""

from __future__ import annotations

import asyncio

from cloche.wire.commands import Command, CommandState, OutputState, StartCommand
from cloche.wire.ends import End, EndReason
from cloche.wire.ids import new_id


class MemoryCommand:
    def __init__(self, sandbox: str, request: StartCommand) -> None:
        self.id = new_id("command")
        self.sandbox = sandbox
        self.request = request
        self.log: list[tuple[int, int, bytes]] = []
        self.size = 0
        self.generation = 1
        self.complete = False
        self.ended: End | None = None
        self.stdin = bytearray()
        self.stdin_closed = not request.stdin
        self.changed = asyncio.Event()
        self.signals: list[int] = []
        self.resizes: list[tuple[int, int]] = []
        self.task: asyncio.Task[None] | None = None

    def print(self, data: bytes, fd: int = 1) -> None:
        self.log.append((self.size, fd, data))
        self.size += len(data)
        self.poke()

    def poke(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def finish(self, end: End) -> None:
        if self.ended is None:
            self.complete, self.ended = True, end
            self.poke()

    def view(self) -> Command:
        return Command(
            id=self.id,
            sandbox=self.sandbox,
            argv=self.request.argv,
            state=CommandState.ENDED if self.ended else CommandState.RUNNING,
            terminal=self.request.terminal is not None,
            stdin=self.request.stdin,
            created_at=1.0,
            output=OutputState(generation=self.generation, end=self.size, complete=self.complete),
            stdin_offset=len(self.stdin),
            ended=self.ended,
        )

    async def run(self) -> None:
        argv = self.request.argv
        code = 0
        if argv[0] == "print":
            self.print(argv[1].encode())
        elif argv[0] == "stderr":
            self.print(argv[1].encode(), 2)
        elif argv[0] == "exit":
            code = int(argv[1])
        elif argv[0] == "bulk":
            self.print(bytes(range(256)) * (int(argv[1]) // 256))
        elif argv[0] == "ticks":
            for n in range(int(argv[1])):
                self.print(f"{n}\n".encode(), 1 + n % 2)
                await asyncio.sleep(float(argv[2]))
        elif argv[0] == "silent":
            await asyncio.sleep(float(argv[1]))
        elif argv[0] == "cat":
            await self._cat()
        self.finish(End(reason=EndReason.EXITED, exit_code=code))

    async def _cat(self) -> None:
        sent = 0
        while True:
            if sent < len(self.stdin):
                data = bytes(self.stdin[sent:])
                sent += len(data)
                self.print(data)
            elif self.stdin_closed:
                return
            else:
                await self.changed.wait()
