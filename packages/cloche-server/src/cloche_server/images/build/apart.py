"""Reads what a stranger wrote in a process of its own: Dockerfiles (BuildKit's parser, Go in a wheel) and compressed archives.

A panic of the parser, or a bomb, ends that process and nothing else. The file is its own program: started as a script it imports
nothing of ours, limits itself, reads stdin, writes stdout and exits.
"""

from __future__ import annotations

import asyncio
import bz2
import importlib
import json
import lzma
import os
import resource
import sys
import zlib
from collections.abc import Callable
from typing import Any, Final

DOCKERFILE_BYTES_MAX: Final = 1024 * 1024
ANSWER_BYTES_MAX: Final = 16 * 1024 * 1024
SECONDS_MAX: Final = 20
UNPACK_SECONDS_MAX: Final = 900
MEMORY_BYTES_MAX: Final = 4 * 1024 * 1024 * 1024
"""Of addresses: Go reserves more than it uses."""
HEREDOCS_TRIED_MAX: Final = 50
CHUNK_BYTES: Final = 1024 * 1024

NOT_PARSED, NOT_WHOLE, TOO_LARGE = 3, 5, 6
"""Exit codes."""

GZIP, BZIP2, XZ, ZSTD = b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd"


class ParserDied(Exception):
    """It gave no answer."""


class NotParsed(Exception):
    """What the parser says, and the line."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


class NotUnpacked(Exception):
    """The archive is damaged, or too large."""


async def dockerfile(data: bytes) -> list[dict[str, Any]]:
    """The parser's commands, as objects."""
    code, answer = await _run(["dockerfile"], data, SECONDS_MAX)
    if code == NOT_PARSED:
        said = json.loads(answer)
        raise NotParsed(str(said["message"]), int(said["line"]))
    if code != 0:
        raise ParserDied(f"exit code {code}")
    found: list[dict[str, Any]] = json.loads(answer)
    return found


async def decompress(source: int, offset: int, size: int, output: int, bytes_max: int) -> None:
    """A part of a file, unpacked into another one."""
    argv = ["decompress", str(offset), str(size), str(bytes_max)]
    code, _ = await _run(argv, None, UNPACK_SECONDS_MAX, source=source, output=output)
    if code == TOO_LARGE:
        raise NotUnpacked(f"it is larger than {bytes_max} bytes")
    if code != 0:
        raise NotUnpacked("it is damaged")


async def _run(
    argv: list[str], data: bytes | None, seconds: float, *, source: int | None = None, output: int | None = None
) -> tuple[int, bytes]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        __file__,
        *argv,
        stdin=asyncio.subprocess.PIPE if source is None else source,
        stdout=asyncio.subprocess.PIPE if output is None else output,
        stderr=asyncio.subprocess.DEVNULL,
        env={},
        cwd="/",
    )
    try:
        async with asyncio.timeout(seconds):
            answer = await _exchange(process, data)
            return await process.wait(), answer
    except TimeoutError as late:
        raise ParserDied(f"no answer within {seconds:g} s") from late
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _exchange(process: asyncio.subprocess.Process, data: bytes | None) -> bytes:
    if process.stdin is not None and data is not None:
        process.stdin.write(data)
        process.stdin.close()
    answer = bytearray()
    while process.stdout is not None and (piece := await process.stdout.read(CHUNK_BYTES)):
        answer += piece
        if len(answer) > ANSWER_BYTES_MAX:
            raise ParserDied(f"more than {ANSWER_BYTES_MAX} bytes")
    return bytes(answer)


# What runs inside.


def _limit(seconds: int, written_max: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (written_max, written_max))


