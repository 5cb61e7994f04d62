"""Variables in a Dockerfile's words, as BuildKit's shell lexer replaces them. Pure.

`$X`, `${X}`, `${X:-w}`, `${X-w}`, `${X:+w}`, `${X+w}`, `${X:?w}`, `${X?w}`; quotes are removed; the escape character takes the next one as
it is. Patterns (`${X#p}`, `${X%p}`, `${X/p/r}`) are refused by name. Values can double with every line, so results have a limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

RESULT_CHARS_MAX: Final = 128 * 1024
"""Linux takes no longer string as an argument or variable."""
DEPTH_MAX: Final = 20
_SPECIAL: Final = frozenset("@*#?-$!0")


class BadExpansion(Exception):
    """The word cannot be read."""


class UnsupportedExpansion(BadExpansion):
    """It can be read by others."""


def expand(word: str, env: Mapping[str, str], escape: str = "\\") -> str:
    """One word: quotes and variables. Spaces in values stay."""
    return _Lexer(word, env, escape).run()[0]


def words(text: str, env: Mapping[str, str], escape: str = "\\", *, raw_quotes: bool = False) -> list[str]:
    """Split at spaces that are not quoted, those inside values too."""
    return _Lexer(text, env, escape, raw_quotes=raw_quotes).run()[1]


def expand_document(text: str, env: Mapping[str, str]) -> str:
    """The content of a heredoc: quotes stay; the backslash escapes and goes, as in BuildKit."""
    return _Lexer(text, env, "\\", skip_quotes=True).run()[0]


class _Words:
    """The second reading of the same text: where it splits."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self._now: list[str] = []
        self._inside = False

    def split(self, text: str) -> None:
        for char in text:
            if not char.isspace():
                self.whole(char)
            elif self._inside and self._now:
                self.done.append("".join(self._now))
                self._now.clear()
                self._inside = False

    def whole(self, text: str) -> None:
        self._now.append(text)
        self._inside = True

    def end(self) -> list[str]:
        last = "".join(self._now)
        return [*self.done, last] if last else self.done


class _Lexer:
    def __init__(
        self,
        text: str,
        env: Mapping[str, str],
        escape: str,
        *,
        skip_quotes: bool = False,
        raw_quotes: bool = False,
    ) -> None:
        self._text = text
        self._at = 0
        self._env = env
        self._escape = escape
        self._skip_quotes = skip_quotes
        self._raw_quotes = raw_quotes
        self._made = 0
        self._depth = 0

    def run(self) -> tuple[str, list[str]]:
        return self._until(None)

    def _peek(self) -> str:
        return self._text[self._at] if self._at < len(self._text) else ""

    def _next(self) -> str:
        char = self._peek()
        self._at += len(char)
        return char

    def _until(self, stop: str | None) -> tuple[str, list[str]]:
        result: list[str] = []
        split = _Words()
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise BadExpansion(f"substitutions are nested deeper than {DEPTH_MAX}")
        while char := self._peek():
            if char == stop:
                self._next()
                self._depth -= 1
                return "".join(result), split.end()
            if char == "$":
                part = self._dollar()
                split.split(part)
            elif char in "'\"" and not self._skip_quotes:
                part = self._single() if char == "'" else self._double()
                split.whole(part)
            else:
                part = self._next()
                if part == self._escape:
                    part = self._next()
                    split.whole(part)
                else:
                    split.split(part)
            result.append(self._counted(part))
        if stop is not None:
            raise BadExpansion(f"missing {stop!r}")
        self._depth -= 1
        return "".join(result), split.end()

    def _counted(self, part: str) -> str:
        self._made += len(part)
        if self._made > RESULT_CHARS_MAX:
            raise BadExpansion(f"the result is longer than {RESULT_CHARS_MAX} characters")
        return part

    def _single(self) -> str:
        start = self._at
        end = self._text.find("'", start + 1)
        if end < 0:
            raise BadExpansion("a single quote is not closed")
        self._at = end + 1
        return self._text[start : end + 1] if self._raw_quotes else self._text[start + 1 : end]

    def _double(self) -> str:
        result = [self._next()] if self._raw_quotes else []
        if not self._raw_quotes:
            self._next()
        while char := self._peek():
            if char == '"':
                self._next()
                return "".join([*result, char] if self._raw_quotes else result)
            if char == "$":
                result.append(self._counted(self._dollar()))
                continue
            self._next()
            if char == self._escape:
                following = self._peek()
                if not following:
                    continue
                if following in ('"', "$", self._escape):
                    char = self._next()
            result.append(char)
        raise BadExpansion("a double quote is not closed")

    def _dollar(self) -> str:
        self._next()
        if self._peek() != "{":
            name = self._name()
            return self._env.get(name, "") if name else "$"
        self._next()
        if not self._peek():
            raise BadExpansion("missing '}'")
        if self._peek() in "{}:":
            raise BadExpansion("bad substitution")
        name = self._name()
        sign = self._next()
        if sign == "}":
            return self._env.get(name, "")
        if not sign:
            raise BadExpansion("missing '}'")
        empty_is_unset = sign == ":"
        if empty_is_unset:
            sign = self._next()
        if sign in ("#", "%", "/") and not empty_is_unset:
            raise UnsupportedExpansion(f"${{{name}{sign}...}}")
        if sign not in ("-", "+", "?"):
            raise BadExpansion(f"bad substitution of {name!r}")
        word = self._until("}")[0]
        return self._chosen(name, sign, word, empty_is_unset=empty_is_unset)

    def _chosen(self, name: str, sign: str, word: str, *, empty_is_unset: bool) -> str:
        value = self._env.get(name)
        is_set = value is not None and not (empty_is_unset and value == "")
        if sign == "-":
            return value if is_set and value is not None else word
        if sign == "+":
            return word if is_set else ""
        if not is_set or value is None:
            raise BadExpansion(f"{name}: {word or 'is not set'}")
        return value

    def _name(self) -> str:
        start = self._at
        first = self._peek()
        if first.isdigit():
            while self._peek().isdigit():
                self._at += 1
        elif first in _SPECIAL:
            self._at += len(first)
        else:
            while (char := self._peek()) and (char.isalpha() or char.isdecimal() or char == "_"):
                self._at += 1
        return self._text[start : self._at]
