"""Commands: durable objects with an id, output that can be read again, and one typed end."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from . import defaults
from .egress import EgressRecord
from .ends import End

OnFull = Literal["end", "block", "drop_oldest"]
Argument = Annotated[str, Field(max_length=128 * 1024)]
ARGUMENTS_MAX: Final = 4096
DENIALS_MAX: Final = 20


class Terminal(BaseModel):
    """A pseudo-terminal for the command."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rows: int = Field(default=24, ge=1, le=1000)
    cols: int = Field(default=80, ge=1, le=1000)
    term: str = Field(default="xterm-256color", max_length=64, pattern=r"^[A-Za-z0-9._+-]+$")


class FirstCommand(BaseModel):
    """A command that is created with its sandbox. Its arguments follow the image's entrypoint, as Docker's do."""

    model_config = ConfigDict(extra="forbid")

    argv: Annotated[list[Argument], Field(max_length=ARGUMENTS_MAX)] = []
    """Empty: what the image says (its `cmd`)."""
    env: dict[str, str] = Field(default_factory=dict, max_length=1024)
    cwd: str | None = Field(default=None, max_length=4096)
    user: str | None = Field(default=None, max_length=128)
    timeout_s: float | None = Field(default=None, gt=0)
    terminal: Terminal | None = None
    stdin: bool = False
    """False: the command reads end of file. True: bytes come by `PUT …/stdin?offset=`."""
    merge_stderr: bool = False
    output_bytes_max: int = Field(default=defaults.OUTPUT_BYTES_MAX, ge=0, le=defaults.OUTPUT_BYTES_LIMIT)
    on_full: OnFull = "end"


class StartCommand(FirstCommand):
    """`POST …/commands`. The header `Idempotency-Key` makes a repeat answer with the first one's command."""

    argv: Annotated[list[Argument], Field(min_length=1, max_length=ARGUMENTS_MAX)]


class CommandState(StrEnum):
    """Where a command is in its life."""

    STARTING = "starting"
    RUNNING = "running"
    ENDED = "ended"


class OutputState(BaseModel):
    """What can be read of a command's output."""

    model_config = ConfigDict(frozen=True)

    generation: int = 1
    first: int = 0
    """The oldest offset that can still be read (> 0 only after `drop_oldest`)."""
    end: int = 0
    complete: bool = False
    """True when no byte will follow."""


class Command(BaseModel):
    """The view of one command."""

    id: str
    sandbox: str
    argv: list[str]
    cwd: str | None = None
    user: str | None = None
    terminal: bool = False
    stdin: bool = False
    timeout_s: float | None = None
    on_full: OnFull = "end"
    state: CommandState
    created_at: float
    runtime_s: float | None = None
    output: OutputState
    stdin_offset: int = 0
    """How many bytes of stdin the guest has confirmed."""
    ended: End | None = None
    denials: Annotated[list[EgressRecord], Field(max_length=DENIALS_MAX)] = []
    """What it tried to reach and was refused: the first of them, in order. Joined by the guest's word."""


class CommandList(BaseModel):
    """`GET …/commands`."""

    commands: list[Command]


class Signal(BaseModel):
    """`POST …/signal`."""

    model_config = ConfigDict(extra="forbid")

    signal: int = Field(ge=1, le=64)


class Resize(BaseModel):
    """`POST …/resize`."""

    model_config = ConfigDict(extra="forbid")

    rows: int = Field(ge=1, le=1000)
    cols: int = Field(ge=1, le=1000)


class StdinState(BaseModel):
    """What the guest has confirmed of stdin."""

    offset: int
    closed: bool = False


class Cursor(BaseModel):
    """Where a reader stands. Written `generation.offset`; a plain offset means generation 1."""

    model_config = ConfigDict(frozen=True)

    generation: int = Field(default=1, ge=1)
    offset: int = Field(default=0, ge=0)

    def __str__(self) -> str:
        return f"{self.generation}.{self.offset}"

    @classmethod
    def parse(cls, text: str) -> Cursor:
        head, dot, tail = text.partition(".")
        if not (
            head.isascii()
            and head.isdigit()
            and len(head) <= 20
            and (not dot or (tail.isascii() and tail.isdigit() and len(tail) <= 20))
        ):
            raise ValueError("a cursor is OFFSET or GENERATION.OFFSET, in digits")
        return cls(generation=int(head), offset=int(tail)) if dot else cls(offset=int(head))
