"""The ways in which one text can be written: so that a placeholder or a secret is seen in each of them. Pure."""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Final
from urllib.parse import quote, quote_plus, unquote_to_bytes

FORM_BYTES_MIN: Final = 4
"""A shorter form would be found everywhere."""
_DECODINGS_MAX: Final = 3
_ESCAPE_BYTES_MAX: Final = 6
_JSON_ESCAPE: Final = re.compile(rb"\\(?:u00([0-7][0-9a-fA-F])|x([0-7][0-9a-fA-F]))")
_LINE_ENDS: Final = b"\r\n"


def forms(placeholder: str) -> tuple[bytes, ...]:
    """How a placeholder may be written. A text that holds one of these holds the placeholder."""
    raw = placeholder.encode()
    return _distinct(raw, raw.lower(), raw.upper(), *_base64s(raw), *_each_byte(raw))


@lru_cache(maxsize=1024)
def value_forms(value: bytes) -> tuple[bytes, ...]:
    """How a server may write a secret that it was given: the raw value first."""
    return _distinct(value, *_base64s(value), *_percents(value), *_escapes(value), *_each_byte(value))


def _distinct(*found: bytes) -> tuple[bytes, ...]:
    return tuple(dict.fromkeys(form for form in found if len(form) >= FORM_BYTES_MIN))


def _base64s(raw: bytes) -> Iterator[bytes]:
    """The characters that do not depend on what stands before and after, at each of the three alignments."""
    for before in range(3):
        coded = base64.b64encode(bytes(before) + raw)
        core = coded[-(-8 * before // 6) : 8 * (before + len(raw)) // 6]
        yield core
        yield core.translate(bytes.maketrans(b"+/", b"-_"))


def _percents(raw: bytes) -> Iterator[bytes]:
    for coded in (quote(raw, safe=""), quote(raw, safe="/"), quote_plus(raw)):
        yield coded.encode()
        yield re.sub(r"%..", lambda found: found[0].lower(), coded).encode()


def _escapes(raw: bytes) -> Iterator[bytes]:
    text = raw.decode("utf-8", "surrogateescape")
    for ascii_only in (True, False):
        escaped = json.dumps(text, ensure_ascii=ascii_only)[1:-1]
        yield escaped.encode("utf-8", "surrogateescape")
        yield escaped.replace("/", "\\/").encode("utf-8", "surrogateescape")
    yield html.escape(text).encode("utf-8", "surrogateescape")


def _each_byte(raw: bytes) -> Iterator[bytes]:
    yield raw.hex().encode()
    yield raw.hex().upper().encode()
    for pattern in ("%%%02x", "%%%02X", "\\u%04x", "\\u%04X"):
        yield "".join(pattern % byte for byte in raw).encode()


def views(text: bytes) -> Iterator[bytes]:
    """`text`, then what it says once percent signs, escapes and line ends are taken away."""
    yield text
    for _ in range(_DECODINGS_MAX):
        plain = text
        if b"%" in plain:
            plain = unquote_to_bytes(plain)
        if b"\\" in plain:
            plain = _JSON_ESCAPE.sub(lambda found: bytes([int(found[1] or found[2], 16)]), plain)
        if plain == text:
            break
        yield plain
        text = plain
    if b"\n" in text or b"\r" in text:
        yield text.translate(None, _LINE_ENDS)


class Sight:
    """Finds any of some named texts, in any form. `folded`: the case of letters does not matter for the text as it is."""

    def __init__(self, texts: dict[str, bytes]) -> None:
        self._forms = {
            name: tuple(form for form in forms(text.decode()) if form not in (text, text.upper()))
            for name, text in texts.items()
        }
        self._folded = {name: text.lower() for name, text in texts.items()}
        self.reach = max((len(text) for text in texts.values()), default=0) * _ESCAPE_BYTES_MAX
        """A text that is split over chunks is seen when this many bytes before the split are looked at again."""
        shared = _shared_start(list(texts.values()))
        self._hints = forms(shared.decode()) if len(shared) >= 2 * FORM_BYTES_MIN else ()

    def __bool__(self) -> bool:
        return bool(self._forms)

    def find(self, text: bytes) -> str | None:
        """The name of a text that stands in `text`."""
        if not self._forms:
            return None
        return next((name for view in views(text) if (name := self._in_view(view)) is not None), None)

    def _in_view(self, view: bytes) -> str | None:
        folded = view.lower()
        if self._hints and not any(hint in view for hint in self._hints) and self._hints[0].lower() not in folded:
            return None
        for name, written in self._forms.items():
            if self._folded[name] in folded or any(form in view for form in written):
                return name
        return None


def _shared_start(texts: list[bytes]) -> bytes:
    if not texts:
        return b""
    first, last = min(texts), max(texts)
    same = 0
    while same < min(len(first), len(last)) and first[same] == last[same]:
        same += 1
    return first[:same]
