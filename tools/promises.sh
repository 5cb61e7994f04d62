#!/usr/bin/env bash
# Every promise, three files at a time: a node waits more than it works. Those that measure time run alone (the mark
# `alone`). At full counts (--long) one after the other, so that what they print can be read beside the figures.
set -euo pipefail
cd "$(dirname "$0")/.."
[[ " $* " == *" --long "* ]] || set -- --numprocesses=3 --dist=loadfile "$@"
exec python -m pytest tests/promises "$@"
