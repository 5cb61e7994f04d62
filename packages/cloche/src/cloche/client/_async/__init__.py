"""The SDK, written by hand, with `await`; `tools/unasync.py` makes `_sync/` from these files.

Words used here:
    transport   connections to one target: requests, streams, WebSockets; its errors are ours
    request     one question with its own time-out; repeated only when a repeat can do no harm
    job         a command's object: its output, its stdin, its end
    follow      reading output to its end, over as many connections as that takes

To keep both versions from one source, the code here uses plain `await`, `async with`, `async for` and generators,
and nothing that has no sync twin: no tasks, no gather, no queues. What needs concurrency (a port forward) is a
shared module with a thread of its own. Deliberately absent: parsing, retry rules and everything else that is pure.
"""
