"""`cloche secret`: what an operator binds, so that sandboxes can use it and never have it.

A value is never an argument: a command line is seen by every user of the machine and kept by the shell.
"""

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from cloche.cli.options import DashCommand, behind_dashes
from cloche.cli.units import DURATION

if TYPE_CHECKING:
    from cloche.wire.secrets import Place, SecretView

HEAD: Final = ("NAME", "FROM", "HOSTS", "PLACES", "REQUIRED", "HELD BY", "SET", "OWNER")
VALUE_CHARS_MAX: Final = 64 * 1024


@click.group("secret")
def command() -> None:
    """Bind credentials to hosts: inside a sandbox stands a placeholder, the real one goes into the request on the host."""


@command.command("set", cls=DashCommand)
@click.argument("name")
@click.argument("words", nargs=-1, metavar="[ARG]...")
@click.option(
    "--from",
    "source",
    type=click.Choice(["env", "file", "command", "http"]),
    required=True,
    help="Where the value is: your variable (ARG, or NAME), your file (ARG, or - for stdin), a command or a URL that the node asks.",
)
@click.option("--host", "hosts", multiple=True, required=True, metavar="HOST[:PORT]", help="Where it may go.")
@click.option("--method", "methods", multiple=True, help="Only with these methods.")
@click.option("--path", "paths", multiple=True, metavar="PATTERN", help="Only to these paths (/repos/**).")
@click.option(
    "--header", "headers", multiple=True, metavar="'NAME: FORMAT'", help="It stands there: 'Authorization: Bearer {}'."
)
@click.option(
    "--basic", "users", multiple=True, metavar="USER", help="It is the password of USER (* for any) in Basic auth."
)
@click.option("--query", "queries", multiple=True, metavar="PARAMETER", help="It stands in this query parameter.")
@click.option("--body", is_flag=True, help="It may stand in the body.")
@click.option("--require", is_flag=True, help="Refuse other credentials in that place.")
@click.option("--ttl", type=DURATION, help="With command, http or --on-node: ask for a new value after this time.")
@click.option("--field", metavar="NAME", help="With http: the JSON field of the answer (data.token).")
@click.option(
    "--request-header",
    "request_headers",
    multiple=True,
    metavar="'NAME: VALUE'",
    help="With http: send this; $NAME is taken from the node's environment.",
)
@click.option("--post", metavar="BODY", help="With http: POST this instead of GET.")
@click.option("--on-node", is_flag=True, help="With file: the node reads it, at each lease.")
@click.option("--json", "as_json", is_flag=True, help="Print its view.")
def set_command(name: str, words: tuple[str, ...], as_json: bool, **given: Any) -> int:
    """Set a secret, or replace it. Sandboxes that hold it go on with the new value.

    What a command or a URL answers is asked for each sandbox (and again after --ttl); only the node's operator can set
    those. A command stands behind `--`. The opposite is: cloche secret rm NAME
    """
    from cloche.cli import render, session
    from cloche.cli.escape import line

    arguments = [*words, *(behind_dashes() or [])]
    value, source = origin_of(name, arguments, given)
    fields = {
        "hosts": given["hosts"],
        "places": places_of(given),
        "methods": [method.upper() for method in given["methods"]] or None,
        "paths": list(given["paths"]) or None,
        "require": given["require"],
    }
    with session.connect(start=True) as node:
        view = node.secrets.set(name, value, source=source, **fields)
    if as_json:
        render.json_out(view)
    else:
        render.tick(f"secret {line(view.name)} is bound to {', '.join(view.hosts)}")
    return 0


