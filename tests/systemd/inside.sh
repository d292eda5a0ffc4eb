#!/bin/sh
# Runs in the system booted by boot.sh: installs the package and uses it like an operator and several users would.
# Actions of hostile users are in hostile.sh.
# Prints one line per step, with the seconds since the start; ends at the first failure.
set -eu
begin=$(date +%s)
service=xlaunch.service
socket=/run/xlaunch/xlaunch.sock
work=/home/alice/job
# A value in the environment of a job, which other users must not be able to read.
secret=hunter2-$$
# Duration of the training job in seconds if it runs alone and is stopped for four fifths of the time, as it is while
# the daemon is disturbed, so that other suites can use the core: long enough for all that happens to the daemon.
length=90

step() {
    echo "ok: $(($(date +%s) - begin)) s: $*"
}

fail() {
    echo "FAILED: $*"
    systemctl status --no-pager --full xlaunch.service xlaunch.socket || true
    journalctl --no-pager --lines 60 --identifier systemd --identifier xlaunch || true
    # The log of a hostile user may not be a regular file.
    find /var/lib/xlaunch/jobs/*/agent -maxdepth 1 -name agent.log -type f -exec tail --lines 20 {} + || true
    exit 1
}

expect() {
    [ "$2" = "$3" ] || fail "$1: expected '$2', found '$3'"
}

# Waits until a command succeeds: for five minutes, or more if the command itself takes long. Only a hang takes that
# long.
until_true() {
    what=$1
    shift
    for _ in $(seq 3000); do
        if "$@"; then return; fi
        sleep 0.1
    done
    fail "timed out waiting for $what"
}

show() {
    systemctl show --property="$1" --value "${2:-$service}"
}

# Returns whether the daemon is active with another process id. Uses a single query: the daemon may exit between two.
is_replaced() {
    now=$(systemctl show --property=ActiveState --property=MainPID $service | sort | tr '\n' ' ')
    case $now in
        "ActiveState=active MainPID=$1 ") return 1 ;;
        "ActiveState=active MainPID="*) return 0 ;;
        *) return 1 ;;
    esac
}

install() {
    dpkg --install "$1" > /srv/test/dpkg 2>&1 || { cat /srv/test/dpkg; fail "the package does not install"; }
}

as() {
    user=$1
    shift
    (cd "$(getent passwd "$user" | cut -d : -f 6)" && runuser -u "$user" -- "$@")
}

# Runs a command as alice, in the directory of her jobs.
in_work() {
    (cd $work && runuser -u alice -- "$@")
}

submit() {
    in_work xlaunch submit "$@" | sed -n 's/^job \([0-9]*\)$/\1/p'
}

# Prints a field of a job, as JSON.
value() {
    as alice xlaunch status "$1" --json | sed -n "s/^  \"$2\": \(.*[^,]\),\{0,1\}\$/\1/p"
}

# Returns whether a job is in one of these states.
is_in() {
    case " $2 " in *" $(value "$1" state | tr -d '"') "*) return 0 ;; *) return 1 ;; esac
}

expect_end() {
    until_true "the end of job $1" is_in "$1" "done failed cancelled lost"
    expect "job $1: $(value "$1" report)" "\"$2\" $3" "$(value "$1" state) $(value "$1" exit_code)"
}

# Returns whether a unit is no longer active.
is_inactive() {
    ! systemctl --quiet is-active "$1"
}

# Prints the steps of a run and their losses.
losses() {
    perl -ne '/"_step": *(\d+)/ and my $s = $1; /"train\/loss": *([^,}\s]+)/ and print "$s $1\n"' "$1"/metrics.jsonl
}

steps() {
    cat $work/jobs/train/latest/metrics.jsonl 2> /dev/null | grep -c train/loss || true
}

has_more_steps_than() {
    [ "$(steps)" -gt "$1" ]
}

# Returns whether the daemon has adopted the training job: it has a fresh status from the same agent.
is_adopted() {
    is_in "$job" running && as alice xlaunch status "$job" --json | grep -q '"status_age_seconds": [01]\.' &&
        [ "$(show MainPID "$unit")" = "$agent" ]
}

# Expects that the daemon adopts the training job after the given event, and that training continues.
expect_adoption() {
    from=$(date +%s%N)
    until_true "the adoption of job $job after $1" is_adopted
    took=$((($(date +%s%N) - from) / 1000000))
    seen=$(steps)
    until_true "a step of job $job after $1" has_more_steps_than "$seen"
    # Manual starts count towards the unit's start limit.
    systemctl reset-failed $service
    step "$1: job $job adopted after $took ms, at step $seen of $total"
}

# Installation.
install /srv/test/xlaunch.deb
for unit in $service xlaunch.socket; do
    expect "$unit at boot" enabled "$(systemctl is-enabled $unit)"
    expect "$unit now" active "$(systemctl is-active $unit)"
done
expect "socket permissions" "660 root xlaunch" "$(stat -c '%a %U %G' $socket)"
expect "permissions of its directory" "755 root root" "$(stat -c '%a %U %G' /run/xlaunch)"
expect "permissions of the state directory" "711 root root" "$(stat -c '%a %U %G' /var/lib/xlaunch)"
systemd-tmpfiles --cat-config | grep -q '^x /tmp/xlaunch-' ||
    fail "systemd-tmpfiles removes old directories of xlaunch from /tmp"
expect "TCP listeners" "" "$(ss --no-header --listening --numeric --tcp)"
getent group xlaunch-admin > /dev/null || fail "there is no group xlaunch-admin"
systemd-analyze security --no-pager --threshold=30 $service > /srv/test/security ||
    fail "confinement: $(tail -n 1 /srv/test/security)"
step "installed and running;$(tail -n 1 /srv/test/security | tr -cd ' -~')"
for path in man/man1/xlaunch-submit.1 bash-completion/completions/xlaunch doc/xlaunch/grafana/xlaunch.json; do
    # A minimal Debian may exclude documentation from installation.
    [ -s /usr/share/$path ] || dpkg --contents /srv/test/xlaunch.deb | grep -q "/usr/share/$path" ||
        fail "the package lacks $path"
done

# Users: alice and dave may submit jobs, carol is an administrator, bob may do nothing.
useradd --create-home --groups xlaunch alice
useradd --create-home bob
useradd --create-home --groups xlaunch,xlaunch-admin carol
useradd --create-home --groups xlaunch dave
as alice /srv/test/grpc_client $socket > /srv/test/grpc 2>&1 || fail "gRPC client: $(cat /srv/test/grpc)"
grep -q '^services: .*grpc.health.v1.Health .*xlaunch.v1.Node' /srv/test/grpc || fail "$(cat /srv/test/grpc)"
grep -q "^daemon: $(show MainPID) " /srv/test/grpc || fail "$(cat /srv/test/grpc)"
if as bob /srv/test/grpc_client $socket > /dev/null 2>&1; then fail "a user outside the group can connect"; fi
if as bob xlaunch jobs > /srv/test/bob 2>&1; then fail "a user outside the group sees jobs"; fi
step "members of the group connect, others do not: $(tr '\n' ';' < /srv/test/grpc)"

# An operator's limit for the jobs of each user.
mkdir -p /etc/systemd/system/xlaunch-user-.slice.d
printf '[Slice]\nTasksMax=2000\n' > /etc/systemd/system/xlaunch-user-.slice.d/limits.conf
systemctl daemon-reload

# A training job, run alone and as a job of the daemon. The latter is disturbed in every way below.
mkdir $work
cat > $work/train.toml << 'JOB'
[job]
seed = 7
[data]
train = ["text.txt"]
[model]
preset = "byte-tiny"
[train]
batch = 1
warmup = 2
eval_every = 0
sample = 0
[engine]
device = "cpu"
[checkpoint]
every = 0
JOB
cat /usr/share/perl5/Debconf/*.pm /usr/lib/x86_64-linux-gnu/perl-base/*.pm /srv/test/inside.sh > $work/text.txt
chown -R alice: $work
in_work xlaunch --nproc 1 train.toml --set train.steps=200 --set job.output=short > /srv/test/train 2>&1 ||
    fail "training: $(cat /srv/test/train)"
# The median, in nanoseconds.
each=$(perl -ne '/"perf\/step_seconds": *([^,}\s]+)/ and push @s, $1;
    END { @s = sort { $a <=> $b } @s; printf "%d", 1e9 * $s[@s / 2] }' $work/short/train/latest/metrics.jsonl)
[ "${each:-0}" -gt 0 ] || fail "no time of a step in $(head -n 3 $work/short/train/latest/metrics.jsonl)"
total=$((length * 1000000000 / each / 5))
step "training: $((each / 1000)) us per step, $total steps"

job=$(in_work env LC_SECRET="$secret" SECRET="$secret" \
    xlaunch submit --gpus 0 train.toml --set train.steps=$total --set job.output=jobs |
    sed -n 's/^job //p')
expect "the first job" 1 "$job"
until_true "the start of job $job" is_in "$job" running
unit=xlaunch-job-$job.service
agent=$(show MainPID $unit)
until_true "a step of job $job" has_more_steps_than 0

# User and cgroup of its processes.
expect "the agent's user" "alice alice" "$(ps -o user=,group= -p "$agent" | tr -s ' ')"
slice=/xlaunch.slice/xlaunch-user.slice/xlaunch-user-$(id -u alice).slice
expect "its cgroup" "0::$slice/$unit" "$(tail -n 1 "/proc/$agent/cgroup")"
expect "the limit of each user's slice" 2000 "$(show TasksMax "${slice##*/}")"
workers=$(pgrep --parent "$agent" --full worker) || fail "the agent has no workers: $(ps -ef)"
for worker in $workers; do
    expect "a worker's user" alice "$(ps -o user= -p "$worker")"
    grep -q "$slice/$unit" "/proc/$worker/cgroup" || fail "a worker's cgroup: $(cat "/proc/$worker/cgroup")"
