# Part of inside.sh: attempts of a user to harm the daemon or other users, under the confinement of its unit. Here alice
# is hostile, dave is an ordinary user and carol is an administrator.
state=/var/lib/xlaunch

# Sets keys of daemon.toml, given as KEY=VALUE, and restarts the daemon.
configure() {
    for setting in "$@"; do
        sed -i "s|^#\{0,1\}${setting%%=*} = .*|${setting%%=*} = ${setting#*=}|" /etc/xlaunch/daemon.toml
    done
    systemctl reset-failed $service
    systemctl restart $service
    pid=$(show MainPID)
}

expect_same_daemon() {
    expect "the daemon's process and restarts after $1" "$pid 0" "$(show MainPID) $(show NRestarts)"
}

# Expects that a command succeeds within a second. A busy machine gets additional time: as long as it takes to start ten
# commands that do not need the daemon, and to write ten files to disk like the daemon does.
slowest=0
answers() {
    from=$(date +%s%N)
    xlaunch --version > /var/tmp/version
    sync /var/tmp/version
    between=$(date +%s%N)
    "$@" > /srv/test/answer 2>&1 || fail "$*: $(tail -c 1000 /srv/test/answer)"
    took=$((($(date +%s%N) - between) / 1000000))
    [ $took -le $((1000 + 10 * (between - from) / 1000000)) ] || fail "$* took $took ms"
    [ $took -le $slowest ] || slowest=$took
}

# Submits a job of dave that is cancelled before it starts.
submit_and_cancel() {
    as dave xlaunch submit --hold -- true > /srv/test/held
    as dave xlaunch cancel "$(sed -n 's/^job //p' /srv/test/held)"
}

configure keep=1 cpu_workers=1

# Directories of jobs are emptied in the background, regardless of depth and size. Only the last job of a user is kept
# here.
nested=14000
files=100000
filled=$(submit -- true)
expect_end "$filled" "done" 0
as alice perl -e 'chdir shift or die; my ($nested, $files) = @ARGV;
    mkdir "wide" or die;
    for (1 .. $files) { open(my $file, ">", "wide/$_") or die "$_: $!" }
    for (1 .. $nested) { mkdir "d" or die "$_: $!"; chdir "d" or die "$_: $!" }' \
    $state/jobs/"$filled"/agent $nested $files
is_removed() {
    [ ! -e $state/jobs/"$filled" ] && [ -z "$(ls -A $state/trash)" ]
}
last=$(submit -- true)
during=0
begun=$(date +%s)
until is_removed; do
    answers as dave xlaunch jobs
    answers submit_and_cancel
    [ -z "$(ls -A $state/trash)" ] || during=$((during + 2))
    [ $(($(date +%s) - begun)) -lt 60 ] || fail "the directory of job $filled was not removed within 60 s"
done
[ $during -gt 0 ] || fail "the directory of job $filled was removed before a command could have been delayed"
expect_end "$last" "done" 0
expect_same_daemon "the removal"
configure keep=5
step "$nested nested directories and $files files removed; commands meanwhile: $during, the slowest in $slowest ms"

# User ids without an account, like those of a user namespace.
if (cd / && setpriv --reuid 4242 --regid xlaunch --clear-groups xlaunch submit -- true 2> /srv/test/refused); then
    fail "a job of a user id without an account is accepted"
fi
grep -q 'user id 4242 has no account' /srv/test/refused || fail "$(cat /srv/test/refused)"
step "a user id without an account is refused"

# The history of each user is kept separately, as is that of jobs that never started.
kept=$(submit -- echo kept)
expect_end "$kept" "done" 0
for _ in $(seq 30); do
    submit_and_cancel > /dev/null
    cancelled=$(submit --hold -- true)
    as alice xlaunch cancel "$cancelled" > /dev/null
done
expect "job $kept after 60 cancelled submissions" "\"done\"" "$(value "$kept" state)"
expect "its log" kept "$(as alice xlaunch logs "$kept")"
keeps_five() {
    [ "$(as dave xlaunch jobs --all --json | grep -c '"id"')" = 5 ]
}
until_true "five cancelled jobs of dave" keeps_five
step "cancelled submissions leave ended jobs of all users in place, and are forgotten"

# A start without progress: the agent waits for a process that reads its log.
first=$(submit -- sleep 1234567)
until_true "the start of job $first" is_in "$first" running
blocked=$(submit -- true)
last=$(submit -- true)
as alice mkfifo $state/jobs/"$blocked"/agent/agent.log
as alice xlaunch cancel "$first" > /dev/null
until_true "the start of job $blocked" is_in "$blocked" starting
sleep 1
expect "jobs $blocked and $last" '"starting" "queued"' "$(value "$blocked" state) $(value "$last" state)"
begun=$(date +%s)
as carol xlaunch cancel --force "$blocked" > /dev/null
until_true "the end of job $blocked" is_in "$blocked" cancelled
expect_end "$last" "done" 0
# Without the command, the daemon would give up after 60 s.
[ $(($(date +%s) - begun)) -lt 30 ] || fail "the slot of job $blocked became free after $(($(date +%s) - begun)) s"
is_inactive "xlaunch-job-$blocked.service" || fail "the unit of job $blocked outlives it"
step "an administrator frees the slot of a start that its user blocks"

