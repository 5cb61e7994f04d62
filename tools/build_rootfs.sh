#!/usr/bin/env bash
# Makes a root file system, build/rootfs/python.erofs or build/clients/clients.erofs, and a .json beside it that says
# what is in it. Two steps with a cache each: the Debian tree (minutes, kept as a tar), and the image (seconds, redone
# when the agent changes).
#
#   tools/build_rootfs.sh [python|clients] [--tree-only]
#
# `python` is the image of every sandbox that names no other: the node looks for it in $CLOCHE_ROOTFS, then
# /var/lib/cloche/images/python.erofs, then build/rootfs/python.erofs of the checkout it runs from. `clients` has the
# programs that people use on the network; the egress promises run the real ones in it.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/cache.sh

name=${1:-python}
suite=bookworm
agent=packages/cloche-engine/src/cloche_engine/bin/cloche-guest-$(uname -m)
options=(--dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*'
    --dpkgopt='path-exclude=/usr/share/locale/*')
case $name in
python)
    packages=ca-certificates,procps,python3,vim-tiny
    options+=(--dpkgopt='path-include=/usr/share/doc/*/copyright')
    recipe=base-3 prefix=rootfs out=build/rootfs kept=5
    ;;
clients)
    packages=ca-certificates,ca-certificates-java,procps,python3,python3-pip,curl,git,nodejs,npm,postgresql-client
    packages+=,openjdk-17-jdk-headless,python3-websockets,python3-grpcio,python3-httpx,python3-h2,bind9-dnsutils
    packages+=,openssl,iputils-ping,strace
    # Java's packages write manual pages' links even where those are left out.
    options+=(--dpkgopt='path-exclude=/usr/lib/jvm/*/jmods/*'
        --essential-hook='mkdir -p "$1/usr/share/man/man1" "$1/usr/share/man/man7"')
    recipe=clients-1 prefix=clients out=build/clients kept=2
    ;;
*) die "no root file system is named $name" ;;
esac

need mmdebstrap "apt-get install mmdebstrap"
need mkfs.erofs "apt-get install erofs-utils"

# A mirror is the machine's own affair: mmdebstrap's default, or this variable.
base_key=$(recipe_hash "$suite" "$packages" "$recipe")
base="$CLOCHE_BUILD_CACHE/$prefix-base-$base_key.tar"
build_base() {
    local mode=unshare
    [[ $(id -u) == 0 ]] && mode=root
    say "fetching Debian $suite for $name (some minutes)"
    mmdebstrap --quiet --format=tar --mode="$mode" --variant=minbase --include="$packages" "${options[@]}" \
        "$suite" "$base.part" ${CLOCHE_DEBIAN_MIRROR:+"$CLOCHE_DEBIAN_MIRROR"}
    mv "$base.part" "$base"
}

# The tree's owners must be real while mkfs.erofs reads it: as root, or as the root of
# a user namespace over the caller's subuid range.
as_root() {
    if [[ $(id -u) == 0 ]]; then "$@"; else unshare --map-root-user --map-auto -- "$@"; fi
}

cache_lock "$prefix"
[[ -f $base ]] || build_base
[[ ${2:-} == --tree-only ]] && exit
# The image's time is its base's: not before any file in it, or mkfs.erofs would pull
# the later ones back, and Python would find every compiled file stale.
SOURCE_DATE_EPOCH=$(stat -c %Y "$base")
export SOURCE_DATE_EPOCH
agent_sum=none
[[ -f $agent ]] && agent_sum=$(sha256sum <"$agent" | cut -d' ' -f1)
[[ $agent_sum == none ]] && say "no agent at $agent: the image will not have /.cloche/agent"
image_key=$(recipe_hash "$base_key" tools/rootfs/pack.sh tools/rootfs/describe.py "$agent_sum")
image="$CLOCHE_BUILD_CACHE/$prefix-$image_key"
if [[ -d $image ]]; then
    say "cached ($image)"
    touch "$image"
else
    work=$(mktemp -d "$CLOCHE_BUILD_CACHE/$prefix-work.XXXXXX")
    trap 'as_root rm -rf "$work"' EXIT
    mkdir "$work/image"
    chmod 0755 "$work" "$work/image"
    as_root tools/rootfs/pack.sh "$base" "$agent" "$work/tree" "$work/image/$name.erofs"
    python3 tools/rootfs/describe.py "$work/image/$name.erofs" "$name" "$suite" "$packages" "$agent_sum" \
        >"$work/image/$name.json"
    mv "$work/image" "$image"
fi
mkdir -p "$out"
for file in "$name.erofs" "$name.json"; do
    # A link where the file systems allow it: the image is large and never written to.
    ln -f "$image/$file" "$out/$file" 2>/dev/null || cp -f "$image/$file" "$out/$file"
done

# Each change of the agent makes an image; only the recent ones are worth their space.
# (A link elsewhere keeps an image's bytes even when its name here is gone.)
find "$CLOCHE_BUILD_CACHE" -maxdepth 1 -type d -name "$prefix-????????????????" -printf '%T@ %p\n' |
    sort -rn | tail -n "+$((kept + 1))" | cut -d' ' -f2- | xargs -r rm -rf
