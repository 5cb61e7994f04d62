"""The command line: one verb a file, on top of the SDK.

Words used here:
    verb        one subcommand; `main.VERBS` is the list, each module is imported only when its verb is typed
    chosen text text that a guest chose (names, argv, errors, file names); `escape` makes it harmless to look at
    carry       moving a command's output, stdin and signals between it and this terminal (`carry.py`, `terminal.py`)
    local node  the node of this machine or this user; `local.py` is the only module that touches the server package

stdout belongs to the program that runs, or to the listing that was asked for; everything else (progress, ticks,
errors) goes to stderr. Without a terminal nothing is coloured, nothing spins, and nothing asks.

Deliberately absent: HTTP (that is the SDK's), defaults of its own (they are in `wire/defaults.py`), any fall-back
to something weaker, any text from a guest printed raw outside `run`, `exec`, `shell` and `logs --raw`.
"""
