"""A sandbox's secrets while a request passes: put in at their places, and seen everywhere else. Pure."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal
from urllib.parse import quote, unquote_to_bytes

from .binding import Sandbox, Secret, Target
from .forms import Sight, value_forms
from .redact import Replacer

AlertKind = Literal["placeholder_elsewhere", "secret_in_request", "foreign_credential"]
Headers = tuple[tuple[bytes, bytes], ...]

_KNOWN_VALUE_BYTES_MIN: Final = 16
"""A shorter value may stand in a request by chance."""
_WHERE_CHARS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class Head:
    """What a request says before its body. `target` has the query."""

    method: str
    target: bytes
    headers: Headers
    other_methods: tuple[str, ...] = ()
    """What a header asks the server to take the method for."""

    @property
    def methods(self) -> tuple[str, ...]:
        return (self.method, *self.other_methods)

    @property
    def path(self) -> str:
        return self.target.partition(b"?")[0].decode("utf-8", "backslashreplace")


class Misplaced(Exception):
    """The request may not go on. `where` is safe to show."""

    def __init__(self, kind: AlertKind, where: str, secret: str, text: str) -> None:
        super().__init__(text)
        self.kind: AlertKind = kind
        self.where = where
        self.secret = secret
        self.text = text


class Guard:
    """One connection's view of its sandbox's secrets."""

    def __init__(self, sandbox: Sandbox, target: Target) -> None:
        self._target = target
        self.secrets = sandbox.secrets
        self._bound = tuple(secret for secret in sandbox.secrets if secret.bound_to(target))
        self._sight = Sight({secret.name: secret.placeholder for secret in sandbox.secrets})
        self._values = {s.name: s.value for s in sandbox.secrets if len(s.value) >= _KNOWN_VALUE_BYTES_MIN}
        hidden = (*sandbox.secrets, *sandbox.ended)
        self._header_pairs = [
            (form, secret.placeholder if form == secret.value else b"x" * len(form))
            for secret in hidden
            for form in value_forms(secret.value)
        ]
        self._body_pairs = [(form, _mask(secret, form)) for secret in hidden for form in value_forms(secret.value)]
        self._header_replacer = Replacer(self._header_pairs)

    @property
    def watches(self) -> bool:
        """Whether requests have to be looked at."""
        return bool(self.secrets)

    @property
    def redacts(self) -> bool:
        return bool(self._body_pairs)

    def usable(self, head: Head) -> tuple[Secret, ...]:
        """Secrets that may go with this request."""
        path = head.path
        return tuple(secret for secret in self._bound if all(secret.fits(method, path) for method in head.methods))

    def head(self, head: Head) -> Head:
        """With the values at their places; raises Misplaced."""
        if not self.secrets:
            return head
        if not self._holds_any(head):
            self._refuse_foreign(head)
            return head
        usable = self.usable(head)
        path, mark, query = head.target.partition(b"?")
        self.look("the method", head.method.encode())
        self.look("the path", path)
        target = path + mark + b"&".join(self._parameter(part, usable) for part in query.split(b"&"))
        headers = tuple((name, self._header(name, value, usable)) for name, value in head.headers)
        self._refuse_foreign(head)
        return replace(head, target=target, headers=headers)

    def _holds_any(self, head: Head) -> bool:
        """Whether it is worth while to look at each part: most requests hold nothing."""
        parts = (part for header in head.headers for part in header)
        text = b"\x00".join((head.method.encode(), head.target, *parts))
        return self._sight.find(text) is not None or any(value in text for value in self._values.values())

    def look(self, where: str, text: bytes) -> None:
        """Raises Misplaced when a placeholder, or a value that should not be known inside, stands there."""
        if (name := self._sight.find(text)) is not None:
            raise self._elsewhere(where, name)
        for name, value in self._values.items():
            if value in text:
                raise Misplaced("secret_in_request", where, name, f"the value of the secret {name} stood in {where}")

    def body(self, head: Head, content_type: bytes) -> BodyWatch | None:
        """What to do with the body of a request; None: nothing."""
        if not self.secrets:
            return None
        pairs = [
            (place.written(secret.placeholder), _coded(place.written(secret.value), content_type))
            for secret in self.usable(head)
            for place in secret.places_of("body")
        ]
        replaced = {secret.name for secret in self.usable(head) if secret.places_of("body")}
        values = [(name, value) for name, value in self._values.items() if name not in replaced]
        return BodyWatch(Replacer(pairs) if pairs else None, self._sight, values, self._elsewhere)

    def redactor(self) -> Replacer:
        """For the body of one answer; keeps its length."""
        return Replacer(self._body_pairs)

    def value_watch(self) -> ValueWatch:
        """For the body of one answer that cannot be changed, only looked at."""
        return ValueWatch([form for form, _ in self._body_pairs])

    def clean(self, text: bytes) -> bytes:
        """A header's value or another short text of an answer, without values."""
        return self._header_replacer.whole(text) if self._header_pairs else text

    def clean_headers(self, headers: Headers) -> Headers:
        """All of them; most hold nothing."""
        if not self._header_replacer.finds(b"\x00".join(part for header in headers for part in header)):
            return headers
        return tuple((self.clean(name), self.clean(value)) for name, value in headers)

    def _elsewhere(self, where: str, name: str) -> Misplaced:
        secret = next(secret for secret in self.secrets if secret.name == name)
        at = f"{self._target.host}:{self._target.port}"
        if secret in self._bound:
            narrow = secret.methods is not None or secret.paths is not None
            why = "it may not stand there" + (", or not with this method and path" if narrow else "")
        elif not self._target.tls:
            why = f"it is not sent to {at} without TLS"
        else:
            why = f"it is not bound to {at}"
        return Misplaced("placeholder_elsewhere", where, name, f"the placeholder of {name} stood in {where}: {why}")

    def _parameter(self, part: bytes, usable: tuple[Secret, ...]) -> bytes:
        name, _, value = part.partition(b"=")
        plain = unquote_to_bytes(value.replace(b"+", b" "))
        for secret in usable:
            for place in secret.places_of("query"):
                if (place.name is None or unquote_to_bytes(name) == place.name.encode()) and plain == place.written(
                    secret.placeholder
                ):
                    return name + b"=" + quote(place.written(secret.value), safe="").encode()
        self.look(f"the query parameter {shown(name)}", part)
        return part

    def _header(self, name: bytes, value: bytes, usable: tuple[Secret, ...]) -> bytes:
        self.look("a header's name", name)
        if name.lower() == b"cookie":
            return b"; ".join(self._field(name, part.strip(), usable) for part in value.split(b";"))
        return self._field(name, value.strip(), usable)

    def _field(self, name: bytes, value: bytes, usable: tuple[Secret, ...]) -> bytes:
        lower, where = name.lower(), f"the header {shown(name)}"
        plain = _basic(value) if lower in _CREDENTIALS else None
        for secret in usable:
            for place in secret.places_of("header"):
                is_it = place.name is not None and place.name.lower().encode() == lower
                if is_it and _same_but_scheme(value, place.written(secret.placeholder)):
                    return place.written(secret.value)
            if plain is not None and lower == b"authorization" and (found := _in_basic(plain, secret)) is not None:
                new, rest = found
                self.look(where, rest)
                return b"Basic " + base64.b64encode(new)
        self.look(where, value if plain is None else value + b"\n" + plain)
        return value

    def _refuse_foreign(self, head: Head) -> None:
        """`require`: what stands in a secret's place must be its placeholder."""
        for secret in self._bound:
            if not secret.require:
                continue
            for name, value in head.headers:
                if name.lower() in _guarded_headers(secret) and not any(
                    _holds(name.lower(), value, other) for other in self._bound
                ):
                    raise self._foreign(f"the header {shown(name)}", secret)
            guarded = {place.name for place in secret.places_of("query")}
            for part in head.target.partition(b"?")[2].split(b"&"):
                name, _, value = part.partition(b"=")
                if unquote_to_bytes(name).decode("utf-8", "replace") in guarded and not any(
                    other.placeholder in unquote_to_bytes(value) for other in self._bound
                ):
                    raise self._foreign(f"the query parameter {shown(name)}", secret)

    def _foreign(self, where: str, secret: Secret) -> Misplaced:
        text = f"{self._target.host} takes no other credential than {secret.name}: one stood in {where}"
        return Misplaced("foreign_credential", where, secret.name, text)


