"""`python -m cloche_server.node`: the daemon. What its imports make stays, so looking for garbage meanwhile is time lost."""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # until it serves
    from cloche_server.node.main import main

    raise SystemExit(main())
