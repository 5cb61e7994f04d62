"""Words that no file may contain, and words that the glossary must."""

import re

from tests.tidy.sources import ROOT, files, report, shown

# In pieces, so that this file does not name what it looks for.
REGISTRY_HOSTS = [
    "pypi" + ".org", "python" + "hosted.org", "proxy.golang" + ".org", "sum.golang" + ".org",
    "registry.npm" + "js.org", "static.crates" + ".io", "index.crates" + ".io",
    "static.rust-lang" + ".org", "deb.deb" + "ian.org", "security.deb" + "ian.org",
    "docker" + ".io", "ghcr" + ".io", "quay" + ".io",
]  # fmt: skip
WORKPLACE = re.compile(
    r"/work/(main|shared)\b|\bshared/(research|design|lab)\b"
    r"|\b(gvisor-node|gvisor-walls|gvisor-2024|house-style|datapath)\.md\b"
)

# Nouns of ours that reach a user.
GLOSSARY = [
    "agent", "command", "cursor", "daemon", "doctor", "end reason", "engine", "generation",
    "guest", "image", "isolation report", "keeper", "lineage", "node", "owner", "promise",
    "sandbox", "sentry", "tenant", "writable layer",
]  # fmt: skip


def _texts() -> list[tuple[str, str]]:
    found = []
    for path in files():
        if path.name in {"test_words.py", "LICENSE"}:
            continue
        try:
            found.append((shown(path), path.read_text()))
        except UnicodeDecodeError:
            continue  # a binary vector
    return found


def test_no_file_names_a_package_registry() -> None:
    problems = []
    for name, text in _texts():
        problems += [f"{name} names {host}" for host in REGISTRY_HOSTS if host in text]
    report(
        problems,
        "Where packages come from is the machine's configuration; a file that names a host "
        "breaks behind a mirror. Locks: `just lock` writes them without.",
    )


def test_no_file_names_the_place_it_was_written_in() -> None:
    problems = [f"{name}: {match.group()}" for name, text in _texts() if (match := WORKPLACE.search(text))]
    report(problems, "Readers do not have that directory. Say the fact here, or link to docs/.")


def test_the_glossary_has_our_words() -> None:
    path = ROOT / "docs" / "glossary.md"
    assert path.is_file(), "docs/glossary.md is missing"
    text = path.read_text().lower()
    problems = [w for w in GLOSSARY if not re.search(rf"^(#+ |\W*\*\*|\| \**){w}\b", text, re.MULTILINE)]
    report(problems, "Each needs an entry in docs/glossary.md (`**word** — what it is`).")