done
expect "the daemon's processes" "$(show MainPID)" "$(cat "/sys/fs/cgroup$(show ControlGroup)/cgroup.procs")"
# A training job that saves a checkpoint may take jobs.max_grace.
expect "settings of the unit" "yes continue mixed 2min 30s" \
    "$(show Delegate $unit) $(show OOMPolicy $unit) $(show KillMode $unit) $(show TimeoutStopUSec $unit)"
[ "$(show TasksMax $unit)" -le $(($(cat /proc/sys/kernel/pid_max) / 4)) ] || fail "tasks: $(show TasksMax $unit)"
[ "$(show TasksMax xlaunch.slice)" -lt "$(cat /proc/sys/kernel/pid_max)" ] ||
    fail "tasks of all jobs are not bounded"
expect "locked memory" infinity "$(show LimitMEMLOCK $unit)"
show After $unit | grep -q 'remote-fs.target' || fail "$unit is not ordered after remote-fs.target: $(show After $unit)"
step "the job runs as its user in $unit"
while kill -STOP "$worker"; do
    sleep 0.2
    kill -CONT "$worker"
    sleep 0.05
done 2> /dev/null &
pauses=$!

# Checks what other users can see.
tr '\0' '\n' < "/proc/$worker/environ" | grep -q "^LC_SECRET=$secret$" || fail "the job lacks its environment"
if tr '\0' '\n' < "/proc/$worker/environ" | grep -q "^SECRET="; then
    fail "a variable that is not allowed reaches it"
