#!/bin/sh
# In the system that boot.sh boots: installs the package, and uses it as an operator and users would. Prints one line for each
# thing that works, with the seconds so far; the first that does not work ends it.
set -eu
begin=$(date +%s)
service=xlaunch.service
socket=/run/xlaunch/xlaunch.sock
work=/home/alice/job
# What the environment of a job holds, and nobody else may read.
secret=hunter2-$$
# Seconds that a training job is to take alone: all that happens to the daemon meanwhile fits in.
length=32

step() {
    echo "ok: $(($(date +%s) - begin)) s: $*"
}

fail() {
    echo "FAILED: $*"
    systemctl status --no-pager --full xlaunch.service xlaunch.socket || true
    journalctl --no-pager --lines 60 --identifier systemd --identifier xlaunch || true
    tail --lines 20 /var/lib/xlaunch/jobs/*/agent/agent.log || true
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

install() {
    dpkg --install "$1" > /srv/test/dpkg 2>&1 || { cat /srv/test/dpkg; fail "the package does not install"; }
}

as() {
    user=$1
    shift
    (cd "$(getent passwd "$user" | cut -d : -f 6)" && runuser -u "$user" -- "$@")
}

# In the directory of alice's jobs.
here() {
    (cd $work && runuser -u alice -- "$@")
}

submit() {
    here xlaunch submit "$@" | sed -n 's/^job \([0-9]*\)$/\1/p'
}

# A value of a job, as JSON.
value() {
    as alice xlaunch status "$1" --json | sed -n "s/^  \"$2\": \(.*[^,]\),\{0,1\}\$/\1/p"
}

is() {
    case " $2 " in *" $(value "$1" state | tr -d '"') "*) return 0 ;; *) return 1 ;; esac
}

ended() {
    until_true "the end of job $1" is "$1" "done failed cancelled lost"
    expect "job $1: $(value "$1" report)" "\"$2\" $3" "$(value "$1" state) $(value "$1" exit_code)"
}

gone() {
    ! systemctl --quiet is-active "$1"
}

# Steps of a run and their losses.
losses() {
    perl -ne '/"_step": *(\d+)/ and my $s = $1; /"train\/loss": *([^,}\s]+)/ and print "$s $1\n"' "$1"/metrics.jsonl
}

steps() {
    cat $work/jobs/train/*/metrics.jsonl 2> /dev/null | grep -c train/loss || true
}

goes_on() {
    [ "$(steps)" -gt "$1" ]
}

# The daemon knows of the job that runs, from its agent, as it is now: it has asked anew, of the same process.
adopted() {
    is "$job" running && as alice xlaunch status "$job" --json | grep -q '"status_age_seconds": [01]\.' &&
        [ "$(show MainPID "$unit")" = "$agent" ]
}

# After something has happened to the daemon.
adopts() {
    from=$(date +%s%N)
    until adopted; do
        [ $(($(date +%s%N) - from)) -lt 5000000000 ] || fail "job $job after $1: $(value "$job" state)"
        sleep 0.1
    done
    took=$((($(date +%s%N) - from) / 1000000))
    seen=$(steps)
    until_true "a step of job $job after $1" goes_on "$seen"
    # Starts by the operator count towards the limit of those in a minute.
    systemctl reset-failed $service
    step "$1: job $job taken up again after $took ms, at step $seen of $total"
}

# Installation.
install /srv/test/xlaunch.deb
for unit in $service xlaunch.socket; do
    expect "$unit at boot" enabled "$(systemctl is-enabled $unit)"
    expect "$unit now" active "$(systemctl is-active $unit)"
done
expect "the socket" "660 root xlaunch" "$(stat -c '%a %U %G' $socket)"
expect "its directory" "755 root root" "$(stat -c '%a %U %G' /run/xlaunch)"
expect "the state" "711 root root" "$(stat -c '%a %U %G' /var/lib/xlaunch)"
systemd-tmpfiles --cat-config | grep -q '^x /tmp/xlaunch-' || fail "old directories in /tmp are cleaned away"
expect "what listens on TCP" "" "$(ss --no-header --listening --numeric --tcp)"
getent group xlaunch-admin > /dev/null || fail "there is no group xlaunch-admin"
systemd-analyze security --no-pager --threshold=30 $service > /srv/test/security ||
    fail "confinement: $(tail -n 1 /srv/test/security)"
step "installed and running;$(tail -n 1 /srv/test/security | tr -cd ' -~')"
for path in man/man1/xlaunch-submit.1 bash-completion/completions/xlaunch doc/xlaunch/grafana/xlaunch.json; do
    # Installations of Debian may leave documents out.
    [ -s /usr/share/$path ] || dpkg --contents /srv/test/xlaunch.deb | grep -q "/usr/share/$path" ||
        fail "the package has no $path"
