"""Requests to hosts of the internet: the one place of the image store that opens a socket.

A name is resolved once, its addresses are judged, and the connection goes to the judged address: a name that changes its
mind between the two reaches nothing. What a registry sends us on to (redirects, token servers) may be on the internet or
where the registry itself is; the machine's loopback, its network and the cloud's metadata are not for it to name.
Everything has a limit: connecting, silence, the whole head of an answer, and the rate of its body.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import urljoin, urlsplit

import httpx2

from cloche_server.images.reference import shown
from cloche_server.images.settings import RegistrySettings, is_loopback_name

REDIRECTS_MAX: Final = 5
LOCATION_CHARS_MAX: Final = 16 * 1024
ADDRESSES_MAX: Final = 4
CONNECTIONS_MAX: Final = 16
USER_AGENT: Final = "cloche"
_PORTS: Final = {"http": 80, "https": 443}
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_METADATA: Final = frozenset(
    ipaddress.ip_address(each) for each in ("168.63.129.16", "100.100.100.200", "192.0.0.192", "fd00:ec2::254")
)
"""Services for the machine itself that clouds keep at addresses which are not link-local."""
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
_FAILURES: Final = (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL, OSError, TimeoutError)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Kind = Literal["public", "private", "loopback", "machine", "nowhere"]


class Failed(Exception):
    """A request that brought no answer. `again` says whether another attempt can help."""

    def __init__(self, why: str, *, again: bool, not_tls: bool = False) -> None:
        super().__init__(why)
        self.why = why
        self.again = again
        self.not_tls = not_tls


@dataclass(frozen=True)
class Origin:
    """Scheme, host and port."""

    scheme: str
    host: str
    port: int

    @property
    def name(self) -> str:
        """`HOST` or `HOST:PORT`, as settings and names of images have it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.name}"


@dataclass(frozen=True)
class Answer:
    """Its head; the body comes by `parts`."""

    status: int
    headers: httpx2.Headers
    parts: AsyncGenerator[bytes]
    origin: Origin
    """Who answered, behind all redirects."""

    async def body(self, bytes_max: int) -> bytes:
        found = bytearray()
        async for part in self.parts:
            found += part
            if len(found) > bytes_max:
                raise Failed(f"its answer has more than {bytes_max} bytes", again=False)
        return bytes(found)


def origin_of(url: str) -> Origin:
    """Of a whole http or https URL without a user in it."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise Failed("it named an address that is not a URL", again=False) from None
    if parts.scheme not in _PORTS or not host or parts.username is not None or port == 0:
        raise Failed("it named an address that is not plain http or https", again=False)
    return Origin(parts.scheme, host, port or _PORTS[parts.scheme])


def kind_of(address: Address) -> Kind:
    """Whose address it is. One inside another (mapped, NAT64, 6to4) is judged as the inner one."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return kind_of(inner)
    if address.is_loopback:
        return "loopback"
    if address.is_link_local or address in _METADATA:
        return "machine"
    if address.is_multicast or address.is_unspecified or address.is_reserved or int(address) >> 24 == 0:
        return "nowhere"
    return "public" if address.is_global else "private"


def may_reach(settings: RegistrySettings, origin: Origin, kind: Kind, first: Origin, first_kind: Kind) -> bool:
    """Whether `origin`, at an address of that kind, may be asked for what `first` was asked for."""
    if kind == "nowhere":
        return False
    if kind == "public" or origin.name in settings.hosts:
        return True
    if origin == first:
        return kind != "machine"
    return kind == first_kind or origin.name in settings.host(first.name).redirects_to