fi
if grep -q "$secret" "/proc/$agent/environ"; then fail "the agent has the environment of the job"; fi
for user in bob dave carol; do
    if as $user cat "/proc/$agent/environ" > /dev/null 2>&1; then fail "$user can read the job's environment"; fi
    if as $user grep -r -s -q "$secret" /var/lib/xlaunch /run/xlaunch /run/systemd; then
        fail "$user can find the secret"
    fi
    if as $user ls /var/lib/xlaunch/jobs/1/agent > /dev/null 2>&1; then fail "$user can list the job's directory"; fi
    if as $user systemctl show $unit | grep -q "$secret"; then fail "$user can see the secret in the unit"; fi
done
if as dave stat /var/lib/xlaunch/jobs/1/agent > /dev/null 2>&1; then fail "dave can see whose job it is"; fi
for file in job.json agent.json; do
    expect "$file" "600 root" "$(stat -c '%a %U' /var/lib/xlaunch/jobs/1/$file)"
done
if as dave xlaunch status "$job" > /dev/null 2>&1; then fail "dave can see the job of alice"; fi
if as dave xlaunch cancel "$job" > /dev/null 2>&1; then fail "dave can cancel the job of alice"; fi
if as dave xlaunch logs "$job" > /dev/null 2>&1; then fail "dave can read the logs of alice"; fi
expect "jobs that dave sees" 0 "$(as dave xlaunch jobs --all --json | grep -c '"id"' || true)"
as carol xlaunch status "$job" > /dev/null || fail "an administrator cannot see the job"
step "other users cannot see the job"

