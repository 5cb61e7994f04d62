"""Coverage-guided fuzzing of everything that reads guest bytes: `python tests/unit/channel/fuzz_decoder.py [atheris options]`.

Needs atheris, which is no dependency of the project: it is built for few Python versions and must compile
against a matching clang. Without it the hypothesis tests beside this file cover the same entry with random input.
"""

import contextlib
import sys

from cloche_server.channel.errors import ProtocolError
from cloche_server.channel.frames import FRAME_BYTES_MAX, Decoder
from cloche_server.channel.reset import Scan
from tests.unit.channel.transcript import Ear, Talk

NONCE = b"0123456789abcdef"


def fuzz_one(data: bytes) -> None:
    """The first byte chooses where the rest is cut; nothing but ProtocolError may come out, and no window may leak."""
    step = (data[0] if data else 0) + 1
    body = data[1:]
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


def main() -> None:
    try:
        import atheris
    except ImportError:
        sys.exit("atheris is not installed (see the docstring); the hypothesis tests cover this entry at random")
    atheris.instrument_all()
    atheris.Setup(sys.argv, fuzz_one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
