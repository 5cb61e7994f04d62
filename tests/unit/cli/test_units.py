import pytest

from cloche.cli import units


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("64m", 64 << 20),
        ("512MB", 512 << 20),
        ("2g", 2 << 30),
        ("1.5g", 3 << 29),
        ("4096", 4096),
        ("1k", 1024),
        ("2GiB", 2 << 30),
    ],
)
def test_sizes(text: str, count: int) -> None:
    assert units.parse_size(text) == count


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("5m", 300), ("1h30m", 5400), ("2d", 172800), ("500ms", 0.5)]
)
def test_times(text: str, seconds: float) -> None:
    assert units.parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "-5m", "12x", "1h 30m", "five"])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        units.parse_duration(text)
    with pytest.raises(ValueError):
        units.parse_size(text + "q")


def test_shown() -> None:
    assert units.size(64 << 20) == "64 MB"
    assert units.size(41.2 * 1024**2) == "41 MB"
    assert units.size(1536 << 20) == "1.5 GB"
    assert units.size_flag(512 << 20) == "512m"
    assert units.size_flag(2 << 30) == "2g"
    assert [units.span(s) for s in (None, 3, 250, 3400, 7300, 200000)] == ["-", "3s", "4m", "56m", "2h", "2d"]
    assert [units.words(s) for s in (300, 90, 86400, 0.5)] == ["5 min", "90 s", "24 h", "0.5 s"]
