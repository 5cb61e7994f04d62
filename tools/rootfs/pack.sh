#!/usr/bin/env bash
# pack.sh BASE_TAR AGENT TREE IMAGE: unpack Debian, add what a sandbox needs, make EROFS.
# Runs as root, or as the root of a user namespace (see build_rootfs.sh).
set -euo pipefail
base=$1 agent=$2 tree=$3 image=$4

mkdir "$tree"
tar --extract --file="$base" --directory="$tree" --numeric-owner --same-owner --preserve-permissions \
    --exclude='./dev/*'
touch "$tree.unpacked"

# apt's state is of no use inside, and its times differ from build to build.
rm -rf "$tree"/var/lib/apt/lists/* "$tree"/var/cache/apt/* "$tree"/var/log/* "$tree"/var/cache/ldconfig/*

# The image's user: commands run as it, never as root by default.
shell=/bin/sh
[[ -x $tree/bin/bash ]] && shell=/bin/bash
grep -q '^user:' "$tree/etc/passwd" || {
    echo "user:x:1000:1000::/home/user:$shell" >>"$tree/etc/passwd"
    echo 'user:x:1000:' >>"$tree/etc/group"
    echo 'user:!:20000:0:99999:7:::' >>"$tree/etc/shadow"
}
install -d -m 0755 -o 1000 -g 1000 "$tree/home/user" "$tree/workspace"

# gVisor's tmpfs hides an empty /tmp that it creates itself; a file keeps it ours.
: >"$tree/tmp/.keep"
printf '127.0.0.1 localhost\n::1 localhost\n' >"$tree/etc/hosts"
# Bound over at start with an id of the sandbox's own: the file must exist.
: >"$tree/etc/machine-id"
rm -f "$tree/etc/hostname" "$tree/etc/resolv.conf"

# The agent is PID 1 and has a uid no command ever gets.
install -d -m 0755 -o 0 -g 0 "$tree/.cloche"
if [[ -f $agent ]]; then
    install -m 0555 -o 64000 -g 64000 "$agent" "$tree/.cloche/agent"
fi

# What we touched gets the fixed time, so that equal input makes an equal image. All else
# keeps its own: Python compares a source's time with the one in its compiled file.
find "$tree" -newer "$tree.unpacked" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +

# No xattrs (gVisor cannot open an inode that has one), no inline data (it maps pages).
mkfs.erofs --quiet -d1 -x-1 -E noinline_data -U 00000000-0000-0000-0000-000000000000 "$image" "$tree"
chmod 0444 "$image"
