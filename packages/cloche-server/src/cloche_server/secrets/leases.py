"""A sandbox's hold of its secrets: what it is made of, when a minted value must be renewed, and its end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from cloche.wire.secrets import Place
from cloche_server.secrets.binding import Binding
from cloche_server.secrets.hidden import Hidden

RENEW_AT: Final = 0.75
"""Of a value's time: what is left is for a source that is slow or fails once."""
AGAIN_S: Final = 5.0
AGAIN_DEAD_S: Final = 30.0
AGAIN_S_MIN: Final = 0.05


@dataclass(frozen=True)
class Lease:
    """`hosts` empty: the value ended and could not be renewed, or the secret was removed; then nothing is replaced anywhere."""

    name: str
    placeholder: str
    value: Hidden
    hosts: tuple[str, ...]
    methods: tuple[str, ...] | None
    paths: tuple[str, ...] | None
    places: tuple[Place, ...]
    require: bool
    ends_at: float | None = None
    """By the clock that the room was given; None: with the sandbox."""
    renew_at: float | None = None

    @property
    def is_dead(self) -> bool:
        return not self.hosts


@dataclass
class Hold:
    """All leases of one sandbox."""

    sandbox: str
    tenant: str
    owner: str
    lineage: str
    leases: dict[str, Lease] = field(default_factory=dict)

    def put(self, lease: Lease) -> None:
        """In the place of the one before, which is wiped."""
        before = self.leases.get(lease.name)
        self.leases[lease.name] = lease
        if before is not None and before.value is not lease.value:
            before.value.wipe()

    def wipe(self) -> None:
        for lease in self.leases.values():
            lease.value.wipe()
        self.leases.clear()

    def due(self, now: float) -> Iterator[Lease]:
        return (each for each in list(self.leases.values()) if each.renew_at is not None and each.renew_at <= now)

    def next_s(self, now: float) -> float | None:
        """Until something is due; None: never."""
        times = [each.renew_at for each in self.leases.values() if each.renew_at is not None]
        return max(0.0, min(times) - now) if times else None


def made(binding: Binding, placeholder: str, value: Hidden, now: float) -> Lease:
    ttl_s = binding.origin.ttl_s
    return Lease(
        name=binding.name,
        placeholder=placeholder,
        value=value,
        hosts=binding.hosts,
        methods=binding.methods,
        paths=binding.paths,
        places=tuple(spot.place() for spot in binding.places),
        require=binding.require,
        ends_at=None if ttl_s is None else now + ttl_s,
        renew_at=None if ttl_s is None else now + RENEW_AT * ttl_s,
    )


def not_renewed(lease: Lease, now: float) -> Lease:
    """After a failed renewal: the old value while it lasts, then none; tried again either way."""
    assert lease.ends_at is not None
    left_s = lease.ends_at - now
    if left_s <= 0:
        return dead(lease, renew_at=now + AGAIN_DEAD_S)
    again_s = max(AGAIN_S_MIN, min(AGAIN_S, left_s / 4))
    return _with(lease, value=lease.value, hosts=lease.hosts, renew_at=min(now + again_s, lease.ends_at))


def dead(lease: Lease, *, renew_at: float | None = None) -> Lease:
    """Bound to no host, with a value that nothing contains: its placeholder is still known, and refused everywhere."""
    return _with(lease, value=Hidden(os.urandom(32).hex().encode()), hosts=(), renew_at=renew_at)


def _with(lease: Lease, *, value: Hidden, hosts: tuple[str, ...], renew_at: float | None) -> Lease:
    return Lease(
        name=lease.name,
        placeholder=lease.placeholder,
        value=value,
        hosts=hosts,
        methods=lease.methods,
        paths=lease.paths,
        places=lease.places,
        require=lease.require,
        ends_at=lease.ends_at,
        renew_at=renew_at,
    )
