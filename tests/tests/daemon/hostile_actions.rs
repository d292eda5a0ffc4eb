//! Hostile users act at random alongside an honest one, whose jobs and commands must not be affected. The time that a
//! command may take is measured simultaneously on a second node without attacks.
//!
//! Attacks on files, processes and sockets are in `hostile_actions.py`, which runs as the user; commands to the daemon
//! are here. `XLAUNCH_TEST_SEED` sets another seed, `XLAUNCH_TEST_ACTIONS` the number of actions, and
//! `XLAUNCH_TEST_MAX_DELAY_MS` how much longer a command of the honest user may take than without attacks. The default
//! finds a daemon that waits for a hostile client, not one on a busy machine.

#![expect(clippy::print_stdout, reason = "prints the seed that reproduces a failure")]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;
use std::time::{Duration, Instant};

use serde_json::Value;
use xlaunch_tests::{HANG_TIMEOUT, Node, Output, Process, requirements, wait_for};

xlaunch_harness::tests! {
    needs requirements::root, requirements::python3:
    hostile_users_neither_harm_nor_delay_others;
}

/// Accounts that exist on every Debian system: `bin` and `games`, and `daemon` as the honest one.
const HOSTILE: [u32; 2] = [2, 5];
const HONEST: u32 = 1;
const SLOTS: usize = 8;
/// Hostile users hold 6 slots and the honest job one, so one slot is always free.
const CONFIG: &str = "cpu_workers = 8\nmax_per_user = 3\nkeep = 5\nmax_grace = \"1s\"";
const CANARY: &str = "canary-d41f8a02-must-not-be-read";
const ACTIONS: &str = include_str!("hostile_actions.py");
/// Hostile jobs and clients may slow the machine down: a command may take its time on the other node times this factor.
const BUSY_FACTOR: u32 = 5;
/// Time limit of a command that reads.
const READ_TIMEOUT: Duration = Duration::from_secs(2);
/// Time to wait for an action of the script. An action that holds something continues alongside the next ones.
const SCRIPT_TIMEOUT: Duration = Duration::from_millis(300);
/// Limit of the daemon's memory growth from start to end.
const MAX_GROWTH_KIB: u64 = 48 << 10;
const MAX_GROWTH_DESCRIPTORS: usize = 8;

fn hostile_users_neither_harm_nor_delay_others() {
    let mut siege = Siege::new(variable("XLAUNCH_TEST_SEED", 1));
    let actions = variable("XLAUNCH_TEST_ACTIONS", 250);
    let honest_job = siege.honest_job();
    let files = siege.untouchable_files(honest_job);
    // Measure the baseline after everything was used once.
    for _ in 0..3 {
        siege.honest_command(0);
    }
    let (memory, descriptors) = (siege.daemon_memory_kib(), siege.daemon_descriptors());
    for action in 0..actions {
        siege.act();
        siege.honest_command(action);
    }
    println!("{siege:?}");

    siege.end_hostile_jobs();
    siege.assert_no_survivors();
    assert_eq!(siege.untouchable_files(honest_job), files, "files outside the hostile users' directories");
    assert_eq!(siege.node.job(honest_job)["state"], "running");
    let logs = siege.node.run(&["logs", &honest_job.to_string()]);
    assert_eq!(logs.stdout, "honest\n", "{}", logs.stderr);
    siege.node.run(&["cancel", &honest_job.to_string()]);
    siege.node.wait(honest_job, "cancelled");
    siege.assert_all_slots_are_free();
    let log = siege.node.daemon().stderr();
    assert!(
        siege.is_same_daemon() && !log.contains("internal error in thread") && !log.contains(CANARY),
        "{log}"
    );
    wait_for("the daemon to close descriptors", || {
        (siege.daemon_descriptors() <= descriptors + MAX_GROWTH_DESCRIPTORS).then_some(())
    });
    let grown = siege.daemon_memory_kib().saturating_sub(memory);
    println!("memory of the daemon: {memory} KiB and {grown} KiB more");
    assert!(grown <= MAX_GROWTH_KIB, "{grown} KiB");
    let most = Duration::from_millis(variable("XLAUNCH_TEST_MAX_DELAY_MS", 10_000));
    assert!(siege.longest_delay.0 <= most, "{:?}", siege.longest_delay);
    siege.clean_up();
}

