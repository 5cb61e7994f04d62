"""What every test shares: requirement marks, `--long`, the seed, and the record of a run.

Each run writes build/evidence/<time>-<pid>.json (or $CLOCHE_EVIDENCE_DIR): which tests of
which requirement ran and how they ended. `just evidence` reads those files. Fixtures that
need a node live beside the tests that use them, not here.
"""

import json
import os
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SEED_VARIABLE = "CLOCHE_TEST_SEED"

_outcomes: dict[str, dict[str, object]] = {}
_started = time.time()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("cloche")
    group.addoption("--long", action="store_true", help="full counts; also tests marked long")
    group.addoption("--req", metavar="ID", help="only tests marked with this requirement")


def pytest_configure(config: pytest.Config) -> None:
    # In the environment, so that xdist's workers and started processes share it.
    os.environ.setdefault(SEED_VARIABLE, str(random.SystemRandom().randrange(2**32)))


def pytest_report_header(config: pytest.Config) -> str:
    seed = os.environ[SEED_VARIABLE]
    size = "long" if config.getoption("--long") else "CI"
    return f"cloche: {size} size, {SEED_VARIABLE}={seed}"


@pytest.fixture(scope="session")
def seed() -> int:
    """Fresh for each run and printed in its header; the variable repeats a run."""
    return int(os.environ[SEED_VARIABLE])


@pytest.fixture(scope="session")
def long_run(pytestconfig: pytest.Config) -> bool:
    """Whether to take the full counts of SPECIFICATION.md instead of CI's."""
    return bool(pytestconfig.getoption("--long"))


def _reqs(item: pytest.Item) -> list[str]:
    return [str(mark.args[0]) for mark in item.iter_markers("req")]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = config.getoption("--req")
    long = config.getoption("--long")
    left_out = [
        item
        for item in items
        if (wanted and wanted not in _reqs(item)) or (item.get_closest_marker("long") and not long)
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    # Part of the report, so that it survives the way from an xdist worker.
    report.user_properties = [*report.user_properties, ("reqs", _reqs(item))]
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    reqs = dict(report.user_properties).get("reqs")
    if not reqs:
        return
    entry = _outcomes.setdefault(report.nodeid, {"reqs": reqs, "outcome": "passed", "phase": "call", "duration_s": 0.0})
    entry["duration_s"] = round(float(str(entry["duration_s"])) + report.duration, 3)
    if not report.passed and entry["outcome"] == "passed":
        entry["outcome"], entry["phase"] = report.outcome, report.when or "call"


def _commit() -> str:
    argv = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput") or not _outcomes:
        return  # an xdist worker, or a run without a single marked test
    folder = Path(os.environ.get("CLOCHE_EVIDENCE_DIR", ROOT / "build" / "evidence"))
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "commit": _commit(),
        "seed": int(os.environ[SEED_VARIABLE]),
        "long": bool(session.config.getoption("--long")),
        "started": _started,
        "tests": _outcomes,
    }
    (folder / f"{int(_started * 1000)}-{os.getpid()}.json").write_text(json.dumps(record, indent=1))
