#!/usr/bin/env bash
# Makes build/rootfs/python.erofs, the root file system of every sandbox for now, and
# python.json, which says what is in it. Two steps with a cache each: the Debian tree
# (a minute, kept as a tar) and the image (seconds, redone when the agent changes).
#
#   tools/build_rootfs.sh [AGENT [OUT_DIR]]
#
# The node looks for the image in $CLOCHE_ROOTFS, then /var/lib/cloche/images/python.erofs,
# then build/rootfs/python.erofs of the checkout it runs from.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/cache.sh

suite=bookworm
packages=ca-certificates,procps,python3,vim-tiny
agent=${1:-packages/cloche-engine/src/cloche_engine/bin/cloche-guest-$(uname -m)}
out=${2:-build/rootfs}

need mmdebstrap "apt-get install mmdebstrap"
need mkfs.erofs "apt-get install erofs-utils"

# A mirror is the machine's own affair: mmdebstrap's default, or this variable.
base_key=$(recipe_hash "$suite" "$packages" base-3)
base="$CLOCHE_BUILD_CACHE/rootfs-base-$base_key.tar"
build_base() {
    local mode=unshare
    [[ $(id -u) == 0 ]] && mode=root
    say "fetching Debian $suite with $packages (a minute)"
    mmdebstrap --quiet --format=tar --mode="$mode" --variant=minbase --include="$packages" \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
        --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
        "$suite" "$base.part" ${CLOCHE_DEBIAN_MIRROR:+"$CLOCHE_DEBIAN_MIRROR"}
    mv "$base.part" "$base"
}

# The tree's owners must be real while mkfs.erofs reads it: as root, or as the root of
# a user namespace over the caller's subuid range.
as_root() {
    if [[ $(id -u) == 0 ]]; then "$@"; else unshare --map-root-user --map-auto -- "$@"; fi
}

cache_lock rootfs
[[ -f $base ]] || build_base
# The image's time is its base's: not before any file in it, or mkfs.erofs would pull
# the later ones back, and Python would find every compiled file stale.
SOURCE_DATE_EPOCH=$(stat -c %Y "$base")
export SOURCE_DATE_EPOCH
agent_sum=none
[[ -f $agent ]] && agent_sum=$(sha256sum <"$agent" | cut -d' ' -f1)
[[ $agent_sum == none ]] && say "no agent at $agent: the image will not have /.cloche/agent"
image_key=$(recipe_hash "$base_key" tools/rootfs/pack.sh tools/rootfs/describe.py "$agent_sum")
image="$CLOCHE_BUILD_CACHE/rootfs-$image_key"
if [[ -d $image ]]; then
    say "cached ($image)"
    touch "$image"
else
    work=$(mktemp -d "$CLOCHE_BUILD_CACHE/rootfs-work.XXXXXX")
    trap 'as_root rm -rf "$work"' EXIT
    mkdir "$work/image"
    chmod 0755 "$work" "$work/image"
    as_root tools/rootfs/pack.sh "$base" "$agent" "$work/tree" "$work/image/python.erofs"
    python3 tools/rootfs/describe.py "$work/image/python.erofs" "$suite" "$packages" "$agent_sum" \
        >"$work/image/python.json"
    mv "$work/image" "$image"
fi
mkdir -p "$out"
for file in python.erofs python.json; do
    # A link where the file systems allow it: the image is large and never written to.
    ln -f "$image/$file" "$out/$file" 2>/dev/null || cp -f "$image/$file" "$out/$file"
done

# Each change of the agent makes an image; only the recent ones are worth their space.
# (A link elsewhere keeps an image's bytes even when its name here is gone.)
find "$CLOCHE_BUILD_CACHE" -maxdepth 1 -type d -name 'rootfs-????????????????' -printf '%T@ %p\n' |
    sort -rn | tail -n +6 | cut -d' ' -f2- | xargs -r rm -rf
