"""Coverage-guided fuzzing of everything that reads guest bytes, with a bound on its time:

    PYTHONPATH=. python tests/unit/channel/fuzz_decoder.py -max_total_time=60

Needs atheris, which is built for few Python versions. Without it this says so and stops; the hypothesis tests beside
this file cover the same entry with random input.
"""

import contextlib
import inspect
import sys

from cloche_server.channel import credit, frames, messages, reset, streams
from cloche_server.channel.errors import ProtocolError
from cloche_server.channel.frames import FRAME_BYTES_MAX, Decoder, encode
from cloche_server.channel.reset import Scan
from tests.unit.channel.transcript import Ear, Talk

NONCE = b"0123456789abcdef"


def fuzz_one(data: bytes) -> None:
    """Nothing but ProtocolError may come out, and no window may leak.

    The first byte chooses where the rest is cut, and (if odd) that the rest describes frames, which get valid
    checksums: a fuzzer cannot guess those, and would never reach the streams.
    """
    step = (data[0] if data else 0) + 1
    body = _framed(data[1:]) if step % 2 == 0 else data[1:]
    talk = Talk(guest_open=lambda *_: Ear())
    talk.mux.open("exec", {}, [Ear(), Ear()])
    decoder, scan = Decoder(), Scan(NONCE, bytes_max=1 << 20)
    try:
        for at in range(0, len(body), step):
            for kind, stream, payload in decoder.feed(body[at : at + step]):
                talk.mux.receive(kind, stream, payload)
            assert decoder.kept_bytes < FRAME_BYTES_MAX
    except ProtocolError:
        pass
    talk.mux.lost("over")
    assert talk.node.bytes_used == 0
    with contextlib.suppress(ProtocolError):
        scan.feed(body)


def _framed(plan: bytes) -> bytes:
    """Frames from (kind, stream, length, payload) quadruples; kinds and streams stay near the ones that exist."""
    made, at = [], 0
    while at + 3 <= len(plan):
        kind, stream, length = plan[at] % 16, plan[at + 1] % 8, plan[at + 2]
        made.append(encode(kind, stream, plan[at + 3 : at + 3 + length]) if kind else b"\0")
        at += 3 + length
    return b"".join(made)


def main() -> None:
    try:
        import atheris
    except ImportError:
        sys.exit("atheris is not installed (see the docstring); the hypothesis tests cover this entry at random")
    for module in (credit, frames, messages, reset, streams):  # ours only: the whole interpreter takes a minute
        for owner in (module, *(each for each in vars(module).values() if inspect.isclass(each))):
            for function in vars(owner).values():
                if inspect.isfunction(function) and function.__module__ == module.__name__:
                    atheris.instrument_func(function)
    atheris.Setup(sys.argv, fuzz_one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