class BodyWatch:
    """One request's body, chunk by chunk: values put in where that is allowed, and a look at the result."""

    def __init__(
        self,
        replacer: Replacer | None,
        sight: Sight,
        values: list[tuple[str, bytes]],
        elsewhere: Callable[[str, str], Misplaced],
        where: str = "the body",
    ) -> None:
        self.replacer = replacer
        self._sight = sight
        self._values = values
        self._elsewhere = elsewhere
        self._where = where
        self._keep = max([sight.reach, *(len(value) for _, value in values)], default=0)
        self._tail = b""

    @property
    def changes(self) -> bool:
        return self.replacer is not None

    def feed(self, data: bytes) -> bytes:
        """What may go on; raises Misplaced."""
        out = data if self.replacer is None else self.replacer.feed(data)
        self.see(out)
        return out

    def flush(self) -> bytes:
        """The rest at the end of the body; raises Misplaced."""
        out = b"" if self.replacer is None else self.replacer.flush()
        self.see(out)
        return out

    def see(self, data: bytes) -> None:
        """Raises Misplaced when what was seen so far, with `data`, holds what it may not hold."""
        window = self._tail + data
        if (name := self._sight.find(window)) is not None:
            raise self._elsewhere(self._where, name)
        for name, value in self._values:
            if value in window:
                text = f"the value of the secret {name} stood in {self._where}"
                raise Misplaced("secret_in_request", self._where, name, text)
        self._tail = window[-self._keep :] if self._keep else b""


