"""Every socket to the world is opened in a file that ARCHITECTURE lists, with its reason; nowhere else."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tidy.sources import ROOT, python_files, report, shown, tree

CLIENTS = frozenset(
    {"aiohttp", "dns", "ftplib", "http.client", "httpx", "httpx2", "smtplib", "urllib.request", "urllib3"}
)
"""Packages that open connections, or ask name servers."""
CALLS = frozenset(
    {"create_connection", "getaddrinfo", "gethostbyname", "open_connection", "create_datagram_endpoint", "sock_connect"}
)
ROW = re.compile(r"^\| `([a-z_/]+\.py)` \| (.+) \|$", re.MULTILINE)
HEADING = "## Sockets to the world"
SERVER = ROOT / "packages" / "cloche-server" / "src" / "cloche_server"


def listed() -> dict[str, str]:
    """File below `cloche_server/` → why it may."""
    text = (ROOT / "ARCHITECTURE.md").read_text().partition(HEADING)[2].partition("\n## ")[0]
    return dict(ROW.findall(text))


def modules(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module


def is_client(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in CLIENTS)


def opens(node: ast.AST) -> str | None:
    """What in this node can reach the world; a unix socket, or one that was handed over, cannot."""
    if any(is_client(module) for module in modules(node)):
        return "imports a client"
    if not isinstance(node, ast.Call):
        return None
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in CALLS:
        return f"calls {name}"
    is_socket = name == "socket" and (isinstance(node.func, ast.Name) or ast.unparse(node.func) == "socket.socket")
    if not is_socket:
        return None
    told = ast.unparse(node)
    return None if "AF_UNIX" in told or "fileno=" in told else "opens a socket"


def found_in(path: Path) -> list[str]:
    return [
        f"{shown(path, getattr(node, 'lineno', 0))} {what}" for node in ast.walk(tree(path)) if (what := opens(node))
    ]


@pytest.mark.req("NET-1")
def test_sockets_to_the_world_are_opened_where_the_map_says() -> None:
    allowed = set(listed())
    problems = []
    for path in python_files("packages"):
        if not path.is_relative_to(SERVER):
            continue
        inside = path.relative_to(SERVER)
        if inside.parts[0] == "interceptor" or str(inside) in allowed:
            continue  # the interceptor runs in an empty network namespace: whatever it opens leads nowhere
        problems += found_in(path)
    report(problems, f"The daemon reaches the world only from the files listed in ARCHITECTURE.md, `{HEADING}`.")


@pytest.mark.req("NET-1")
def test_the_list_has_no_file_that_opens_nothing() -> None:
    rows = listed()
    assert len(rows) >= 5, "the table is gone, or its form has changed"
    idle = [name for name in rows if not (SERVER / name).is_file() or not found_in(SERVER / name)]
    report(idle, "ARCHITECTURE.md lists files that open no socket any more; take them out.")


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import httpx2", "imports a client"),
        ("from urllib.request import urlopen", "imports a client"),
        ("import dns.message", "imports a client"),
        ("socket.create_connection(('h', 1))", "calls create_connection"),
        ("loop.getaddrinfo('h', 1)", "calls getaddrinfo"),
        ("socket.socket(socket.AF_INET)", "opens a socket"),
        ("socket.socket()", "opens a socket"),
        ("socket(family)", "opens a socket"),
        ("socket.socket(socket.AF_UNIX)", None),
        ("socket.socket(fileno=3)", None),
        ("socket.socketpair()", None),
        ("import socket", None),
    ],
)
def test_the_scan_sees_what_it_should(source: str, what: str | None) -> None:
    found = [seen for node in ast.walk(ast.parse(source)) if (seen := opens(node))]
    assert found == ([what] if what else [])
