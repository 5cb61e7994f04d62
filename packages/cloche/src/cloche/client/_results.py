"""What a caller gets back: chunks of output, and results. They print usefully, and escaped."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from cloche.wire.commands import Command, Cursor
from cloche.wire.egress import EgressRecord
from cloche.wire.ends import End, EndReason
from cloche.wire.errors import CLASSES
from cloche.wire.ids import short

SHOWN_MAX: Final = 60

_CommandFailed: Any = CLASSES["command_failed"]


@dataclass(frozen=True)
class Chunk:
    """A piece of output as it came. `cursor` is where the next one begins: keep it to go on later."""

    data: bytes
    fd: int
    cursor: Cursor
    carry: bytes = field(default=b"", repr=False)
    """The first bytes of a character that the last chunk of this kind broke off."""

    @property
    def text(self) -> str:
        """As text; a character split between two chunks is in the second."""
        whole = self.carry + self.data
        return whole[: len(whole) - len(self.tail)].decode("utf-8", "replace")

    @property
    def tail(self) -> bytes:
        """The beginning of a character that this chunk does not finish."""
        return unfinished((self.carry + self.data[-3:])[-3:])

    def __repr__(self) -> str:
        name = "stdout" if self.fd == 1 else "stderr"
        return f"<Chunk {name} {shown(self.data)} cursor={self.cursor}>"


def unfinished(data: bytes) -> bytes:
    """The last one to three bytes, if they begin a UTF-8 character and don't end it."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        need = 2 if byte & 0xE0 == 0xC0 else 3 if byte & 0xF0 == 0xE0 else 4 if byte & 0xF8 == 0xF0 else 1
        return data[-back:] if need > back else b""
    return b""


@dataclass(frozen=True)
class Result:
    """A command that is over."""

    command: Command
    stdout_bytes: bytes
    stderr_bytes: bytes
    end: End
    output_complete: bool = True
    """False when the oldest output was dropped (`on_full="drop_oldest"`)."""

    @property
    def stdout(self) -> str:
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        return self.stderr_bytes.decode("utf-8", "replace")

    @property
    def exit_code(self) -> int | None:
        """The program's own code; None when it did not get to return one (see `ended`)."""
        return self.end.exit_code

    @property
    def ended(self) -> EndReason:
        return self.end.reason

    @property
    def denials(self) -> list[EgressRecord]:
        """What it tried to reach and was refused (the first 20): each says why, and how a person can allow it."""
        return self.command.denials

    @property
    def command_id(self) -> str:
        return self.command.id

    @property
    def ok(self) -> bool:
        return self.end.reason is EndReason.EXITED and self.end.exit_code == 0

    def check(self) -> Result:
        """Itself, or `CommandFailed`."""
        if not self.ok:
            raise CommandFailed(self)
        return self

    def __repr__(self) -> str:
        parts = [f"<Result {how(self.end)}"]
        if self.stdout_bytes:
            parts.append(f"stdout={shown(self.stdout_bytes)}")
        if self.stderr_bytes:
            parts.append(f"stderr={shown(self.stderr_bytes)}")
        if self.denials:
            parts.append(f"denials={len(self.denials)}")
        return " ".join([*parts, f"command={short(self.command.id)}>"])


class CommandFailed(_CommandFailed):  # type: ignore[misc]
    """A command that did not end with exit code 0, when success was asked for. Its `result` has everything."""

    def __init__(self, result: Result) -> None:
        printed = (result.stderr_bytes or result.stdout_bytes).rstrip()
        last = printed[printed.rfind(b"\n") + 1 :]
        line = f" It last said: {shown(last)}." if last else ""
        super().__init__(
            f"{command_line(result.command.argv)} ended: {how(result.end)}.{line}",
            detail={"command": result.command.id},
        )
        self.result = result


def how(end: End) -> str:
    """An end in a few words."""
    if end.reason is EndReason.EXITED:
        return f"exit code {end.exit_code}"
    if end.reason is EndReason.SIGNALLED:
        return f"signal {end.signal}"
    by = f" by {escaped(end.by)}" if end.by else ""
    return f"{end.reason.value}{by}"


def command_line(argv: list[str]) -> str:
    text = " ".join(argv)
    return escaped(text if len(text) <= SHOWN_MAX else text[:SHOWN_MAX] + "…")


def shown(data: bytes) -> str:
    """The beginning of some bytes, for a person: quoted, escaped, with its size when cut."""
    text = repr(data[:SHOWN_MAX].decode("utf-8", "replace"))
    return escaped(text) if len(data) <= SHOWN_MAX else f"{escaped(text)}… ({len(data)} bytes)"


def escaped(text: str) -> str:
    """Without anything that a terminal would act on: what a guest chose is shown, not obeyed."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)
