"""The end of a guest's tar is found wherever the pieces are cut, and one entry is put behind."""

import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche_server.node.tar_tail import RESULT_NAME, TarBroken, TarTail, result_entry


def archive(contents: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in contents.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return made.getvalue()


@given(
    contents=st.dictionaries(
        st.text("abcä/", min_size=1, max_size=120).map(lambda name: f"d/{name}x"),
        st.binary(max_size=1500) | st.integers(0, 3000).map(bytes),
        max_size=4,
    ),
    cut=st.integers(1, 1400),
)
def test_every_entry_passes_and_ours_is_the_last(contents: dict[str, bytes], cut: int) -> None:
    source, tail = archive(contents), TarTail()
    passed = b"".join(tail.feed(source[at : at + cut]) for at in range(0, len(source), cut))
    assert tail.is_whole
    with tarfile.open(fileobj=io.BytesIO(passed + result_entry(b'{"files":1}'))) as tar:
        names = [member.name for member in tar.getmembers()]
        assert names == [*contents, RESULT_NAME]
        for name, content in contents.items():
            member = tar.extractfile(name)
            assert member is not None
            assert member.read() == content


def test_a_stream_cut_in_the_middle_is_not_whole() -> None:
    tail = TarTail()
    tail.feed(archive({"a": b"x" * 1000})[:700])
    assert not tail.is_whole


def test_a_size_that_is_no_number_has_a_name() -> None:
    source = bytearray(archive({"a": b"x"}))
    source[124:136] = b"not a number"
    with pytest.raises(TarBroken):
        TarTail().feed(bytes(source))
