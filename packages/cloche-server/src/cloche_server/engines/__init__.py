"""Engines: what gives a sandbox a kernel of its own.

Words used here:
    spec        what is asked for: names and numbers, never a path, uid or command line (`spec.py`)
    engine      one kind of isolation: gVisor here, a QEMU microVM as the second (`contract.py`)
    instance    one live sandbox as its engine sees it
    command     the pure builder of an engine's configuration and command line, used by the keeper
    plan        what such a builder gives the keeper (`plan.py`)
    seal        ending the helper processes that only the start needed

`converter/` is started in the same way and is no engine: it turns image layers into root file systems.

Engines do not know each other, nor the node, nor HTTP. The daemon talks to an engine's processes only through
descriptors that the keeper handed over; everything those processes answer is a guest's word. Deliberately
absent: any fall-back from one engine to another, and any simulated engine (that one lives with the tests).
"""
