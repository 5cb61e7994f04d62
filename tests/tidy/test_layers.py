"""What import-linter cannot say: that a room imports the standard library and little else."""

import ast
import re
import sys
from pathlib import Path

from tests.tidy.sources import python_files, report, shown, tree

# Room (by path) -> what it may import besides the standard library and itself.
NARROW_ROOMS = {
    r"cloche_server/keeper/": r"cloche_server\.(engines\.(plan|spec)|engines\.\w+\.command)$",
    r"cloche_server/engines/(plan|spec)\.py$": r"(?!)",
    r"cloche_server/engines/\w+/command\.py$": r"cloche_server\.engines\.(plan|spec)$",
}


def _imported(path: Path) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            if _is_package(node.module):
                found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
            else:
                found.append((node.lineno, node.module))
    return found


def _is_package(module: str) -> bool:
    folder = module.replace(".", "/")
    return any(str(path).endswith(f"{folder}/__init__.py") for path in python_files("packages"))


def _allowed(name: str, room: str, also: str) -> bool:
    if name.partition(".")[0] in sys.stdlib_module_names:
        return True
    own = re.sub(r"[\\$]|\.py", "", room).strip("/").replace("/", ".")
    return name.startswith(own) or bool(re.match(also, name))


def test_narrow_rooms_import_what_they_may() -> None:
    problems = []
    for path in python_files("packages"):
        for room, also in NARROW_ROOMS.items():
            if re.search(room, str(path)):
                problems += [
                    f"{shown(path, line)} imports {name}"
                    for line, name in _imported(path)
                    if not _allowed(name, room, also)
                ]
    report(
        problems,
        "The keeper and what it imports run on the standard library alone: it holds every "
        "sandbox, so it must be small enough to be read whole.",
    )
