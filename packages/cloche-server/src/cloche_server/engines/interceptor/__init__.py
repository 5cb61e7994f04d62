"""The interceptor: the process that reads TLS in the clear, started by the keeper like an engine.

Words: *interceptor* is the program (`cloche_server/interceptor`, with mitmproxy); its *environment* is the directory with the
packages of its hash lock, made at first need (`egress.interception.environment`), named `<python version>-<digest>`.

Like the converter it is no engine of sandboxes. It gets a host uid of its own, a cgroup, every namespace (its network
namespace stays empty), no capability, and a file system that it cannot write. Its stdin is the control channel.
`egress.interception` speaks to it. Deliberately absent: a control socket, adoption (a daemon that starts ends what its
predecessor left), any path in a message.
"""