# As many connections as the daemon accepts, each from a different user id of a subordinate range.
perl -MSocket -e '$| = 1; my ($path, $gid) = @ARGV; $) = "$gid $gid"; my @held;
    for my $uid (524288 .. 524987) {
        socket(my $connection, PF_UNIX, SOCK_STREAM, 0) or die "socket: $!";
        $> = $uid; connect($connection, sockaddr_un($path)) or die "$uid: $!"; $> = 0;
        push @held, $connection;
    }
    sleep 1000' $socket "$(stat -c %g $socket)" &
connector=$!
# Each connection takes two descriptors. Connections are closed after 10 s without a call.
is_full() {
    [ "$(ls /proc/"$pid"/fd | wc -l)" -ge 1024 ]
}
until_true "512 connections" is_full
for _ in 1 2 3; do
    answers xlaunch jobs
    answers xlaunch node
    answers as carol xlaunch status "$kept"
done
is_full || fail "the connections were closed before root had made its queries"
kill $connector
wait $connector 2> /dev/null || true
expect_same_daemon "the connections"
step "root and administrators are served beside connections of 700 user ids"

# Texts from jobs are cut to a limited length: a report of a failed job, and forged results.
configure keep=20
long=$(submit -- sh -c 'head -c 3000000 /dev/zero | tr "\0" x >&2; exit 3')
expect_end "$long" failed 3
cat > $work/forge << 'FORGE'
job=$(tail -n 1 /proc/self/cgroup | sed 's/.*xlaunch-job-\([0-9]*\).*/\1/')
cd "/var/lib/xlaunch/jobs/$job/agent"
perl -e 'printf q({"exit":1,"start":1,"reason":"%s","report":"%s"}), "r" x 400000, "t" x 500000' > new
mv new result.json
kill -KILL $PPID
FORGE
jobs=$long
for _ in 1 2 3 4 5 6; do
    forged=$(submit -- sh forge)
    until_true "the end of job $forged" is_in "$forged" "failed lost"
    value "$forged" reason | grep -q '^"rrrr' || fail "the forged reason of job $forged: $(value "$forged" reason)"
    jobs="$jobs $forged"
done
for long in $jobs; do
    for text in reason report; do
        bytes=$(value "$long" $text | wc -c)
        [ "$bytes" -lt 5000 ] || fail "job $long: $text of $bytes bytes"
    done
done
for command in "jobs --all" history "jobs --all --json"; do
    # shellcheck disable=SC2086
    answers as alice xlaunch $command
done
bytes=$(wc -c < /srv/test/answer)
[ "$bytes" -lt 200000 ] || fail "a list of $bytes bytes"
expect_same_daemon "the long texts"
step "texts of 400,000 to 3,000,000 bytes are cut; the list of all jobs has $bytes bytes"

# A training job runs code of its user only if commands are allowed.
cp /usr/lib/x86_64-linux-gnu/libz.so.1 $work/preload.so
printf '#!/bin/sh\ntouch %s/ran\nexec xlaunch worker\n' $work > $work/program
chmod 755 $work/program
train() {
    in_work env XLAUNCH_WORKER_PROGRAM=$work/program LD_PRELOAD=$work/preload.so \
        xlaunch submit --gpus 0 train.toml --set train.steps=10000000 --set job.output=code |
        sed -n 's/^job //p'
}
worker_of() {
    worker=$(pgrep --parent "$(show MainPID "xlaunch-job-$1.service")" --full 'xlaunch.* worker') &&
        grep -q xlaunch "/proc/$worker/maps"
}
# Programs and libraries that the job and its agent have run and loaded once it trains.
code_of() {
    until_true "the worker of job $1" worker_of "$1"
    until_true "the first step of job $1" test -s $work/code/train/latest/metrics.jsonl
    found=$(ls $work | grep '^ran$' || true)
    for process in "$worker" "$(show MainPID "xlaunch-job-$1.service")"; do
        found="$found $(grep -o 'preload.so$' "/proc/$process/maps" | sort -u)"
    done
    as alice xlaunch cancel "$1" > /dev/null
    until_true "the end of job $1" is_in "$1" cancelled
    rm -rf $work/ran $work/code
}
allowed=$(train)
code_of "$allowed"
expect "code of a training job where commands are allowed" "ran preload.so " "$found"
configure allow_commands=false
refused=$(train)
code_of "$refused"
expect "code of a training job where commands are not allowed" "  " "$found"
step "a training job runs neither a program nor a library of its user where commands are not allowed"
