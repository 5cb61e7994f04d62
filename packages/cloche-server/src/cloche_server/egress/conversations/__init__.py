"""How a guest asks. Each conversation is one file, thin: it reads what is asked, makes an attempt, and hands the rest over.

`proxy`: a connection to a proxy address; its first byte says whether it is HTTP or `socks`. `connect`: a connection to the address
that stands for a name. `resolve`: a question for a name, which is answered without asking anybody. `carry` sees to what an
allowed connection must begin with (a TLS hello that names its host, a request), and says no in the words of that protocol.

Deliberately absent: decisions (steps), bytes after the first ones (relay, forward), any wait without an end (`talk` has the times).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from cloche_server.channel import JsonObject
from cloche_server.egress.conversations import connect, proxy
from cloche_server.egress.conversations.talk import Conversation

CONVERSATIONS: Final[Mapping[str, Callable[[JsonObject], Conversation | None]]] = {
    "proxy": proxy.of,
    "connect": connect.of,
}
"""By the op that the guest opened; None: the fields are not what the contract says."""
