#!/bin/sh
# In the system that boot.sh boots: installs the package, and uses it as an operator and users would. Prints one line for each
# thing that works, with the seconds so far; the first that does not work ends it.
#
# XLAUNCH_TEST_DAEMON=stand-in has stand-in.pl in the daemon's place and leaves the jobs out; `real` tests the daemon.
set -eu
begin=$(date +%s)
service=xlaunch.service
socket=/run/xlaunch/xlaunch.sock

step() {
    echo "ok: $(($(date +%s) - begin)) s: $*"
}

fail() {
    echo "FAILED: $*"
    systemctl status --no-pager --full xlaunch.service xlaunch.socket || true
    journalctl --no-pager --lines 60 || true
    exit 1
}

expect() {
    [ "$2" = "$3" ] || fail "$1: expected '$2', found '$3'"
}

# Waits until a command succeeds.
until_true() {
    what=$1
    shift
    for _ in $(seq 600); do
        if "$@"; then return; fi
        sleep 0.1
    done
    fail "$what did not happen"
}

show() {
    systemctl show --property="$1" --value "${2:-$service}"
}

# Runs, and as another process than the given one. Asked for in one go: it may end between two questions.
replaced() {
    now=$(systemctl show --property=ActiveState --property=MainPID $service | sort | tr '\n' ' ')
    case $now in
        "ActiveState=active MainPID=$1 ") return 1 ;;
        "ActiveState=active MainPID="*) return 0 ;;
        *) return 1 ;;
    esac
}

connects() {
    runuser -u "$1" -- perl -MIO::Socket::UNIX -e 'exit !IO::Socket::UNIX->new(Peer => $ARGV[0])' "$socket"
}

if [ "$XLAUNCH_TEST_DAEMON" = stand-in ]; then
    useradd --create-home alice
    mkdir -p "/etc/systemd/system/$service.d"
    printf '[Service]\nExecStart=\nExecStart=/usr/bin/perl /srv/test/stand-in.pl\n' \
        > "/etc/systemd/system/$service.d/stand-in.conf"
    # An address off the loopback network, so that what keeps the daemon from it is its unit.
    ip address add 192.0.2.1/32 dev lo
fi

# Installation.
dpkg --install /srv/test/xlaunch.deb > /srv/test/dpkg 2>&1 || { cat /srv/test/dpkg; fail "the package does not install"; }
for unit in $service xlaunch.socket; do
    expect "$unit at boot" enabled "$(systemctl is-enabled $unit)"
    expect "$unit now" active "$(systemctl is-active $unit)"
done
expect "the socket" "660 root xlaunch" "$(stat -c '%a %U %G' $socket)"
expect "its directory" "755 root root" "$(stat -c '%a %U %G' /run/xlaunch)"
expect "the state" "711 root root" "$(stat -c '%a %U %G' /var/lib/xlaunch)"
expect "what listens on TCP" "" "$(ss --no-header --listening --numeric --tcp)"
getent group xlaunch-admin > /dev/null || fail "there is no group xlaunch-admin"
systemd-analyze security --no-pager --threshold=30 $service > /srv/test/security ||
    fail "confinement: $(tail -n 1 /srv/test/security)"
step "installed and running;$(tail -n 1 /srv/test/security | tr -cd ' -~')"

# Users: alice may submit, carol may do all, bob nothing.
id alice > /dev/null 2>&1 || useradd --create-home alice
usermod --append --groups xlaunch alice
useradd --create-home bob
useradd --create-home --groups xlaunch,xlaunch-admin carol
connects alice || fail "a member of the group cannot connect"
if connects bob; then fail "somebody outside of the group can connect"; fi
step "members of the group connect, others do not"

# Its life under systemd.
pid=$(show MainPID)
systemctl reload $service
expect "the process after a reload" "$pid" "$(show MainPID)"
expect "the daemon after a reload" active "$(show ActiveState)"
step "reload"

kill -KILL "$pid"
until_true "a new daemon after SIGKILL" replaced "$pid"
expect "restarts by systemd" 1 "$(show NRestarts)"
step "SIGKILL: another daemon"

# The unit's time is long for a test.
expect "the watchdog's time" 30s "$(show WatchdogUSec)"
mkdir -p "/run/systemd/system/$service.d"
printf '[Service]\nWatchdogSec=2\n' > "/run/systemd/system/$service.d/watchdog.conf"
systemctl daemon-reload
systemctl restart $service
sleep 5
pid=$(show MainPID)
expect "restarts while it answers" 0 "$(show NRestarts)"
kill -STOP "$pid"
until_true "a new daemon after SIGSTOP" replaced "$pid"
journalctl --unit $service --no-pager | grep -q "Watchdog timeout" || fail "it was not the watchdog"
rm "/run/systemd/system/$service.d/watchdog.conf"
systemctl daemon-reload
step "SIGSTOP: the watchdog replaces the daemon"

systemctl stop $service 2> /dev/null
connects alice || fail "callers do not wait at the socket"
until_true "a daemon for the caller" replaced 0
step "a caller starts the daemon"