# The same training undisturbed, at the same time.
in_work xlaunch --nproc 1 train.toml --set train.steps=$total --set job.output=undisturbed > /srv/test/train 2>&1 &
undisturbed=$!

# Restarts and crashes of the daemon under systemd.
systemctl restart $service
expect_adoption "restart"

pid=$(show MainPID)
kill -KILL "$pid"
until_true "a new daemon after SIGKILL" is_replaced "$pid"
expect_adoption "SIGKILL"

# The unit's timeout is too long for a test. The daemon notifies the watchdog twice within it.
expect "the watchdog timeout" 30s "$(show WatchdogUSec)"
mkdir -p "/run/systemd/system/$service.d"
printf '[Service]\nWatchdogSec=10\n' > "/run/systemd/system/$service.d/watchdog.conf"
systemctl daemon-reload
systemctl restart $service
pid=$(show MainPID)
sleep 1
kill -STOP "$pid"
until_true "a new daemon after SIGSTOP" is_replaced "$pid"
journalctl --sync
journalctl --unit $service --no-pager | grep -q "Watchdog timeout" ||
    fail "the daemon was not restarted by the watchdog"
rm "/run/systemd/system/$service.d/watchdog.conf"
systemctl daemon-reload
expect "state of $unit after daemon-reload" loaded "$(show LoadState $unit)"
expect_adoption "SIGSTOP and watchdog"

# Socket activation: the first client starts the daemon.
systemctl stop $service 2> /dev/null
expect "the daemon" inactive "$(show ActiveState)"
expect_adoption "stop and socket activation"

systemctl stop $service 2> /dev/null
seen=$(steps)
until_true "a step without a daemon" has_more_steps_than "$seen"
systemctl start $service
expect_adoption "stop and start"

# Upgrade: a new daemon, the same socket, and the operator's configuration.
echo '# by the operator' >> /etc/xlaunch/daemon.toml
dpkg-deb --raw-extract /srv/test/xlaunch.deb /srv/new
sed -i 's/^Version: .*/&+1/' /srv/new/DEBIAN/control
dpkg-deb --build -Znone /srv/new /srv/new.deb > /dev/null
pid=$(show MainPID)
since=$(show ActiveEnterTimestampMonotonic xlaunch.socket)
install /srv/new.deb
until_true "a new daemon after the upgrade" is_replaced "$pid"
expect "start time of the socket unit" "$since" "$(show ActiveEnterTimestampMonotonic xlaunch.socket)"
grep -q '# by the operator' /etc/xlaunch/daemon.toml || fail "the upgrade has replaced the operator's configuration"
dpkg-query --show xlaunch | grep -q '+1$' || fail "the new version is not installed"
expect_adoption "upgrade"

# Nothing else happens to the job, so it may finish at full speed.
kill "$pauses"
kill -CONT "$worker"

expect_end "$job" "done" 0
until_true "the end of its unit" is_inactive $unit
wait $undisturbed || fail "training: $(cat /srv/test/train)"
losses $work/jobs/train/latest > /srv/test/job-losses
losses $work/undisturbed/train/latest > /srv/test/undisturbed-losses
expect "steps" "$(seq "$total" | md5sum)" "$(cut -d ' ' -f 1 /srv/test/job-losses | md5sum)"
cmp /srv/test/job-losses /srv/test/undisturbed-losses || fail "losses differ from those of the undisturbed training"
expect "runs of the job" 1 "$(find $work/jobs/train -mindepth 1 -maxdepth 1 -type d | wc -l)"
step "the job is done, with every step once and the losses of the undisturbed training"

# Jobs that run commands, once the operator allows them.
if in_work xlaunch submit -- true 2> /srv/test/refused; then fail "a command is accepted by default"; fi
grep -q allow_commands /srv/test/refused || fail "the error does not name allow_commands: $(cat /srv/test/refused)"
sed -i 's/^#allow_commands = .*/allow_commands = true/' /etc/xlaunch/daemon.toml
pid=$(show MainPID)
systemctl reload $service
accepts_commands() {
    commanded=$(submit --name greet -- sh -c 'echo hello' 2> /dev/null) && [ -n "$commanded" ]
}
until_true "a command after the reload" accepts_commands
expect "process id after the reload" "$pid" "$(show MainPID)"
expect "the daemon after the reload" active "$(show ActiveState)"
expect_end "$commanded" "done" 0
expect "its output" hello "$(as alice xlaunch logs "$commanded")"
cp /etc/xlaunch/daemon.toml /srv/test/daemon.toml
echo '[jbos]' >> /etc/xlaunch/daemon.toml
if systemctl reload $service 2> /srv/test/reload; then fail "the reload of a broken file succeeds"; fi
expect "the daemon after a failed reload" "active $pid" "$(show ActiveState) $(show MainPID)"
cp /srv/test/daemon.toml /etc/xlaunch/daemon.toml
step "reload"

