"""The fuzz entry itself runs in the gate, on random bytes and on frames with valid checksums."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche_server.channel.frames import Kind, encode
from tests.unit.channel.fuzz_decoder import fuzz_one

FRAMES = st.builds(encode, st.sampled_from(list(Kind)), st.integers(0, 6), st.binary(max_size=60))


@pytest.mark.req("ISO-7")
@given(st.binary(max_size=3000) | st.lists(FRAMES, max_size=8).map(lambda frames: b"\x05" + b"".join(frames)))
def test_fuzz_entry(data: bytes) -> None:
    fuzz_one(data)
