"""Every code block of README and tutorial works as printed, on a real node.

A ```console block: each line behind `$ ` is typed in turn, in one directory a page. It must exit with 0, or with
N where `# → exit N` stands below it. Other lines below it are what stdout must be; `...` stands for anything.
A ```python block is run as a program. Blocks without one of these two words are not commands of ours.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.promises.nodes import CLI, RealNode

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/tutorial.md")
BLOCK = re.compile(r"^```(console|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXIT = re.compile(r"# → exit (\d+)")
STEP_S_MAX = 60


@dataclass
class Step:
    """One thing that a reader would do."""

    argv: list[str]
    shown: str
    exit_code: int = 0
    expected: list[str] = field(default_factory=list)

    def run(self, folder: Path, environment: dict[str, str]) -> None:
        done = subprocess.run(
            self.argv,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=STEP_S_MAX,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        said = f"{self.shown}\nexit code {done.returncode}\nstdout: {done.stdout}\nstderr: {done.stderr}"
        assert done.returncode == self.exit_code, said
        assert matches("\n".join(self.expected), done.stdout.rstrip("\n")) or not self.expected, said


def matches(expected: str, found: str) -> bool:
    """Equal, but for runs of blanks; `...` stands for anything, also for nothing and for many lines."""
    parts = [r"[ ]+".join(re.escape(word) for word in re.split(" +", part)) for part in expected.split("...")]
    return re.fullmatch(".*?".join(parts), found, re.DOTALL) is not None


def steps_of(page: str) -> list[Step]:
    steps = []
    for kind, text in BLOCK.findall((ROOT / page).read_text()):
        steps += _console(text) if kind == "console" else [Step([sys.executable, "-c", text], text)]
    return steps


def _console(text: str) -> list[Step]:
    steps: list[Step] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            steps.append(Step(["bash", "-c", line[2:]], line))
        elif found := EXIT.match(line):
            steps[-1].exit_code = int(found[1])
        else:
            steps[-1].expected.append(line)
    return steps


def test_pages_have_blocks() -> None:
    for page in PAGES:
        assert len(steps_of(page)) > 5, page


def test_expected_lines_are_compared() -> None:
    assert matches("ID ... OWNER\n...demo...", "ID  IMAGE  OWNER\ns1 (demo)  x")
    assert matches("...\nonce", "hello\nonce")
    assert not matches("42", "43")


@pytest.mark.req("UX-1")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES)
def test_every_block_works(page: str, tmp_path: Path, own_node: RealNode) -> None:
    environment = {**own_node.environment, "PATH": f"{CLI.parent}:{os.environ['PATH']}"}
    for step in steps_of(page):
        step.run(tmp_path, environment)
