"""Collects the licence texts of what a binary was linked from.

`licences.py go BINARY SOURCE_DIR` asks the Go binary which modules it holds;
`licences.py cargo MANIFEST` asks cargo which crates the agent uses. The text goes
into the wheel beside the binaries. Standard library only: it runs in setup,
before the environment exists.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_NAMES = ("LICENSE", "LICENCE", "COPYING", "NOTICE")


def _run(*argv: str, cwd: str | None = None) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True, cwd=cwd).stdout


def _texts(directory: Path) -> Iterator[str]:
    for path in sorted(directory.iterdir()):
        if path.is_file() and path.name.upper().startswith(_NAMES):
            yield f"--- {path.name}\n{path.read_text(errors='replace').strip()}\n"


def _section(title: str, directory: Path) -> str:
    body = "\n".join(_texts(directory)) or "(no licence file in the source; see its metadata)\n"
    return f"{'=' * 78}\n{title}\n{body}"


def _escaped(module: str) -> str:
    """The module cache writes capital letters as `!` and the small one."""
    return "".join(f"!{c.lower()}" if c.isupper() else c for c in module)


def go_licences(binary: str, source_dir: str) -> Iterator[str]:
    """The main module, Go itself, and every module linked into `binary`."""
    yield _section("gvisor.dev/gvisor", Path(source_dir))
    yield _section("The Go standard library and runtime", Path(_run("go", "env", "GOROOT").strip()))
    cache = Path(_run("go", "env", "GOMODCACHE").strip())
    for line in _run("go", "version", "-m", binary).splitlines():
        fields = line.split()
        if fields and fields[0] == "dep":
            name, version = fields[1], fields[2]
            yield _section(f"{name} {version}", cache / f"{_escaped(name)}@{version}")


def cargo_licences(manifest: str) -> Iterator[str]:
    """Every crate in the resolved tree that is not ours."""
    text = _run("cargo", "metadata", "--format-version=1", "--locked", "--manifest-path", manifest)
    for package in json.loads(text)["packages"]:
        if package["source"] is not None:
            title = f"{package['name']} {package['version']} ({package['license']})"
            yield _section(title, Path(package["manifest_path"]).parent)


def main(argv: list[str]) -> int:
    """Print all sections for the kind of binary named first."""
    kind, *rest = argv
    sections = go_licences(*rest) if kind == "go" else cargo_licences(*rest)
    for section in sections:
        sys.stdout.write(section + "\n")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("LC_ALL", "C.UTF-8")
    raise SystemExit(main(sys.argv[1:]))
