#!/usr/bin/env bash
# Builds cloche-convert, static, into the cloche-engine package.
#
#   tools/build_converter.sh [--features LIST] [--out DIR] [ARCH...]     (this machine's)
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
((${#arches[@]})) || arches=("$(uname -m)")
need cargo "Install Rust (rustup) 1.95 or newer."

# The first target of an architecture that is there or can be fetched.
target_for() {
    local candidate
    for candidate in "$1-unknown-linux-musl" "$1-unknown-linux-gnu"; do
        if [[ -d $(rustc --print sysroot)/lib/rustlib/$candidate/lib ]] || rustup target add "$candidate" >&2; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

compile() {
    local target=$1 flags=()
    local -x RUSTFLAGS="-C target-feature=+crt-static --remap-path-prefix=$HOME=/build --remap-path-prefix=$PWD=/src"
    if [[ $target == aarch64-*-musl && $(uname -m) != aarch64 ]]; then
        export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_LINKER=rust-lld
        RUSTFLAGS+=" -C linker-flavor=ld.lld -C link-self-contained=yes"
    elif [[ $target == aarch64-*-gnu && $(uname -m) != aarch64 ]]; then
        export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
    fi
    [[ -n $features ]] && flags+=(--features "$features")
    CARGO_TARGET_DIR="$CLOCHE_BUILD_CACHE/cargo-target" cargo build --quiet --release --locked \
        --manifest-path converter/Cargo.toml --bin cloche-convert --target "$target" "${flags[@]}"
    install -D -m 0755 "$CLOCHE_BUILD_CACHE/cargo-target/$target/release/cloche-convert" "$2"
}

source_key() {
    find converter -type f \( -name '*.rs' -o -name 'Cargo.*' \) -not -path '*/target/*' -not -path '*/tests/*' -print0 |
        LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -d' ' -f1
}

cache_lock converter
for arch in "${arches[@]}"; do
    target=$(target_for "$arch") || die "no Rust target for $arch"
    key=$(recipe_hash "$(source_key)" "$(rustc --version)" "$target" "$features" tools/build_converter.sh)
    built="$CLOCHE_BUILD_CACHE/converters/$arch-$key"
    if [[ -f $built ]]; then
        say "cached $target${features:+ with $features}"
    else
        say "building for $target${features:+ with $features}"
        compile "$target" "$built.part"
        mv "$built.part" "$built"
    fi
    place "$built" "$out/cloche-convert-$arch"
done
if [[ -z $features ]]; then
    python3 tools/licences.py cargo converter/Cargo.toml >"$out/LICENCES-converter.txt"
fi
