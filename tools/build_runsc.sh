#!/usr/bin/env bash
# Builds the pinned runsc (slim, static) and its prewarmer into the cloche-engine
# package. About 3 minutes the first time on two cores, a copy afterwards.
#
# "Slim": the embedded helper for checkpoints in cloud buckets (47 MB) is left out,
# and the seccomp programs our flags select are compiled now instead of at each start.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/cache.sh

module=gvisor.dev/gvisor
module_version=v0.0.0-20260905035102-160fafc42237
module_sum='h1:AU5+CtCvnBnxdZRNcZt1NfSLqgkXZVT3N/u6u1aXg44='
release=release-20260905.0
bin=packages/cloche-engine/src/cloche_engine/bin

need go "Install Go 1.26 or newer."
need gcc "apt-get install gcc"
[[ $(uname -m) == x86_64 ]] || die "only x86_64 is built so far"

key=$(recipe_hash tools/build_runsc.sh tools/runsc/precompile_seccomp.go tools/runsc/prewarmer.c \
    tools/licences.py "$(go env GOVERSION)")
built="$CLOCHE_BUILD_CACHE/runsc-$key"

# The module's own sum is pinned here; its go.sum, covered by that, pins the rest.
fetch_module() {
    local answer got
    answer=$(cd "$work" && GOFLAGS=-mod=mod go mod download -json "$module@$module_version")
    got=$(python3 -c 'import json,sys; print(json.load(sys.stdin)["Sum"])' <<<"$answer")
    [[ $got == "$module_sum" ]] || die "$module@$module_version has sum $got, expected $module_sum"
    source_dir=$(python3 -c 'import json,sys; print(json.load(sys.stdin)["Dir"])' <<<"$answer")
}

# A private copy, because Go refuses overlays inside its module cache.
prepare_source() {
    cp -r --no-preserve=mode "$source_dir" "$work/gvisor"
    : >"$work/gvisor/runsc/checkpointgofer/checkpointgofer.bin"
    mkdir "$work/gvisor/runsc/precompile"
    cp tools/runsc/precompile_seccomp.go "$work/gvisor/runsc/precompile/main.go"
}

precompile_seccomp() {
    local filter=runsc/boot/filter
    (cd "$work/gvisor" && go run ./runsc/precompile "$work/precompiled.go")
    cp "$work/precompiled.go" "$work/gvisor/$filter/precompiled_programs.go"
    sed -i -e 's/^\tprecompiledPrograms = programs$/\taddPrecompiled(programs)\n&/' \
        -e 's/^const PrecompilationDisabledAtBuildTime = true$/const PrecompilationDisabledAtBuildTime = false/' \
        "$work/gvisor/$filter/filter_precompiled.go"
    grep -q 'addPrecompiled(programs)' "$work/gvisor/$filter/filter_precompiled.go" ||
        die "upstream changed filter_precompiled.go: the programs were not added"
    rm -r "$work/gvisor/runsc/precompile"
}

compile() {
    (cd "$work/gvisor" && go build -trimpath -buildvcs=false \
        -ldflags "-s -w -X $module/runsc/version.version=$release" -o "$work/out/runsc" ./runsc)
    gcc -O2 -Wall -Wextra -static -nostdlib -ffreestanding -fno-stack-protector -fno-pie -no-pie \
        -Wl,--build-id=none -s -o "$work/out/gvisor-sentry-prewarmer" tools/runsc/prewarmer.c
}

# (grep reads to the end: one that left at its first match would break the pipe, and with it the answer.)
# runsc has no test of itself: it must name the release (restore compares that
# string) and be static (the sentry's chroot has no loader).
verify() {
    "$work/out/runsc" --version | grep -x "runsc version $release" >/dev/null || die "wrong version label"
    if readelf -l "$work/out/runsc" | grep INTERP >/dev/null; then die "runsc is not static"; fi
    "$work/out/gvisor-sentry-prewarmer" /bin/true true || die "the prewarmer does not exec"
}

build() {
    work=$(mktemp -d "$CLOCHE_BUILD_CACHE/runsc-work.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    mkdir "$work/out"
    export CGO_ENABLED=0 GOFLAGS=-buildvcs=false GOTOOLCHAIN=local
    fetch_module
    prepare_source
    precompile_seccomp
    compile
    verify
    printf '%s\n' "$release" >"$work/out/RELEASE"
    python3 tools/licences.py go "$work/out/runsc" "$work/gvisor" >"$work/out/LICENCES-runsc.txt"
    mv "$work/out" "$built"
}

cache_lock runsc
if [[ -d $built ]]; then
    say "cached ($built)"
else
    say "building $release (minutes)"
    build
fi
mkdir -p "$bin/gvisor-bin"
install -m 0755 "$built/runsc" "$bin/runsc"
install -m 0755 "$built/gvisor-sentry-prewarmer" "$bin/gvisor-bin/gvisor-sentry-prewarmer"
install -m 0644 "$built/LICENCES-runsc.txt" "$bin/LICENCES-runsc.txt"
install -m 0644 "$built/RELEASE" "$bin/RELEASE"
