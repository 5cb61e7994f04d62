import ast
from pathlib import Path

from tests.tidy.sources import ROOT, lines, python_files, report, shown, tree

PACKAGE_DOCSTRING_LINES_MIN = 5


def _is_broad(handler: ast.ExceptHandler) -> bool:
    caught = handler.type
    if caught is None:
        return True
    parts = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(isinstance(p, ast.Name) and p.id in {"Exception", "BaseException"} for p in parts)


def _undoes_and_reraises(handler: ast.ExceptHandler) -> bool:
    """Hides nothing, so it needs no excuse."""
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def _says_why(path: Path, handler: ast.ExceptHandler) -> bool:
    """A comment on the line, or between it and the first statement."""
    first = handler.body[0].lineno
    return any("#" in line for line in lines(path)[handler.lineno - 1 : first])


def test_broad_excepts_say_why() -> None:
    problems = [
        shown(path, node.lineno)
        for path in python_files()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ExceptHandler)
        and _is_broad(node)
        and not _undoes_and_reraises(node)
        and not _says_why(path, node)
    ]
    report(
        problems,
        "`except Exception` hides what nobody thought of. Catch less, or say on that line "
        "why everything must be caught here.",
    )


def test_packages_introduce_themselves() -> None:
    problems = []
    for path in python_files("packages"):
        if path.name == "__init__.py":
            text = ast.get_docstring(tree(path)) or ""
            count = len(text.splitlines())
            if count < PACKAGE_DOCSTRING_LINES_MIN:
                problems.append(f"{shown(path)}: {count} lines")
    report(
        problems,
        f"A package's docstring (at least {PACKAGE_DOCSTRING_LINES_MIN} lines) names the words "
        "used in it and what is deliberately absent.",
    )


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {path.parent for path in python_files("packages") if "src" in path.parts}
    problems = [shown(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()]
    report(problems, "Without __init__.py the folder has no docstring, and wheels may leave it out.")


def _sleeps(path: Path) -> list[int]:
    allowed: set[int] = set()
    found: list[int] = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef) and node.name == "wait_until":
            allowed.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"time.sleep", "sleep"}:
            found.append(node.lineno)
    return [line for line in found if line not in allowed and "# sleep: " not in lines(path)[line - 1]]


def test_tests_do_not_sleep() -> None:
    problems = [shown(path, line) for path in python_files("tests") for line in _sleeps(path)]
    report(
        problems,
        "A fixed sleep is too short on a busy machine and too long on others. Poll with "
        "wait_until, or write `# sleep: <reason>` when the waiting itself is under test.",
    )


def _skips_without_reason(path: Path) -> list[int]:
    found = []
    for node in ast.walk(tree(path)):
        names = ("pytest.skip", "pytest.mark.skip", "pytest.mark.skipif", "pytest.mark.xfail")
        if isinstance(node, ast.Call) and ast.unparse(node.func) in names:
            keywords = {keyword.arg for keyword in node.keywords}
            is_plain = ast.unparse(node.func) in {"pytest.skip", "pytest.mark.skip"}
            if "reason" not in keywords and not (is_plain and node.args):
                found.append(node.lineno)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bare = {"pytest.mark.skip", "pytest.mark.xfail"}
            found += [d.lineno for d in node.decorator_list if ast.unparse(d) in bare]
    return found


def test_skips_give_their_reason() -> None:
    problems = [shown(path, line) for path in python_files("tests") for line in _skips_without_reason(path)]
    report(problems, "Say why: a skip without a reason is a test nobody will ever turn on again.")


def test_test_folders_are_the_known_ones() -> None:
    known = {"unit", "contract", "promises", "defects", "tidy", "sim", "conftest.py"}
    found = {path.relative_to(ROOT).parts[1] for path in python_files("tests")}
    report(sorted(found - known), f"Tests live in tests/ below one of {sorted(known)}.")
