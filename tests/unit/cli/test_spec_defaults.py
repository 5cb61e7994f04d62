"""One table of defaults: what SPECIFICATION.md shows, what a request gets, what the command line sends."""

import pytest

from cloche.wire import defaults
from cloche.wire.commands import StartCommand
from cloche.wire.sandboxes import CreateSandbox
from tools import render_docs

pytestmark = pytest.mark.req("UX-7")


def test_the_specification_shows_the_table() -> None:
    text = (render_docs.ROOT / "SPECIFICATION.md").read_text()
    shown = text.split(render_docs.BEGIN)[1].split(render_docs.END)[0].strip()
    assert shown == render_docs.defaults_table().strip(), "python -m tools.render_docs"


def test_the_table_has_every_default() -> None:
    names = {name for name in vars(defaults) if name.isupper()} - set(render_docs.NOT_DEFAULTS)
    assert names == set(render_docs.MEANINGS)


def test_the_table_says_what_was_promised() -> None:
    table = render_docs.defaults_table()
    for cell in (
        "| 1 |",
        "| 512 MB |",
        "| 256 |",
        "| 2 GB |",
        "| 5 min |",
        "| 15 min |",
        "| 24 h |",
        "| 64 MB |",
        "| none |",
        "| python:3.12-slim |",
    ):
        assert cell in table, cell


def test_a_request_gets_them() -> None:
    made = CreateSandbox()
    assert made.limits.cpus == defaults.CPUS
    assert made.limits.memory_bytes == defaults.MEMORY_BYTES
    assert made.limits.processes == defaults.PROCESSES
    assert made.limits.disk_bytes == defaults.DISK_BYTES
    assert made.limits.open_files == defaults.OPEN_FILES
    assert (made.ttl_s, made.idle_timeout_s, made.retain_s) == (
        defaults.TTL_S,
        defaults.IDLE_TIMEOUT_S,
        defaults.RETAIN_S,
    )
    assert made.image is None, "the node knows its own; without one it is the table's"
    assert StartCommand(argv=["x"]).output_bytes_max == defaults.OUTPUT_BYTES_MAX


def test_create_sends_no_others(node, cloche) -> None:
    assert cloche("create").exit_code == 0
    plain = CreateSandbox().model_dump()
    assert node.created[0].model_dump() == plain
