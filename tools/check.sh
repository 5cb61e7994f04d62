#!/usr/bin/env bash
# The static half of the gate. Runs all of it even when one part fails, then says which.
set -uo pipefail
cd "$(dirname "$0")/.."
failed=()

part() {
    local name=$1
    shift
    printf '\n== %s\n' "$name"
    "$@" || failed+=("$name")
}

part format ruff format --check .
part lint ruff check .
part types mypy
part imports lint-imports --no-logo
part locks tools/lock.sh --check
export CARGO_TARGET_DIR="${CLOCHE_BUILD_CACHE:-$HOME/.cache/cloche-build}/cargo-target"
for crate in guest-agent converter; do
    part "rustfmt $crate" cargo fmt --all --check --manifest-path "$crate/Cargo.toml"
    part "clippy $crate" cargo clippy --quiet --locked --manifest-path "$crate/Cargo.toml" --all-targets -- -D warnings
done
part "clippy converter, planted" cargo clippy --quiet --locked --manifest-path converter/Cargo.toml --features planted \
    -- -D warnings

if ((${#failed[@]})); then
    printf '\ncheck failed: %s (`just fmt` mends format)\n' "${failed[*]}"
    exit 1
fi
printf '\ncheck passed\n'
