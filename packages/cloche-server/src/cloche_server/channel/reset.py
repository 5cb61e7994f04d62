"""Re-attach: find the guest's STATE in whatever a predecessor left in the pipe, and say where to go on.

Until a STATE with our nonce is found nothing that was read is believed; a guest can only make the search
longer, and the search is bounded in bytes and in tries here, and in time by the pump.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cloche_server.channel.credit import WINDOW_BYTES_MAX
from cloche_server.channel.errors import BadFrame, ProtocolError
from cloche_server.channel.frames import (
    FRAME_BYTES_MAX,
    HEADER_BYTES,
    STREAM_ID_MAX,
    TRAILER_BYTES,
    Decoder,
    Kind,
    decode_json,
    encode,
    encode_json,
)
from cloche_server.channel.messages import JsonObject, check_count, check_flag, check_text

NONCE_BYTES = 16
PADDING_BYTES = FRAME_BYTES_MAX
SCAN_BYTES_MAX = 67_108_864
SCAN_SECONDS_MAX = 10
SCAN_TRIES_MAX = 64  # places that hold the nonce: an honest guest has one
STATE_STREAMS_MAX = 512
OFFSET_MAX = 2**62
COMMAND_CHARS_MAX = 128


@dataclass(frozen=True, slots=True)
class StreamState:
    """What the guest says about one stream."""

    op: str
    command: str | None
    opened: bool
    sent: int
    acked: int
    received: int
    eof_sent: bool
    eof_received: bool
    ended: bool


@dataclass(frozen=True, slots=True)
class State:
    """A checked STATE."""

    streams: dict[int, StreamState]
    highest_host: int
    highest_guest: int


def reset_bytes(nonce: bytes) -> bytes:
    """One maximum frame of zeros, which ends any half frame in the guest's decoder, and RESET."""
    assert len(nonce) == NONCE_BYTES
    return bytes(PADDING_BYTES) + encode(Kind.RESET, 0, nonce)


class Scan:
    """Fed with bytes until they hold STATE with the nonce. Keeps at most one frame and what was fed last."""

    def __init__(self, nonce: bytes, *, bytes_max: int = SCAN_BYTES_MAX) -> None:
        self._nonce = nonce
        self._kept = bytearray()
        self._bytes_left = bytes_max
        self._tries_left = SCAN_TRIES_MAX
        self._waiting = False
        self.rest = b""

    def feed(self, data: bytes | memoryview) -> State | None:
        """The state, once found; what follows it is then in `rest`. Raises ProtocolError `unresponsive` at the bound."""
        self._kept += data
        while True:
            at = self._kept.find(self._nonce, HEADER_BYTES)
            if at < 0:
                # Keep what may be the start of a frame whose nonce is not here yet.
                del self._kept[: max(0, len(self._kept) - HEADER_BYTES - NONCE_BYTES + 1)]
                break
            self._tries_left -= 1
            if self._tries_left < 0:
                raise ProtocolError("unresponsive", "the nonce in too many places that are no STATE")
            payload = self._frame_at(at - HEADER_BYTES)
            if payload is not None:
                return check_state(decode_json(payload[NONCE_BYTES:]))
            if self._waiting:
                self._tries_left += 1
                del self._kept[: at - HEADER_BYTES]
                break
            del self._kept[: at - HEADER_BYTES + 1]
        self._bytes_left -= len(data)
        if self._bytes_left <= 0:
            raise ProtocolError("unresponsive", "no STATE within the bytes that a re-attach reads")
        return None

    def _frame_at(self, start: int) -> bytes | None:
        self._waiting = False
        head = self._kept[start : start + HEADER_BYTES]
        length = int.from_bytes(head[5:9], "little")
        if head[:5] != bytes((Kind.STATE, 0, 0, 0, 0)) or not NONCE_BYTES <= length <= FRAME_BYTES_MAX - 13:
            return None
        stop = start + HEADER_BYTES + length + TRAILER_BYTES
        if len(self._kept) < stop:
            self._waiting = True
            return None
        try:
            for _, _, payload in Decoder().feed(memoryview(self._kept)[start:stop].tobytes()):
                self.rest = bytes(self._kept[stop:])
                return bytes(payload)
        except BadFrame:
            pass
        return None


def check_state(message: JsonObject) -> State:
    """Nothing here is believed beyond its bounds: ids, counts, and at most one window between acked and sent."""
    highest_host = check_count(message, "highest_host", STREAM_ID_MAX)
    highest_guest = check_count(message, "highest_guest", STREAM_ID_MAX)
    if highest_host % 2 or (highest_guest and not highest_guest % 2):
        raise ProtocolError("state", "highest ids of the wrong parity")
    streams = message.get("streams")
    if not isinstance(streams, dict) or len(streams) > STATE_STREAMS_MAX:
        raise ProtocolError("state", f"streams is not an object of at most {STATE_STREAMS_MAX}")
    checked: dict[int, StreamState] = {}
    for name, value in streams.items():
        stream = _stream_id(name)
        if stream > (highest_guest if stream % 2 else highest_host):
            raise ProtocolError("state", f"stream {stream} is above the highest id")
        if not isinstance(value, dict):
            raise ProtocolError("state", f"stream {stream} is not an object")
        checked[stream] = _stream_state(stream, value)
    return State(dict(sorted(checked.items())), highest_host, highest_guest)


def _stream_id(name: str) -> int:
    if not (name.isascii() and name.isdigit() and len(name) <= 10) or name[0] == "0" or int(name) > STREAM_ID_MAX:
        raise ProtocolError("state", "a stream id is not a decimal number of 32 bits")
    return int(name)


def _stream_state(stream: int, value: JsonObject) -> StreamState:
    state = StreamState(
        op=check_text(value, "op"),
        command=check_text(value, "command", COMMAND_CHARS_MAX) if value.get("command") is not None else None,
        opened=check_flag(value, "opened"),
        sent=check_count(value, "sent", OFFSET_MAX),
        acked=check_count(value, "acked", OFFSET_MAX),
        received=check_count(value, "received", OFFSET_MAX),
        eof_sent=check_flag(value, "eof_sent"),
        eof_received=check_flag(value, "eof_received"),
        ended=check_flag(value, "ended"),
    )
    if not state.acked <= state.sent <= state.acked + WINDOW_BYTES_MAX:
        raise ProtocolError("state", f"stream {stream} sent {state.sent} and kept from {state.acked}")
    return state


def check_logged(state: State, logged: Mapping[int, int]) -> None:
    """The log's offsets must lie where the guest can go on; else one of the two lies or lost bytes."""
    for stream, offset in logged.items():
        known = state.streams.get(stream)
        if known is None or stream % 2:
            raise ProtocolError("resume", f"stream {stream} cannot be kept")
        if not known.acked <= offset <= known.sent:
            raise ProtocolError("resume", f"stream {stream} is logged to {offset}, not in {known.acked}..{known.sent}")


def resume_bytes(nonce: bytes, state: State, logged: Mapping[int, int]) -> bytes:
    """RESUME: the streams to keep with their offsets; all others of STATE are closed."""
    check_logged(state, logged)
    message = {
        "streams": {str(stream): {"logged": offset} for stream, offset in logged.items()},
        "close": [stream for stream in state.streams if stream not in logged],
    }
    return encode(Kind.RESUME, 0, nonce + encode_json(message))
