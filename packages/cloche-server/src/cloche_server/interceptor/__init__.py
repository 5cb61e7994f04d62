"""The interceptor: mitmproxy, driven as a library, in a process and virtual environment of its own.

Words: a *connection* is one intercepted client connection, known by the number that the gate gave it; an *ask* is one
request that waits for the gate's verdict; a *dial* is one wish for an upstream; a *place* is where a secret may stand; a
*form* is a way to write a text (base64, percent, …); a *guard* is what knows a sandbox's secrets while a request passes.

`main.py` is started by path, by an interpreter that has `requirements.lock` installed and nothing of ours. So this package
imports the standard library, mitmproxy with what it needs, and itself. `forms`, `redact`, `places`, `binding` and
`strict` are pure and need the standard library alone.

Deliberately absent: sockets that it opens itself, files, threads, subprocesses, decisions about what is allowed (the
gate's), names of Cloche's other packages, and any import in this file.
"""
