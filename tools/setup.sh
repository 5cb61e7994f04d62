#!/usr/bin/env bash
# Everything a checkout needs before its first test: system packages (only the missing
# ones), the Python environment, the engine, the agent, the image converter, the root file systems (ours, and the one
# with the clients of the egress promises), and the clean Debian in which the promises install a release.
# Seconds when another clone on this machine has done it before (tools/cache.sh).
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/cache.sh

# command:package, as Debian names them
needs=(mmdebstrap:mmdebstrap mkfs.erofs:erofs-utils newuidmap:uidmap gcc:gcc strace:strace
    tmux:tmux qemu-system-x86_64:qemu-system-x86
    autoreconf:autoconf automake:automake libtoolize:libtool pkg-config:pkg-config patch:patch
    docker-registry:docker-registry skopeo:skopeo umoci:umoci buildah:buildah git:git ip:iproute2)
# path:package, for what is no command: the servers that the egress promises start on loopback
servers=(/usr/lib/python3/dist-packages/hypercorn:python3-hypercorn /usr/lib/python3/dist-packages/grpc:python3-grpcio
    /usr/lib/postgresql:postgresql)

install_packages() {
    local pair missing=()
    for pair in "${needs[@]}"; do
        command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
    done
    for pair in "${servers[@]}"; do
        [[ -e ${pair%%:*} ]] || missing+=("${pair##*:}")
    done
    ((${#missing[@]})) || return 0
    if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
        die "missing: ${missing[*]}. Install them (Debian: sudo apt-get install ${missing[*]})."
    fi
    say "installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    # The tests make their own database; none shall run because of us.
    if [[ ! -e /etc/postgresql-common/createcluster.conf ]]; then
        mkdir -p /etc/postgresql-common
        echo 'create_main_cluster = false' >/etc/postgresql-common/createcluster.conf
    fi
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends -o Dpkg::Options::=--force-confold "${missing[@]}" >/dev/null
}

python_environment() {
    export VIRTUAL_ENV="$PWD/.venv"
    .venv/bin/uv pip sync --quiet --require-hashes requirements/dev.lock
    .venv/bin/uv pip install --quiet --no-deps --build-constraint requirements/build.lock \
        -e packages/cloche -e packages/cloche-server -e packages/cloche-engine
}

stage() {
    local before=$SECONDS
    "$@"
    say "$*: $((SECONDS - before)) s"
}

# What only downloads and unpacks goes on beside the compilers: Debian's trees need neither them nor the agent.
trees() {
    stage tools/build_rootfs.sh python --tree-only
    stage tools/build_rootfs.sh clients --tree-only
    stage tools/build_chroot.sh >/dev/null
}

[[ -x .venv/bin/uv ]] || die "run tools/bootstrap first"
stage install_packages
stage python_environment
trees &
stage tools/build_runsc.sh
stage tools/build_agent.sh
stage tools/build_erofs.sh
stage tools/build_converter.sh
stage python3 tools/engine_manifest.py
stage tools/build_converter.sh --features planted --out build/planted
wait $! || die "one of the Debian trees could not be made"
stage tools/build_rootfs.sh python
stage tools/build_rootfs.sh clients
stage tools/build_microvm.sh
