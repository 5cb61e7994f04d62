"""Every planted defect. `just defects` runs them; the table is in docs/controls.md.

To add one: write a function that gets the imported module and switches one control off
(use `replace`), and an entry that names the tests of that requirement which must fail.
Keep the imports to the standard library.

    def forget_the_cursor(module: ModuleType) -> None:
        replace(module.CommandLog, "read", lambda read: lambda self, start: read(self, 0))

    Defect(
        id="EXE-4/lost-cursor",
        req="EXE-4",
        module="cloche_server.node.command_log",
        patch=forget_the_cursor,
        tests=("tests/promises/test_output.py::test_a_reader_continues_from_its_cursor",),
    )
"""

from tests.defects.defect import Defect

DEFECTS: tuple[Defect, ...] = ()


def by_id(defect_id: str) -> Defect:
    """The entry of that id; KeyError when there is none."""
    return {defect.id: defect for defect in DEFECTS}[defect_id]
