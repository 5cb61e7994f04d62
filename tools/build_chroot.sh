#!/usr/bin/env bash
# What the new user of tests/promises/test_new_user.py has before Cloche: a small Debian
# (Python, newuidmap, sudo; no compiler) as a tar, and the wheels that ours depend on, as
# locked, for an installation without a network. Both are cached; the two paths are printed.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/cache.sh

suite=bookworm
packages=python3,python3-venv,sudo,uidmap
uv=.venv/bin/uv
products=(packages/cloche/pyproject.toml packages/cloche-server/pyproject.toml)

need mmdebstrap "apt-get install mmdebstrap"
[[ -x $uv ]] || die "run tools/bootstrap first"

build_chroot() {
    local mode=unshare
    [[ $(id -u) == 0 ]] && mode=root
    say "fetching Debian $suite with $packages (a minute)"
    mmdebstrap --quiet --format=tar --mode="$mode" --variant=minbase --include="$packages" \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' \
        "$suite" "$chroot.part" ${CLOCHE_DEBIAN_MIRROR:+"$CLOCHE_DEBIAN_MIRROR"}
    mv "$chroot.part" "$chroot"
}

# Only what the two products need, at the versions and hashes of the lock; for the chroot's Python, not ours.
build_wheelhouse() {
    local work
    work=$(mktemp -d "$CLOCHE_BUILD_CACHE/wheelhouse-work.XXXXXX")
    say "downloading the wheels that ours depend on"
    "$uv" pip compile --quiet --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate \
        --no-emit-package cloche --no-emit-package cloche-server \
        --constraint requirements/dev.lock "${products[@]}" >"$work/needed.txt"
    .venv/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
        --python-version 3.11 --implementation cp --platform "manylinux2014_$(uname -m)" \
        --platform "manylinux_2_28_$(uname -m)" --require-hashes -r "$work/needed.txt" --dest "$work/wheels"
    chmod 0755 "$work/wheels"
    mv "$work/wheels" "$wheelhouse"
    rm -rf "$work"
}

cache_lock chroot
chroot="$CLOCHE_BUILD_CACHE/chroot-$(recipe_hash "$suite" "$packages" chroot-1).tar"
wheelhouse="$CLOCHE_BUILD_CACHE/wheelhouse-$(recipe_hash requirements/dev.lock "${products[@]}" wheelhouse-1)"
[[ -f $chroot ]] || build_chroot
[[ -d $wheelhouse ]] || build_wheelhouse
printf '%s\n%s\n' "$chroot" "$wheelhouse"
