"""Every planted defect. `just defects` runs them; the table is in docs/controls.md.

To add one: write, in the room where it belongs, a function that gets the imported module and
switches one control off (use `replace`), and an entry that names the tests of that
requirement which must fail. Choose the fastest that truly proves it. Keep the imports to
the standard library; what a patched function needs of ours it imports when it is called.

    def forget_the_cursor(module: ModuleType) -> None:
        replace(module.CommandLog, "read", lambda read: lambda self, start: read(self, 0))

    Defect(
        "EXE-4/lost-cursor",
        "EXE-4",
        ("tests/promises/test_output.py::test_a_reader_continues_from_its_cursor",),
        "cloche_server.node.command_log",
        forget_the_cursor,
    )

A patch reaches the processes that import its module, so a name that another module took
with `from ... import` is patched there.
"""

from tests.defects.attacks import ATTACKS
from tests.defects.defect import Defect
from tests.defects.egress import EGRESS
from tests.defects.images import IMAGES
from tests.defects.interception import INTERCEPTION
from tests.defects.interceptor import INTERCEPTOR
from tests.defects.lives import LIVES
from tests.defects.policy import POLICY
from tests.defects.requests import REQUESTS
from tests.defects.secrets import SECRETS
from tests.defects.walls import WALLS

DEFECTS: tuple[Defect, ...] = tuple(
    sorted(
        (
            *WALLS, *LIVES, *IMAGES, *EGRESS, *POLICY, *REQUESTS, *ATTACKS, *INTERCEPTION, *INTERCEPTOR, *SECRETS,
        ),
        key=lambda defect: defect.id,
    )
)  # fmt: skip


def by_id(defect_id: str) -> Defect:
    """The entry of that id; KeyError when there is none."""
    return {defect.id: defect for defect in DEFECTS}[defect_id]
