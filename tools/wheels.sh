#!/usr/bin/env bash
# The three wheels, built in isolation with the pinned backend.
#
#   tools/wheels.sh [OUT_DIR]      (build/wheels)
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-build/wheels}
rm -rf "$out"
uv build --quiet --all-packages --wheel --build-constraints requirements/build.lock --require-hashes \
    --out-dir "$out"
rm -f "$out/.gitignore"
limit_bytes=15000000
for wheel in "$out"/*.whl; do
    size=$(stat -c %s "$wheel")
    printf '%9d  %s\n' "$size" "$(basename "$wheel")"
    ((size <= limit_bytes)) || { echo "wheels: larger than $limit_bytes bytes" >&2; exit 1; }
done
