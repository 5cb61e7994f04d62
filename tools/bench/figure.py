"""Figures: what is measured, ours against the bare engine, and the statistics of it.

A figure is a class with two methods that each return one sample:

    @figure("cold_create", unit="ms", at_most=1.15)
    class ColdCreate:
        is_long = False                   # optional: set to True for `--long`
        unit = "s"                        # optional: set while it runs, where the size differs with `--long`
        def __enter__(self): ...          # optional: set up once
        def __exit__(self, *exc): ...     # optional: undo it
        def ours(self) -> float: ...
        def bare(self) -> float: ...      # the engine's fastest documented flags

Samples are taken in turn (ours, bare, bare, ours, ...), so that whatever else the machine
does falls on both. `ratio` is median over median; `at_most` and `at_least` are its bound.
A figure without a baseline leaves `bare` out; then the bound is on our own median.
"""

import contextlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

CI_SAMPLES = 10
LONG_SAMPLES = 30


@dataclass(frozen=True)
class Figure:
    """A registered measurement with its bound."""

    name: str
    unit: str
    probe: type[Any]
    at_most: float | None
    at_least: float | None
    samples_ci: int
    samples_long: int
    warm_up: bool = True


@dataclass(frozen=True)
class Result:
    """One line of build/bench.json, with the samples it came from."""

    name: str
    unit: str
    ours: float
    bare: float | None
    ratio: float | None
    n: int
    p95: float
    bare_p95: float | None
    bound: str
    within_bound: bool
    samples: dict[str, list[float]]


REGISTRY: dict[str, Figure] = {}


def figure(
    name: str,
    *,
    unit: str,
    at_most: float | None = None,
    at_least: float | None = None,
    samples_ci: int = CI_SAMPLES,
    samples_long: int = LONG_SAMPLES,
    warm_up: bool = True,
) -> Callable[[type[Any]], type[Any]]:
    """Register a probe class under a name; the bound is on the ratio."""

    def register(probe: type[Any]) -> type[Any]:
        assert name not in REGISTRY, f"two figures are called {name}"
        REGISTRY[name] = Figure(name, unit, probe, at_most, at_least, samples_ci, samples_long, warm_up)
        return probe

    return register


def percentile_95(samples: list[float]) -> float:
    """The smallest sample that 95 % do not exceed."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]


def take_samples(probe: Any, n: int, *, warm_up: bool = True) -> tuple[list[float], list[float]]:
    """n of each, the order swapped every time; with `warm_up` the first pair is dropped."""
    ours: list[float] = []
    bare: list[float] = []
    has_bare = hasattr(probe, "bare")
    for index in range(0 if warm_up else 1, n + 1):
        turns = [(probe.ours, ours)]
        if has_bare:
            turns.insert(index % 2, (probe.bare, bare))
        for sample, kept in turns:
            value = float(sample())
            if index > 0:
                kept.append(value)
    return ours, bare


def measure(fig: Figure, *, long: bool) -> Result:
    """Set up, sample, undo, summarise."""
    n = fig.samples_long if long else fig.samples_ci
    instance = fig.probe()
    instance.is_long = long
    context = instance if hasattr(instance, "__enter__") else contextlib.nullcontext(instance)
    with context:
        ours, bare = take_samples(instance, n, warm_up=fig.warm_up)
    return replace(summarise(fig, ours, bare), unit=getattr(instance, "unit", fig.unit))


def summarise(fig: Figure, ours: list[float], bare: list[float]) -> Result:
    """Medians, 95th percentiles, ratio, and whether the bound holds."""
    our_median = statistics.median(ours)
    bare_median = statistics.median(bare) if bare else None
    ratio = our_median / bare_median if bare_median else None
    judged = our_median if ratio is None else ratio
    bounds = [f"<= {fig.at_most}"] if fig.at_most is not None else []
    bounds += [f">= {fig.at_least}"] if fig.at_least is not None else []
    held = (fig.at_most is None or judged <= fig.at_most) and (fig.at_least is None or judged >= fig.at_least)
    return Result(
        name=fig.name,
        unit=fig.unit,
        ours=round(our_median, 4),
        bare=None if bare_median is None else round(bare_median, 4),
        ratio=None if ratio is None else round(ratio, 4),
        n=len(ours),
        p95=round(percentile_95(ours), 4),
        bare_p95=round(percentile_95(bare), 4) if bare else None,
        bound=" and ".join(bounds),
        within_bound=held,
        samples={"ours": ours, "bare": bare},
    )