# Limits of limits.conf(5).
cp /usr/share/doc/xlaunch/pam-xlaunch /etc/pam.d/xlaunch
printf 'alice hard nofile 12345\nalice - memlock 7000\n' > /etc/security/limits.d/test.conf
limited=$(submit -- sh -c 'echo $(ulimit -H -n) $(ulimit -l); sleep 3')
until_true "the start of job $limited" is_in "$limited" running
expect "the time that its start may take" infinity "$(show TimeoutStartUSec "xlaunch-job-$limited.service")"
expect_end "$limited" "done" 0
expect "the limits of a job" "12345 7000" "$(as alice xlaunch logs "$limited")"
rm /etc/pam.d/xlaunch
step "limits.conf applies to jobs, where the operator wants it"

# Limits on cores and memory, and what a job has used.
limited=$(submit --cpus 1 --mem 64M -- sleep 1)
until_true "the start of job $limited" is_in "$limited" running
expect "its limits" "67108864 1s" "$(show MemoryMax "xlaunch-job-$limited.service") $(
    show CPUQuotaPerSecUSec "xlaunch-job-$limited.service")"
expect_end "$limited" "done" 0
used=$(as alice xlaunch history --json | grep -c '"cpu_seconds": [0-9]' || true)
[ "$used" -ge 1 ] || fail "the history has no CPU time: $(as alice xlaunch history)"
expect "jobs in the history of dave" "no jobs" "$(as dave xlaunch history)"
step "units have the limits of their jobs; the history has what jobs have used"

# A time limit, with a warning.
warned=$(submit --time 2s --signal USR1@1 -- sh -c 'trap "echo warned" USR1; while :; do sleep 0.1; done')
until_true "the end of job $warned" is_in "$warned" failed
value "$warned" reason | grep -q 'time limit of 2s reached' || fail "its reason: $(value "$warned" reason)"
expect "its output" warned "$(as alice xlaunch logs "$warned")"
step "a job at its time limit is warned and stopped"

# A job that is killed goes back to the queue.
requeued=$(submit --requeue -- sh -c 'echo run >> runs; while ! [ -e stop ]; do sleep 0.1; done')
until_true "the start of job $requeued" test -e $work/runs
systemctl kill --signal KILL "xlaunch-job-$requeued.service"
until_true "the second start of job $requeued" sh -c "[ \$(wc -l < $work/runs) -eq 2 ]"
in_work touch stop
expect_end "$requeued" "done" 0
step "a job that is killed is started again where its user wants it"

# Hooks, as root and as the job's user.
cat > /etc/xlaunch/hook << 'HOOK'
#!/bin/sh
echo "$0 $XLAUNCH_HOOK_JOB_ID $(id -un) $XLAUNCH_HOOK_JOB_STATE" | systemd-cat -t xlaunch-hook
HOOK
chmod 755 /etc/xlaunch/hook
sed -i 's|^#prolog = .*|prolog = "/etc/xlaunch/hook"|' /etc/xlaunch/daemon.toml
sed -i 's|^#on_end = .*|on_end = "/etc/xlaunch/hook"|' /etc/xlaunch/daemon.toml
systemctl reset-failed $service
systemctl restart $service
hooked=$(submit -- true)
expect_end "$hooked" "done" 0
has_hooks() {
    journalctl --no-pager --identifier xlaunch-hook --output cat > /srv/test/hooks
    grep -q "^/etc/xlaunch/hook $hooked root$" /srv/test/hooks &&
        grep -q "^/etc/xlaunch/hook $hooked alice done$" /srv/test/hooks
}
until_true "the hooks of job $hooked" has_hooks
printf '#!/bin/sh\nexit 3\n' > /etc/xlaunch/hook
refused=$(submit -- true)
is_drained() { value "$refused" reason | grep -q 'the node is drained: .*prolog failed'; }
until_true "the drain of the node" is_drained
sed -i 's/^prolog = /#&/; s/^on_end = /#&/' /etc/xlaunch/daemon.toml
rm /etc/xlaunch/hook
systemctl reset-failed $service
systemctl restart $service
xlaunch drain --undo
expect_end "$refused" "done" 0
step "hooks run as root or as the user; a prolog that fails drains the node"

