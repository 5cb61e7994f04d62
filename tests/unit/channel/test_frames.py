import contextlib
import json
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloche_server.channel import credit, frames, messages, reset, streams
from cloche_server.channel.errors import BadFrame
from cloche_server.channel.frames import FRAME_BYTES_MAX, PAYLOAD_BYTES_MAX, Decoder, Kind, decode_json, encode

PROTOCOL = Path(__file__).parents[3] / "protocol" / "guest"
GEN = json.loads((PROTOCOL / "gen-1.json").read_text())
VECTORS = sorted((PROTOCOL / "vectors").glob("*.json"))
SPLITS_ALL_BELOW_BYTES = 2_000

Plain = tuple[int, int, bytes]


def decode(pieces: list[bytes]) -> tuple[list[Plain], str | None]:
    decoder, out = Decoder(), list[Plain]()
    try:
        for piece in pieces:
            out.extend((kind, stream, bytes(payload)) for kind, stream, payload in decoder.feed(piece))
            assert decoder.kept_bytes < FRAME_BYTES_MAX
    except BadFrame as error:
        return out, error.reason
    return out, None


@pytest.mark.req("EXE-1")
def test_numbers_are_the_contracts() -> None:
    assert GEN["generation"] == frames.GENERATION
    assert {kind.name: int(kind) for kind in Kind} == GEN["kinds"]
    assert struct.calcsize(GEN["frame"]["header"]) == frames.HEADER_BYTES
    assert struct.calcsize(GEN["frame"]["trailer"]) == frames.TRAILER_BYTES
    assert GEN["frame"]["payload_bytes_max"] == frames.PAYLOAD_BYTES_MAX
    assert GEN["ping_bytes_max"] == frames.PING_BYTES_MAX
    assert GEN["json_depth_max"] == frames.JSON_DEPTH_MAX
    assert GEN["window_bytes_start"] == credit.WINDOW_BYTES_START
    assert GEN["window_bytes_max"] == credit.WINDOW_BYTES_MAX
    assert GEN["windows_bytes_per_sandbox_max"] == credit.WINDOWS_BYTES_PER_SANDBOX_MAX
    assert streams.STREAMS_PER_OPENER_MAX == reset.STATE_STREAMS_MAX == GEN["streams_per_opener_max"]
    assert GEN["nonce_bytes"] == reset.NONCE_BYTES
    assert GEN["reset_padding_bytes"] == reset.PADDING_BYTES
    assert GEN["reattach_scan_bytes_max"] == reset.SCAN_BYTES_MAX
    assert GEN["reattach_seconds_max"] == reset.SCAN_SECONDS_MAX
    assert set(GEN["error_codes"]) == messages.ERROR_CODES


def _joined(vector: dict[str, object], name: str) -> bytes:
    parts = vector.get(f"{name}parts") or [{"hex": vector[f"{name}hex"], "repeat": 1}]
    return b"".join(bytes.fromhex(part["hex"]) * part["repeat"] for part in parts)  # type: ignore[attr-defined]


def _expected(vector: dict[str, object]) -> list[Plain]:
    listed = vector["frames"]
    assert isinstance(listed, list)
    return [(GEN["kinds"].get(f["kind"], f["kind"]), f["stream"], _joined(f, "payload_")) for f in listed]


def test_vectors_are_there() -> None:
    assert len(VECTORS) >= 15, "one for every kind, at least"


@pytest.mark.req("EXE-1")
@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
def test_vector_at_every_split(path: Path) -> None:
    """The host stops at the first error (the sandbox ends); frames the vector lists after it are the guest's business."""
    vector = json.loads(path.read_text())
    raw, expected = _joined(vector, ""), _expected(vector)
    whole, error = decode([raw])
    assert error == vector["error"]
    assert whole == (expected if error is None else expected[: len(whole)])
    step = 1 if len(raw) <= SPLITS_ALL_BELOW_BYTES else len(raw) // 64
    for at in range(1, len(raw), step):
        assert decode([raw[:at], raw[at:]]) == (whole, error), f"cut at {at}"


