#!/usr/bin/env bash
# Makes build/microvm/{vmlinux,initramfs.cpio,manifest.json}: what the experimental QEMU
# engine starts. Debian's stock kernel, downloaded and unpacked but not installed, and an
# initramfs of the agent and a few modules. Two steps with a cache each, as in
# build_rootfs.sh. The root image is the same build/rootfs/python.erofs.
#
#   tools/build_microvm.sh [AGENT [OUT_DIR]]
#
# CLOCHE_MICROVM_KERNEL names another kernel package (default: what linux-image-amd64 depends on).
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/cache.sh

agent=${1:-packages/cloche-engine/src/cloche_engine/bin/cloche-guest-$(uname -m)}
out=${2:-build/microvm}

[[ $(uname -m) == x86_64 ]] || die "only x86_64 is built so far"
[[ -f $agent ]] || die "no agent at $agent. Run tools/build_agent.sh first."
need apt-get "The kernel comes from Debian's archive: build on Debian, or copy build/microvm from there."
need dpkg-deb "apt-get install dpkg"

# The package, and the version that apt would take now: a new one is a new key.
package=${CLOCHE_MICROVM_KERNEL:-$(apt-cache depends linux-image-amd64 | sed -n 's/^ *Depends: *\(linux-image-[0-9][^ ]*\)$/\1/p' | head -n 1)}
[[ -n $package ]] || die "apt knows no linux-image-amd64. Run apt-get update."
version=$(apt-cache show --no-all-versions "$package" | sed -n 's/^Version: //p' | head -n 1)
[[ -n $version ]] || die "apt knows no $package. Run apt-get update."
kernel_key=$(recipe_hash "$package" "$version" tools/microvm/pack.py)
kernel="$CLOCHE_BUILD_CACHE/kernel-$kernel_key"

# apt checks the archive's signature and the package's hash. Of the package's 400 MB only
# the kernel and nine modules are kept.
fetch_kernel() {
    say "fetching $package $version (70 MB)"
    mkdir "$work/tree" "$work/kernel"
    (cd "$work" && apt-get download -qq "$package=$version" 2>apt.log) || die "$(tail -n 3 "$work/apt.log")"
    dpkg-deb --fsys-tarfile "$work"/*.deb |
        tar --extract --no-same-owner --directory="$work/tree" ./boot ./lib/modules
    python3 tools/microvm/pack.py kernel "$work/tree" "$work/kernel"
    chmod 0444 "$work/kernel/vmlinux"
    mv "$work/kernel" "$kernel"
}

cache_lock microvm
work=$(mktemp -d "$CLOCHE_BUILD_CACHE/microvm-work.XXXXXX")
trap 'rm -rf "$work"' EXIT
[[ -d $kernel ]] || fetch_kernel
built="$CLOCHE_BUILD_CACHE/microvm-$(recipe_hash "$kernel_key" "$agent")"
if [[ -d $built ]]; then
    say "cached ($built)"
    touch "$built"
else
    mkdir "$work/out"
    python3 tools/microvm/pack.py initramfs "$kernel" "$agent" "$work/out"
    ln "$kernel/vmlinux" "$work/out/vmlinux"
    chmod 0444 "$work/out/initramfs.cpio"
    mv "$work/out" "$built"
fi
mkdir -p "$out"
for file in vmlinux initramfs.cpio manifest.json; do
    ln -f "$built/$file" "$out/$file" 2>/dev/null || cp -f "$built/$file" "$out/$file"
done

# Each change of the agent makes a set; only the recent ones are worth their space.
find "$CLOCHE_BUILD_CACHE" -maxdepth 1 -type d -name 'microvm-????????????????' -printf '%T@ %p\n' |
    sort -rn | tail -n +4 | cut -d' ' -f2- | xargs -r rm -rf
