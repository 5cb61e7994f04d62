"""`cloche image fsck`: is the store whole?"""

import sys

import click


@click.command("fsck")
@click.option(
    "--repair", is_flag=True, help="Remove what is broken (the administrator); it is pulled anew when needed."
)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def command(repair: bool, as_json: bool) -> int:
    """Read the whole store and compare it with its hashes. Exit code 1 when something is wrong and not repaired."""
    from cloche.cli import render, session, units
    from cloche.cli.progress import spinning

    with session.connect() as node, spinning("reading the image store"):
        report = node.images.fsck(repair=repair)
    bad = [problem for problem in report.problems if not problem.repaired]
    if as_json:
        render.json_out(report)
        return 1 if bad else 0
    for problem in report.problems:
        mark = render.sign("✓", "+", sys.stdout) if problem.repaired else render.sign("✗", "x", sys.stdout)
        print(f"{mark} {render.shown(problem.path)}: {render.shown(problem.what)}")
    images = units.count(report.images, "image", "images")
    text = f"{images}, {report.blobs} blobs, {report.roots} roots, {units.size(report.bytes)}"
    if bad:
        render.say(
            f"  {units.count(len(bad), 'thing', 'things')} wrong in {text}; cloche image fsck --repair removes it"
        )
        return 1
    render.tick(f"the store is whole: {text}")
    return 0
