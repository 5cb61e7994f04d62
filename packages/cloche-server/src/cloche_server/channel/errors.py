"""What can go wrong on a channel, by name. The node maps these to the public error table."""

from __future__ import annotations

GUEST_TEXT_CHARS_MAX = 4096


class ChannelError(Exception):
    """Every error of this room."""


class ProtocolError(ChannelError):
    """The guest broke the contract. Outside a re-attach the sandbox ends with `protocol_error`."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class BadFrame(ProtocolError):
    """Bytes that are no frame, or a payload that is not what its kind says (`reason`: length, kind, crc, json, ...)."""


class WrongGeneration(ProtocolError):
    """HELLO names a generation that this host does not speak; `reason` is `guest_too_new` or `guest_too_old`."""

    def __init__(self, generation: int, spoken: int) -> None:
        super().__init__("guest_too_new" if generation > spoken else "guest_too_old", f"generation {generation}")
        self.generation = generation


class ChannelLost(ChannelError):
    """The channel is gone; `reason` is what `on_lost` was told."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ChannelFull(ChannelError):
    """No further stream can be opened now (`reason`: streams, ids)."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class StreamEnded(ChannelError):
    """The operation has ended, so nothing can be sent to it any more; `Stream.result` says how it ended."""


class OperationFailed(ChannelError):
    """The guest answered END with an error. The text was chosen by a guest: escape it before a person sees it."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
