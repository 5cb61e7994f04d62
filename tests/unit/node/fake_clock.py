"""A clock that a test moves: hours pass, or the machine sleeps, at a call."""

from cloche_server.node.clock import NS


class FakeClock:
    def __init__(self) -> None:
        self.ns = 1_000 * NS

    def boot_ns(self) -> int:
        self.ns += 1000  # no two moments are the same
        return self.ns

    def wall_s(self) -> float:
        return 1_800_000_000 + self.ns / NS

    def pass_s(self, seconds: float) -> None:
        self.ns += int(seconds * NS)