class ValueWatch:
    """One answer's body, piece by piece: whether it holds a value."""

    def __init__(self, forms: list[bytes]) -> None:
        self._forms = forms
        self._keep = max(map(len, forms), default=1) - 1
        self._tail = b""

    def sees_one(self, data: bytes) -> bool:
        window = self._tail + data
        self._tail = window[-self._keep :] if self._keep else b""
        return any(form in window for form in self._forms)


_CREDENTIALS: Final = frozenset({b"authorization", b"proxy-authorization"})


def shown(name: bytes) -> str:
    """A name that the guest chose, safe to show."""
    text = name[:_WHERE_CHARS_MAX].decode("ascii", "backslashreplace")
    return "".join(char if char.isprintable() else "?" for char in text)


def _mask(secret: Secret, form: bytes) -> bytes:
    """As long as `form`, so that the length of an answer stays true."""
    return (secret.placeholder if form == secret.value else b"").ljust(len(form), b"x")[: len(form)]


def _coded(value: bytes, content_type: bytes) -> bytes:
    """As a body of that type writes it."""
    kind = content_type.partition(b";")[0].strip().lower()
    if kind == b"application/x-www-form-urlencoded":
        return quote(value, safe="").encode()
    if kind == b"application/json" or kind.endswith(b"+json"):
        return json.dumps(value.decode("utf-8", "surrogateescape"))[1:-1].encode("utf-8", "surrogateescape")
    return value


def _same_but_scheme(value: bytes, wanted: bytes) -> bool:
    """Equal; the case of a scheme (`bearer`) does not matter."""
    scheme, _, rest = value.partition(b" ")
    wanted_scheme, _, wanted_rest = wanted.partition(b" ")
    return value == wanted or (rest != b"" and rest == wanted_rest and scheme.lower() == wanted_scheme.lower())


def _basic(value: bytes) -> bytes | None:
    scheme, _, coded = value.strip().partition(b" ")
    if scheme.lower() != b"basic":
        return None
    try:
        return base64.b64decode(coded.strip(), validate=True)
    except binascii.Error:
        return None


def _in_basic(plain: bytes, secret: Secret) -> tuple[bytes, bytes] | None:
    """With the value in it, and the part that was left as it was.

    `user:placeholder`; where any user may be, also a placeholder that stands as the user, as tokens often do.
    """
    user, colon, password = plain.partition(b":")
    for place in secret.places_of("basic"):
        old, new = place.written(secret.placeholder), place.written(secret.value)
        if colon and password == old and (place.name is None or place.name.encode() == user):
            return user + colon + new, user
        if place.name is None and user == old:
            return new + colon + password, password
    return None


def _guarded_headers(secret: Secret) -> set[bytes]:
    names = {place.name.lower().encode() for place in secret.places_of("header") if place.name is not None}
    if secret.places_of("basic") or b"authorization" in names or names:
        names.add(b"authorization")
    return names


def _holds(name: bytes, value: bytes, secret: Secret) -> bool:
    return secret.placeholder in value or (name in _CREDENTIALS and secret.placeholder in (_basic(value) or b""))