# Jobs.
if [ "$XLAUNCH_TEST_DAEMON" = real ]; then
    as() {
        user=$1
        shift
        (cd /srv/job && runuser -u "$user" -- "$@")
    }
    state() {
        as alice xlaunch status "$1" --json | tr -d ' \n' | sed -n 's/.*"state":"\([a-z]*\)".*/\1/p' | head -n 1
    }
    is() {
        case " $2 " in *" $(state "$1") "*) return 0 ;; *) return 1 ;; esac
    }
    submit() {
        as alice xlaunch submit "$@" | sed -n 's/^job \([0-9]*\)$/\1/p'
    }
    agent() {
        systemctl show --property=MainPID --value "xlaunch-job-$1.service"
    }
    gone() {
        ! systemctl --quiet is-active "$1"
    }
    mkdir -p /srv/job
    cat > /srv/job/train.toml << 'JOB'
[job]
seed = 7
[launch]
nproc = 2
[data]
train = ["/usr/share/common-licenses/*"]
[train]
steps = 200
eval_every = 0
sample = 0
[engine]
device = "cpu"
[checkpoint]
every = 50
JOB
    chown -R alice: /srv/job

    # One run with nothing in its way, to compare with.
    calm=$(submit train.toml)
    until_true "the end of job $calm" is "$calm" "done failed"
    expect "job $calm" "done" "$(state "$calm")"
    step "a job runs as its user"

    # The same job, with all that can happen to a daemon meanwhile.
    job=$(submit train.toml)
    until_true "the start of job $job" is "$job" running
    agent=$(agent "$job")
    expect "the agent's user" alice "$(ps -o user= -p "$agent")"
    as bob xlaunch status "$job" > /dev/null 2>&1 && fail "bob sees the job of alice"
    as carol xlaunch status "$job" > /dev/null || fail "an administrator does not see the job"
    systemctl restart $service
    is "$job" running || fail "job $job after a restart: $(state "$job")"
    pid=$(show MainPID)
    kill -KILL "$pid"
    until_true "a new daemon after SIGKILL" replaced "$pid"
    is "$job" running || fail "job $job after SIGKILL of the daemon: $(state "$job")"
    dpkg --install /srv/test/xlaunch.deb > /srv/test/dpkg 2>&1 || fail "the upgrade: $(cat /srv/test/dpkg)"
    is "$job" running || fail "job $job after an upgrade: $(state "$job")"
    expect "the agent" "$agent" "$(agent "$job")"
    until_true "the end of job $job" is "$job" "done failed"
    expect "job $job" "done" "$(state "$job")"
    as alice xlaunch status "$job" --json | grep -q '"exit_code": *0\b' || fail "job $job has no exit code, or another"
    as alice xlaunch jobs --all --json | grep -q "\"id\": *$job\b" || fail "the list has no job $job"
    set -- /srv/job/runs/train/*/checkpoints/step-00000200/model.safetensors
    expect "results" 2 $#
    cmp "$1" "$2" || fail "jobs $calm and $job made different weights"
    step "restart, SIGKILL and upgrade of the daemon: the job does not notice"

    job=$(submit train.toml)
    until_true "the start of job $job" is "$job" running
    as bob xlaunch cancel "$job" > /dev/null 2>&1 && fail "bob cancels the job of alice"
    as alice xlaunch cancel "$job" > /dev/null
    until_true "the end of job $job" is "$job" cancelled
    until_true "the end of its unit" gone "xlaunch-job-$job.service"
    step "cancel"

    echo 'nonsense = 1' >> /etc/xlaunch/daemon.toml
    systemctl restart $service && fail "it starts with a broken configuration"
    expect "the exit code" 2 "$(show ExecMainStatus)"
    expect "starts with a broken configuration" 0 "$(show NRestarts)"
    sed -i '/^nonsense/d' /etc/xlaunch/daemon.toml
    systemctl reset-failed $service
    systemctl start $service
    step "a broken configuration is refused, once"
fi

# Upgrade: another daemon, the same socket, the operator's configuration.
echo '# by the operator' >> /etc/xlaunch/daemon.toml
pid=$(show MainPID)
since=$(show ActiveEnterTimestampMonotonic xlaunch.socket)
dpkg --install /srv/test/xlaunch.deb > /srv/test/dpkg 2>&1 || { cat /srv/test/dpkg; fail "the upgrade"; }
until_true "a new daemon after the upgrade" replaced "$pid"
expect "when the socket was opened" "$since" "$(show ActiveEnterTimestampMonotonic xlaunch.socket)"
grep -q '# by the operator' /etc/xlaunch/daemon.toml || fail "the operator's configuration is gone"
step "upgrade"

dpkg --remove xlaunch > /srv/test/dpkg 2>&1 || { cat /srv/test/dpkg; fail "removal"; }
[ ! -e $socket ] || fail "the socket is left"
[ -d /var/lib/xlaunch ] || fail "removal took the journal"
dpkg --purge xlaunch > /srv/test/dpkg 2>&1 || { cat /srv/test/dpkg; fail "purge"; }
for path in /var/lib/xlaunch /run/xlaunch /etc/xlaunch; do
    [ ! -e $path ] || fail "purge leaves $path"
done
step "removed and purged"