# Files that the job's user can write say that it has ended; its unit says that it runs.
forged=$(submit -- sleep 1234567)
until_true "the start of job $forged" is_in "$forged" running
as alice sh -c "cd /var/lib/xlaunch/jobs/$forged/agent && rm begun-1 agent.sock &&
    echo '{\"exit\":0,\"reason\":\"forged\",\"start\":1}' > result.json"
systemctl restart $service
until_true "the daemon after the restart" as alice xlaunch jobs > /dev/null
sleep 2
is_in "$forged" "running starting" || fail "a forged result: $(value "$forged" state)"
xlaunch cancel --force "$forged" > /dev/null
until_true "the end of job $forged" is_in "$forged" "cancelled done"
is_inactive "xlaunch-job-$forged.service" || fail "the unit of job $forged outlives it"
systemctl reset-failed $service
step "forged files neither end a running job nor keep it"

failing=$(submit --propagate-exit-code -- sh -c 'while ! [ -e go ]; do sleep 0.1; done; echo broken >&2; exit 7')
until_true "the start of job $failing" is_in "$failing" running
systemctl stop $service 2> /dev/null
in_work touch go
until_true "the end of job $failing without a daemon" is_inactive "xlaunch-job-$failing.service"
systemctl start $service
expect_end "$failing" failed 7
value "$failing" report | grep -q 'exit code 7.*broken' || fail "its report: $(value "$failing" report)"
step "a job that fails while the daemon is stopped keeps its exit code and report"

# The unit's cgroup holds all processes of a job, in any session.
cancelled=$(submit -- sh -c 'setsid sleep 1234567 & sleep 1234567')
until_true "the start of job $cancelled" is_in "$cancelled" running
until_true "the processes of job $cancelled" pgrep --full 'sleep 1234567' > /dev/null
as alice xlaunch cancel "$cancelled" > /dev/null
expect_end "$cancelled" cancelled 143
until_true "the end of its unit" is_inactive "xlaunch-job-$cancelled.service"
if pgrep --full '^sleep 1234567'; then fail "processes of job $cancelled were left"; fi
killed=$(submit -- sleep 1234567)
until_true "the start of job $killed" is_in "$killed" running
systemctl kill --signal KILL "xlaunch-job-$killed.service"
until_true "the end of job $killed" is_in "$killed" lost
if pgrep --full '^sleep 1234567'; then fail "processes of job $killed were left"; fi
stopped=$(submit -- sleep 1234567)
until_true "the start of job $stopped" is_in "$stopped" running
# As at shutdown of the system.
systemctl stop "xlaunch-job-$stopped.service"
expect_end "$stopped" failed 143
step "cancelled job; stopped unit: job failed; killed unit: job lost"

# As if the system had been restarted: all processes of the job are gone, and the boot id differs.
running=$(submit -- sleep 1234567)
until_true "the start of job $running" is_in "$running" running
systemctl stop $service 2> /dev/null
systemctl kill --signal KILL "xlaunch-job-$running.service"
until_true "the end of its unit" is_inactive "xlaunch-job-$running.service"
cat /proc/sys/kernel/random/uuid > /srv/boot_id
printf '[Service]\nBindReadOnlyPaths=/srv/boot_id:/proc/sys/kernel/random/boot_id\n' \
    > "/run/systemd/system/$service.d/boot.conf"
systemctl daemon-reload
systemctl reset-failed $service
systemctl start $service
expect_end "$running" lost null
value "$running" reason | grep -q 'rebooted' || fail "its reason: $(value "$running" reason)"
rm "/run/systemd/system/$service.d/boot.conf"
systemctl daemon-reload
step "a job that was running at a reboot is lost"

# Web page and metrics, once the operator enables them.
sed -i 's/^#listen = .*/listen = "127.0.0.1:9470"/' /etc/xlaunch/daemon.toml
systemctl reset-failed $service
systemctl restart $service
perl -MIO::Socket::INET -e '$s = IO::Socket::INET->new("127.0.0.1:9470") or die $!;
    print $s "GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:9470\r\nConnection: close\r\n\r\n"; print <$s>' \
    > /srv/test/metrics ||
    fail "the metrics: $(cat /srv/test/metrics)"
