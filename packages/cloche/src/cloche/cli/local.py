"""The node of this machine or this user: where it lives, starting, stopping, checking it.

The only module that touches `cloche_server`, and only when one of its functions needs it: a client that talks to
a node elsewhere does not have that package, and on macOS and Windows it cannot run.
"""

import contextlib
import importlib
import importlib.util
import os
import platform
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from cloche.wire.errors import ClocheError, error

if TYPE_CHECKING:
    from cloche.wire.nodes import NodeView

Mode = Literal["machine", "user"]

MACHINE_STATE: Final = Path("/var/lib/cloche")
MACHINES: Final = ("x86_64", "amd64")
SYSTEM_NAMES: Final = {"darwin": "macOS", "win32": "Windows", "cygwin": "Windows"}
STOP_S_MAX: Final = 30.0
SYSTEM_USER: Final = "cloche"
DEFAULT_IMAGE_FILE: Final = "python.erofs"
STORE_LINK: Final = "store"
"""In the state directory: a link to an image store elsewhere, so that a reset can name it."""


@dataclass(frozen=True)
class Place:
    """Where one node keeps and listens."""

    mode: Mode
    state_dir: Path
    run_dir: Path
    images_dir: Path
    """Root file systems made elsewhere."""
    store_dir: Path | None = None
    """The image store, when not in the state directory."""

    @property
    def socket(self) -> Path:
        return self.run_dir / "api.sock"


def require_linux() -> None:
    if sys.platform != "linux":
        system = SYSTEM_NAMES.get(sys.platform, sys.platform)
        raise error("no_linux_kernel", f"a node needs a Linux kernel, and this machine runs {system}")


def require() -> None:
    """That a node can run here at all: a Linux kernel, our architecture, the server package."""
    require_linux()
    if platform.machine().lower() not in MACHINES:
        raise error("unsupported_architecture", f"there is no engine for {platform.machine()} yet")
    for package in ("cloche_server", "cloche_engine"):
        if importlib.util.find_spec(package) is None:
            raise error("server_missing", f"this is the client alone: the package {package} is not installed")


def place(images: Path | None = None, store: Path | None = None) -> Place:
    """The machine's for root, else the user's own; where the SDK looks for them too."""
    require()
    from cloche.client._target import MACHINE_SOCKET, user_socket_path, user_state_dir

    is_machine = os.geteuid() == 0
    state = MACHINE_STATE if is_machine else user_state_dir()
    run = (MACHINE_SOCKET if is_machine else user_socket_path()).parent
    return Place("machine" if is_machine else "user", state, run, images or find_images() or state / "images", store)


def find_images() -> Path | None:
    """The directory with a prebuilt default image: CLOCHE_ROOTFS, the machine's, the user's, this checkout's."""
    from cloche.client._target import user_state_dir

    given = os.environ.get("CLOCHE_ROOTFS")
    if given:
        path = Path(given, DEFAULT_IMAGE_FILE) if Path(given).is_dir() else Path(given)
        if path.name != DEFAULT_IMAGE_FILE or not path.is_file():
            text = f"CLOCHE_ROOTFS is {given}, and that is not a file named {DEFAULT_IMAGE_FILE}"
            raise error(
                "image_not_found", text, fix="Correct the variable, or unset it: images are pulled when needed."
            )
        return path.parent
    checkout = Path(__file__).parents[5] / "build" / "rootfs"
    for directory in (MACHINE_STATE / "images", _data_dir() / "images", user_state_dir() / "images", checkout):
        if (directory / DEFAULT_IMAGE_FILE).is_file():
            return directory
    return None


def _data_dir() -> Path:
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "cloche"


def running(where: Place) -> "NodeView | None":
    """The node's view, or None when nobody answers there."""
    from cloche.cli import session

    if not where.socket.exists():
        return None
    try:
        with session.at_socket(where.socket) as node:
            return node.info()
    except ClocheError as refused:
        if refused.code in ("node_unavailable", "time_out"):
            return None
        raise


