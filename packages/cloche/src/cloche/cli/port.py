"""`cloche port`: a port inside, on 127.0.0.1 here, for as long as this runs."""

import threading

import click

LOOK_S = 0.5


def parse(text: str) -> tuple[int, int]:
    """(inside, here) from `8000` or `8000:9000`."""
    inside, colon, local = text.partition(":")
    try:
        pair = int(inside), int(local) if colon else int(inside)
    except ValueError:
        raise click.UsageError(f"{text!r} is not PORT or PORT:LOCAL") from None
    if not (1 <= pair[0] <= 65535 and 0 <= pair[1] <= 65535):
        raise click.UsageError(f"{text!r}: a port is 1 to 65535")
    return pair


@click.command("port")
@click.argument("target", metavar="ID")
@click.argument("port", metavar="PORT[:LOCAL]")
def command(target: str, port: str) -> int:
    """Forward 127.0.0.1:LOCAL to PORT inside, until Ctrl-C. LOCAL 0 takes a free one."""
    from cloche.cli import render, session
    from cloche.cli.failure import show_error
    from cloche.wire.ids import short

    inside, local = parse(port)
    shown = None
    with session.connect() as node:
        box = node.connect(target)
        with box.ports.forward(inside, local) as forward:
            render.tick(f"127.0.0.1:{forward.local_port} is port {inside} in {short(box.id)}; Ctrl-C ends it")
            try:
                while not threading.Event().wait(LOOK_S):
                    if forward.last_error is not None and forward.last_error is not shown:
                        shown = forward.last_error
                        show_error(shown)
            except KeyboardInterrupt:
                return 0
    return 0
