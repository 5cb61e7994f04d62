"""HTTP in, problem+json out: the only room that knows the web framework.

Words used here:
    backend     what answers: a node today, a fleet later; this room knows only the protocol in `backend.py`
    peer        the other end of a connection, as the kernel names it (SO_PEERCRED); nothing a client can send
    caller      who asks: the owner that a peer or a key stands for, and whether he sees everything
    gate        the first thing a request meets: it makes the caller, or refuses by name
    boundary    the last thing an error meets: whatever was raised leaves as RFC 9457
    direct      a route whose handler gets the bare request; for the few that are called thousands of times

One file per group of verbs, each verb: parse, call the backend, render. Bytes pass through in the pieces they
came in. Deliberately absent: any state of a sandbox, any default the node decides, files, retries, access logs,
sessions, cookies, cross-origin headers.
"""