class Outbound:
    """Connections, kept by origin. One for a pull; `aclose` ends them."""

    def __init__(self, settings: RegistrySettings) -> None:
        self._settings = settings
        self._times = settings.timeouts
        self._transports: dict[tuple[Origin, Address], httpx2.AsyncHTTPTransport] = {}
        self._judged: dict[tuple[Origin, Origin], list[Address]] = {}
        self._kinds: dict[Origin, Kind] = {}

    @asynccontextmanager
    async def request(
        self,
        method: str,
        url: str,
        *,
        first: Origin | None = None,
        headers: Mapping[str, str],
        content: bytes = b"",
        follow: bool = True,
    ) -> AsyncIterator[Answer]:
        """The answer behind the redirects. `first` is who sent us here: absent when it was the user or a setting."""
        origin = origin_of(url)
        first = first or origin
        sent = {name.lower(): value for name, value in headers.items()}
        for _ in range(REDIRECTS_MAX + 1):
            async with self._one(method, url, origin, first, sent, content) as answer:
                if not follow or answer.status not in _REDIRECTS:
                    yield answer
                    return
                url = _target(url, answer)
            before, origin = origin, origin_of(url)
            if before.scheme == "https" and origin.scheme == "http":
                raise Failed(f"it redirects from https to plain http ({shown(str(origin))})", again=False)
            if origin != before:
                sent.pop("authorization", None)
        raise Failed(f"it redirects more than {REDIRECTS_MAX} times", again=False)

    async def aclose(self) -> None:
        transports, self._transports = self._transports, {}
        for transport in transports.values():
            await _closed(transport)

    @asynccontextmanager
    async def _one(
        self, method: str, url: str, origin: Origin, first: Origin, headers: Mapping[str, str], content: bytes
    ) -> AsyncIterator[Answer]:
        addresses = await self._addresses(origin, first)
        response = None
        for number, address in enumerate(addresses, 1):
            try:
                response = await self._send(method, url, origin, address, headers, content)
                break
            except Failed as failed:
                if number == len(addresses) or not failed.again:
                    raise
        assert response is not None
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        parts = self._parts(response.stream)
        try:
            if response.headers.get("content-encoding", "identity").lower() != "identity":
                raise Failed("it compressed its answer though it was asked not to", again=False)
            yield Answer(response.status_code, response.headers, parts, origin)
        finally:
            await parts.aclose()
            await _closed(response.stream)

    async def _send(
        self, method: str, url: str, origin: Origin, address: Address, headers: Mapping[str, str], content: bytes
    ) -> httpx2.Response:
        """To the address that was judged; the name goes into the Host header and the TLS handshake."""
        host = f"[{address}]" if address.version == 6 else str(address)
        parts = urlsplit(url)
        silence = self._times.silence_s
        request = httpx2.Request(
            method,
            f"{origin.scheme}://{host}:{origin.port}{parts.path or '/'}" + (f"?{parts.query}" if parts.query else ""),
            headers={"user-agent": USER_AGENT, "accept-encoding": "identity", **headers, "host": origin.name},
            content=content,
            extensions={
                "sni_hostname": origin.host,
                "timeout": {"connect": self._times.connect_s, "read": silence, "write": silence, "pool": silence * 10},
            },
        )
        try:
            async with asyncio.timeout(self._times.connect_s + 2 * silence):
                transport = await self._transport(origin, address)
                return await transport.handle_async_request(request)
        except _FAILURES as raised:
            raise _failed(raised, origin) from None

    async def _parts(self, stream: httpx2.AsyncByteStream) -> AsyncGenerator[bytes]:
        """The body. Only the time that we wait for it counts, not what the reader does with it."""
        times = self._times
        source = aiter(stream)
        waited, arrived = 0.0, 0
        try:
            while True:
                began = time.monotonic()
                async with asyncio.timeout(times.silence_s):
                    part = await anext(source, None)
                if part is None:
                    return
                waited += time.monotonic() - began
                arrived += len(part)
                if waited > times.rate_window_s:
                    if arrived < waited * times.rate_min_bytes_s:
                        raise Failed(f"it sends fewer than {times.rate_min_bytes_s:g} bytes a second", again=True)
                    waited, arrived = 0.0, 0
                yield part
        except _FAILURES as raised:
            raise _failed(raised, None) from None

    async def _transport(self, origin: Origin, address: Address) -> httpx2.AsyncHTTPTransport:
        """One for each name and address: a connection proven for one name is not used for another."""
        if (origin, address) not in self._transports:
            # Reading the system's certificates takes tens of milliseconds.
            tls = await asyncio.to_thread(self._tls, origin) if origin.scheme == "https" else False
            limits = httpx2.Limits(max_connections=CONNECTIONS_MAX, max_keepalive_connections=CONNECTIONS_MAX)
            made = httpx2.AsyncHTTPTransport(verify=tls, trust_env=False, limits=limits)
            self._transports.setdefault((origin, address), made)
        return self._transports[origin, address]

    def _tls(self, origin: Origin) -> ssl.SSLContext:
        context = ssl.create_default_context()
        ca_file = self._settings.host(origin.name).ca_file
        if ca_file is not None:
            try:
                context.load_verify_locations(ca_file)
            except (OSError, ssl.SSLError) as raised:
                why = raised.strerror or "it is not PEM"
                raise Failed(f"its ca_file {ca_file} cannot be used: {why}", again=False) from None
        return context

    async def _addresses(self, origin: Origin, first: Origin) -> list[Address]:
        """Judged once a pull. All must be good: a name with one bad address is a trick."""
        known = self._judged.get((origin, first))
        if known is not None:
            return known
        found = await self._resolved(origin)
        kinds = {kind_of(address) for address in found}
        if origin == first:
            self._kinds[origin] = kind_of(found[0])
        elif first not in self._kinds:
            await self._addresses(first, first)
        for kind in kinds:
            if not may_reach(self._settings, origin, kind, first, self._kinds[first]):
                raise Failed(f"{shown(origin.name)} is at an address that images may not come from", again=False)
        if origin.scheme == "http" and is_loopback_name(origin.name) and kinds != {"loopback"}:
            raise Failed(f"{shown(origin.name)} is not on this machine, and it was asked without TLS", again=False)
        self._judged[origin, first] = found
        return found

    async def _resolved(self, origin: Origin) -> list[Address]:
        try:
            return [ipaddress.ip_address(origin.host)]
        except ValueError:
            pass  # a name
        try:
            async with asyncio.timeout(self._times.connect_s):
                rows = await asyncio.get_running_loop().getaddrinfo(
                    origin.host, origin.port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP
                )
        except (OSError, UnicodeError, TimeoutError):
            raise Failed(f"the name {shown(origin.host)} has no address", again=True) from None
        found = list(dict.fromkeys(ipaddress.ip_address(str(row[4][0]).partition("%")[0]) for row in rows))
        if not found:
            raise Failed(f"the name {shown(origin.host)} has no address", again=True)
        return found[:ADDRESSES_MAX]


