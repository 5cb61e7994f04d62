import ast
import re

from tests.tidy.sources import files, python_files, report, shown, tree

DRAWERS = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "managers"}
VAGUE_CLASS = re.compile(r".(Manager|Helper|Util|Utils|Service|Handler)$")


def test_there_are_no_drawers() -> None:
    problems = []
    for path in files():
        if path.suffix in {".py", ".rs"}:
            names = {path.stem, *path.parent.parts}
            if names & DRAWERS or path.stem.startswith("base_"):
                problems.append(shown(path))
    report(
        problems,
        "These names say nothing of what is inside. Put each function where its subject lives.",
    )


def test_classes_are_named_after_what_they_are() -> None:
    problems = [
        f"{shown(path, node.lineno)} class {node.name}"
        for path in python_files()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef) and VAGUE_CLASS.search(node.name)
    ]
    report(problems, "Manager, Helper, Util, Service, Handler: name the thing, not that it does things.")
