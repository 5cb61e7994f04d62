"""The node daemon with one change: a command's output is dropped the moment it leaves the channel.

The baseline of the output figures. The same guest, agent, frames, windows and decoder as in the product; no log, no
reader, no HTTP. Started by `bare.dropping_node` in the daemon's place; the product knows nothing of it.
"""

import sys

from cloche_server.node import command, main


def dropped(output: command.Output, view: memoryview) -> None:
    output._take(len(view))


if __name__ == "__main__":
    command.Output.data = dropped  # type: ignore[method-assign, assignment]
    sys.exit(main.main())
