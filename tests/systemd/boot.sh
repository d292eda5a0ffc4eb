#!/bin/sh
# Boots Debian in namespaces of its own, with systemd as its first process, and runs inside.sh there:
# boot.sh DEB CLIENT DIR
#
# DEB is the package to install, CLIENT the program `reflect` of these tests. DIR takes `log`, what inside.sh printed, and
# `exit`, how it ended. The tree of Debian is made once, in $XLAUNCH_TEST_SYSTEMD_ROOT where that is set, and never written to:
# what happens inside is gone with the last process, and so is all of it when this script ends. Needs root, systemd-nspawn
# and, for the tree, debootstrap.
#
# Exits as inside.sh does; with 77, and a reason, where no system can be booted.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
dir=$(cd "$3" && pwd)
root=${XLAUNCH_TEST_SYSTEMD_ROOT:-$dir}
# Seconds until it counts as hung.
limit=300

skip() {
    echo "$*" >&2
    exit 77
}

unshare --pid --fork --mount-proc true 2> /dev/null || skip "no namespaces may be made"

mkdir -p "$root"
(
    flock 9
    [ -d "$root/tree" ] && exit
    rm -rf --one-file-system "$root/tree.new"
    # It mounts; in a namespace of its own, what it mounts goes with it.
    unshare --mount debootstrap --variant=minbase --include=systemd,systemd-sysv,dbus,procps,iproute2 \
        bookworm "$root/tree.new" > "$root/debootstrap.log" 2>&1 ||
        skip "debootstrap: $(tail -n 5 "$root/debootstrap.log")"
    # The tree holds no packages: it is installed into, and not from.
    rm -rf "$root/tree.new"/var/cache/apt/archives/*.deb
    mv "$root/tree.new" "$root/tree"
) 9> "$root/lock"

cp "$1" "$dir/xlaunch.deb"
cp "$2" "$dir/reflect"
cp "$here"/inside.sh "$dir"
# Users run the client.
chmod 755 "$dir" "$dir/reflect"
cat > "$dir/inside.service" << 'UNIT'
[Unit]
After=multi-user.target dbus.service
SuccessAction=poweroff-force
FailureAction=poweroff-force

[Service]
Type=oneshot
ExecStart=/bin/sh /srv/test/inside.sh
ExecStopPost=/bin/sh -c 'echo $EXIT_STATUS > /srv/test/exit'
StandardOutput=append:/srv/test/log
StandardError=append:/srv/test/log
UNIT

# A control group of its own, to be divided up inside. Where systemd runs the host, it gives one out; elsewhere one is made in
# every hierarchy that systemd looks at: version 2 alone, or its part of a hybrid layout.
group=xlaunch-test-$$
groups=
scope=
if [ -d /run/systemd/system ]; then
    scope="systemd-run --quiet --scope --property=Delegate=yes"
else
    for hierarchy in /sys/fs/cgroup /sys/fs/cgroup/unified /sys/fs/cgroup/systemd; do
        [ -e "$hierarchy/cgroup.procs" ] && groups="$groups $hierarchy/$group"
    done
    for made in $groups; do
        mkdir "$made" || skip "no control group may be made"
    done
fi

# The end of `unshare` is the end of all processes in its namespace.
inside=
finish() {
    [ -z "$inside" ] || kill -KILL "$inside" 2> /dev/null || true
    wait
    for made in $groups; do
        # Dead processes leave their groups a moment later.
        for _ in 1 2 3 4 5 6 7 8 9 10; do
            find "$made" -depth -type d -exec rmdir {} + 2> /dev/null || true
            [ -d "$made" ] || break
            sleep 0.2
        done
    done
}
trap finish EXIT
trap 'exit 1' INT TERM HUP

# All capabilities and no filter of system calls: inside, systemd confines services as it does on a machine.
(
    for made in $groups; do
        echo 0 > "$made/cgroup.procs"
    done
    SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=1 SYSTEMD_SECCOMP=0
    export SYSTEMD_NSPAWN_UNIFIED_HIERARCHY SYSTEMD_SECCOMP
    exec $scope unshare --pid --fork --kill-child --mount-proc timeout --signal KILL $limit \
        systemd-nspawn --quiet --boot --register=no --keep-unit --console=pipe --private-network --capability=all \
        --directory="$root/tree" --volatile=overlay --machine=xlaunch-test \
        --bind="$dir:/srv/test" --bind-ro="$dir/inside.service:/etc/systemd/system/inside.service" \
        systemd.wants=inside.service
) < /dev/null > "$dir/console" 2>&1 &
inside=$!
wait "$inside" || true
inside=

cat "$dir/log" 2> /dev/null || cat "$dir/console"
[ -f "$dir/exit" ] || { echo "the system inside ended, or was ended after $limit s, before the test did" >&2; exit 1; }
exit "$(cat "$dir/exit")"
