"""Real credentials: the only room of the daemon with plaintext.

Words used here:
    secret       a name, a value or where it comes from, and what it is bound to: hosts, methods, paths, places
    binding      all of a secret but its value
    box          seals what is written to disk; its key is outside the data directory
    source       where a value comes from: given once, or asked at each lease (a file, a command, an HTTP call)
    lease        a sandbox's hold of a value; it ends with the sandbox, and at once when the secret is removed
    placeholder  what stands inside the sandbox for the value; one for each lineage and secret

`service.Secrets` is what the node uses. A value is a `hidden.Hidden`: nothing that prints, logs, compares or pickles shows it.
Deliberately absent: the node, the API, the gate (they are told by callbacks), a way to read a value back over the API,
a fall-back when a key or a source is missing. Sockets are opened in `minting.py` only.
"""
