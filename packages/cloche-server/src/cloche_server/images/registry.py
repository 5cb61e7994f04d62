"""The registry client: manifests and blobs of one pull, from mirrors in their order and then from the registry itself.

A tag's digest is computed from the bytes that came, never taken from a header; with a digest the bytes must have it. Blobs
come from any offset: an interrupted one goes on where it stopped, also at another server. They are cut at the length that
the manifest names and NOT hashed here: whoever stores them does that.

Deliberately absent: pushing, schema 1, clocks that a server sets, and any way to switch off the check of a certificate.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from cloche.wire.errors import ClocheError, error
from cloche_server.images.auth import Credentials
from cloche_server.images.manifest import ACCEPTED, MANIFEST_BYTES_MAX, Descriptor, manifest_type
from cloche_server.images.outbound import Answer, Failed, Outbound, origin_of
from cloche_server.images.reference import DEFAULT_REGISTRY, Reference, shown
from cloche_server.images.settings import RegistrySettings, Timeouts
from cloche_server.images.strict import strict_json
from cloche_server.images.tokens import Asker, Tokens, denied

PROGRESS_BYTES: Final = 1024 * 1024
"""An attempt that brought this much is not counted as a failed one."""
BACKOFF_MAX_S: Final = 10.0
_HOST_OF_DEFAULT: Final = f"registry-1.{DEFAULT_REGISTRY}"
_CONTENT_RANGE: Final = re.compile(r"bytes ([0-9]{1,20})-([0-9]{1,20})/([0-9]{1,20}|\*)")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Endpoint:
    """A server that has the repository."""

    base: str
    host: str
    is_mirror: bool

    @property
    def name(self) -> str:
        return self.base if self.is_mirror else self.host


class _Later(Failed):
    """It asks us to come back."""

    def __init__(self, seconds: float) -> None:
        super().__init__("it says that it is asked too often", again=True)
        self.seconds = seconds


class Registry:
    """One for a pull. The connections and tokens are kept until `aclose`."""

    def __init__(self, settings: RegistrySettings, credentials: Credentials) -> None:
        self._settings = settings
        self._times = settings.timeouts
        self._outbound = Outbound(settings)
        self._tokens = Tokens(self._outbound, credentials)
        self._settled: dict[str, str] = {}

    async def __aenter__(self) -> Registry:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._outbound.aclose()

    async def resolve(self, ref: Reference) -> tuple[Descriptor, bytes]:
        """What the name means now: its manifest or index, with the digest of the bytes that came."""

        async def get(endpoint: Endpoint) -> tuple[Descriptor, bytes]:
            return await self._manifest(endpoint, ref, ref.digest or ref.tag or "latest", ref.digest)

        return await self._anywhere(ref, get)

    async def manifest(self, ref: Reference, digest: str) -> tuple[str, bytes]:
        """Media type and bytes of a manifest, which have that digest."""

        async def get(endpoint: Endpoint) -> tuple[Descriptor, bytes]:
            return await self._manifest(endpoint, ref, digest, digest)

        found, body = await self._anywhere(ref, get)
        return found.media_type, body

    async def blob(
        self, ref: Reference, descriptor: Descriptor, offset: int = 0, *, use_mirrors: bool = True
    ) -> AsyncGenerator[bytes]:
        """Exactly the bytes from `offset` to the descriptor's size, or an error. Use it with `aclosing`.

        `use_mirrors=False` is for a second attempt, when what came had another hash.
        """
        position, size = offset, descriptor.size
        assert 0 <= offset <= size
        failures: list[tuple[Endpoint, ClocheError]] = []
        for endpoint in self._endpoints(ref, use_mirrors):
            patience, use_range = _Patience(self._times), True
            while position < size:
                start = position
                try:
                    async with self._open_blob(endpoint, ref, descriptor, position, use_range) as parts:
                        async for part in parts:
                            kept = part[: size - position]
                            position += len(kept)
                            yield kept
                            if position == size:
                                return
                    raise Failed(f"it ended after {position} of {size} bytes", again=True)
                except Failed as failed:
                    use_range = use_range and not isinstance(failed, _BadRange)
                    if position - start >= PROGRESS_BYTES:
                        patience = _Patience(self._times)
                    if not await patience.wait(failed):
                        failures.append((endpoint, _unreachable(endpoint, failed)))
                        break
                except ClocheError as refused:
                    failures.append((endpoint, refused))
                    break
        if position < size:
            raise _all_failed(failures)

    @asynccontextmanager
    async def _open_blob(
        self, endpoint: Endpoint, ref: Reference, descriptor: Descriptor, position: int, use_range: bool
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """The body from `position` on; a server that does not know ranges sends what we have once more."""
        headers = {"range": f"bytes={position}-"} if position and use_range else {}
        async with self._get(endpoint, ref, f"blobs/{descriptor.digest}", headers) as answer:
            if answer.status == 416:
                raise _corrupt(endpoint, f"its layer is shorter than the {descriptor.size} bytes of the manifest")
            _check_status(answer, endpoint, ref, "a part of it is missing")
            if answer.status == 206:
                _check_range(answer, position, descriptor.size)
            skip = position if answer.status != 206 else 0
            length = answer.headers.get("content-length", "")
            expected = descriptor.size - position + skip
            if length.isdecimal() and int(length[:20]) != expected:
                raise _corrupt(endpoint, f"it has {shown(length, 20)} bytes where the manifest says {expected}")
            async with aclosing(_after(answer.parts, skip)) as parts:
                yield parts

    async def _manifest(
        self, endpoint: Endpoint, ref: Reference, name: str, digest: str | None
    ) -> tuple[Descriptor, bytes]:
        headers = {"accept": ", ".join(ACCEPTED)}
        async with self._get(endpoint, ref, f"manifests/{name}", headers) as answer:
            _check_status(answer, endpoint, ref, f"it has no {shown(name)}")
            body = await answer.body(MANIFEST_BYTES_MAX)
            sent_as, claimed = answer.headers.get("content-type"), answer.headers.get("docker-content-digest")
        found = f"sha256:{hashlib.sha256(body).hexdigest()}"
        if digest is not None and found != digest:
            raise _corrupt(endpoint, f"the manifest that it gave for {digest} has the digest {found}")
        if claimed is not None and claimed.startswith("sha256:") and claimed != found:
            raise _corrupt(endpoint, f"it calls a manifest {shown(claimed, 80)} that has the digest {found}")
        return Descriptor(
            manifest_type(strict_json(body, MANIFEST_BYTES_MAX, "manifest"), sent_as), found, len(body)
        ), body

    async def _anywhere(self, ref: Reference, get: Callable[[Endpoint], Awaitable[_T]]) -> _T:
        failures: list[tuple[Endpoint, ClocheError]] = []
        for endpoint in self._endpoints(ref):
            patience = _Patience(self._times)
            while True:
                try:
                    return await get(endpoint)
                except Failed as failed:
                    if not await patience.wait(failed):
                        failures.append((endpoint, _unreachable(endpoint, failed)))
                        break
                except ClocheError as refused:
                    failures.append((endpoint, refused))
                    break
        raise _all_failed(failures)

    @asynccontextmanager
    async def _get(
        self, endpoint: Endpoint, ref: Reference, path: str, headers: dict[str, str]
    ) -> AsyncIterator[Answer]:
        """Asked as we are known; after a 401 once more with what it asks for."""
        base = await self._base(endpoint)
        asker = Asker(base, endpoint.host, ref.repository, endpoint.is_mirror)
        url = f"{base}/v2/{ref.repository}/{path}"
        for attempt in (1, 2):
            header = self._tokens.header(asker)
            sent = {**headers, "authorization": header} if header else headers
            async with self._outbound.request("GET", url, headers=sent) as answer:
                # Only the registry itself may ask for the login, not a server that it redirects to.
                is_own = answer.origin == origin_of(base)
                if answer.status != 401 or attempt == 2 or not is_own:
                    yield answer
                    return
                said = answer.headers.get_list("www-authenticate")
            await self._tokens.obtain(asker, said, header)

    def _endpoints(self, ref: Reference, use_mirrors: bool = True) -> list[Endpoint]:
        mirrors = self._settings.host(ref.registry).mirrors if use_mirrors else ()
        host = _HOST_OF_DEFAULT if ref.registry == DEFAULT_REGISTRY else ref.registry
        own = Endpoint(f"https://{host}", ref.registry, is_mirror=False)
        return [*(Endpoint(mirror, origin_of(mirror).name, is_mirror=True) for mirror in mirrors), own]

    async def _base(self, endpoint: Endpoint) -> str:
        """https; http where that is allowed and the server does not speak TLS. Its certificate being wrong is no reason."""
        if endpoint.is_mirror or not self._settings.may_be_plain(endpoint.host):
            return endpoint.base
        if endpoint.base not in self._settled:
            plain = replace(endpoint, base=endpoint.base.replace("https://", "http://", 1))
            try:
                async with self._outbound.request("GET", f"{endpoint.base}/v2/", headers={}, follow=False):
                    self._settled[endpoint.base] = endpoint.base
            except Failed as failed:
                if not (failed.not_tls or failed.again):
                    raise
                async with self._outbound.request("GET", f"{plain.base}/v2/", headers={}, follow=False):
                    self._settled[endpoint.base] = plain.base
        return self._settled[endpoint.base]


class _BadRange(Failed):
    """It answered another part than we asked for."""


class _Patience:
    """How often one server is asked again, and when."""

    def __init__(self, times: Timeouts) -> None:
        self._times = times
        self._used = 0

    async def wait(self, failed: Failed) -> bool:
        """Before the next attempt; False when there is none."""
        seconds = min(self._times.backoff_s * 2**self._used, BACKOFF_MAX_S) * random.uniform(0.75, 1.25)
        if isinstance(failed, _Later):
            seconds = max(seconds, failed.seconds)
        if not failed.again or self._used >= self._times.retries or seconds > self._times.retry_after_max_s:
            return False
        self._used += 1
        await asyncio.sleep(seconds)
        return True


def _check_status(answer: Answer, endpoint: Endpoint, ref: Reference, missing: str) -> None:
    status = answer.status
    if status in (200, 206):
        return
    if status == 404:
        text = f"{shown(endpoint.name)} does not have {shown(ref.familiar)}: {missing}."
        raise error("image_not_found", text, fix="Check the name and the tag of the image.")
    if status in (401, 403):
        raise denied(endpoint.name, ref.repository, has_login=None)
    if status == 429:
        after = answer.headers.get("retry-after", "")
        raise _Later(float(after[:9]) if after.isascii() and after.isdecimal() else 0.0)
    raise Failed(f"it answered {status}", again=status >= 500 or status == 408)


def _check_range(answer: Answer, position: int, size: int) -> None:
    match = _CONTENT_RANGE.fullmatch(answer.headers.get("content-range", ""))
    good = match and int(match[1]) == position and int(match[2]) == size - 1 and match[3] in ("*", str(size))
    if not good:
        raise _BadRange("it answered another part than the one that it was asked for", again=True)


async def _after(parts: AsyncIterator[bytes], skip: int) -> AsyncGenerator[bytes]:
    async for part in parts:
        if skip < len(part):
            yield part[skip:] if skip else part
        skip = max(0, skip - len(part))


def _unreachable(endpoint: Endpoint, failed: Failed) -> ClocheError:
    after = min(failed.seconds, 86400.0) if isinstance(failed, _Later) else None
    text = f"{shown(endpoint.name)} gave nothing: {failed.why}."
    return error("registry_unreachable", text, retry_after_s=after)


def _corrupt(endpoint: Endpoint, why: str) -> ClocheError:
    return error("image_corrupt", f"{shown(endpoint.name)} gave something else than it should: {why}.")


def _all_failed(failures: list[tuple[Endpoint, ClocheError]]) -> ClocheError:
    """What the registry itself said; of its mirrors in the detail."""
    _, last = failures[-1]
    if len(failures) > 1:
        last.detail["mirrors"] = {endpoint.name: f"{each.code}: {each.message}" for endpoint, each in failures[:-1]}
    return last
