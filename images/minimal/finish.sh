#!/bin/sh
# finish.sh ROOT: keep the program and its copyright, and give it its names.
set -eu
root=$1

cp "$root/bin/busybox" "$root/busybox"
cp "$root/usr/share/doc/busybox-static/copyright" "$root/copyright"
find "$root" -mindepth 1 -maxdepth 1 ! -name busybox ! -name copyright -exec rm -rf {} +
mkdir -p "$root/bin" "$root/etc" "$root/usr/share/doc/busybox-static"
mkdir -m 1777 "$root/tmp"
mv "$root/busybox" "$root/bin/busybox"
mv "$root/copyright" "$root/usr/share/doc/busybox-static/copyright"
for name in $("$root/bin/busybox" --list); do
    [ "$name" = busybox ] || ln -s busybox "$root/bin/$name"
done
printf 'root:x:0:0:root:/:/bin/sh\nuser:x:1000:1000::/workspace:/bin/sh\n' >"$root/etc/passwd"
printf 'root:x:0:\nuser:x:1000:\n' >"$root/etc/group"