def keeper_lives(where: Place) -> bool:
    """True when a keeper holds sandboxes of this place although no daemon answers (after `down --keep`, or a crash)."""
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.connect(str(where.run_dir / "keeper.sock"))
        except OSError:
            return False
    return True


def limits_by() -> str:
    """Which version of cgroups this machine has."""
    return "cgroup v2" if Path("/sys/fs/cgroup/cgroup.controllers").exists() else "cgroup v1"


def machine_node_comes_first(where: Place) -> bool:
    """True when a user has an own node beside the machine's: the machine's is asked, unless CLOCHE_URL says otherwise."""
    from cloche.client._target import choose_target

    return where.mode == "user" and choose_target().chosen == "machine"


def describe(view: "NodeView") -> str:
    """`gVisor release-20260905; limits by cgroup v2`."""
    engines = [f"{'gVisor' if name == 'gvisor' else name} {version}" for name, version in sorted(view.engines.items())]
    parts = [
        ", ".join(engines) or "no engine",
        f"limits by {limits_by()}" if view.cgroup else "no limits by cgroup",
    ]
    if view.accepted:
        parts.append("accepted: " + ", ".join(view.accepted))
    return "; ".join(parts)


def start(where: Place, *, accept: tuple[str, ...] = (), replace: bool = False) -> "NodeView":
    """Starts it, waits until it answers, and leaves it running. `replace`: a new daemon takes the sandboxes over."""
    from cloche.cli.progress import spinning

    launcher: Any = importlib.import_module("cloche_server.node.launch.up")
    places: Any = importlib.import_module("cloche_server.node.launch.places")
    paths = places.NodePaths(
        state=where.state_dir,
        run=where.run_dir,
        images=where.images_dir.absolute(),
        store_dir=where.store_dir.absolute() if where.store_dir else None,
    )
    with spinning("starting the node"):
        (launcher.replace if replace else launcher.up)(paths, mode=where.mode, accept=accept)
    _link_store(where)
    view = running(where)
    if view is None:
        raise error("node_unavailable", "the node was started and does not answer", fix="See why: cloche node logs")
    return view


def _link_store(where: Place) -> None:
    link = where.state_dir / STORE_LINK
    with contextlib.suppress(FileNotFoundError):
        link.unlink()
    if where.store_dir is not None:
        link.symlink_to(where.store_dir.absolute())


def store_elsewhere(where: Place) -> str | None:
    """The image store of the last start, when it is not in the state directory. The node could have written this."""
    try:
        return os.readlink(where.state_dir / STORE_LINK)
    except OSError:  # there is none
        return None


def stop(where: Place, *, keep: bool) -> bool:
    """With `keep` the daemon alone; else every sandbox, the daemon and the keeper. False when nothing ran."""
    from cloche.cli import session

    view = running(where)
    if view is None:
        if keep or not keeper_lives(where):
            return False
        view = start(where)  # only a daemon can end what a keeper holds, and write down why it ended
    if not keep:
        with session.at_socket(where.socket) as node:
            node.kill_all()
    end_process(view.pid)  # first: a living daemon would start a new keeper
    if not keep and view.keeper_pid is not None:
        end_process(view.keeper_pid)
    return True


def end_process(pid: int) -> None:
    """SIGTERM, then SIGKILL; by pidfd, so that a number used again is never hit."""
    import select

    try:
        held = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        for number, wait_s in ((signal.SIGTERM, STOP_S_MAX), (signal.SIGKILL, 5.0)):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(held, number)
            if select.select([held], [], [], wait_s)[0]:
                return
    finally:
        os.close(held)


