#!/usr/bin/env bash
# Builds mkfs.erofs, static and without compressors, from Debian's source into the cloche-engine
# package. Half a minute the first time, a copy afterwards.
#
# The mirror is the one that this machine's apt uses; the source's version and hash are pinned here.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/cache.sh

suite=trixie
version=1.8.6
source_version=$version-1
source_sha256=5b221dc3fd6d151425b30534ede46fb7a90dc233a8659cba0372796b0a066547
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
bin=packages/cloche-engine/src/cloche_engine/bin

need gcc "apt-get install gcc"
need autoreconf "apt-get install autoconf automake libtool pkg-config"

key=$(recipe_hash tools/build_erofs.sh tools/erofs/stream.patch "$(gcc -dumpfullversion)" "$(uname -m)")
built="$CLOCHE_BUILD_CACHE/erofs-$key"

# The first Debian mirror in apt's own configuration, old format or new.
mirror() {
    local found
    found=${CLOCHE_DEBIAN_MIRROR:-$(cat /etc/apt/sources.list.d/*.sources /etc/apt/sources.list 2>/dev/null |
        awk '$1 == "URIs:" { print $2; exit } $1 == "deb" { for (i = 2; i <= NF; i++) if ($i ~ /^https?:/) { print $i; exit } }')}
    [[ -n $found ]] || die "no Debian mirror in apt's sources; set CLOCHE_DEBIAN_MIRROR"
    echo "$found"
}

# Lists, cache and sources of our own: the machine's apt is not touched.
fetch_source() {
    local apt=$work/apt got
    mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$apt/sources"
    printf 'Types: deb-src\nURIs: %s\nSuites: %s\nComponents: main\nSigned-By: %s\n' \
        "$(mirror)" "$suite" "$keyring" >"$apt/sources/debian.sources"
    local options=(-qq -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts="$apt/sources"
        -o Dir::State::lists="$apt/lists" -o Dir::Cache="$apt/cache" -o APT::Sandbox::User=root)
    apt-get "${options[@]}" update
    (cd "$work" && apt-get "${options[@]}" source --download-only "erofs-utils=$source_version" >/dev/null)
    got=$(sha256sum <"$work/erofs-utils_$version.orig.tar.gz" | cut -d' ' -f1)
    [[ $got == "$source_sha256" ]] || die "erofs-utils $version has hash $got, expected $source_sha256"
    tar --extract --file="$work/erofs-utils_$version.orig.tar.gz" --directory="$work"
}

compile() {
    local source_dir=$work/erofs-utils-$version
    patch --quiet --strip=1 --directory="$source_dir" <tools/erofs/stream.patch
    (
        cd "$source_dir"
        ./autogen.sh
        ./configure --disable-lz4 --disable-lzma --without-zlib --without-libdeflate --without-libzstd \
            --without-qpl --without-xxhash --without-uuid --without-selinux --disable-fuse --disable-multithreading \
            CFLAGS="-O2 -ffile-prefix-map=$source_dir=/src -fstack-protector-strong -D_FORTIFY_SOURCE=2"
        make -j2 LDFLAGS=-all-static
    ) >"$work/log" 2>&1 || { tail -n 40 "$work/log" >&2; die "erofs-utils did not build"; }
    install -D -m 0755 "$source_dir/mkfs/mkfs.erofs" "$work/out/mkfs.erofs"
    strip "$work/out/mkfs.erofs"
    {
        echo "mkfs.erofs of erofs-utils $version, from Debian's source package erofs-utils $source_version,"
        echo "with tools/erofs/stream.patch of Cloche's source (given below)."
        cat "$source_dir/COPYING" "$source_dir/LICENSES/GPL-2.0" "$source_dir/LICENSES/Apache-2.0" tools/erofs/stream.patch
    } >"$work/out/LICENCES-erofs.txt"
}

verify() {
    if readelf -l "$work/out/mkfs.erofs" | grep INTERP >/dev/null; then die "mkfs.erofs is not static"; fi
    "$work/out/mkfs.erofs" --version | grep "$version" >/dev/null || die "wrong version"
}

build() {
    work=$(mktemp -d "$CLOCHE_BUILD_CACHE/erofs-work.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    fetch_source
    compile
    verify
    mv "$work/out" "$built"
}

cache_lock erofs
if [[ -d $built ]]; then
    say "cached ($built)"
else
    say "building mkfs.erofs $version"
    build
fi
mkdir -p "$bin"
place "$built/mkfs.erofs" "$bin/mkfs.erofs"
install -m 0644 "$built/LICENCES-erofs.txt" "$bin/LICENCES-erofs.txt"
