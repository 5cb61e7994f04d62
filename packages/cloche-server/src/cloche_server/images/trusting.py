"""The node's trust policy, asked before an image is converted and each time before it is run.

A pull asks the source for signatures and the store keeps them, as blobs; what is already here is asked again from those,
without the network, so that a policy that became stricter holds for old images too. For an image of several platforms a
signature over its index or over its own manifest counts.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Final, cast

import msgspec

from cloche.wire.errors import ClocheError, error
from cloche_server.images.layout import ImageRecord
from cloche_server.images.pulling import Signed, Source
from cloche_server.images.reference import Reference
from cloche_server.images.registry import Registry
from cloche_server.images.store import Store
from cloche_server.images.trust import Signature, TrustPolicy, signatures_of, verify

KEPT_BYTES_MAX: Final = 256 * 1024
UNSIGNED: Final = ("signature_missing", "signature_invalid")


class KeptSignature(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A signature as the store keeps it."""

    of: str
    payload: str
    signature: str


class Trusting:
    """Applies one policy."""

    def __init__(self, policy: TrustPolicy) -> None:
        self._policy = policy

    async def check_source(self, ref: Reference, digests: Sequence[str], source: Source) -> Signed:
        """Signatures over one of these digests, the outermost last, as the source has them."""
        fetched: list[bytes] = []

        async def fetch(where: Reference, digest: str) -> Sequence[Signature]:
            found = await signatures_of(cast(Registry, source))(where, digest)
            fetched.extend(_kept(digest, each) for each in found)
            return found

        failures: list[ClocheError] = []
        for digest in reversed(digests):
            try:
                return Signed(await verify(self._policy, ref, digest, fetch), tuple(dict.fromkeys(fetched)))
            except ClocheError as failed:
                if failed.code not in UNSIGNED:
                    raise
                failures.append(failed)
        raise failures[0]

    async def check_kept(self, refs: Sequence[Reference], image: ImageRecord, store: Store) -> tuple[str, ...]:
        """Who signed, by what the store has. One of the names must satisfy the policy; without names its default must."""
        if not refs:
            self.check_nameless()
            return ()

        async def fetch(_: Reference, digest: str) -> list[Signature]:
            found = (_read(store.read_blob(each, KEPT_BYTES_MAX)) for each in image.signatures)
            return [signature for of, signature in found if of == digest]

        failures: list[ClocheError] = []
        for ref in refs:
            for digest in (*image.indexes, image.digest):
                try:
                    return await verify(self._policy, ref, digest, fetch)
                except ClocheError as failed:
                    if failed.code not in UNSIGNED:
                        raise
                    failures.append(failed)
        raise failures[0]

    def check_nameless(self) -> None:
        if self._policy.default == "refuse":
            raise error("signature_missing", "The trust policy refuses images without a name.")


def _kept(digest: str, signature: Signature) -> bytes:
    return msgspec.json.encode(
        KeptSignature(
            of=digest,
            payload=base64.b64encode(signature.payload).decode(),
            signature=base64.b64encode(signature.signature).decode(),
        )
    )


def _read(data: bytes) -> tuple[str, Signature]:
    try:
        kept = msgspec.json.decode(data, type=KeptSignature)
        return kept.of, Signature(base64.b64decode(kept.payload), base64.b64decode(kept.signature))
    except (msgspec.DecodeError, binascii.Error) as bad:
        raise error("signature_invalid", "A signature that the store keeps cannot be read.") from bad
