# Cloche's commands. Start with `tools/bootstrap`, then `.venv/bin/just setup`.

set positional-arguments

export VIRTUAL_ENV := justfile_directory() / ".venv"
export PATH := VIRTUAL_ENV / "bin" + ":" + env("PATH")

[private]
default:
    @just --list --unsorted

# Install what is missing, build runsc, the agent and the root file system (cached)
setup:
    @tools/setup.sh

# Format, lint, strict types, import contracts, Rust lints: everything that runs nothing
check:
    @tools/check.sh

# Unit, contract and tidy tests; arguments go to pytest (`just test -k codec`)
test *args:
    @tools/test.sh "$@"

# Every promise with a requirement's id, on real sandboxes (`just promises --long`)
promises *args:
    @tools/promises.sh "$@"

# The tests of one requirement (`just promise EXE-4`)
promise id *args:
    @shift; python -m pytest tests --req "{{ id }}" "$@"

# Switch each control off in turn and see a test of its requirement fail (`just defects ISO-4`)
defects *args:
    @python -m tools.defects "$@"

# Measure Cloche against the bare engine -> build/bench.json (`just bench --long`)
bench *args:
    @python -m tools.bench.run "$@"

# Render what the last runs proved -> build/evidence.json and docs/controls.md
evidence *args:
    @python -m tools.evidence "$@"

# Build the three wheels -> build/wheels
wheels:
    @tools/wheels.sh

# Format Python and Rust, and fix what the linter can
fmt:
    @ruff check --quiet --fix-only . && ruff format --quiet .
    @if [ -f guest-agent/Cargo.toml ]; then cargo fmt --all --manifest-path guest-agent/Cargo.toml; fi
    @cargo fmt --all --manifest-path converter/Cargo.toml

# Renew the hash-pinned locks in requirements/ (`just lock --upgrade`)
lock *args:
    @tools/lock.sh "$@"
