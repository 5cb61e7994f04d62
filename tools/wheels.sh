#!/usr/bin/env bash
# build/wheels: the three wheels, built in isolation with the pinned backend.
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf build/wheels
uv build --quiet --all-packages --wheel --build-constraints requirements/build.lock --require-hashes \
    --out-dir build/wheels
rm -f build/wheels/.gitignore
limit_bytes=15000000
for wheel in build/wheels/*.whl; do
    size=$(stat -c %s "$wheel")
    printf '%9d  %s\n' "$size" "$(basename "$wheel")"
    ((size <= limit_bytes)) || { echo "wheels: larger than $limit_bytes bytes" >&2; exit 1; }
done
