# In the daemon's place until there is one: keeps to systemd's protocol, and does in the unit's confinement what the daemon
# will. Where a right is missing, or one is left that it should not have, the service does not start.
use strict;
use warnings;
use IO::Socket::INET;
use IO::Socket::UNIX;
use Socket;

sub notify {
    my $socket = IO::Socket::UNIX->new(Type => SOCK_DGRAM, Peer => $ENV{NOTIFY_SOCKET}) or die "notify: $!";
    $socket->send(join "\n", @_);
}

sub until_true {
    my ($what, $done) = @_;
    for (1 .. 300) {
        return if $done->();
        select undef, undef, undef, 0.1;
    }
    die "$what did not happen: $!";
}

$ENV{LISTEN_PID} == $$ && $ENV{LISTEN_FDS} == 1 && $ENV{LISTEN_FDNAMES} eq "grpc" or die "no socket was handed over";

# A directory for a job, and an agent in it that runs as the job's user. systemd reads `$$` as `$`.
my ($uid, $gid) = (getpwnam "alice")[2, 3];
my $dir = "$ENV{STATE_DIRECTORY}/jobs";
mkdir $dir, 0711 or $!{EEXIST} or die "mkdir: $!";
chmod 0711, $dir or die "chmod: $!";
$dir .= "/$$";
mkdir $dir, 0700 or die "mkdir: $!";
chown $uid, $gid, $dir or die "chown: $!";
my $agent = 'use IO::Socket::UNIX; umask 0077; my $l = IO::Socket::UNIX->new(Local => "agent.sock", Listen => 1) or die $!;
    open my $f, ">", "pid" or die $!; print $f $$$$; close $f; $l->accept; sleep 1000';
system("busctl", "--quiet", "--", "call", "org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager",
    "StartTransientUnit", "ssa(sv)a(sa(sv))", "xlaunch-job-$$.service", "fail", 3,
    "User", "s", "alice", "WorkingDirectory", "s", $dir,
    "ExecStart", "a(sasb)", 1, "/usr/bin/perl", 3, "perl", "-e", $agent, "false", 0) == 0 or die "no unit for the agent";
until_true("the agent", sub { -s "$dir/pid" });
IO::Socket::UNIX->new(Peer => "$dir/agent.sock") or die "the agent's socket: $!";
open my $file, "<", "$dir/pid" or die "the agent's file: $!";
my $pid = <$file>;
open my $stat, "<", "/proc/$pid/stat" or die "the agent's /proc: $!";
kill "TERM", $pid or die "signal to the agent: $!";
until_true("the end of the agent", sub { !-e "/proc/$pid" });
system("rm", "-rf", $dir) == 0 or die "the job's directory";

# What it has no business with.
mkdir "/usr/xlaunch" and die "it may write to /usr";
opendir my $home, "/home/alice" and die "it may read homes";
IO::Socket::INET->new(Proto => "udp", PeerAddr => "192.0.2.1", PeerPort => 9)->send("x") and die "it may send packets";
$!{EPERM} or die "packets: $!";
IO::Socket::INET->new(Listen => 1, LocalAddr => "127.0.0.1") or die "no page on the loopback device: $!";
system("unshare --user true 2> /dev/null") != 0 or die "it may make namespaces";

my ($reloads, $ended) = (0, 0);
$SIG{HUP} = sub { $reloads++; notify("RELOADING=1"); notify("READY=1", "STATUS=reloaded $reloads") };
$SIG{TERM} = sub { $ended = 1 };
notify("READY=1", "STATUS=stand-in");
my $listener = IO::Socket::UNIX->new_from_fd(3, "r");
while (!$ended) {
    notify("WATCHDOG=1");
    vec(my $ready = "", 3, 1) = 1;
    $listener->accept if select($ready, undef, undef, $ENV{WATCHDOG_USEC} / 4e6) > 0;
}
notify("STOPPING=1");
