"""The files of the repository, as the tidy tests see them: tracked, or new and not ignored."""

import ast
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def files() -> tuple[Path, ...]:
    argv = ["git", "-C", str(ROOT), "ls-files", "-z", "-co", "--exclude-standard"]
    listed = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split("\0")
    return tuple(sorted(ROOT / name for name in listed if name and (ROOT / name).is_file()))


def python_files(*folders: str) -> list[Path]:
    """Python modules, all or below the given top-level folders."""
    return [path for path in files() if path.suffix == ".py" and _below(path, folders)]


def _below(path: Path, folders: tuple[str, ...]) -> bool:
    return not folders or path.relative_to(ROOT).parts[0] in folders


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


@cache
def lines(path: Path) -> tuple[str, ...]:
    return tuple(path.read_text().splitlines())


def shown(path: Path, line: int | None = None) -> str:
    """`path:line` relative to the root, for messages one can click on."""
    name = str(path.relative_to(ROOT))
    return name if line is None else f"{name}:{line}"


def report(problems: list[str], advice: str) -> None:
    """Fail with every problem at once and what to do about them."""
    assert not problems, "\n".join(["", *problems, "", advice])