def remove_state(where: Place) -> list[str]:
    """Removes what the node kept and what `up` made for it; answers what was there."""
    removed = []
    for directory in (where.state_dir, where.run_dir, _engine_cache()):
        if directory.is_dir() and not directory.is_symlink():
            shutil.rmtree(directory)
            removed.append(str(directory))
            _remove_empty_above(directory)
    removed += _remove_keys(where)
    if where.mode == "machine":
        cgroups: Any = importlib.import_module("cloche_server.node.launch.cgroup")
        removed += [str(path) for path in cgroups.take_back(SYSTEM_USER)]
        if subprocess.run(["userdel", SYSTEM_USER], capture_output=True, check=False).returncode == 0:
            removed.append(f"the user {SYSTEM_USER}")
    return removed


def _remove_keys(where: Place) -> list[str]:
    """The node's own keys, which open nothing any more. What the operator wrote beside them stays."""
    places: Any = importlib.import_module("cloche_server.node.launch.places")
    config: Path = places.default_config_dir(where.mode)
    keys = config / "keys"
    if not keys.is_dir() or keys.is_symlink():
        return []
    shutil.rmtree(keys)
    with contextlib.suppress(OSError):  # policy.yaml and the like are there
        config.rmdir()
    _remove_empty_above(config)
    return [str(keys)]


def _remove_empty_above(directory: Path) -> None:
    """`~/.local/state` and the like, which a start made for itself: gone when nothing else is in them."""
    home = Path.home()
    for parent in directory.parents:
        if home not in parent.parents:
            return
        try:
            parent.rmdir()
        except OSError:  # somebody else has something there
            return


def _engine_cache() -> Path:
    """Where the engine package copies its binaries when its installation cannot be written to."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cloche" / "engine"


def log_files(where: Place) -> list[Path]:
    """The node's own logs, by name."""
    return sorted(path for path in (where.state_dir / "logs").glob("*.log") if path.is_file())


def checks() -> list[dict[str, Any]]:
    """The host's checks as plain data: name, state (ok, weaker, missing), text, fix."""
    try:
        require()
    except ClocheError as lacking:
        return [
            {"name": "platform", "state": "missing", "text": lacking.message, "fix": lacking.fix, "code": lacking.code}
        ]
    host: Any = importlib.import_module("cloche_server.node.host")
    return [*(_plain(check) for check in host.checks()), _image_check()]


def _image_check() -> dict[str, Any]:
    """Which image a sandbox gets whose caller names none, and where from."""
    from cloche.wire import defaults

    try:
        found = find_images()
    except ClocheError as wrong:
        return {"name": "image", "state": "missing", "text": wrong.message, "fix": wrong.fix, "code": wrong.code}
    chosen = os.environ.get("CLOCHE_IMAGE")
    if chosen:
        text = f"{chosen} (CLOCHE_IMAGE), pulled when it is first used"
    elif found is not None:
        names = ", ".join(sorted(path.stem for path in found.glob("*.erofs")))
        text = f"{names} in {found}"
    else:
        text = f"{defaults.IMAGE}, pulled when it is first used"
    return {"name": "image", "state": "ok", "text": text, "fix": "", "code": None}


def command_for_root() -> str:
    """`cloche` as it has to be typed behind sudo."""
    require()
    prepare: Any = importlib.import_module("cloche_server.node.launch.prepare")
    return str(prepare.command_for_root())


def _plain(check: Any) -> dict[str, Any]:
    return {key: getattr(check, key, None) for key in ("name", "state", "text", "fix", "code")}


def delegate(user: str, *, remove: bool) -> str:
    """Gives a user a cgroup of his own, or takes it away; says what was done."""
    require()
    launch: Any = importlib.import_module("cloche_server.node.launch")
    if not remove:
        launch.delegate(user)
        return f"{user} can run a node with limits now; take it away: cloche delegate --remove {user}"
    try:
        launch.undelegate(user)
    except OSError as busy:
        text = f"the cgroup of {user} is in use ({busy.strerror})"
        raise error("busy", text, fix=f"Let {user} type: cloche down") from None
    return f"{user} has no delegated cgroup any more"
