import ast

from tests.tidy.sources import files, lines, python_files, report, shown, tree

MODULE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70
REASON_WITHIN_LINES = 40


def test_modules_are_short_or_say_why_not() -> None:
    problems = []
    for path in files():
        if path.suffix not in {".py", ".rs"} or len(lines(path)) <= MODULE_LINES_MAX:
            continue
        head = lines(path)[:REASON_WITHIN_LINES]
        if not any(line.lstrip().startswith(("# size: ", "// size: ")) for line in head):
            problems.append(f"{shown(path)} has {len(lines(path))} lines")
    report(
        problems,
        f"A module has at most {MODULE_LINES_MAX} lines. Split it by what changes together, "
        "or write `# size: <reason>` near its top.",
    )


def test_functions_are_short() -> None:
    problems = []
    for path in python_files():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > FUNCTION_LINES_MAX:
                    problems.append(f"{shown(path, node.lineno)} {node.name} has {length} lines")
    report(
        problems,
        f"A function has at most {FUNCTION_LINES_MAX} lines: give its parts names of their own.",
    )
