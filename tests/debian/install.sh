#!/bin/sh
# Installs the Debian package and the wheel of `cargo xtask dist` on bare Debian systems, and runs the README's first
# job with each:
#
#     tests/debian/install.sh ROOTS bullseye bookworm trixie > tests/debian/results/install.txt
#
# ROOTS is a directory for the systems, which debootstrap creates and which are then never written to: changes go to an
# overlay in memory that is discarded. Needs root and debootstrap. The systems have Python with pip, but neither Rust
# nor a compiler.
set -eu
here=$(cd "$(dirname "$0")/../.." && pwd)
dist=${CARGO_TARGET_DIR:-$here/target}/dist
mkdir -p "$1"
roots=$(cd "$1" && pwd)
shift

# Runs in the system.
inside() {
    cat << 'END'
set -eu
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8 HOME=/root
apt-get update -qq 2> /dev/null
run() {
    echo "\$ $*"
    from=$(date +%s%N)
    "$@" > /tmp/out 2>&1 || { cat /tmp/out; echo "FAILED"; exit 1; }
    took=$((($(date +%s%N) - from) / 1000000))
}
shown() {
    sed 's/^/    /' /tmp/out
}
echo "== $(. /etc/os-release; echo "$PRETTY_NAME"), $(ldd --version | head -n 1), $(python3 --version)"
! command -v cargo > /dev/null && ! command -v cc > /dev/null && echo "no Rust, no C compiler"
# What the package depends on, and a minimal system lacks, is not part of the time.
apt-get install -qq --no-install-recommends procps systemd > /dev/null 2>&1
run apt-get install -qq --no-install-recommends ./dist/xlaunch_*_amd64.deb
echo "    $took ms"
run xlaunch --version
shown
run xlaunch daemon --check
shown
mkdir /src && tar --extract --gzip --strip-components 1 --directory /src --file dist/xlaunch-[0-9]*[0-9].tar.gz
cd /src
run xlaunch --nproc 2 deploy/train.toml
grep -E '^(steps|loss|val loss|speed|checkpoint) ' /tmp/out | sed 's/^/    /'
run apt-get purge -qq xlaunch
cd /
python3 -m venv /venv
run /venv/bin/pip install --quiet --no-index ./dist/xlaunch-*-manylinux_2_28_x86_64.whl
echo "    $took ms"
cd /src
run /venv/bin/xlaunch --nproc 2 deploy/train.toml --set train.steps=20
grep -E '^(steps|loss) ' /tmp/out | sed 's/^/    /'
END
}

for suite in "$@"; do
    if [ ! -d "$roots/$suite" ]; then
        unshare --mount debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates \
            "$suite" "$roots/$suite.new" > "$roots/$suite.log" 2>&1 || { tail "$roots/$suite.log"; exit 1; }
        mv "$roots/$suite.new" "$roots/$suite"
    fi
    inside | unshare --mount --pid --fork --kill-child sh -c '
        set -eu
        mount -t tmpfs tmpfs /mnt
        mkdir /mnt/upper /mnt/work /mnt/root
        mount -t overlay overlay -o "lowerdir=$1,upperdir=/mnt/upper,workdir=/mnt/work" /mnt/root
        mkdir /mnt/root/dist
        mount --bind "$2" /mnt/root/dist
        mount -t proc proc /mnt/root/proc
        mount --rbind /dev /mnt/root/dev
        cp /etc/resolv.conf /mnt/root/etc/resolv.conf
        exec chroot /mnt/root sh -s
    ' sh "$roots/$suite" "$dist"
done