grep -q '^xlaunch_' /srv/test/metrics || fail "the metrics: $(cat /srv/test/metrics)"
step "metrics on the loopback interface"

# The address of the page held by systemd.
sed -i 's/^listen = /#&/' /etc/xlaunch/daemon.toml
systemctl stop $service 2> /dev/null
cp /usr/share/doc/xlaunch/xlaunch-web.socket /etc/systemd/system
systemctl daemon-reload
systemctl start xlaunch-web.socket
perl -MIO::Socket::INET -e '$s = IO::Socket::INET->new("127.0.0.1:9470") or die $!;
    print $s "GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:9470\r\nConnection: close\r\n\r\n"; print <$s>' \
    > /srv/test/metrics || fail "the metrics: $(cat /srv/test/metrics)"
grep -q '^xlaunch_' /srv/test/metrics || fail "the metrics through xlaunch-web.socket: $(cat /srv/test/metrics)"
expect "the daemon after a connection to the page" active "$(show ActiveState)"
systemctl stop xlaunch-web.socket
systemctl reset-failed $service
step "xlaunch-web.socket starts the daemon"

. /srv/test/hostile.sh

journalctl --unit $service --no-pager JOB="$job" | grep -q "done" || fail "the journal has no end of job $job"
expect "lines of job $failing among those of job $job" 0 \
    "$(journalctl --unit $service --no-pager --quiet JOB="$job" | grep -c "job $failing " || true)"
[ -n "$(journalctl --unit $service --no-pager --quiet JOB="$failing" RANK=0 ATTEMPT=0)" ] ||
    fail "the journal has no failure of rank 0 of job $failing"
[ -n "$(journalctl --unit $service --no-pager --quiet UID="$(id -u alice)")" ] || fail "the journal has no user ids"
if journalctl --no-pager | grep -q "$secret"; then fail "the journal contains the secret"; fi
step "the journal has structured fields"

echo 'nonsense = 1' >> /etc/xlaunch/daemon.toml
systemctl restart $service 2> /dev/null && fail "it starts with an invalid configuration"
expect "the exit code" 2 "$(show ExecMainStatus)"
expect "restarts with an invalid configuration" 0 "$(show NRestarts)"
if as alice timeout 15 xlaunch jobs > /dev/null 2>&1; then fail "a daemon with an invalid configuration answers"; fi
expect "the socket of a daemon with an invalid configuration" active "$(systemctl is-active xlaunch.socket)"
sed -i '/^nonsense/d' /etc/xlaunch/daemon.toml
as alice xlaunch jobs > /dev/null || fail "the daemon does not start with the corrected configuration"
step "an invalid configuration is refused without restarts; the socket starts the daemon when it is corrected"

# Another state directory, where the confined service may write only after the operator has followed the message.
other=/srv/xlaunch
sed -i "s|^#state_dir = .*|state_dir = \"$other\"|" /etc/xlaunch/daemon.toml
systemctl restart $service 2> /dev/null && fail "it starts although it cannot write to its state directory"
expect "the exit code" 2 "$(show ExecMainStatus)"
journalctl --sync
journalctl --unit $service --no-pager | grep -q "failed to use $other as .*create it and .*ReadWritePaths=$other)" ||
    fail "the message does not say how to make $other writable"
mkdir $other
printf '[Service]\nReadWritePaths=%s\n' $other > "/run/systemd/system/$service.d/state.conf"
systemctl daemon-reload
systemctl reset-failed $service xlaunch.socket
systemctl start xlaunch.socket $service
[ -e $other/journal ] || fail "the daemon does not use $other"
rm "/run/systemd/system/$service.d/state.conf"
sed -i 's/^state_dir = /#&/; s/^#*allow_commands = .*/allow_commands = true/' /etc/xlaunch/daemon.toml
systemctl daemon-reload
systemctl reset-failed $service
systemctl restart $service
step "a read-only state directory is refused with what to do, which helps"

