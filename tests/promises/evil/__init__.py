"""Images whose agent is evil: `agent.c` as /.cloche/agent in a tiny EROFS, beside the honest `python` image.

Words of a *behaviour* (how it starts, binds and answers RESET; `serve` is honest in all three):

    serve  silent  exit-at-once  hello-noise  hello-endless  gen N  hello-escapes  hello-twice  exit-after-hello
    bind-never  bind-refused  deaf-after-bind
    reset-silent  reset-exit  reset-garbage  reset-endless  reset-lies JSON (without blanks)

What a *command* does is its argv: `ok [TEXT]`, `end JSON`, `frames SPEC…`, `repeat N SPEC…` (N frames, then `sent N`;
`repeat-deaf` never reads), `opens N`, `random SEED N`, `burst SPEC…` (for ever, burning CPU where it would wait), `burn`, `endless`, `hang`, `stuck`, `deaf`,
`stubborn` (answers PING and obeys nothing), `hang-up`, `exit`. A SPEC is made by `spec` or `raw`.

`tree.read` and `file.read` answer with the image's file of that path, and PATH.end as END; every other operation
with /.cloche/answers/OP.data and OP.end. Nothing of it ever runs outside a sandbox.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from cloche_server.node.launch.places import default_images_dir

SOURCE = Path(__file__).with_name("agent.c")


def spec(kind: int, stream: int | str, payload: bytes = b"") -> str:
    """A well-formed frame; stream `s` is the command's own, `e` its stderr."""
    return f"{int(kind)}:{stream}:{payload.hex()}"


def raw(data: bytes) -> str:
    """Bytes as they are."""
    return f"raw:{data.hex()}"


class EvilImages:
    """A directory of images: `python`, and one more for each call. The name is what `image=` takes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._agent = directory.parent / "evil-agent"
        honest = default_images_dir()
        directory.mkdir(mode=0o755)
        for name in ("python.erofs", "python.json"):
            try:
                os.link(honest / name, directory / name)
            except OSError:  # another file system
                shutil.copy(honest / name, directory / name)
        argv = ["gcc", "-O2", "-static", "-Wall", "-Wextra", "-Werror", "-o", str(self._agent), str(SOURCE)]
        subprocess.run(argv, check=True)

    def __call__(self, behaviour: str = "serve", files: Mapping[str, bytes] | None = None) -> str:
        """`files` is path in the image (without its first slash) → content."""
        inside = {".cloche/behaviour": f"{behaviour}\n".encode(), **(files or {})}
        digest = hashlib.sha256(json.dumps([(name, inside[name].hex()) for name in sorted(inside)]).encode())
        name = f"evil-{digest.hexdigest()[:16]}"
        if not (self.directory / f"{name}.json").exists():
            self._make(name, inside)
        return name

    def _make(self, name: str, inside: Mapping[str, bytes]) -> None:
        file = self.directory / f"{name}.erofs"
        with tempfile.TemporaryDirectory(dir=self.directory.parent) as made:
            tree = Path(made) / "tree"
            for directory in ("proc", "sys", "dev", "tmp", "etc", ".cloche/placeholder"):
                (tree / directory).mkdir(parents=True)
            tree.chmod(0o755)
            shutil.copy(self._agent, tree / ".cloche" / "agent")
            for path, content in inside.items():
                (tree / path).parent.mkdir(parents=True, exist_ok=True)
                (tree / path).write_bytes(content)
            argv = ["mkfs.erofs", "--quiet", "-d1", "-x-1", "-E", "noinline_data", str(file), str(tree)]
            subprocess.run(argv, check=True, capture_output=True)
        file.chmod(0o644)
        config = {"User": "1000:1000", "Env": ["PATH=/bin"], "WorkingDir": "/"}
        (self.directory / f"{name}.json").write_text(json.dumps({"schema": 1, "name": name, "config": config}))
