import pytest

from tools.bench.figure import Figure, percentile_95, summarise, take_samples


class Counting:
    """Remembers the order in which it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def ours(self) -> float:
        self.asked.append("ours")
        return len(self.asked)

    def bare(self) -> float:
        self.asked.append("bare")
        return len(self.asked)


def figure_with(at_most: float | None = None, at_least: float | None = None) -> Figure:
    return Figure("f", "ms", Counting, at_most, at_least, 3, 30)


def test_samples_alternate_and_the_first_pair_is_dropped() -> None:
    probe = Counting()
    ours, bare = take_samples(probe, 3)
    assert probe.asked == ["bare", "ours", "ours", "bare"] * 2
    assert (ours, bare) == ([3, 6, 7], [4, 5, 8])


@pytest.mark.parametrize(
    ("bound", "held"),
    [({"at_most": 1.15}, False), ({"at_most": 2.5}, True), ({"at_least": 1.5}, True), ({}, True)],
)
def test_the_bound_is_on_the_ratio_of_medians(bound: dict[str, float], held: bool) -> None:
    result = summarise(figure_with(**bound), [3.0, 4.0, 100.0], [2.0, 2.0, 2.0])
    assert (result.ours, result.bare, result.ratio) == (4.0, 2.0, 2.0)
    assert result.within_bound is held


def test_without_a_baseline_the_bound_is_on_our_own_figure() -> None:
    result = summarise(figure_with(at_most=5), [6.0, 6.0], [])
    assert result.bare is None
    assert result.ratio is None
    assert not result.within_bound


def test_p95_of_few_samples_is_the_largest() -> None:
    assert percentile_95([1.0, 9.0, 2.0]) == 9.0
    assert percentile_95([float(n) for n in range(100)]) == 95.0