# Neither journal nor files name a running job. Its unit does, so it is listed again and can be cancelled.
accepts_unknown() {
    unknown=$(submit -- sleep 1234567 2> /dev/null) && [ -n "$unknown" ]
}
until_true "a command after the restart" accepts_unknown
until_true "the start of job $unknown" is_in "$unknown" running
systemctl stop $service 2> /dev/null
perl -pi -e 's/./\0/gs' /var/lib/xlaunch/journal
rm -r "/var/lib/xlaunch/jobs/$unknown"
systemctl reset-failed $service
systemctl start $service
until_true "the adoption of job $unknown" is_in "$unknown" "starting running"
expect "the unit of job $unknown" active "$(systemctl is-active "xlaunch-job-$unknown.service")"
as alice xlaunch cancel --force "$unknown" > /dev/null
until_true "the end of job $unknown" is_in "$unknown" cancelled
until_true "the end of its unit" is_inactive "xlaunch-job-$unknown.service"
systemctl reset-failed $service
step "a running job that journal and files do not name is adopted and can be cancelled"

# A daemon of a user, in a service of its own: systemd ends agents with it unless it has KillMode=process.
start_own() {
    printf '[Service]\nUser=alice\nKillMode=%s\nExecStart=/usr/bin/xlaunch daemon --socket %s\n' "$1" $own \
        > /run/systemd/system/own.service
    systemctl daemon-reload
    systemctl restart own.service
    until_true "the socket of the daemon of alice" as alice xlaunch jobs --socket $own > /dev/null 2>&1
}
has_warned() {
    journalctl --unit own.service --output cat | grep -q 'a restart of own.service ends all jobs'
}
has_started() {
    [ "$(grep -sc start /home/alice/own-starts)" = "$1" ]
}
own=/home/alice/own.sock
start_own process
as alice xlaunch submit --requeue --socket $own -- sh -c 'echo start >> own-starts; sleep 1234567' > /dev/null
until_true "the start of the job" has_started 1
start_own process
has_started 1 || fail "the job was started again in spite of KillMode=process"
if has_warned; then fail "a warning in spite of KillMode=process"; fi
start_own control-group
until_true "the warning" has_warned
until_true "the second start of the job" has_started 2
as alice xlaunch cancel --socket $own 1 > /dev/null
systemctl stop own.service
step "a service with KillMode=process is restarted without ending jobs; otherwise its daemon warns, and requeues them"

# Removal and purge while a job runs: it continues, and the next daemon reports how it ended.
accepts_lasting() {
    lasting=$(submit -- sh -c 'while ! [ -e finish ]; do sleep 0.1; done; echo finished' 2> /dev/null) &&
        [ -n "$lasting" ]
}
until_true "a command after the reload" accepts_lasting
until_true "the start of job $lasting" is_in "$lasting" running
dpkg --remove xlaunch > /srv/test/dpkg 2>&1 || { cat /srv/test/dpkg; fail "removal with a running job"; }
expect "the unit of job $lasting after the removal" active "$(systemctl is-active "xlaunch-job-$lasting.service")"
dpkg --purge xlaunch > /srv/test/dpkg 2>&1 || { cat /srv/test/dpkg; fail "purge with a running job"; }
grep -q "jobs still run" /srv/test/dpkg || fail "the purge does not name running jobs: $(cat /srv/test/dpkg)"
expect "the unit of job $lasting after the purge" active "$(systemctl is-active "xlaunch-job-$lasting.service")"
[ -d "/var/lib/xlaunch/jobs/$lasting" ] || fail "the purge deleted the directory of the running job $lasting"
[ ! -e /etc/xlaunch ] || fail "purge left /etc/xlaunch"
in_work touch finish
until_true "the end of job $lasting without the package" is_inactive "xlaunch-job-$lasting.service"
install /srv/test/xlaunch.deb
expect_end "$lasting" "done" 0
expect "its output" finished "$(as alice xlaunch logs "$lasting")"
step "a job outlives removal and purge of the package, and its end is known after an installation"

dpkg --remove xlaunch > /srv/test/dpkg 2>&1 || { cat /srv/test/dpkg; fail "removal"; }
[ ! -e $socket ] || fail "removal left the socket"
[ -d /var/lib/xlaunch ] || fail "removal deleted the state directory"
dpkg --purge xlaunch > /srv/test/dpkg 2>&1 || { cat /srv/test/dpkg; fail "purge"; }
for path in /var/lib/xlaunch /run/xlaunch /etc/xlaunch; do
    [ ! -e $path ] || fail "purge left $path"
done
step "removed and purged"