done

# Users: alice and dave may submit, carol may do all, bob nothing.
useradd --create-home --groups xlaunch alice
useradd --create-home bob
useradd --create-home --groups xlaunch,xlaunch-admin carol
useradd --create-home --groups xlaunch dave
as alice /srv/test/reflect $socket > /srv/test/reflection 2>&1 || fail "reflection: $(cat /srv/test/reflection)"
grep -q '^services: .*grpc.health.v1.Health .*xlaunch.v1.Node' /srv/test/reflection || fail "$(cat /srv/test/reflection)"
grep -q "^daemon: $(show MainPID) " /srv/test/reflection || fail "$(cat /srv/test/reflection)"
if as bob /srv/test/reflect $socket > /dev/null 2>&1; then fail "somebody outside of the group can connect"; fi
if as bob xlaunch jobs > /srv/test/bob 2>&1; then fail "somebody outside of the group sees jobs"; fi
step "members of the group connect, others do not: $(tr '\n' ';' < /srv/test/reflection)"

# A training job, alone and as a job of the daemon, which has all happen to it that can.
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
from=$(date +%s%N)
here xlaunch --nproc 1 train.toml --set train.steps=5 --set job.output=short > /srv/test/train 2>&1 ||
    fail "training: $(cat /srv/test/train)"
between=$(date +%s%N)
here xlaunch --nproc 1 train.toml --set train.steps=55 --set job.output=short > /srv/test/train 2>&1
each=$((($(date +%s%N) - between - (between - from)) / 50))
[ $each -gt 1000000 ] || each=1000000
total=$((length * 1000000000 / each))
step "training: $((each / 1000000)) ms a step, $total steps"

job=$(here env SECRET="$secret" xlaunch submit --gpus 0 train.toml --set train.steps=$total --set job.output=jobs |
    sed -n 's/^job //p')
expect "the first job" 1 "$job"
until_true "the start of job $job" is "$job" running
unit=xlaunch-job-$job.service
agent=$(show MainPID $unit)
until_true "a step of job $job" goes_on 0

# Whose it is, and where.
expect "the agent's user" "alice alice" "$(ps -o user=,group= -p "$agent" | tr -s ' ')"
expect "its control group" "0::/system.slice/$unit" "$(tail -n 1 "/proc/$agent/cgroup")"
workers=$(pgrep --parent "$agent" --full worker) || fail "the agent has no workers: $(ps -ef)"
for worker in $workers; do
    expect "a worker's user" alice "$(ps -o user= -p "$worker")"
    grep -q "/system.slice/$unit" "/proc/$worker/cgroup" || fail "a worker in $(cat "/proc/$worker/cgroup")"
done
expect "the daemon's processes" "$(show MainPID)" "$(cat "/sys/fs/cgroup$(show ControlGroup)/cgroup.procs")"
expect "the unit" "yes continue mixed $((60 * 1000000))" \
    "$(show Delegate $unit) $(show OOMPolicy $unit) $(show KillMode $unit) $(show TimeoutStopUSec $unit |
        sed 's/^1min$/60000000/')"
expect "locked memory" infinity "$(show LimitMEMLOCK $unit)"
show After $unit | grep -q 'remote-fs.target' || fail "$unit is not ordered: $(show After $unit)"
step "the job runs as its user, in $unit"

# Who sees what.
tr '\0' '\n' < "/proc/$agent/environ" | grep -q "^SECRET=$secret$" || fail "the job lacks its environment"
for user in bob dave carol; do
    if as $user cat "/proc/$agent/environ" > /dev/null 2>&1; then fail "$user reads the job's environment"; fi
    if as $user grep -r -s -q "$secret" /var/lib/xlaunch /run/xlaunch /run/systemd; then fail "$user finds the secret"; fi
    if as $user ls /var/lib/xlaunch/jobs/1/agent > /dev/null 2>&1; then fail "$user looks into the job's directory"; fi
    if as $user systemctl show $unit | grep -q "$secret"; then fail "the unit shows the secret"; fi
done
for file in job.json start-1.json; do
    expect "$file" "600 root" "$(stat -c '%a %U' /var/lib/xlaunch/jobs/1/$file)"
done
if as dave xlaunch status "$job" > /dev/null 2>&1; then fail "dave sees the job of alice"; fi
if as dave xlaunch cancel "$job" > /dev/null 2>&1; then fail "dave cancels the job of alice"; fi
if as dave xlaunch logs "$job" > /dev/null 2>&1; then fail "dave reads the logs of alice"; fi
expect "what dave sees" 0 "$(as dave xlaunch jobs --all --json | grep -c '"id"' || true)"
as carol xlaunch status "$job" > /dev/null || fail "an administrator does not see the job"
step "other users see nothing of it"