/// Returns a variable of the environment, or this value.
fn variable<T: FromStr<Err: Debug>>(name: &str, default: T) -> T {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

/// Returns the result of a process if it exits within this time.
fn exited(mut process: Process, timeout: Duration) -> Result<Output, Process> {
    let deadline = Instant::now() + timeout;
    while process.is_running() {
        if Instant::now() > deadline {
            return Err(process);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(process.wait())
}

fn assert_no_canary(args: &[&str], output: &Output) {
    assert!(!(output.stdout.clone() + &output.stderr).contains(CANARY), "{args:?}: {output:?}");
}

/// A node under attack.
struct Siege {
    node: Node,
    /// The same node without attacks.
    calm: Node,
    daemon: u32,
    seed: u64,
    random: u64,
    script: PathBuf,
    canary: PathBuf,
    honest_agent: PathBuf,
    /// Hostile clients and scripts that are still running.
    clients: Vec<Process>,
    scripts: Vec<Process>,
    /// Values of `HOSTILE_MARK` of jobs whose reaper was attacked.
    unreaped: BTreeSet<String>,
    longest_delay: (Duration, String),
    counts: BTreeMap<String, u32>,
}

impl Debug for Siege {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { seed, longest_delay, counts, unreaped, .. } = self;
        write!(f, "seed {seed}: longest delay {longest_delay:?}; unreaped {}; {counts:?}", unreaped.len())
    }
}

impl Siege {
    fn new(seed: u64) -> Self {
        println!("XLAUNCH_TEST_SEED={seed}");
        let (node, calm) = (Node::new(CONFIG), Node::new(CONFIG));
        for node in [&node, &calm] {
            std::fs::set_permissions(node.socket(), Permissions::from_mode(0o666)).unwrap();
        }
        for uid in HOSTILE.into_iter().chain([HONEST, 0]) {
            let home = node.path().join(uid.to_string());
            std::fs::create_dir(&home).unwrap();
            chown(&home, Some(uid), None).unwrap();
            std::fs::set_permissions(&home, Permissions::from_mode(0o700)).unwrap();
        }
        let script = node.write("hostile_actions.py", ACTIONS);
        let canary = node.write("canary", CANARY);
        std::fs::set_permissions(&canary, Permissions::from_mode(0o600)).unwrap();
        Self::write_bait(&node.path().join("bait"));
        let daemon = node.daemon().pid();
        let (clients, scripts, unreaped) = (Vec::new(), Vec::new(), BTreeSet::new());
        let (longest_delay, counts) = (Default::default(), BTreeMap::new());
        Self {
            node,
            calm,
            daemon,
            seed,
            random: seed,
            script,
            canary,
            honest_agent: PathBuf::new(),
            clients,
            scripts,
            unreaped,
            longest_delay,
            counts,
        }
    }

    /// Writes the files that the daemon reads in the directory of a job, with the canary in each. Only root can read
    /// them.
    fn write_bait(dir: &Path) {
        let logs = dir.join("logs/attempt_0/0");
        std::fs::create_dir_all(&logs).unwrap();
        let result = format!(r#"{{"exit":1,"start":1,"reason":"{CANARY}"}}"#);
        let files = [(logs.join("stdout.log"), CANARY), (logs.join("stderr.log"), CANARY)];
        for (path, text) in files.into_iter().chain([(dir.join("result.json"), result.as_str())]) {
            std::fs::write(path, text).unwrap();
        }
        std::fs::set_permissions(dir, Permissions::from_mode(0o700)).unwrap();
    }

    /// Splitmix64.
    fn below(&mut self, bound: usize) -> usize {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((z ^ (z >> 31)) % bound as u64).unwrap()
    }

    fn client(&self, uid: u32, args: &[&str]) -> Command {
        self.client_of(&self.node, uid, args)
    }

    fn client_of(&self, node: &Node, uid: u32, args: &[&str]) -> Command {
        let mut command = node.client(args);
        command.uid(uid).gid(uid).current_dir(self.node.path().join(uid.to_string()));
        command
    }

    /// Starts the first job of each node.
    fn honest_job(&mut self) -> u64 {
        // Longer than the test takes on any machine.
        let script = "echo honest; exec sleep 1000000";
        let [_, job] = [&self.calm, &self.node].map(|node| {
            let args = ["submit", "--", "sh", "-c", script];
            let output = Process::spawn(&mut self.client_of(node, HONEST, &args)).wait();
            let job = output.stdout.trim().strip_prefix("job ").unwrap().parse().unwrap();
            node.wait(job, "running");
            job
        });
        let logs = || self.node.run(&["logs", &job.to_string()]).stdout == "honest\n";
        wait_for("output of the honest job", || logs().then_some(()));
        self.honest_agent = self.agent_dir(job);
        job
    }

    fn agent_dir(&self, job: u64) -> PathBuf {
        self.node.state_dir().join(format!("jobs/{job}/agent"))
    }

    /// Returns the unfinished jobs of this user.
    fn jobs_of(&self, uid: u32) -> Vec<u64> {
        let listed = self.node.json(&["jobs"]);
        let jobs = listed.as_array().or_else(|| listed["jobs"].as_array()).unwrap();
        let own = jobs.iter().filter(|job| job["uid"] == uid).filter_map(|job| job["id"].as_u64());
        own.collect()
    }

    /// Performs one action of one hostile user.
    fn act(&mut self) {
        self.clients.retain_mut(Process::is_running);
        self.collect_scripts(Duration::ZERO);
        let uid = HOSTILE[self.below(HOSTILE.len())];
        let jobs = self.jobs_of(uid);
        let job = jobs.get(self.below(jobs.len().max(1))).copied();
        match self.below(10) {
            0 | 1 => self.submit(uid),
            2 => self.flood(uid, job),
            3 => self.reach_for_others(uid),
            4 => self.cancel(uid, job),
            5 => self.read_own_logs(uid, job),
            _ => self.run_script(uid, job),
        }
    }

    fn count(&mut self, what: &str) {
        *self.counts.entry(what.into()).or_default() += 1;
    }

    /// Runs a client command as a hostile user.
    fn run_as(&self, uid: u32, args: &[&str]) -> Output {
        let output = Process::spawn(&mut self.client(uid, args)).wait();
        assert_no_canary(args, &output);
        output
    }

    fn submit(&mut self, uid: u32) {
        self.count("submit");
        let canary = format!("cat {}; ls -R {}", self.canary.display(), self.node.state_dir().display());
        let scripts = [
            "exec sleep 1000",
            "trap '' TERM INT; while :; do sleep 1; done",
            "setsid sleep 1000 & (setsid sleep 1000 &); exit 0",
            "yes '\x1b[2J' | head -c 3000000; sleep 1000",
            "kill -STOP $PPID; sleep 1000",
            "exit 3",
            &canary,
        ];
        let script = scripts[self.below(scripts.len())].to_owned();
        let text = ["a\nINFO forged \x1b[2J".to_owned(), "x".repeat(100_000), String::new()];
        let text = &text[self.below(3)];
        let name = ["n", "../../x\n\x1b", "-"][self.below(3)];
        let count = ["1", "2", "1000", "4294967295"][self.below(4)];
        let args = ["submit", "--name", name, "--nproc-per-node", count, "--", "sh", "-c", &script, text];
        let mut command = self.client(uid, &args);
        command.env("HOSTILE_MARK", self.random.to_string());
        if self.below(4) == 0 {
            for number in 0..self.below(4) {
                command.env(format!("BIG_{number}\x1b"), "v\n".repeat(50_000));
            }
        }
        let output = Process::spawn(&mut command).wait();
        assert!(!output.stderr.contains('\x1b') && !output.stderr.contains(CANARY), "{output:?}");
    }

    /// Starts many clients at once, which continue for a while.
    fn flood(&mut self, uid: u32, job: Option<u64>) {
        self.count("flood");
        let job = job.unwrap_or(1).to_string();
        let commands: [&[&str]; 6] = [
            &["submit", "--", "true"],
            &["cancel", &job],
            &["jobs", "--all"],
            &["status", &job, "--watch"],
            &["logs", &job, "--follow"],
            &["submit", "--wait", "--", "true"],
        ];
        let command = commands[self.below(commands.len())];
        let more = (0..6).map(|_| Process::spawn(&mut self.client(uid, command))).collect::<Vec<_>>();
        self.clients.extend(more);
        // The oldest are killed.
        let excess = self.clients.len().saturating_sub(12);
        self.clients.drain(..excess).for_each(drop);
    }

    fn reach_for_others(&mut self, uid: u32) {
        self.count("reach for others");
        for command in ["status", "logs", "cancel", "stop"] {
            let refused = self.run_as(uid, &[command, "1"]);
            assert!(refused.code != 0 && refused.stderr.contains("no job 1"), "{command}: {refused:?}");
        }
        assert_ne!(self.run_as(uid, &["drain"]).code, 0);
        assert_ne!(self.run_as(uid, &["submit", "--priority", "9", "--", "true"]).code, 0);
    }

    fn cancel(&mut self, uid: u32, job: Option<u64>) {
        self.count("cancel");
        if self.below(2) == 0 {
            let output = self.run_as(uid, &["submit", "--", "sleep", "1000"]);
            if let Some(job) = output.stdout.trim().strip_prefix("job ") {
                self.run_as(uid, &["cancel", job]);
            }
        }
        if let Some(job) = job {
            self.run_as(uid, &["cancel", "--force", &job.to_string()]);
        }
    }

    fn read_own_logs(&mut self, uid: u32, job: Option<u64>) {
        self.count("read logs");
        for job in self.jobs_of(uid).into_iter().chain(job) {
            self.read_logs_of(uid, job);
        }
    }

    fn read_logs_of(&self, uid: u32, job: u64) {
        for args in [&["logs"][..], &["logs", "--stderr"], &["status"]] {
            let id = job.to_string();
            let args = [args, &[&id]].concat();
            // A stopped agent does not answer.
            if let Ok(output) = exited(Process::spawn(&mut self.client(uid, &args)), READ_TIMEOUT) {
                assert_no_canary(&args, &output);
            }
        }
    }

    fn run_script(&mut self, uid: u32, job: Option<u64>) {
        let (seed, daemon) = (self.below(usize::MAX), self.daemon);
        let mut command = Command::new("python3");
        command.arg(&self.script).arg(seed.to_string()).arg(self.node.path());
        command.arg(self.node.path().join(uid.to_string())).arg(&self.canary);
        command.arg(daemon.to_string()).arg(&self.honest_agent);
        command.args(job.map(|job| self.agent_dir(job))).uid(uid).gid(uid).current_dir("/");
        match exited(Process::spawn(&mut command), SCRIPT_TIMEOUT) {
            Ok(output) => {
                self.note_script(&output);
                if let Some(job) = job.filter(|_| output.stdout.starts_with("bait ")) {
                    self.read_logs_of(uid, job);
                }
            }
            Err(process) => self.scripts.push(process),
        }
    }

    /// Collects the results of scripts, each of which may still take this long.
    fn collect_scripts(&mut self, timeout: Duration) {
        for process in std::mem::take(&mut self.scripts) {
            match exited(process, timeout) {
                Ok(output) => self.note_script(&output),
                Err(process) => self.scripts.push(process),
            }
        }
    }

    fn note_script(&mut self, output: &Output) {
        assert!(!output.stderr.contains("Traceback"), "{}", output.stderr);
        let what = output.stdout.split_whitespace().next().unwrap_or("nothing").to_owned();
        self.count(&what);
        let unreaped = output.stdout.lines().filter_map(|line| line.strip_prefix("unreaped "));
        self.unreaped.extend(unreaped.map(str::to_owned));
    }

    /// Runs and times a command of the honest user. The time on the other node accounts for the load of the machine.
    fn honest_command(&mut self, turn: u64) {
        let commands: [&[&str]; 3] = [&["jobs"], &["status", "1"], &["submit", "--wait", "--", "true"]];
        let command = commands[usize::try_from(turn % 3).unwrap()];
        let timed = |node| {
            let start = Instant::now();
            let output = Process::spawn(&mut self.client_of(node, HONEST, command)).wait();
            (output, start.elapsed())
        };
        let ((output, took), (calm_output, calm)) = std::thread::scope(|scope| {
            let calm = scope.spawn(|| timed(&self.calm));
            (timed(&self.node), calm.join().unwrap())
        });
        assert_eq!(calm_output.code, 0, "{command:?}: {calm_output:?}");
        assert_eq!(output.code, 0, "{command:?}: {output:?}\n{self:?}");
        assert!(self.is_same_daemon());
        let delay = took.saturating_sub(BUSY_FACTOR * calm);
        if delay > self.longest_delay.0 {
            self.longest_delay =
                (delay, format!("{command:?} after action {turn}: {took:?} beside {calm:?}"));
        }
    }

    fn end_hostile_jobs(&mut self) {
        self.clients.clear();
        self.collect_scripts(HANG_TIMEOUT);
        let start = Instant::now();
        wait_for("the end of all hostile jobs", || {
            let jobs: Vec<_> = HOSTILE.iter().flat_map(|uid| self.jobs_of(*uid)).collect();
            for job in &jobs {
                assert_eq!(self.node.run(&["cancel", "--force", &job.to_string()]).code, 0);
            }
            assert!(start.elapsed() < HANG_TIMEOUT, "{jobs:?} go on: {}", self.node.daemon().stderr());
            jobs.is_empty().then_some(())
        });
    }

    fn assert_no_survivors(&self) {
        let mark = self.node.path().display().to_string();
        let is_unreaped = |environ: &str| {
            let value = environ.split('\0').find_map(|variable| variable.strip_prefix("HOSTILE_MARK="));
            value.is_some_and(|value| self.unreaped.contains(value))
        };
        let read = |pid: &Path, name: &str| {
            String::from_utf8_lossy(&std::fs::read(pid.join(name)).unwrap_or_default()).into_owned()
        };
        let survivors = || {
            let pids = std::fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
            let hostile = pids.filter(|pid| pid.metadata().is_ok_and(|it| HOSTILE.contains(&it.uid())));
            let marked = hostile.filter_map(|pid| {
                let (line, environ) = (read(&pid, "cmdline"), read(&pid, "environ"));
                let of_node = line.contains(&mark) || environ.contains(&mark);
                (of_node && !is_unreaped(&environ)).then(|| format!("{}: {line:?}", pid.display()))
            });
            marked.collect::<Vec<_>>()
        };
        let start = Instant::now();
        wait_for("the end of hostile processes", || {
            let alive = survivors();
            assert!(start.elapsed() < HANG_TIMEOUT, "{alive:?}\n{self:?}");
            alive.is_empty().then_some(())
        });
    }

    fn assert_all_slots_are_free(&self) {
        let jobs: Vec<_> = (0..SLOTS)
            .map(|slot| {
                let uid = [0, HONEST, HOSTILE[0]][slot / 3];
                let output = self.run_as(uid, &["submit", "--", "sleep", "1000"]);
                output.stdout.trim().strip_prefix("job ").unwrap().parse::<u64>().unwrap()
            })
            .collect();
        jobs.iter().for_each(|job| drop(self.node.wait(*job, "running")));
        jobs.iter().for_each(|job| drop(self.node.run(&["cancel", "--force", &job.to_string()])));
    }

    /// Returns owner, mode, change time and content of files that no hostile user may change.
    fn untouchable_files(&self, honest_job: u64) -> BTreeMap<PathBuf, String> {
        let node = self.node.path();
        let mut files = BTreeMap::new();
        let mut note = |path: PathBuf| {
            let found = path.symlink_metadata().unwrap();
            let content = if found.is_file() { std::fs::read(&path).unwrap() } else { Vec::new() };
            let text = String::from_utf8_lossy(&content).into_owned();
            let description = format!("{} {:o} {} {text}", found.uid(), found.mode(), found.ctime());
            files.insert(path, description);
        };
        for dir in [node.to_path_buf(), node.join(HONEST.to_string()), self.agent_dir(honest_job)] {
            for entry in std::fs::read_dir(&dir).unwrap().flatten() {
                let name = entry.file_name();
                let is_hostile = dir == node && HOSTILE.iter().any(|uid| name == *uid.to_string());
                if !is_hostile && name != "state" {
                    note(entry.path());
                }
            }
        }
        files
    }

    fn is_same_daemon(&self) -> bool {
        let node: Value = self.node.json(&["node"]);
        node["daemon_pid"] == self.daemon || node["node"]["daemon_pid"] == self.daemon
    }

    fn daemon_memory_kib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.daemon)).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }

    fn daemon_descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.daemon)).unwrap().count()
    }

    /// Removes files that a recursive removal cannot remove, and processes whose reaper was attacked.
    fn clean_up(&self) {
        let mark = self.node.path().display().to_string();
        for entry in std::fs::read_dir("/proc").unwrap().flatten() {
            let environ = std::fs::read(entry.path().join("environ")).unwrap_or_default();
            let environ = String::from_utf8_lossy(&environ).into_owned();
            let is_hostile = entry.metadata().is_ok_and(|it| HOSTILE.contains(&it.uid()));
            if let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok())
                && is_hostile
                && environ.contains(&mark)
            {
                xlaunch_tests::send_signal(pid, rustix::process::Signal::KILL);
            }
        }
        for name in ["xlaunch-0", "xlaunch-1", "xlaunch", "xlaunch.sock"] {
            let path = Path::new("/tmp").join(name);
            if path.read_link().is_ok_and(|target| target == self.canary) {
                std::fs::remove_file(path).unwrap();
            }
        }
        let homes = HOSTILE.map(|uid| self.node.path().join(uid.to_string()));
        // A killed process may remove or write files until it has exited, and `rm` then fails.
        wait_for("the files of hostile users to be removed", || {
            let mut remove = Command::new("rm");
            remove.arg("-rf").args(&homes).arg(self.node.state_dir().join("jobs"));
            remove.status().unwrap().success().then_some(())
        });
    }
}
