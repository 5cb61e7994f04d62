"""What a name means in this store, to one owner."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from cloche.wire.errors import error
from cloche_server.images.layout import DIGEST, PUBLIC, ImageRecord
from cloche_server.images.manifest import host_platform, parse_platform
from cloche_server.images.reference import Reference, parse
from cloche_server.images.store import Store, may_see

SHORT_DIGEST: Final = re.compile(r"(sha256:)?[0-9a-f]{12,64}")
BARE_DIGEST_CHARS: Final = 64


class Lookup:
    """Names, digests and the beginnings of digests."""

    def __init__(self, store: Store, default_registry: str) -> None:
        self._store = store
        self._default_registry = default_registry
        self._host = str(host_platform())

    def parse(self, name: str) -> Reference:
        return parse(name, default_registry=self._default_registry)

    def platform(self, said: str | None) -> str:
        return self._host if said is None else str(parse_platform(said))

    def local(self, name: str, owner: str, platform: str | None) -> ImageRecord | None:
        """A whole name or digest, for a platform: the one of this machine when none is said."""
        wanted = self.platform(platform)
        if DIGEST.fullmatch(name):
            return self._store.find_digest(owner, wanted, name)
        ref = self.parse(name)
        if ref.digest is not None:
            return self._store.find_digest(owner, wanted, ref.digest)
        return self._store.find_name(owner, wanted, ref.name)

    def any(self, name: str, owner: str, is_admin: bool) -> ImageRecord | None:
        """For people: also the beginning of a digest, any platform, and for the administrator any owner's."""
        if SHORT_DIGEST.fullmatch(name):
            found = self._by_short_digest(name, owner, is_admin)
            if found is not None or len(name) >= BARE_DIGEST_CHARS:
                return found
        return self.local(name, owner, None) or next(self._by_name(name, owner, is_admin), None)

    def _by_short_digest(self, name: str, owner: str, is_admin: bool) -> ImageRecord | None:
        start = "sha256:" + name.removeprefix("sha256:")
        found = [
            image
            for image in self._store.images.values()
            if any(digest.startswith(start) for digest in (image.digest, *image.indexes))
            and (is_admin or may_see(image, owner))
        ]
        if len(found) > 1:
            raise error("ambiguous", f"{len(found)} images begin with {start}.")
        return found[0] if found else None

    def _by_name(self, name: str, owner: str, is_admin: bool) -> Iterator[ImageRecord]:
        ref = self.parse(name)
        for each in sorted(self._store.names.values(), key=lambda each: (each.scope, each.platform)):
            image = self._store.images.get(each.digest)
            is_meant = each.name == ref.name or (image is not None and ref.digest == image.digest)
            if image is not None and is_meant and (is_admin or each.scope in (PUBLIC, owner)):
                yield image
