#!/usr/bin/env bash
# Builds the guest agent, static, for x86_64 and aarch64, into the cloche-engine package.
#
#   tools/build_agent.sh [--features LIST] [--out DIR] [ARCH...]
#
# musl first (a third of the size); where its target cannot be downloaded, glibc linked
# statically. aarch64 is linked by Rust's own lld: no cross compiler needed.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/cache.sh

features='' out=packages/cloche-engine/src/cloche_engine/bin arches=()
while (($#)); do
    case $1 in
    --features) features=$2; shift 2 ;;
    --out) out=$2; shift 2 ;;
    *) arches+=("$1"); shift ;;
    esac
done
((${#arches[@]})) || arches=(x86_64 aarch64)
need cargo "Install Rust (rustup) 1.95 or newer."
[[ -f guest-agent/Cargo.toml ]] || die "guest-agent/Cargo.toml is not there"

has_target() {
    [[ -d $(rustc --print sysroot)/lib/rustlib/$1/lib ]]
}

# The first target of an architecture that is there or can be fetched.
target_for() {
    local candidate
    for candidate in "$1-unknown-linux-musl" "$1-unknown-linux-gnu"; do
        if has_target "$candidate" || rustup target add "$candidate" >&2; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

compile() {
    local arch=$1 target=$2 flags=()
    local -x RUSTFLAGS="-C target-feature=+crt-static --remap-path-prefix=$HOME=/build --remap-path-prefix=$PWD=/src"
    if [[ $target == aarch64-*-musl && $(uname -m) != aarch64 ]]; then
        export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_LINKER=rust-lld
        RUSTFLAGS+=" -C linker-flavor=ld.lld -C link-self-contained=yes"
    elif [[ $target == aarch64-*-gnu && $(uname -m) != aarch64 ]]; then
        export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
    fi
    [[ -n $features ]] && flags+=(--features "$features")
    CARGO_TARGET_DIR="$CLOCHE_BUILD_CACHE/cargo-target" cargo build --quiet --release --locked \
        --manifest-path guest-agent/Cargo.toml --bin cloche-guest --target "$target" "${flags[@]}"
    install -D -m 0755 "$CLOCHE_BUILD_CACHE/cargo-target/$target/release/cloche-guest" "$3"
}

# Everything but tests, docs and cargo's own output decides the bytes.
source_key() {
    find guest-agent -type f \( -name '*.rs' -o -name 'Cargo.*' -o -name '*.json' \) \
        -not -path '*/target/*' -not -path '*/fuzz/*' -not -path '*/tests/*' -print0 |
        LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -d' ' -f1
}

cache_lock agent
for arch in "${arches[@]}"; do
    if ! target=$(target_for "$arch"); then
        [[ $arch != "$(uname -m)" ]] || die "no Rust target for $arch"
        say "no Rust target for $arch: left out"
        continue
    fi
    key=$(recipe_hash "$(source_key)" "$(rustc --version)" "$target" "$features" tools/build_agent.sh)
    built="$CLOCHE_BUILD_CACHE/agents/$arch-$key"
    if [[ -f $built ]]; then
        say "cached $target"
    else
        say "building for $target${features:+ with $features}"
        compile "$arch" "$target" "$built.part"
        mv "$built.part" "$built"
    fi
    install -D -m 0755 "$built" "$out/cloche-guest-$arch"
done
if [[ -z $features ]]; then
    python3 tools/licences.py cargo guest-agent/Cargo.toml >"$out/LICENCES-agent.txt"
fi
