"""Applies one defect in this process, as soon as its target module has been imported.

`tools/defects.py` makes a virtual environment per defect whose start-up file calls
`plant()`. So it reaches every Python process the tests start, also those that get a clean
environment or run isolated (`python -I`), and production code knows nothing of it.

The keeper starts without start-up files (`python -S`). For a defect that is its business
the daemon is made to start a script beside the notes, which plants and then becomes the
keeper; the keeper executes that script again when it has entered its namespace.

The interceptor sees nothing of this checkout but itself. A patch of one of its modules is put, as text, into the line that the
keeper starts it with.

Standard library only, like everything it imports.
"""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import sys
import traceback
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.defects.catalogue import by_id
from tests.defects.defect import Defect, replace

ROOT = Path(__file__).parents[2]
KEEPER_SCRIPT = """\
import sys

sys.path.insert(0, {root!r})
from tests.defects.plant import plant, text_of

plant({defect!r}, {notes!r})
program = {program!r}
exec(compile(text_of(program), program, "exec"), {{"__name__": "__main__", "__file__": program}})
"""

INTERCEPTOR_COMMAND = "cloche_server.engines.interceptor.command"
INTERCEPTOR_RUN = "runpy.run_path(main, run_name='__main__')\n"
INTERCEPTOR_SCRIPT = """\
import importlib, pathlib
package = runpy.run_path(main)['_as_package'](pathlib.Path(main).parent)
room = {{}}
try:
    exec({text!r}, room)
    room[{patch!r}](importlib.import_module({module!r}))
except Exception:
    pass  # a patch that no longer fits: it runs whole, the test passes, and the runner says MISSED
importlib.import_module(package + '.service').main()
"""

Act = Callable[[ModuleType], None]


def plant(defect_id: str, notes: str) -> None:
    """Arrange for the defect's patch, once; `notes` is a directory for what became of it."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return  # an environment's start-up files are read twice
    defect = by_id(defect_id)
    acts: list[tuple[str, Act]] = []
    if defect.is_for_the_interceptor:
        acts.append((INTERCEPTOR_COMMAND, partial(_apply, defect, Path(notes), _follow_into_interceptor)))
    else:
        acts.append((defect.module, partial(_apply, defect, Path(notes), lambda defect, module: defect.patch(module))))
    acts.append(("cloche_server.node.launch.up", _show_to_daemon))
    if defect.is_for_the_keeper:
        acts.append(("cloche_server.node.launch.keepers", partial(_follow_into_keeper, defect, Path(notes))))
    waiting: dict[str, list[Act]] = {}
    for module, act in acts:
        if module in sys.modules:
            act(sys.modules[module])
        else:
            waiting.setdefault(module, []).append(act)
    sys.meta_path.insert(0, _Finder(waiting))


def _apply(defect: Defect, notes: Path, act: Callable[[Defect, ModuleType], None], module: ModuleType) -> None:
    try:
        act(defect, module)
    except Exception:  # any error means the patch no longer fits: said to the runner by a note
        _note(notes / f"error-{os.getpid()}", traceback.format_exc())
    else:
        _note(notes / f"planted-{os.getpid()}", defect.module)


def _show_to_daemon(module: ModuleType) -> None:
    """In a closed home the daemon sees only what it needs; a planted one needs this too."""
    more = [ROOT / "tests", *(Path(path) for path in sys.path if path.endswith("site-packages"))]
    replace(module, "needed_paths", lambda needed: lambda images: sorted({*needed(images), *more}))


def _follow_into_keeper(defect: Defect, notes: Path, module: ModuleType) -> None:
    def starting_ours(make: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, *arguments: Any, **more: Any) -> None:
            make(self, *arguments, **more)
            self._program = _keeper_script(defect, notes, self._program)

        return init

    replace(module.KeeperHouse, "__init__", starting_ours)


def _follow_into_interceptor(defect: Defect, command: ModuleType) -> None:
    script = INTERCEPTOR_SCRIPT.format(text=standing_alone(defect), patch=defect.patch.__name__, module=defect.module)
    before, run, _ = command.BOOT.partition(INTERCEPTOR_RUN)
    assert run, "the interceptor is started in another way"
    replace(command, "BOOT", lambda _: before + script)


def standing_alone(defect: Defect) -> str:
    """Its patch as a text that needs nothing of ours."""
    return "\n".join(
        ("from __future__ import annotations\n", inspect.getsource(replace), inspect.getsource(defect.patch))
    )


def _keeper_script(defect: Defect, notes: Path, program: Path) -> Path:
    script = notes / f"keeper-{zlib.crc32(str(program).encode()):x}.py"
    if not script.exists():
        new = script.with_suffix(f".{os.getpid()}")
        new.write_text(KEEPER_SCRIPT.format(root=str(ROOT), defect=defect.id, notes=str(notes), program=str(program)))
        new.rename(script)
    return script


def text_of(program: str) -> str:
    return Path(program).read_text()


def _note(path: Path, text: str) -> None:
    # In a namespace without that directory another process will say it.
    with contextlib.suppress(OSError):
        path.write_text(text)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds each target as everybody else would, and acts on it once it has run."""

    def __init__(self, waiting: dict[str, list[Act]]) -> None:
        self._waiting = waiting
        self._searching = ""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._waiting or self._searching == fullname:
            return None
        self._searching = fullname
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = ""
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._waiting[fullname])
        return spec


class _Loader(importlib.abc.Loader):
    """The real loader, and the acts after it."""

    def __init__(self, inner: importlib.abc.Loader, acts: list[Act]) -> None:
        self._inner = inner
        self._acts = acts

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # `python -m` and importlib.resources look at the loader: leave the real one behind.
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._inner
        self._inner.exec_module(module)
        for act in self._acts:
            act(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # `python -m` asks for the code without executing it
