"""A program that follows a command's output into a file and notes its cursor, until it ends or is killed.

`python reader.py URL SANDBOX COMMAND DIR`: DIR/data gets the bytes, DIR/cursor the cursor after each chunk.
"""

import sys
from pathlib import Path

from cloche.client import Node
from cloche.client._target import parse_url


def main(url: str, sandbox: str, command: str, directory: Path) -> None:
    noted = directory / "cursor"
    start = noted.read_text() if noted.exists() else "1.0"
    with Node(parse_url(url, None)) as node, (directory / "data").open("ab") as data:
        data.truncate(int(start.split(".")[1]))  # what was written and not noted comes again
        for chunk in node.connect(sandbox).commands.get(command).output(from_=start):
            data.write(chunk.data)
            data.flush()
            part = directory / "cursor.part"
            part.write_text(str(chunk.cursor))
            part.rename(noted)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]))
