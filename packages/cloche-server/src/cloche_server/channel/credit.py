"""Byte sequences with absolute offsets, the credit that bounds them, and the budgets that bound the credit."""

from __future__ import annotations

from collections import deque

from cloche_server.channel.errors import ProtocolError

WINDOW_BYTES_START = 65_536
WINDOW_BYTES_MAX = 1_048_576
WINDOWS_BYTES_PER_SANDBOX_MAX = 16_777_216


class Budget:
    """Receive-window bytes granted and not yet given back, with a limit; a sandbox's budget draws on the node's.

    What a guest can cause (a stream that it opens, a window that grows) is refused beyond the limit.
    A stream that the node itself opens is counted but never refused: their number is the node's own decision.
    """

    def __init__(self, bytes_max: int, parent: Budget | None = None) -> None:
        self.bytes_max = bytes_max
        self.bytes_used = 0
        self._parent = parent

    def take(self, count: int) -> bool:
        if self.bytes_used + count > self.bytes_max or (self._parent is not None and not self._parent.take(count)):
            return False
        self.bytes_used += count
        return True

    def take_to_grow(self, count: int) -> bool:
        """For a window that grows: half stays for windows that begin, else a few busy streams would shut the rest out."""
        return self.bytes_used + count <= self.bytes_max // 2 and self.take(count)

    def take_always(self, count: int) -> None:
        self.bytes_used += count
        if self._parent is not None:
            self._parent.take_always(count)

    def give(self, count: int) -> None:
        assert 0 <= count <= self.bytes_used, "more window given back than taken"
        self.bytes_used -= count
        if self._parent is not None:
            self._parent.give(count)


class Inbound:
    """What the guest sends on one stream. The window must already be taken from the budget."""

    __slots__ = ("_bound", "_budget", "consumed", "ended", "limit", "received", "window")

    def __init__(self, budget: Budget, *, at: int = 0, adopted: bool = False) -> None:
        self._budget = budget
        self.received = self.consumed = at
        self.window = WINDOW_BYTES_START
        self.limit = at + WINDOW_BYTES_START
        # After a re-attach the guest may still hold the predecessor's limit: at most one full window past the log.
        self._bound = at + WINDOW_BYTES_MAX if adopted else self.limit
        self.ended = False

    def take(self, count: int) -> None:
        if self.ended:
            raise ProtocolError("data_after_eof")
        received = self.received + count
        if received > self._bound:
            raise ProtocolError("beyond_limit", f"{received} > {self._bound}")
        self.received = received

    def finish(self, offset: int) -> None:
        if self.ended:
            raise ProtocolError("eof_twice")
        if offset != self.received:
            raise ProtocolError("eof_offset", f"{offset} after {self.received}")
        self.ended = True

    def consume(self, total: int) -> tuple[int, int] | None:
        """`total` bytes are taken over for good; the CREDIT to send, if it is time for one."""
        assert self.consumed <= total <= self.received, "consumed runs from its last value to what was received"
        self.consumed = total
        if self.ended or not self.window:
            return None
        if self.limit - total > self.window // 2:
            return None
        if total == self.received:  # drained, and the guest used half of its window: a larger one would be used too
            growth = min(self.window, WINDOW_BYTES_MAX - self.window)
            if growth and self._budget.take_to_grow(growth):
                self.window += growth
        return self.grant()

    def grant(self) -> tuple[int, int]:
        self.limit = max(self.limit, self.consumed + self.window)
        self._bound = max(self._bound, self.limit)
        return self.consumed, self.limit

    def release(self) -> None:
        """The window goes back to the budget; nothing more is accepted."""
        self._budget.give(self.window)
        self.window = 0
        self.ended = True


class Outbound:
    """What the host sends on one stream. Bytes beyond the guest's limit wait here; the caller bounds them."""

    __slots__ = ("_wanted_eof", "confirmed", "eof_sent", "limit", "pending_bytes", "queue", "sent")

    def __init__(self, *, at: int = 0, adopted: bool = False, eof_sent: bool = False) -> None:
        self.sent = self.confirmed = at
        self.limit = at if adopted else WINDOW_BYTES_START  # an adopted stream waits for the guest's fresh CREDIT
        self.eof_sent = eof_sent
        self.queue: deque[memoryview] = deque()
        self.pending_bytes = 0
        self._wanted_eof = eof_sent

    @property
    def closed(self) -> bool:
        return self._wanted_eof

    def credit(self, consumed: int, limit: int) -> None:
        if consumed < self.confirmed or limit < self.limit:
            raise ProtocolError("credit_went_back", f"{consumed}/{limit} after {self.confirmed}/{self.limit}")
        if consumed > self.sent:
            raise ProtocolError("credit_beyond_sent", f"{consumed} > {self.sent}")
        if not consumed <= limit <= consumed + WINDOW_BYTES_MAX:
            raise ProtocolError("credit_window", f"{consumed}/{limit}")
        self.confirmed, self.limit = consumed, limit

    def push(self, data: bytes) -> None:
        assert not self._wanted_eof, "no data after eof"
        if data:
            self.queue.append(memoryview(data))
            self.pending_bytes += len(data)

    def finish(self) -> None:
        self._wanted_eof = True

    def next_piece(self, bytes_max: int) -> memoryview | None:
        """The next bytes that may go out now, at most `bytes_max`, or None."""
        room = min(self.limit - self.sent, bytes_max)
        if room <= 0 or not self.queue:
            return None
        head = self.queue[0]
        if len(head) <= room:
            self.queue.popleft()
        else:
            self.queue[0], head = head[room:], head[:room]
        self.sent += len(head)
        self.pending_bytes -= len(head)
        return head

    def take_eof(self) -> int | None:
        """The offset for EOF, once: when it was asked for and everything before it went out."""
        if self.eof_sent or not self._wanted_eof or self.queue:
            return None
        self.eof_sent = True
        return self.sent

    def drop(self) -> None:
        self.queue.clear()
        self.pending_bytes = 0
        self._wanted_eof = self.eof_sent = True
