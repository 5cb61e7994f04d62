"""Makes the sync SDK from the async one: `python tools/unasync.py [--check]`.

A list of words and what each becomes, applied to the text; the result is formatted as the repository is. Whatever this can't
turn must not be written in `_async/`.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CLIENT = ROOT / "packages" / "cloche" / "src" / "cloche" / "client"
TESTS = ROOT / "tests" / "unit" / "client"
PAIRS = {
    **{path: CLIENT / "_sync" / path.name for path in sorted((CLIENT / "_async").glob("*.py"))},
    **{path: TESTS / path.name.replace("async_", "sync_") for path in sorted(TESTS.glob("test_async_*.py"))},
}
NOTE = "# Made by tools/unasync.py from {source}: edit that one.\n"

WORDS: list[tuple[str, str]] = [
    (r"asyncio\.to_thread\((\w+(?:\.\w+)*), ", r"\1("),
    (r"asyncio\.to_thread\((\w+(?:\.\w+)*)\)", r"\1()"),
    (r"\basyncio\.sleep\b", "time.sleep"),
    (r"^import asyncio\n", "import time\n"),
    (r"\bwebsockets\.asyncio\.client\b", "websockets.sync.client"),
    (r"\basync (def|with|for)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\b_async\b", "_sync"),
    (r"\bAsyncGenerator\[(.+?), None\]", r"Generator[\1, None, None]"),
    (r"\bAsync(?=[A-Z])", ""),
    (r"\basynccontextmanager\b", "contextmanager"),
    (r"\b__aenter__\b", "__enter__"),
    (r"\b__aexit__\b", "__exit__"),
    (r"\baclosing\b", "closing"),
    (r"\baclose\b", "close"),
    (r"\bhandle_async_request\b", "handle_request"),
    (r"\bByteStream\b", "SyncByteStream"),
    (r"\btest_async_", "test_sync_"),
    (r"\basync_", "sync_"),
]


def turned(text: str, source: Path) -> str:
    for word, other in WORDS:
        text = re.sub(word, other, text, flags=re.MULTILINE)
    text = _without_doubled_imports(text)
    if '"""The SDK, written by hand' in text:
        text = SYNC_PACKAGE
    return NOTE.format(source=source.relative_to(ROOT)) + text


def _without_doubled_imports(text: str) -> str:
    """`import asyncio` may become an `import time` that is there already."""
    lines = text.splitlines(keepends=True)
    first = next((number for number, line in enumerate(lines) if line == "import time\n"), None)
    return "".join(line for number, line in enumerate(lines) if line != "import time\n" or number == first)


SYNC_PACKAGE = '''"""The SDK without `await`: made from `_async/` by `tools/unasync.py`, never edited here.

Words used here: those of `_async/`. A test makes these files anew and compares. Each call waits in the calling thread;
objects may be used from several threads, one call at a time each.
Deliberately absent: anything that is not in `_async/`.
"""
'''


def formatted(text: str, name: Path) -> str:
    run = [
        "ruff",
        "check",
        "--quiet",
        "--fix-only",
        "--unsafe-fixes",
        "--select",
        "I,F401,UP028,C416",
        "--stdin-filename",
        str(name),
        "-",
    ]
    text = _piped(run, text)
    return _piped(["ruff", "format", "--quiet", "--stdin-filename", str(name), "-"], text)


def _piped(argv: list[str], text: str) -> str:
    tool = Path(sys.executable).parent / argv[0]
    return subprocess.run(
        [str(tool), *argv[1:]], input=text, capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout


def made() -> dict[Path, str]:
    return {target: formatted(turned(source.read_text(), source), target) for source, target in PAIRS.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if something would change")
    check = parser.parse_args().check
    stale = []
    for target, text in made().items():
        if not target.exists() or target.read_text() != text:
            stale.append(str(target.relative_to(ROOT)))
            if not check:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text)
    for name in stale:
        print(f"{'stale' if check else 'made'} {name}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
