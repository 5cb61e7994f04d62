"""One machine's sandboxes: the implementation of `api.backend.Backend`.

Words used here:
    node        the daemon of one machine; `node.Node` is the Backend, `main` the process around it
    journal     append-only lines chained by hash: what was decided, written before its effect is visible
    store       the state directory: for each sandbox what is shown of it, for each command its log
    log         one command's output on disk; the public offset is the file's offset
    cause       why a sandbox or a command is being ended, journalled before anything is killed
    facts       what is known when it is over; `lifecycle` derives the one typed end from cause and facts
    adoption    what a new daemon does with the sandboxes of the last one
    stock       the image store and what was made elsewhere; a root of it is what a sandbox starts from
    room        a sandbox that is lent to a build, owned by the build and by no caller
    agenda      one heap of deadlines on the boot clock for the whole node

Deciding (`lifecycle`, `admission`, `command_log`'s arithmetic, the journal's chain) is apart from acting (`sandbox`,
`command`, `files`), and every byte of a guest comes through `channel/`, bounded there.
Deliberately absent: HTTP, paths that a guest chose, privileges, the engines' command lines (the keeper's),
any task that polls a sandbox, and wall-clock time in a decision.
"""
