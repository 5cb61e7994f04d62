# Made by tools/unasync.py from packages/cloche/src/cloche/client/_async/__init__.py: edit that one.
"""The SDK without `await`: made from `_async/` by `tools/unasync.py`, never edited here.

Words used here: those of `_async/`. A test makes these files anew and compares. Each call waits in the calling thread;
objects may be used from several threads, one call at a time each.
Deliberately absent: anything that is not in `_async/`.
"""
