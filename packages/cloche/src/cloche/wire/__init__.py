"""The public nouns: what crosses the HTTP API, and nothing else.

Words used here:
    sandbox     one agent session with a kernel of its own
    command     a durable object inside a sandbox: it outlives the connection that started it
    cursor      (generation, offset) into a command's output
    end         the one typed reason why a command or a sandbox is over
    problem     an error as RFC 9457 JSON, with a code from `errors.TABLE`

Pydantic models live here and only here. The SDK, the CLI and the server's `api/` import this room; it imports
nothing of ours. Deliberately absent: sockets, files, clocks, defaults that the node decides (they are in
`defaults.py` as one table, read by the node and shown by the docs).
"""