FRAMES = st.tuples(st.sampled_from(list(Kind)), st.integers(0, 2**32 - 1), st.binary(max_size=300))


@pytest.mark.req("EXE-1")
@given(st.lists(st.tuples(FRAMES, st.integers(0, 3)), max_size=12), st.data())
def test_frames_survive_any_split_and_padding(plan: list[tuple[Plain, int]], data: st.DataObject) -> None:
    raw = b"".join(bytes(padding) + encode(*frame) for frame, padding in plan)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert decode(pieces) == ([frame for frame, _ in plan], None)


@pytest.mark.req("ISO-7")
@given(st.lists(st.binary(max_size=2000), max_size=20))
def test_garbage_raises_nothing_but_bad_frame_and_keeps_less_than_a_frame(pieces: list[bytes]) -> None:
    _, error = decode(pieces)
    assert error in {None, "crc", "length", "kind"}


@pytest.mark.req("ISO-7")
@given(FRAMES, st.data())
def test_one_flipped_bit_is_found(frame: Plain, data: st.DataObject) -> None:
    raw = bytearray(encode(*frame))
    bit = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[bit // 8] ^= 1 << bit % 8
    got, _ = decode([bytes(raw)])
    assert frame not in got or not raw[0]


@pytest.mark.req("ISO-7")
def test_largest_frame_and_one_byte_more() -> None:
    payload = bytes(PAYLOAD_BYTES_MAX)
    assert decode([encode(Kind.DATA, 2, payload)]) == ([(Kind.DATA, 2, payload)], None)
    assert decode([struct.pack("<BII", 4, 2, PAYLOAD_BYTES_MAX + 1)]) == ([], "length")


def test_a_payload_dies_with_the_next_frame() -> None:
    walk = Decoder().feed(encode(Kind.DATA, 2, b"one") + encode(Kind.DATA, 2, b"two"))
    _, _, first = next(walk)
    assert bytes(first) == b"one"
    next(walk)
    with pytest.raises(ValueError, match="released"):
        bytes(first)


def test_a_stopped_iterator_keeps_the_rest() -> None:
    decoder = Decoder()
    walk = decoder.feed(encode(Kind.DATA, 2, b"one") + encode(Kind.DATA, 2, b"two"))
    next(walk)
    walk.close()
    assert [bytes(payload) for _, _, payload in decoder.feed(b"")] == [b"two"]


def _nested(depth: int) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth


@pytest.mark.req("ISO-7")
@pytest.mark.parametrize(
    "payload",
    [
        b"", b"[]", b"1", b"{", b'{"a":NaN}', b'{"a":-Infinity}', b"\xff{}", b"\xef\xbb\xbf{}", "{}".encode("utf-16"),
        b'{"a":' + b"9" * 5000 + b"}", b"[" * 100_000, b'{"a":' + b"[" * 60_000 + b"]" * 60_000 + b"}", _nested(17),
        b'{"a":' + b" " * PAYLOAD_BYTES_MAX + b"1}",
    ],
    ids=range(14),
)  # fmt: skip
def test_hostile_json_is_a_bad_frame(payload: bytes) -> None:
    with pytest.raises(BadFrame) as caught:
        decode_json(payload)
    assert caught.value.reason == "json"


def test_json_at_the_bounds() -> None:
    assert decode_json(_nested(16))
    assert decode_json(b'{"path":"/a\\udcff"}') == {"path": "/a\udcff"}
    assert decode_json(frames.encode_json({"path": "/a\udcff"})) == {"path": "/a\udcff"}


@pytest.mark.req("ISO-7")
@settings(max_examples=300)
@given(st.binary(max_size=400) | st.text(alphabet='{}[]":,0123456789eE.-ntf\\u d', max_size=200).map(str.encode))
def test_json_raises_nothing_but_bad_frame(payload: bytes) -> None:
    with contextlib.suppress(BadFrame):
        assert isinstance(decode_json(payload), dict)
