"""Watermarks: each refuses by its name, with a time to try again."""

from dataclasses import replace

import pytest

from cloche.wire.defaults import GIB, MIB
from cloche.wire.errors import ClocheError
from cloche_server.node import admission
from cloche_server.node.admission import Ask, Use, Watermarks

ROOMY = Use(
    sandboxes=3,
    disk_free_bytes=100 * GIB,
    disk_reserved_bytes=6 * GIB,
    memory_free_bytes=8 * GIB,
    descriptors_used=100,
    descriptors_max=4096,
    log_bytes=GIB,
)
ASK = Ask(disk_bytes=2 * GIB, memory_bytes=512 * MIB)


@pytest.mark.req("RES-1")
def test_room_is_room() -> None:
    admission.admit(ROOMY, ASK, Watermarks())


@pytest.mark.req("RES-1")
@pytest.mark.parametrize(
    ("use", "watermark"),
    [
        (replace(ROOMY, sandboxes=1000), "sandboxes"),
        (replace(ROOMY, disk_free_bytes=2 * GIB), "disk"),
        (replace(ROOMY, disk_reserved_bytes=98 * GIB), "disk"),
        (replace(ROOMY, memory_free_bytes=256 * MIB), "memory"),
        (replace(ROOMY, descriptors_used=4030), "descriptors"),
        (replace(ROOMY, log_bytes=64 * GIB), "log_bytes"),
    ],
)
def test_each_watermark_refuses_by_name(use: Use, watermark: str) -> None:
    with pytest.raises(ClocheError) as refused:
        admission.admit(use, ASK, Watermarks())
    assert refused.value.code == "overloaded"
    assert refused.value.detail == {"watermark": watermark}
    assert refused.value.retry_after_s


@pytest.mark.req("RES-1")
def test_disk_is_promised_before_it_is_written() -> None:
    marks = Watermarks()
    use = replace(ROOMY, disk_free_bytes=7 * GIB, disk_reserved_bytes=0)
    admitted = 0
    while admission.refusal(use, ASK, marks) is None:
        use = replace(use, disk_reserved_bytes=use.disk_reserved_bytes + ASK.disk_bytes)
        admitted += 1
    assert admitted == 3


def test_the_machine_can_be_read(tmp_path: object) -> None:
    used, most = admission.descriptors()
    assert 0 < used < most
    assert admission.memory_free() > 0
