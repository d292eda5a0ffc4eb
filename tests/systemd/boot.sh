#!/bin/sh
# Boots Debian with systemd in namespaces and runs inside.sh there:
#
#     boot.sh DEB CLIENT DIR
#     boot.sh --check          # can namespaces and cgroups be created here?
#     boot.sh --tree           # only creates the Debian tree
#
# DEB is the package to install, CLIENT the test program `grpc_client`. DIR receives `log`, the output of inside.sh, and
# `exit`, its exit status, which is also the exit status of this script. The Debian tree is created once, in
# $XLAUNCH_TEST_SYSTEMD_ROOT if that is set, and never written to: changes go to an overlay that is discarded. Nothing
# outlives this script. Needs root, systemd-nspawn and, for the tree, debootstrap.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
# Seconds after which the booted system counts as hung.
limit=600

fail() {
    echo "$*" >&2
    exit 1
}

# The booted system gets its own cgroups. If systemd runs on the host, it delegates them; otherwise they are created in
# every hierarchy that systemd uses: version 2 alone, or its part of a hybrid layout.
group=xlaunch-test-$$
groups=
scope=
create_cgroups() {
    if [ -d /run/systemd/system ]; then
        scope="systemd-run --quiet --scope --property=Delegate=yes"
        return
    fi
    for hierarchy in /sys/fs/cgroup /sys/fs/cgroup/unified /sys/fs/cgroup/systemd; do
        [ -e "$hierarchy/cgroup.procs" ] || continue
        mkdir "$hierarchy/$group" || fail "no permission to create a cgroup in $hierarchy"
        groups="$groups $hierarchy/$group"
    done
    [ -n "$groups" ] || fail "no cgroup hierarchy in /sys/fs/cgroup"
}

remove_cgroups() {
    for created in $groups; do
        # A cgroup stays busy until its last process has been reaped.
        for _ in 1 2 3 4 5 6 7 8 9 10; do
            find "$created" -depth -type d -exec rmdir {} + 2> /dev/null || true
            [ -d "$created" ] || break
            sleep 0.2
        done
    done
}

# Killing `unshare` kills all processes of its PID namespace.
inside=
finish() {
    [ -z "$inside" ] || kill -KILL "$inside" 2> /dev/null || true
    wait
    remove_cgroups
}
trap finish EXIT
trap 'exit 1' INT TERM HUP

unshare --mount --pid --fork --mount-proc true 2> /dev/null || fail "no permission to create namespaces"
[ "$1" = --tree ] || create_cgroups
[ "$1" != --check ] || exit 0

[ "$1" = --tree ] || dir=$(cd "$3" && pwd)
root=${XLAUNCH_TEST_SYSTEMD_ROOT:-${dir:?--tree needs XLAUNCH_TEST_SYSTEMD_ROOT}}
mkdir -p "$root"
(
    flock 9
    [ -d "$root/tree" ] && exit
    rm -rf --one-file-system "$root/tree.new"
    # Runs in a mount namespace, so that mounts of debootstrap do not remain.
    unshare --mount debootstrap --variant=minbase --include=systemd,systemd-sysv,dbus,procps,iproute2 \
        bookworm "$root/tree.new" > "$root/debootstrap.log" 2>&1 ||
        fail "debootstrap: $(tail -n 5 "$root/debootstrap.log")"
    # The booted system installs no other packages.
    rm -rf "$root/tree.new"/var/cache/apt/archives/*.deb
    mv "$root/tree.new" "$root/tree"
) 9> "$root/lock"
[ "$1" != --tree ] || exit 0

cp "$1" "$dir/xlaunch.deb"
cp "$2" "$dir/grpc_client"
cp "$here"/inside.sh "$here"/hostile.sh "$dir"
# Other users run the client.
chmod 755 "$dir" "$dir/grpc_client"
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

# All capabilities and no seccomp filter: the systemd inside confines its services as on a real machine.
(
    for created in $groups; do
        echo 0 > "$created/cgroup.procs"
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
[ -f "$dir/exit" ] || fail "the booted system stopped before the test was over, or was killed after $limit s"
exit "$(cat "$dir/exit")"