def _parse_inside() -> int:
    # Go starts its threads when it is loaded: never in the daemon.
    parser = importlib.import_module("dockerfile")

    _limit(SECONDS_MAX, 0)
    text = sys.stdin.buffer.read(DOCKERFILE_BYTES_MAX + 1).decode("utf-8", "surrogateescape")
    try:
        commands = parser.parse_string(text)
    except ValueError as bad:
        answer: object = {"message": str(bad), "line": _line_of(parser.parse_string, text, str(bad))}
        code = NOT_PARSED
    else:
        answer, code = [_as_object(each) for each in commands], 0
    sys.stdout.buffer.write(json.dumps(answer).encode())
    return code


def _as_object(command: Any) -> dict[str, Any]:
    return {
        "cmd": command.cmd,
        "json": command.json,
        "original": command.original,
        "line": command.start_line,
        "flags": list(command.flags),
        "value": list(command.value),
        "heredocs": [{"name": each.name, "content": each.content} for each in command.heredocs],
    }


def _line_of(parse: Callable[[str], Any], text: str, message: str) -> int:
    """The parser does not say where: the shortest beginning that fails alike ends there."""
    lines = text.splitlines(keepends=True)

    def fails(count: int) -> str | None:
        try:
            parse("".join(lines[:count]))
        except ValueError as bad:
            return str(bad)
        return None

    if "heredoc" in message:
        starts = [index for index, line in enumerate(lines) if "<<" in line]
        for index in reversed(starts[-HEREDOCS_TRIED_MAX:]):
            if fails(index) in (None, "file with no instructions"):
                return index + 1
        return len(lines)
    low, high = 0, len(lines)
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fails(middle) == message else (middle, high)
    return max(high, 1)


def _decompress_inside(offset: int, size: int, bytes_max: int) -> int:
    _limit(UNPACK_SECONDS_MAX, bytes_max + CHUNK_BYTES)
    source, output = 0, 1
    start = os.pread(source, min(size, 8), offset)
    unpack = _decoder(start)
    written = at = 0
    while at < size:
        piece = os.pread(source, min(CHUNK_BYTES, size - at), offset + at)
        if not piece:
            return NOT_WHOLE
        at += len(piece)
        for made in unpack(piece):
            written += len(made)
            if written > bytes_max:
                return TOO_LARGE
            _write_all(output, made)
    for made in unpack(b""):
        _write_all(output, made)
    return 0


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _decoder(start: bytes) -> Callable[[bytes], Any]:
    """Bytes in, pieces of at most one chunk out; several members one after the other are one stream."""
    makers: list[tuple[bytes, Callable[[], Any]]] = [
        (GZIP, lambda: zlib.decompressobj(31)),
        (BZIP2, bz2.BZ2Decompressor),
        (XZ, lambda: lzma.LZMADecompressor(memlimit=256 * 1024 * 1024)),
    ]
    make = next((maker for magic, maker in makers if start.startswith(magic)), None)
    if make is None:
        return lambda piece: [piece] if piece else []
    state = [make()]

    def unpack(piece: bytes) -> Any:
        if not piece:
            if not state[0].eof:
                raise EOFError("cut short")
            return
        while piece:
            if state[0].eof:
                if not piece.strip(b"\0"):
                    return
                state[0] = make()
            yield state[0].decompress(piece, CHUNK_BYTES)
            piece = b""
            while _has_more(state[0]):
                yield state[0].decompress(getattr(state[0], "unconsumed_tail", b""), CHUNK_BYTES)
            if state[0].eof:
                piece = state[0].unused_data

    return unpack


def _has_more(decoder: Any) -> bool:
    if decoder.eof:
        return False
    tail = getattr(decoder, "unconsumed_tail", None)
    return bool(tail) if tail is not None else not decoder.needs_input


def _main(argv: list[str]) -> int:
    if argv[0] == "dockerfile":
        return _parse_inside()
    offset, size, bytes_max = (int(each) for each in argv[1:])
    try:
        return _decompress_inside(offset, size, bytes_max)
    except (zlib.error, lzma.LZMAError, EOFError, OSError, MemoryError):
        return NOT_WHOLE


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
