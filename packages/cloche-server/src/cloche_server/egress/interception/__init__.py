"""Interception, seen from the daemon: one hostile process per tenant that reads requests in the clear for the gate.

Words: the *interceptor* is that process (`cloche_server.interceptor`, mitmproxy); its *environment* is the directory of
packages that it runs with; the *control channel* is the socket over which it is told what to do and asks back; an *ask* is
its question about one request; an *authority* is the certificate authority of one lineage; *trust* is what a guest is given
so that its programs believe in it.

    interpreter   which Python it can run with
    environment   makes the directory of packages from the hash lock, once
    messages      what it says, from bytes to checked values (pure)
    control       the channel: framing, descriptors, bounds
    running       one process and what depends on it: connections, asks, dials
    supervisor    `Interception`: starts it at need, again after its death, tells it what it must know
    authority     a certificate authority per lineage, its key sealed
    trust         trust.pem and a Java trust store

Everything that the process says is hostile: it reads what guests and servers send. It cannot dial (its network namespace is
empty): it asks, and gets one end of a socket pair whose other end the gate relays. When it dies or lies, everything of it is
closed at once. Only the secrets of live sandboxes are ever told to it.

Deliberately absent: any decision (`policy`, the gate), sockets to the world, TLS.
"""
