"""The node daemon, and under it the keeper, with one fault planted: `failing_daemon.py PLANT <the daemon's arguments>`.

PLANT/fault holds `HOW POINT`; whoever of the two passes POINT first renames it to `taken` and then
    fail          raises OSError there,
    kill          dies there (SIGKILL),
    kill-daemon   kills the daemon (PLANT/daemon holds its pid) and goes on.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

PLANT = Path(sys.argv.pop(1)) if __name__ == "__main__" else Path(__file__).parent


def reached(point: str) -> None:
    try:
        how, where = (PLANT / "fault").read_text().split()
    except FileNotFoundError:
        return
    if where != point:
        return
    os.rename(PLANT / "fault", PLANT / "taken")
    if how == "fail":
        raise OSError(f"planted at {point}")
    os.kill(os.getpid() if how == "kill" else int((PLANT / "daemon").read_text()), signal.SIGKILL)


KEEPER = """import sys
sys.path[:0] = [{source!r}, {plant!r}]
from cloche_server.keeper import points
from cloche_server.keeper.main import main
import failing_daemon
points.reached = failing_daemon.reached
raise SystemExit(main(sys.argv))
"""


def start() -> int:
    import cloche_server
    from cloche_server import points
    from cloche_server.node import main
    from cloche_server.node.launch import keepers

    source = str(Path(cloche_server.__file__).parents[1])
    (PLANT / "failing_keeper.py").write_text(KEEPER.format(source=source, plant=str(PLANT)))
    (PLANT / "daemon").write_text(str(os.getpid()))
    defaults = keepers.KeeperHouse.__init__.__kwdefaults__
    assert defaults is not None
    defaults["program"] = PLANT / "failing_keeper.py"
    points.reached = reached
    return main.main()


if __name__ == "__main__":
    sys.exit(start())
