#!/usr/bin/env bash
# Renews requirements/*.lock from the pyproject files; existing pins stay unless --upgrade.
# Hashes and no index: where packages come from is the machine's affair, what they are is ours.
# --check: fails when a dependency was declared but not locked (works offline).
set -euo pipefail
cd "$(dirname "$0")/.."

compile() {
    local lock=$1
    shift
    uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
        --no-header --no-annotate --no-emit-package cloche --no-emit-package cloche-server \
        --no-emit-package cloche-engine -o "requirements/$lock.lock" "$@"
}

if [[ ${1:-} == --check ]]; then
    exec python -m tools.lock_check
fi
products=(packages/cloche/pyproject.toml packages/cloche-server/pyproject.toml)
compile dev --group dev "${products[@]}" "$@"
compile build --group build "$@"
compile bootstrap --group bootstrap --constraint requirements/dev.lock "$@"