def _target(url: str, answer: Answer) -> str:
    location = answer.headers.get("location", "")
    if not location or len(location) > LOCATION_CHARS_MAX or not location.isprintable():
        raise Failed("it redirects to nowhere", again=False)
    try:
        return urljoin(url, location)
    except ValueError:
        raise Failed("it redirects to something that is not a URL", again=False) from None


def _failed(raised: BaseException, origin: Origin | None) -> Failed:
    name = shown(str(origin)) if origin else "it"
    seen: BaseException | None = raised
    while seen is not None:
        if isinstance(seen, ssl.SSLCertVerificationError):
            why = shown(seen.verify_message or "it cannot be verified")
            text = f"the certificate of {name} is not trusted ({why}); a CA of your own is named by ca_file"
            return Failed(text, again=False)
        if isinstance(seen, ssl.SSLError):
            return Failed(f"{name} does not speak TLS as it must", again=False, not_tls=True)
        seen = seen.__cause__ or seen.__context__
    if isinstance(raised, httpx2.ConnectError):
        return Failed(f"no connection to {name}", again=True)
    if isinstance(raised, (httpx2.TimeoutException, TimeoutError)):
        return Failed(f"{name} did not answer in time", again=True)
    return Failed(f"the connection to {name} broke", again=True)


async def _closed(thing: httpx2.AsyncByteStream | httpx2.AsyncHTTPTransport) -> None:
    try:
        await thing.aclose()
    except _FAILURES:
        return  # it is closed either way
