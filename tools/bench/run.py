"""Measures every figure and writes build/bench.json.

    python -m tools.bench.run [--long] [--strict] [NAME...]

The figures are in tools/bench/figures_*.py. CI takes a few samples, to see that the
measurement works and to catch a disaster; `--long` takes at least 30 and is what README
quotes. A missed bound is shown, and fails the run only with --strict: a busy CI machine
is no verdict on the code.
"""

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tools.bench.figure import REGISTRY, Figure, Result, measure

ROOT = Path(__file__).parents[2]
OUTPUT = ROOT / "build" / "bench.json"
_BARS = "▁▂▃▄▅▆▇█"
_BUCKETS = 16


def load_figures() -> None:
    """Import every figures_*.py: importing registers."""
    for path in sorted(Path(__file__).parent.glob("figures_*.py")):
        importlib.import_module(f"tools.bench.{path.stem}")


def chosen(names: list[str]) -> list[Figure]:
    """Figures by name; all without names."""
    unknown = [name for name in names if name not in REGISTRY]
    if unknown:
        raise SystemExit(f"no figure is called {', '.join(unknown)}; there are {list(REGISTRY)}")
    return [fig for name, fig in REGISTRY.items() if not names or name in names]


def distribution(samples: list[float], low: float, high: float) -> str:
    """A histogram in one line, on the same axis for ours and bare."""
    counts = [0] * _BUCKETS
    width = (high - low) / _BUCKETS or 1.0
    for sample in samples:
        counts[min(_BUCKETS - 1, int((sample - low) / width))] += 1
    most = max(counts)
    return "".join(_BARS[(len(_BARS) - 1) * count // most] if count else " " for count in counts)


def show(results: list[Result]) -> None:
    """The table a person reads."""
    table = Table("figure", "who", "median", "p95", "unit", "distribution", "ratio", "bound")
    for result in results:
        everything = result.samples["ours"] + result.samples["bare"]
        low, high = min(everything), max(everything)
        colour = "green" if result.within_bound else "red"
        judged = "" if result.ratio is None else f"[{colour}]{result.ratio:.3f}[/]"
        ours = distribution(result.samples["ours"], low, high)
        row = (f"{result.ours:.3f}", f"{result.p95:.3f}", result.unit, ours, judged)
        table.add_row(result.name, "ours", *row, f"[{colour}]{result.bound}[/]")
        if result.bare is not None:
            bare = distribution(result.samples["bare"], low, high)
            row = (f"{result.bare:.3f}", f"{result.bare_p95:.3f}", result.unit, bare, "")
            table.add_row("", "bare", *row, "")
        table.add_section()
    Console(width=120).print(table)


def machine() -> dict[str, object]:
    """Enough to judge a figure by."""
    argv = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    commit = subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "commit": commit,
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "taken": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def main() -> int:
    """Measure, write, show."""
    parser = argparse.ArgumentParser(description="measure Cloche against the bare engine")
    parser.add_argument("names", nargs="*", metavar="NAME", help="figures; all without")
    parser.add_argument("--long", action="store_true", help="30 samples or more of each")
    parser.add_argument("--strict", action="store_true", help="fail when a bound is missed")
    arguments = parser.parse_args()
    load_figures()
    about = machine() | {"long": arguments.long}
    results = []
    for fig in chosen(arguments.names):
        n = fig.samples_long if arguments.long else fig.samples_ci
        print(f"{fig.name}: {n} samples", flush=True)
        results.append(measure(fig, long=arguments.long))
    OUTPUT.parent.mkdir(exist_ok=True)
    document = {"machine": about, "figures": [asdict(result) for result in results]}
    OUTPUT.write_text(json.dumps(document, indent=1) + "\n")
    show(results)
    missed = [result.name for result in results if not result.within_bound]
    if missed:
        print(f"bound missed: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed and arguments.strict else 0


if __name__ == "__main__":
    raise SystemExit(main())
