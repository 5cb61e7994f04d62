#!/usr/bin/env bash
# Makes build/clients/clients.erofs and clients.json: a root file system with the clients that people use
# (curl, git, pip, npm, Node, Java, psql, WebSocket, gRPC), in which the egress promises run the real ones.
# Two steps with a cache each, as in build_rootfs.sh: the Debian tree, and the image with the agent in it.
#
#   tools/build_clients.sh [AGENT [OUT_DIR]]
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/cache.sh

suite=bookworm
packages=ca-certificates,ca-certificates-java,procps,python3,python3-pip,curl,git,nodejs,npm,postgresql-client
packages+=,openjdk-17-jdk-headless,python3-websockets,python3-grpcio,python3-httpx,python3-h2,bind9-dnsutils
packages+=,openssl,iputils-ping,strace
agent=${1:-packages/cloche-engine/src/cloche_engine/bin/cloche-guest-$(uname -m)}
out=${2:-build/clients}

need mmdebstrap "apt-get install mmdebstrap"
need mkfs.erofs "apt-get install erofs-utils"

base_key=$(recipe_hash "$suite" "$packages" clients-1)
base="$CLOCHE_BUILD_CACHE/clients-base-$base_key.tar"
build_base() {
    local mode=unshare
    [[ $(id -u) == 0 ]] && mode=root
    say "fetching Debian $suite with the clients (some minutes)"
    mmdebstrap --quiet --format=tar --mode="$mode" --variant=minbase --include="$packages" \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/lib/jvm/*/jmods/*' \
        --essential-hook='mkdir -p "$1/usr/share/man/man1" "$1/usr/share/man/man7"' \
        "$suite" "$base.part" ${CLOCHE_DEBIAN_MIRROR:+"$CLOCHE_DEBIAN_MIRROR"}
    mv "$base.part" "$base"
}

as_root() {
    if [[ $(id -u) == 0 ]]; then "$@"; else unshare --map-root-user --map-auto -- "$@"; fi
}

cache_lock clients
[[ -f $base ]] || build_base
SOURCE_DATE_EPOCH=$(stat -c %Y "$base")
export SOURCE_DATE_EPOCH
agent_sum=$(sha256sum <"$agent" | cut -d' ' -f1)
image_key=$(recipe_hash "$base_key" tools/rootfs/pack.sh tools/rootfs/describe.py "$agent_sum")
image="$CLOCHE_BUILD_CACHE/clients-$image_key"
if [[ -d $image ]]; then
    say "cached ($image)"
    touch "$image"
else
    work=$(mktemp -d "$CLOCHE_BUILD_CACHE/clients-work.XXXXXX")
    trap 'as_root rm -rf "$work"' EXIT
    mkdir "$work/image"
    chmod 0755 "$work" "$work/image"
    as_root tools/rootfs/pack.sh "$base" "$agent" "$work/tree" "$work/image/clients.erofs"
    python3 tools/rootfs/describe.py "$work/image/clients.erofs" "$suite" "$packages" "$agent_sum" |
        sed 's/"name": "python"/"name": "clients"/' >"$work/image/clients.json"
    mv "$work/image" "$image"
fi
mkdir -p "$out"
for file in clients.erofs clients.json; do
    ln -f "$image/$file" "$out/$file" 2>/dev/null || cp -f "$image/$file" "$out/$file"
done

# A changed agent makes another image of a gigabyte; the last two are kept.
find "$CLOCHE_BUILD_CACHE" -maxdepth 1 -type d -name 'clients-????????????????' -printf '%T@ %p\n' |
    sort -rn | tail -n +3 | cut -d' ' -f2- | xargs -r rm -rf
