"""`python -m cloche_server.node.launch up|delegate|undelegate`: what the CLI runs, as root or as the user."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cloche.wire.errors import ClocheError, to_problem
from cloche_server.node.launch import delegate, undelegate
from cloche_server.node.launch.places import MODES, NodePaths, default_images_dir, default_run_dir, default_state_dir
from cloche_server.node.launch.up import replace, up


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        if options.verb == "up":
            paths = NodePaths(
                state=(options.state_dir or default_state_dir(options.mode)).absolute(),
                run=(options.run_dir or default_run_dir(options.mode)).absolute(),
                images=(options.images_dir or default_images_dir()).absolute(),
                store_dir=options.store_dir.absolute() if options.store_dir else None,
                config_dir=options.config_dir.absolute() if options.config_dir else None,
            )
            accept = tuple(name for name in options.accept.split(",") if name)
            more = ("--listen", options.listen) if options.listen else ()
            start = replace if options.replace else up
            pid = start(paths, mode=options.mode, accept=accept, more=more)
            sys.stdout.write(f"up, pid {pid}\n" if pid else "up already\n")
        else:
            done = delegate(options.user) if options.verb == "delegate" else undelegate(options.user)
            sys.stdout.writelines(f"{path}\n" for path in done)
    except ClocheError as failure:
        sys.stderr.write(f"{to_problem(failure).model_dump_json()}\n")
        return failure.kind.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cloche_server.node.launch")
    verbs = parser.add_subparsers(dest="verb", required=True)
    start = verbs.add_parser("up")
    start.add_argument("--mode", choices=MODES, required=True)
    for name in ("--state-dir", "--run-dir", "--images-dir", "--store-dir", "--config-dir"):
        start.add_argument(name, type=Path)
    start.add_argument("--accept", default="")
    start.add_argument("--listen")
    start.add_argument("--replace", action="store_true", help="end a living daemon first; its sandboxes stay")
    for verb in ("delegate", "undelegate"):
        verbs.add_parser(verb).add_argument("user")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
