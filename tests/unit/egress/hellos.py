"""TLS hellos as real clients send them: made by the standard library's own TLS."""

import ssl


def hello(name: str | None) -> bytes:
    """A ClientHello, with this name in it or with none."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    talk = context.wrap_bio(incoming, outgoing, server_hostname=name)
    try:
        talk.do_handshake()
    except ssl.SSLWantReadError:
        return outgoing.read()
    raise AssertionError("a handshake without a server")