# The same, with nothing in its way, at the same time.
here xlaunch --nproc 1 train.toml --set train.steps=$total --set job.output=calm > /srv/test/train 2>&1 &
calm=$!

# The daemon's life under systemd.
systemctl restart $service
adopts "restart"

pid=$(show MainPID)
kill -KILL "$pid"
until_true "a new daemon after SIGKILL" replaced "$pid"
adopts "SIGKILL"

# The unit's time is long for a test; the daemon is to say that it is alive twice in it.
expect "the watchdog's time" 30s "$(show WatchdogUSec)"
mkdir -p "/run/systemd/system/$service.d"
printf '[Service]\nWatchdogSec=10\n' > "/run/systemd/system/$service.d/watchdog.conf"
systemctl daemon-reload
systemctl restart $service
pid=$(show MainPID)
sleep 1
kill -STOP "$pid"
until_true "a new daemon after SIGSTOP" replaced "$pid"
journalctl --unit $service --no-pager | grep -q "Watchdog timeout" || fail "it was not the watchdog"
rm "/run/systemd/system/$service.d/watchdog.conf"
systemctl daemon-reload
expect "the unit of job $job after a daemon-reload" loaded "$(show LoadState $unit)"
adopts "SIGSTOP and watchdog"

# Callers wait at the socket, and the first one starts the daemon.
systemctl stop $service 2> /dev/null
expect "the daemon" inactive "$(show ActiveState)"
adopts "stop, and a caller"

systemctl stop $service 2> /dev/null
seen=$(steps)
until_true "a step without a daemon" goes_on "$seen"
systemctl start $service
adopts "stop and start"

# An upgrade: another daemon, the same socket, the operator's configuration, and a path that still has programs of its own.
echo '# by the operator' >> /etc/xlaunch/daemon.toml
dpkg-deb --raw-extract /srv/test/xlaunch.deb /srv/new
sed -i 's/^Version: .*/&+1/' /srv/new/DEBIAN/control
dpkg-deb --build -Znone /srv/new /srv/new.deb > /dev/null
pid=$(show MainPID)
since=$(show ActiveEnterTimestampMonotonic xlaunch.socket)
install /srv/new.deb
until_true "a new daemon after the upgrade" replaced "$pid"
expect "when the socket was opened" "$since" "$(show ActiveEnterTimestampMonotonic xlaunch.socket)"
grep -q '# by the operator' /etc/xlaunch/daemon.toml || fail "the operator's configuration is gone"
dpkg-query --show xlaunch | grep -q '+1$' || fail "the upgrade is none"
adopts "upgrade"

ended "$job" "done" 0
until_true "the end of its unit" gone $unit
wait $calm || fail "training: $(cat /srv/test/train)"
losses $work/jobs/train/latest > /srv/test/of-job
losses $work/calm/train/latest > /srv/test/alone
expect "steps" "$(seq 0 $((total - 1)) | md5sum)" "$(cut -d ' ' -f 1 /srv/test/of-job | md5sum)"
cmp /srv/test/of-job /srv/test/alone || fail "the job's losses are others than those of the same training alone"
expect "runs of the job" 1 "$(find $work/jobs/train -mindepth 1 -maxdepth 1 -type d | wc -l)"
step "the job is done, with every step once and the losses of one that was left alone"

# Other jobs: commands, where the operator allows them.
if here xlaunch submit -- true 2> /srv/test/refused; then fail "commands are taken"; fi
grep -q allow_commands /srv/test/refused || fail "the refusal: $(cat /srv/test/refused)"
sed -i 's/^#allow_commands = .*/allow_commands = true/' /etc/xlaunch/daemon.toml
pid=$(show MainPID)
systemctl reload $service
takes_commands() {
    commanded=$(submit --name greet -- sh -c 'echo hello' 2> /dev/null) && [ -n "$commanded" ]
}
until_true "a command after the reload" takes_commands
expect "the process after a reload" "$pid" "$(show MainPID)"
expect "the daemon after a reload" active "$(show ActiveState)"
ended "$commanded" "done" 0
expect "its output" hello "$(as alice xlaunch logs "$commanded")"
step "reload"

failing=$(submit --propagate-exit-code -- sh -c 'while ! [ -e go ]; do sleep 0.1; done; echo broken >&2; exit 7')
until_true "the start of job $failing" is "$failing" running
systemctl stop $service 2> /dev/null
here touch go
until_true "the end of job $failing without a daemon" gone "xlaunch-job-$failing.service"
systemctl start $service
ended "$failing" failed 7
value "$failing" report | grep -q 'exit code 7.*broken' || fail "its report: $(value "$failing" report)"
step "a job that fails while there is no daemon keeps its exit code and report"

