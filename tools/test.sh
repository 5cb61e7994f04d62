#!/usr/bin/env bash
# Fast tests: the agent's and the converter's own (cargo), then pytest's unit, contract and tidy.
# With arguments, pytest only, and they are its arguments.
set -euo pipefail
cd "$(dirname "$0")/.."
if ((!$#)) && [[ -f guest-agent/Cargo.toml ]]; then
    CARGO_TARGET_DIR="${CLOCHE_BUILD_CACHE:-$HOME/.cache/cloche-build}/cargo-target" \
        cargo test --quiet --locked --manifest-path guest-agent/Cargo.toml
    CARGO_TARGET_DIR="${CLOCHE_BUILD_CACHE:-$HOME/.cache/cloche-build}/cargo-target" \
        cargo test --quiet --locked --manifest-path converter/Cargo.toml
fi
folders=()
for folder in tests/unit tests/contract tests/tidy; do
    [[ -d $folder ]] && folders+=("$folder")
done
(($#)) || set -- --numprocesses=3
exec python -m pytest "${folders[@]}" "$@"
