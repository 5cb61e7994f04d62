#!/usr/bin/env bash
# Renews the interceptor's own lock: mitmproxy and all it needs, pinned and hashed, without an index.
# mitmproxy is pinned exactly: interceptor/{flow,streams,websocket,connection}.py use parts of it that are not promised.
# A new version is taken here, and the tests in tests/unit/interceptor are what it must pass.
set -euo pipefail
cd "$(dirname "$0")/.."
room=packages/cloche-server/src/cloche_server/interceptor
oldest=$(sort -V "$room/python.txt" | head -1)
uv pip compile --quiet --universal --python-version "$oldest" --generate-hashes --no-emit-index-url --no-header \
    --no-annotate --only-binary :all: -o "$room/requirements.lock" "$@" - <<<'mitmproxy==12.2.3 ; sys_platform == "linux"'
