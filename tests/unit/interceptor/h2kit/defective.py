"""The interceptor with one defence switched off, or one limit made small: `python defective.py ROOM NAME`. For tests of the tests."""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _module(name: str) -> Any:
    return importlib.import_module(f"interceptor.{name}")


def _no_raw_head() -> None:
    _module("flow").raw_head = lambda data: None


def _no_request_form() -> None:
    judge = _module("judge")
    judge.request = lambda asked, target: None
    judge.validate_headers = lambda message: None


def _no_look() -> None:
    _module("places").Guard._holds_any = lambda self, head: False


def _no_body_look() -> None:
    _module("places").BodyWatch.see = lambda self, data: None


def _no_redaction() -> None:
    _module("redact").Replacer._pass = lambda self, buffer, *, ended: (buffer, b"")


def _no_name_check() -> None:
    _module("connection").Intercepted._names_target = lambda self: True


def _no_bounds() -> None:
    flow = _module("flow")
    flow.STREAM_WINDOW_BYTES = flow.CONNECTION_WINDOW_BYTES = 2**31 - 1


def _no_head_bound() -> None:
    _module("strict").HEAD_BYTES_MAX = 1 << 40
    _module("flow").HTTP1_BUFFER_BYTES_MAX = 1 << 40


def _no_verification() -> None:
    certificates = _module("certificates")
    certificates.SSL.VERIFY_PEER = certificates.SSL.VERIFY_NONE


def _no_failing_closed() -> None:
    _module("connection").Intercepted._failed = lambda self, where: None


def _no_long_life() -> None:
    _module("flow").STREAM_ID_LAST = 40


DEFECTS: dict[str, Callable[[], None]] = {name: made for name, made in globals().items() if name.startswith("_no_")}


if __name__ == "__main__":
    room = Path(sys.argv[1])
    package = runpy.run_path(str(room / "main.py"))["_as_package"](room)
    DEFECTS[sys.argv[2]]()
    importlib.import_module(f"{package}.service").main()
