//! Jobs on several nodes: workers, agents, hosts and connections fail, and nodes come and go.
//!
//! A [`Group`] has hosts and the command line of one job. Its workers are a shell script that records each start. Tests
//! control it with files in a directory that all hosts see.

mod cuts;
mod failures;
mod hangs;
mod joining;
mod membership;
mod training;

use std::path::PathBuf;
use std::process::Command;

use xlaunch_tests::{Hosts, Output, Process, is_alive, wait_for, xlaunch_path};

xlaunch_harness::tests! {
    modules cuts, failures, hangs, joining, membership, training;
}

/// A worker: writes heartbeats until `done` exists. A file `fail-RANK` contains a command for the worker of that rank.
const WORKER: &str = r#"
host=$(uname -n)
read -r uptime idle < /proc/uptime
place="$RANK $LOCAL_RANK $GROUP_RANK $WORLD_SIZE $TORCHELASTIC_RESTART_COUNT"
echo "$place $host $MASTER_ADDR $MASTER_PORT $uptime" >> starts
trap 'exit 0' TERM
while [ ! -e done ]; do
    read -r uptime idle < /proc/uptime
    echo "$uptime" > "beat-$host-$LOCAL_RANK"
    if [ -e "fail-$RANK" ]; then mv "fail-$RANK" "failing-$RANK"; . "./failing-$RANK"; fi
    sleep 0.05
done
"#;

/// Command that makes a worker fail like a crash.
const CRASH: &str = "kill -9 $$";

/// Hosts, and the flags of a job on them.
struct Group {
    hosts: Hosts,
    flags: Vec<String>,
}

/// The record of a worker's start.
#[derive(Clone, Debug, PartialEq)]
struct Start {
    rank: u32,
    local_rank: u32,
    node_rank: u32,
    world: u32,
    restarts: u32,
    host: String,
    /// `MASTER_ADDR` and `MASTER_PORT`.
    master: (String, u16),
    /// Time in seconds, by a clock that all hosts share.
    at: f64,
}

impl Group {
    /// Creates hosts for a job of two workers per node.
    fn new(hosts: usize, flags: &str) -> Self {
        let hosts = Hosts::new(hosts);
        std::fs::write(hosts.shared().join("worker.sh"), WORKER).unwrap();
        Self { hosts, flags: flags.split_whitespace().map(String::from).collect() }
    }

    /// Same, with fixed node ranks and the coordinator on `h0`.
    fn fixed(hosts: usize, flags: &str) -> Self {
        Self::new(hosts, &format!("--nnodes {hosts} --rdzv-endpoint h0 {flags}"))
    }

    /// Same, with nodes that come and go.
    fn elastic(hosts: usize, nodes: &str, flags: &str) -> Self {
        Self::new(
            hosts,
            &format!("--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint h0 --rdzv-id job {flags}"),
        )
    }

    /// Returns `xlaunch` with the job's flags on a host.
    fn command(&self, host: usize) -> Command {
        let mut command = self.hosts[host].command_in(&self.hosts.shared(), xlaunch_path());
        command.env("XLAUNCH_TOKEN", "a token of the tests").args(&self.flags);
        if !self.flags.iter().any(|flag| flag == "c10d") {
            command.args(["--node-rank", &host.to_string()]);
        }
        command
    }

    /// Starts the launch of a host with additional flags.
    fn start_with(&self, host: usize, flags: &[&str]) -> Process {
        let mut command = self.command(host);
        command.args(flags).args(["--nproc-per-node", "2", "--", "sh", "worker.sh"]);
        Process::spawn_inside(&mut command)
    }

    fn start(&self, host: usize) -> Process {
        self.start_with(host, &[])
    }

    /// Starts the launches of the first hosts, and waits until all workers have started.
    fn start_all(&self, hosts: usize) -> Vec<Process> {
        let launches: Vec<Process> = (0..hosts).map(|host| self.start(host)).collect();
        self.wait_for_starts(2 * hosts, &launches);
        launches
    }

    fn file(&self, name: &str) -> PathBuf {
        self.hosts.shared().join(name)
    }

    /// Returns all starts of workers so far.
    fn starts(&self) -> Vec<Start> {
        let text = std::fs::read_to_string(self.file("starts")).unwrap_or_default();
        text.split_inclusive('\n').filter(|line| line.ends_with('\n')).map(Start::parse).collect()
    }

    /// Waits until this many workers have started since the first launch. Returns the starts after the first `before`.
    fn wait_for_starts(&self, count: usize, launches: &[Process]) -> Vec<Start> {
        wait_for("workers to start", || {
            let starts = self.starts();
            let errors = || launches.iter().map(Process::stderr).collect::<Vec<_>>().join("---\n");
            assert!(starts.len() <= count, "{} starts, not {count}: {starts:?}\n{}", starts.len(), errors());
            // Check this after reading the starts, which precede the end.
            let running = launches.iter().all(|launch| is_alive(launch.pid()));
            assert!(running || starts.len() == count, "a launch has ended: {starts:?}\n{}", errors());
            (starts.len() == count).then_some(starts)
        })
    }

    /// Returns the time of the last heartbeat of the workers of a host.
    fn last_beat(&self, host: &str) -> f64 {
        let beats = [0, 1].map(|rank| std::fs::read_to_string(self.file(&format!("beat-{host}-{rank}"))));
        beats.map(|beat| beat.unwrap().trim().parse().unwrap_or(0.0)).into_iter().fold(0.0, f64::max)
    }

    /// Makes the worker of a rank run a shell command.
    fn order(&self, rank: u32, command: &str) {
        std::fs::write(self.file("order"), command).unwrap();
        std::fs::rename(self.file("order"), self.file(&format!("fail-{rank}"))).unwrap();
    }

    /// Makes all workers exit with code 0.
    fn finish(&self) {
        std::fs::write(self.file("done"), "").unwrap();
    }

    /// Waits until no process and no listener remains on any host.
    fn expect_nothing_left(&self) {
        for host in self.hosts.iter() {
            let what = || format!("{:?}, listening on {:?}", host.processes(), host.listeners());
            wait_for(&format!("{} to be empty: {}", host.name(), what()), || {
                (host.processes().is_empty() && host.listeners().is_empty()).then_some(())
            });
        }
    }

    /// Waits for the launches, which all end with the same code.
    fn expect_codes(&self, launches: Vec<Process>, code: i32) -> Vec<Output> {
        let outputs: Vec<Output> = launches.into_iter().map(Process::wait).collect();
        let codes: Vec<i32> = outputs.iter().map(|output| output.code).collect();
        assert_eq!(codes, vec![code; outputs.len()], "{outputs:#?}");
        self.expect_nothing_left();
        outputs
    }

    /// Makes the job end successfully.
    fn expect_success(&self, launches: Vec<Process>) -> Vec<Output> {
        self.finish();
        self.expect_codes(launches, 0)
    }
}

impl Start {
    fn parse(line: &str) -> Self {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let number = |index: usize| fields[index].parse().unwrap();
        Self {
            rank: number(0),
            local_rank: number(1),
            node_rank: number(2),
            world: number(3),
            restarts: number(4),
            host: fields[5].into(),
            master: (fields[6].into(), fields[7].parse().unwrap()),
            at: fields[8].parse().unwrap(),
        }
    }
}

/// Returns ranks and hosts of these starts, in order of rank.
fn places(starts: &[Start]) -> Vec<(u32, &str)> {
    let mut places: Vec<_> = starts.iter().map(|start| (start.rank, &*start.host)).collect();
    places.sort_unstable();
    places
}
