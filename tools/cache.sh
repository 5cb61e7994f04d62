# Sourced by the build scripts: where finished builds are kept, and under which name.
#
# A build's directory is named by the hash of everything that decides its bytes, so
# a second clean clone copies instead of building, and a changed recipe never meets
# an old result. It is outside the checkout on purpose.

CLOCHE_BUILD_CACHE="${CLOCHE_BUILD_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/cloche-build}"
mkdir -p "$CLOCHE_BUILD_CACHE"

# recipe_hash WORD-OR-FILE...: 16 hex digits over files' contents and plain words.
recipe_hash() {
    local item
    for item in "$@"; do
        if [[ -f $item ]]; then sha256sum <"$item"; else printf '%s\n' "$item"; fi
    done | sha256sum | cut -c1-16
}

# One build of a kind at a time; a second caller waits and then finds it cached.
cache_lock() {
    exec 9>"$CLOCHE_BUILD_CACHE/$1.lock"
    flock 9
}

# place FILE TARGET: an executable, put there in one step, and only when it differs: a test may be running it.
place() {
    cmp --silent "$1" "$2" && return
    install -D -m 0755 "$1" "$2.part"
    mv "$2.part" "$2"
}

say() { printf '%s: %s\n' "$(basename "$0" .sh)" "$*" >&2; }
die() { say "$*"; exit 1; }
need() { command -v "$1" >/dev/null || die "$1 is not installed. $2"; }
