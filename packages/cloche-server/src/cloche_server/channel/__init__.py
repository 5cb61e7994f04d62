"""The host's end of the guest channel (protocol/guest, generation 1).

A *channel* is one byte stream to one sandbox's agent. It carries *frames*; frames belong to *streams*, which have an
*opener* and an *acceptor*. Each direction of a stream is a byte sequence with absolute offsets: *received*, then
*consumed* (taken over for good, in practice: logged), under a *limit* that CREDIT raises; a *window* is how far the limit
runs ahead, and *budgets* bound all windows. A *sink* is told what happens on a stream. *Re-attach* finds the guest's
STATE in a pipe that a predecessor used. The *pace* rests a channel that costs the loop more than its bytes are worth.

Every byte that comes in is hostile. Rules a guest can break raise ProtocolError and end the channel; rules
only our code can break are assertions.

Pure: frames, credit, streams, messages, reset, outbox, pace. The one socket is in pump; stream, channel and calls put
futures around it.

Deliberately absent: retries and time-outs other than re-attach's (the node's), any file, journal or log (sinks),
knowledge of what an operation means (only `stderr_stream` is known), copies of sent bytes (whoever sends stdin
keeps it until `confirmed`), ancillary data, threads, any other room of Cloche.
"""

from cloche_server.channel.calls import ByteReader, ByteWriter
from cloche_server.channel.channel import Channel, GuestOpen, Stats
from cloche_server.channel.credit import Budget
from cloche_server.channel.errors import (
    BadFrame,
    ChannelError,
    ChannelFull,
    ChannelLost,
    OperationFailed,
    ProtocolError,
    StreamEnded,
    WrongGeneration,
)
from cloche_server.channel.messages import JsonObject, unwrap
from cloche_server.channel.reset import StreamState
from cloche_server.channel.stream import Stream
from cloche_server.channel.streams import Sink

__all__ = [
    "BadFrame",
    "Budget",
    "ByteReader",
    "ByteWriter",
    "Channel",
    "ChannelError",
    "ChannelFull",
    "ChannelLost",
    "GuestOpen",
    "JsonObject",
    "OperationFailed",
    "ProtocolError",
    "Sink",
    "Stats",
    "Stream",
    "StreamEnded",
    "StreamState",
    "WrongGeneration",
    "unwrap",
]