@command.command("ls")
@click.option("-q", "--quiet", is_flag=True, help="Only names.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def list_command(quiet: bool, as_json: bool) -> int:
    """List your secrets and what they are bound to. No value is ever shown."""
    from cloche.cli import render, session
    from cloche.cli.escape import line

    with session.connect() as node:
        views = node.secrets.list()
    if as_json:
        render.json_out({"secrets": [view.model_dump(mode="json") for view in views]})
    elif quiet:
        for view in views:
            print(line(view.name))
    else:
        render.table(HEAD, [row(view) for view in views])
    return 0


@command.command("rm")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
def remove_command(names: tuple[str, ...]) -> int:
    """Remove secrets. Sandboxes that hold one lose it at once."""
    from cloche.cli import session
    from cloche.cli.escape import line
    from cloche.cli.failure import show_error
    from cloche.wire.errors import ClocheError

    code = 0
    with session.connect() as node:
        for name in names:
            try:
                print(line(node.secrets.remove(name).name))
            except ClocheError as error:
                code = show_error(error)
    return code


def origin_of(name: str, words: list[str], given: dict[str, Any]) -> tuple[str | None, dict[str, Any] | None]:
    """The value, read here; or the source that the node asks."""
    kind, ttl_s = given["source"], given["ttl"]
    _check(kind, given)
    if kind == "command":
        if not words:
            raise click.UsageError("which command? cloche secret set NAME --from command … -- PROGRAM ARG…")
        return None, _plain(kind="command", argv=words, ttl_s=ttl_s)
    if len(words) > 1:
        raise click.UsageError(f"{words[1]!r} is one word too many; only a command has several")
    if kind == "env":
        return _variable(words[0] if words else name), None
    if not words:
        raise click.UsageError("which file? Give its path, or - for stdin" if kind == "file" else "which URL?")
    if kind == "http":
        headers = dict(_pair(text, "--request-header") for text in given["request_headers"])
        post = given["post"]
        method = None if post is None else "POST"
        fields = _plain(url=words[0], field=given["field"], headers_from=headers or None, method=method, body=post)
        return None, {"kind": "http", **fields, **_plain(ttl_s=ttl_s)}
    if given["on_node"]:
        return None, _plain(kind="file", path=words[0], ttl_s=ttl_s)
    return _file(words[0]), None


def places_of(given: dict[str, Any]) -> "list[Place]":
    from cloche.cli.options import checked
    from cloche.wire.secrets import Place

    found: list[dict[str, Any]] = []
    for text in given["headers"]:
        header, form = _pair(text, "--header")
        found.append({"kind": "header", "name": header, "format": form or "{}"})
    found += [{"kind": "basic", "name": None if user == "*" else user} for user in given["users"]]
    found += [{"kind": "query", "name": parameter} for parameter in given["queries"]]
    found += [{"kind": "body"}] if given["body"] else []
    if not found:
        raise click.UsageError("where in a request does it stand? For example --header 'Authorization: Bearer {}'")
    for place in found:
        if "{}" not in str(place.get("format", "{}")):
            raise click.UsageError(f"--header: write {{}} where the value stands: '{place['name']}: Bearer {{}}'")
    return [checked(Place, place) for place in found]


def row(view: "SecretView") -> tuple[str, ...]:
    from cloche.cli import units
    from cloche.cli.ps import owner_name

    return (
        view.name,
        view.source,
        ", ".join(view.hosts),
        ", ".join(f"{place.kind} {place.name}" if place.name else place.kind for place in view.places),
        "yes" if view.require else "no",
        units.count(view.leases, "sandbox"),
        f"{units.span(time.time() - view.set_at)} ago",
        owner_name(view.owner),
    )


def _check(kind: str, given: dict[str, Any]) -> None:
    only_http = [name for name in ("field", "post", "request_headers") if given[name]]
    if kind != "http" and only_http:
        raise click.UsageError(f"--{only_http[0].rstrip('s').replace('_', '-')} is for --from http")
    if given["on_node"] and kind != "file":
        raise click.UsageError("--on-node is for --from file")
    if given["ttl"] and not (kind in ("command", "http") or given["on_node"]):
        raise click.UsageError(
            "--ttl is for values that the node asks for: --from command, http, or file with --on-node"
        )


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if value is None:
        raise click.UsageError(f"your environment has no variable {name}")
    return value


def _file(path: str) -> str:
    with sys.stdin.buffer if path == "-" else Path(path).open("rb") as file:
        data = file.read(VALUE_CHARS_MAX + 3)
    try:
        return data.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise click.UsageError(f"{path} is not text") from None


def _pair(text: str, option: str) -> tuple[str, str]:
    name, colon, rest = text.partition(":")
    if not colon or not name.strip():
        raise click.UsageError(f"{option} is NAME: TEXT")
    return name.strip(), rest.strip()


def _plain(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
