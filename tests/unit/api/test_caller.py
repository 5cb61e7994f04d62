from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from cloche.wire.errors import ClocheError
from cloche_server.api.caller import ApiKey, Peer, Rules, TcpConfig, check_tcp, identify, make_rules

KEYS = (ApiKey.of("ci", "first-key"), ApiKey.of("boss", "second-key", is_admin=True))
RULES = Rules(
    admin_uids=frozenset({0}),
    keys=KEYS,
    allowed_hosts=frozenset({"node.example:8443"}),
    allowed_origins=frozenset({"https://console.example"}),
    nobody_uid=65534,
)
HOST = (b"host", b"node.example:8443")
KEY = (b"authorization", b"Bearer first-key")


@pytest.mark.req("ISO-3")
@pytest.mark.parametrize(
    ("uid", "owner", "is_admin"), [(0, "uid:0", True), (1000, "uid:1000", False), (4294967294, "uid:4294967294", False)]
)
def test_a_local_user_is_who_the_kernel_says(uid: int, owner: str, is_admin: bool) -> None:
    for headers in ([], [KEY], [(b"x-forwarded-user", b"root"), (b"host", b"anything")]):
        caller = identify(Peer(uid), headers, RULES)
        assert (caller.owner, caller.is_admin) == (owner, is_admin)


@pytest.mark.req("ISO-3")
def test_a_key_is_its_owner() -> None:
    assert identify(Peer(None), [HOST, KEY], RULES).owner == "key:ci"
    boss = identify(Peer(None), [HOST, (b"Authorization", b"bearer second-key")], RULES)
    assert (boss.owner, boss.is_admin) == ("key:boss", True)


@pytest.mark.req("ISO-3")
@pytest.mark.parametrize(
    ("peer", "headers", "code"),
    [
        (None, [HOST, KEY], "unauthenticated"),
        (Peer(65534), [], "node_refused"),
        (Peer(None), [HOST], "unauthenticated"),
        (Peer(None), [HOST, (b"authorization", b"Bearer ")], "unauthenticated"),
        (Peer(None), [HOST, (b"authorization", b"Bearer wrong")], "unauthenticated"),
        (Peer(None), [HOST, (b"authorization", b"Basic first-key")], "unauthenticated"),
        (Peer(None), [HOST, (b"authorization", b"Bearer " + b"k" * 600)], "unauthenticated"),
        (Peer(None), [HOST, KEY, KEY], "unauthenticated"),
        (Peer(None), [KEY], "host_refused"),
        (Peer(None), [HOST, HOST, KEY], "host_refused"),
        (Peer(None), [(b"host", b"node.example"), KEY], "host_refused"),
        (Peer(None), [(b"host", b"evil.example:8443"), KEY], "host_refused"),
        (Peer(None), [(b"host", b"node.example:8443.evil.example"), KEY], "host_refused"),
        (Peer(None), [HOST, KEY, (b"origin", b"https://evil.example")], "origin_refused"),
        (Peer(None), [HOST, KEY, (b"origin", b"null")], "origin_refused"),
        (Peer(0), [(b"origin", b"https://evil.example")], "origin_refused"),
    ],
)
def test_who_is_refused(peer: Peer | None, headers: list[tuple[bytes, bytes]], code: str) -> None:
    with pytest.raises(ClocheError) as raised:
        identify(peer, headers, RULES)
    assert raised.value.code == code


def test_a_listed_origin_is_let_in() -> None:
    assert identify(Peer(None), [HOST, KEY, (b"origin", b"https://console.example")], RULES).owner == "key:ci"


@pytest.mark.parametrize(
    ("tcp", "code"),
    [
        (TcpConfig("127.0.0.1", 1, ()), "key_required"),
        (TcpConfig("0.0.0.0", 1, KEYS, frozenset({"h"})), "tls_required"),
        (TcpConfig("node.example", 1, KEYS, frozenset({"h"})), "tls_required"),
        (TcpConfig("::", 1, KEYS, frozenset({"h"})), "tls_required"),
        (TcpConfig("0.0.0.0", 1, KEYS, tls_certificate=Path("c"), tls_key=Path("k")), "host_refused"),
    ],
)
def test_listening_where_strangers_could_come_in_is_refused_by_name(tcp: TcpConfig, code: str) -> None:
    with pytest.raises(ClocheError) as raised:
        check_tcp(tcp)
    assert raised.value.code == code


def test_loopback_needs_no_tls() -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        check_tcp(TcpConfig(host, 1, KEYS))
    rules = make_rules(TcpConfig("127.0.0.1", 99, KEYS))
    assert rules.allowed_hosts == {"localhost:99", "127.0.0.1:99", "[::1]:99"}
    assert rules.admin_uids == {0, os.geteuid()}


def test_the_nodes_key_is_not_kept() -> None:
    assert "first-key" not in repr(KEYS)


def test_peer_of_a_socket_that_is_none() -> None:
    from cloche_server.api.peer import peer_of

    class Transport:
        def __init__(self, sock: socket.socket | None) -> None:
            self.sock = sock

        def get_extra_info(self, name: str) -> object:
            return self.sock

    ours, other = socket.socketpair()
    with ours, other:
        assert peer_of(Transport(ours)) == Peer(os.geteuid())  # type: ignore[arg-type]
    assert peer_of(Transport(None)) is None  # type: ignore[arg-type]
    with socket.socket() as tcp:
        assert peer_of(Transport(tcp)) == Peer(None)  # type: ignore[arg-type]