# The unit's delegated control group holds whatever a job starts, in whatever session it hides.
cancelled=$(submit -- sh -c 'setsid sleep 1234567 & sleep 1234567')
until_true "the start of job $cancelled" is "$cancelled" running
until_true "its processes" pgrep --full 'sleep 1234567' > /dev/null
as alice xlaunch cancel "$cancelled" > /dev/null
ended "$cancelled" cancelled 143
until_true "the end of its unit" gone "xlaunch-job-$cancelled.service"
if pgrep --full '^sleep 1234567'; then fail "processes of job $cancelled are left"; fi
stopped=$(submit -- sleep 1234567)
until_true "the start of job $stopped" is "$stopped" running
systemctl kill --signal KILL "xlaunch-job-$stopped.service"
until_true "the end of job $stopped" is "$stopped" lost
if pgrep --full '^sleep 1234567'; then fail "processes of job $stopped are left"; fi
asked=$(submit -- sleep 1234567)
until_true "the start of job $asked" is "$asked" running
# What happens to all units when the system goes down.
systemctl stop "xlaunch-job-$asked.service"
ended "$asked" cancelled 143
step "cancel; a job whose unit is stopped says how it ended, one that is killed as a whole is lost"

# As far as a daemon can tell, the system has been restarted: all processes are gone, and its number is another.
running=$(submit -- sleep 1234567)
until_true "the start of job $running" is "$running" running
systemctl stop $service 2> /dev/null
systemctl kill --signal KILL "xlaunch-job-$running.service"
until_true "the end of its unit" gone "xlaunch-job-$running.service"
cat /proc/sys/kernel/random/uuid > /srv/boot_id
printf '[Service]\nBindReadOnlyPaths=/srv/boot_id:/proc/sys/kernel/random/boot_id\n' \
    > "/run/systemd/system/$service.d/boot.conf"
systemctl daemon-reload
systemctl reset-failed $service
systemctl start $service
ended "$running" lost null
value "$running" reason | grep -q 'restarted' || fail "its reason: $(value "$running" reason)"
rm "/run/systemd/system/$service.d/boot.conf"
systemctl daemon-reload
step "a job that ran when the system ended is lost"

# The page and the metrics, where the operator wants them.
sed -i 's/^#listen = .*/listen = "127.0.0.1:9470"/' /etc/xlaunch/daemon.toml
systemctl reset-failed $service
systemctl restart $service
perl -MIO::Socket::INET -e '$s = IO::Socket::INET->new("127.0.0.1:9470") or die $!;
    print $s "GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:9470\r\nConnection: close\r\n\r\n"; print <$s>' > /srv/test/metrics ||
    fail "the metrics: $(cat /srv/test/metrics)"
grep -q '^xlaunch_' /srv/test/metrics || fail "the metrics: $(cat /srv/test/metrics)"
step "metrics on the loopback device"

journalctl --unit $service --no-pager JOB="$job" | grep -q "job $job has ended: done" || fail "the journal knows no job"
expect "lines of other jobs" 0 "$(journalctl --unit $service --no-pager --quiet JOB="$job" | grep -c "job $failing " || true)"
journalctl --unit $service --no-pager JOB="$failing" RANK=0 ATTEMPT=0 | grep -q "rank 0 of job $failing has failed" ||
    fail "the journal knows neither rank nor attempt"
[ -n "$(journalctl --unit $service --no-pager --quiet UID="$(id -u alice)")" ] || fail "the journal knows no user"
if journalctl --no-pager | grep -q "$secret"; then fail "the journal has the secret"; fi
step "the journal has fields"

echo 'nonsense = 1' >> /etc/xlaunch/daemon.toml
systemctl restart $service 2> /dev/null && fail "it starts with a broken configuration"
expect "the exit code" 2 "$(show ExecMainStatus)"
expect "starts with a broken configuration" 0 "$(show NRestarts)"
sed -i '/^nonsense/d' /etc/xlaunch/daemon.toml
systemctl reset-failed $service xlaunch.socket
systemctl start xlaunch.socket $service
step "a broken configuration is refused, once"

dpkg --remove xlaunch > /srv/test/dpkg 2>&1 || { cat /srv/test/dpkg; fail "removal"; }
[ ! -e $socket ] || fail "the socket is left"
[ -d /var/lib/xlaunch ] || fail "removal took the journal"
dpkg --purge xlaunch > /srv/test/dpkg 2>&1 || { cat /srv/test/dpkg; fail "purge"; }
for path in /var/lib/xlaunch /run/xlaunch /etc/xlaunch; do
    [ ! -e $path ] || fail "purge leaves $path"
done
step "removed and purged"
