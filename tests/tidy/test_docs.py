import re
from pathlib import Path

from cloche.wire import errors
from tests.tidy.sources import ROOT, files, report, shown

LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
EXTERNAL = ("http://", "https://", "mailto:")


def _slug(heading: str) -> str:
    words = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return words.replace(" ", "-")


def _anchors(path: Path) -> set[str]:
    return {_slug(text) for text in re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)}


def _broken(page: Path, target: str) -> bool:
    name, _, anchor = target.partition("#")
    path = (page.parent / name).resolve() if name else page
    if not path.exists():
        return True
    return bool(anchor) and path.suffix == ".md" and anchor not in _anchors(path)


def test_links_lead_somewhere() -> None:
    problems = []
    for page in files():
        if page.suffix != ".md":
            continue
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        problems += [
            f"{shown(page)} -> {target}"
            for target in LINK.findall(prose)
            if not target.startswith(EXTERNAL) and _broken(page, target)
        ]
    report(problems, "Correct the link, or write the page it promises.")


def test_every_error_is_documented() -> None:
    page = ROOT / "docs" / "reference" / "errors.md"
    assert page.is_file(), "docs/reference/errors.md is missing"
    text = page.read_text()
    problems = [code for code in errors.TABLE if f"`{code}`" not in text]
    report(problems, "Each code of wire/errors.py needs a line in docs/reference/errors.md.")
