"""The daemon's log: one JSON object a line on stderr. JSON's escapes keep control characters from a terminal."""

from __future__ import annotations

import json
import sys
import time
import traceback


class Log:
    """`event` says what in words, the fields about what; `exc_info` is an exception whose trace is told."""

    def info(self, event: str, **fields: object) -> None:
        _write("info", event, fields)

    def warning(self, event: str, **fields: object) -> None:
        _write("warning", event, fields)

    def error(self, event: str, *, exc_info: BaseException | None = None, **fields: object) -> None:
        if exc_info is not None:
            fields["exception"] = "".join(traceback.format_exception(exc_info)).rstrip()
        _write("error", event, fields)


def _write(level: str, event: str, fields: dict[str, object]) -> None:
    now = time.time()
    at = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now))}.{int(now % 1 * 1e6):06}Z"
    sys.stderr.write(json.dumps({**fields, "event": event, "level": level, "timestamp": at}, default=repr) + "\n")
    sys.stderr.flush()
