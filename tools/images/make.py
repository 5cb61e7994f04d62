"""Makes an image of Debian packages from a recipe in `images/`.

    python -m tools.images.make NAME OUT

OUT is a directory for an OCI layout, or an archive when it ends in `.tar`. The name in it is `image`:
`skopeo copy oci:OUT:image docker://registry.example/team/NAME:1`, or `cloche image import -t NAME:1 OUT`.
As root, or as a user with a subuid range. `CLOCHE_DEBIAN_MIRROR` names a mirror.
"""

import argparse
import os
import shutil
import subprocess
import tarfile
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tools.images import oci

ROOT: Final = Path(__file__).parents[2]
RECIPES: Final = ROOT / "images"
FINISH: Final = Path(__file__).with_name("finish.sh")
LEFT_OUT: Final = ("doc/*", "man/*", "locale/*", "info/*", "lintian/*")
KEPT: Final = ("doc/*/copyright",)
OF_THE_MAKING: Final = ("dev/", "var/cache/apt/", "var/cache/ldconfig/", "var/lib/apt/lists/", "var/log/")
OF_THIS_MACHINE: Final = ("etc/hostname", "etc/resolv.conf", "etc/dpkg/dpkg.cfg.d/99mmdebstrap")
PIECE_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Recipe:
    """One `recipe.toml`."""

    name: str
    suite: str
    variant: str
    packages: tuple[str, ...]
    config: dict[str, Any]
    labels: dict[str, str]
    keep: tuple[str, ...] = ()
    """Names at which the tree is cut out; all of it without."""

    @classmethod
    def read(cls, name: str) -> "Recipe":
        path = RECIPES / name / "recipe.toml"
        if not path.is_file():
            raise SystemExit(f"there is no {path}; there are: {', '.join(names())}")
        table = tomllib.loads(path.read_text())
        packages, keep = tuple(table.pop("packages")), tuple(table.pop("keep", ()))
        return cls(name=name, packages=packages, keep=keep, **table)

    def has(self, path: str) -> bool:
        """Whether that entry of the tree is in the image."""
        if path == "." or path in OF_THIS_MACHINE or path.startswith(OF_THE_MAKING):
            return False
        return not self.keep or any(
            path == each or path.startswith(f"{each}/") or each.startswith(f"{path}/") for each in self.keep
        )

    def image_config(self) -> dict[str, Any]:
        """As OCI writes it."""
        found = {"Env": self.config.get("env", []), "Cmd": self.config.get("cmd", []), "Labels": self.labels}
        found |= {"User": self.config["user"]} if "user" in self.config else {}
        return found | ({"WorkingDir": self.config["workdir"]} if "workdir" in self.config else {})

    def argv(self, output: str) -> list[str]:
        mode = "root" if os.getuid() == 0 else "unshare"
        argv = ["mmdebstrap", "--quiet", "--format=tar", f"--mode={mode}", f"--variant={self.variant}"]
        argv += [f"--include={','.join(self.packages)}"]
        argv += [f"--dpkgopt=path-exclude=/usr/share/{pattern}" for pattern in LEFT_OUT]
        argv += [f"--dpkgopt=path-include=/usr/share/{pattern}" for pattern in KEPT]
        own = RECIPES / self.name / "finish.sh"
        hook = "extract" if self.variant == "extract" else "customize"  # the last that this variant runs
        argv += [f'--{hook}-hook="{each}" "$1"' for each in ([FINISH, own] if own.exists() else [FINISH])]
        mirror = os.environ.get("CLOCHE_DEBIAN_MIRROR")
        return [*argv, self.suite, output, *([mirror] if mirror else [])]


def names() -> list[str]:
    return sorted(path.parent.name for path in RECIPES.glob("*/recipe.toml"))


def make(name: str, out: Path) -> str:
    """An OCI layout in a new directory; the image's digest."""
    recipe = Recipe.read(name)
    layout = oci.Layout(out)
    with tempfile.TemporaryDirectory(prefix="cloche-image-") as folder:
        tree = Path(folder) / "tree.tar"
        subprocess.run(recipe.argv(str(tree)), check=True)
        with tree.open("rb") as source, layout.layer() as sink:
            _copy_tree(source, sink, recipe)
    history = [f"mmdebstrap {recipe.suite}: {' '.join(recipe.packages)}"]
    return layout.finish(recipe.image_config(), history=history)


def _copy_tree(source: Any, sink: Any, recipe: Recipe) -> None:
    with (
        tarfile.open(fileobj=source, mode="r|", bufsize=PIECE_BYTES) as tree,
        tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT, bufsize=PIECE_BYTES) as layer,
    ):
        for entry in tree:
            entry.name = os.path.normpath(entry.name)
            if not recipe.has(entry.name):
                continue
            if entry.islnk():
                entry.linkname = os.path.normpath(entry.linkname)
            entry.uname = entry.gname = ""
            layer.addfile(entry, tree.extractfile(entry) if entry.isreg() else None)


def main() -> int:
    """Make it, and say what it is."""
    parser = argparse.ArgumentParser(description="make an image of Debian packages")
    parser.add_argument("name", help=f"one of: {', '.join(names())}")
    parser.add_argument("out", type=Path, help="a new directory, or a file that ends in .tar")
    arguments = parser.parse_args()
    if shutil.which("mmdebstrap") is None:
        raise SystemExit("mmdebstrap is not installed: apt-get install mmdebstrap")
    out: Path = arguments.out
    if out.exists():
        raise SystemExit(f"{out} is there already")
    if out.suffix == ".tar":
        with tempfile.TemporaryDirectory(prefix="cloche-image-") as folder:
            digest = make(arguments.name, Path(folder) / "layout")
            subprocess.run(["tar", "-C", f"{folder}/layout", "-cf", str(out), "."], check=True)
    else:
        digest = make(arguments.name, out)
    print(f"{digest}  {out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
