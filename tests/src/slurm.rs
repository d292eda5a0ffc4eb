//! A real Slurm on hosts of this machine: the controller on `h0`, a node daemon and MUNGE on every host.
//!
//! Its packages must be installed. It does not matter whether the machine itself runs Slurm: these hosts have their own
//! `/etc/slurm` and `/run`. Partition `main` is the default; a job in `high` preempts jobs in `main`, which are
//! requeued. Timeouts are short: SIGKILL follows 5 s after SIGTERM, and a node is lost after 10 s (noticed up to 30 s
//! later).
//!
//! Users are root and `NOBODY`. A requeued job waits 120 s, which cannot be configured in Slurm: `scontrol update
//! jobid=N StartTime=now` ends the wait.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Hosts, NOBODY, Output, Process, is_alive, wait_for};

/// Number of CPUs that a node claims to have, regardless of the machine.
const CPUS: usize = 4;

/// A running cluster. The order of the fields is the order in which they are dropped.
#[derive(Debug)]
pub struct Slurm {
    daemons: Vec<Process>,
    hosts: Hosts,
}

impl Slurm {
    /// Starts a cluster and waits until all nodes are idle.
    ///
    /// # Panics
    /// If that fails; see [`crate::requirements::slurm`].
    pub fn start(nodes: usize) -> Self {
        let hosts = Hosts::new(nodes);
        let dir = hosts.path().join("slurm");
        std::fs::create_dir(&dir).expect("create a directory");
        std::fs::write(dir.join("slurm.conf"), config(nodes, &dir)).expect("write the configuration");
        std::fs::write(dir.join("munge.key"), key()).expect("write the key");
        std::fs::set_permissions(dir.join("munge.key"), PermissionsExt::from_mode(0o400))
            .expect("set permissions");
        let home = hosts.shared().join("nobody");
        std::fs::create_dir(&home).expect("create a directory");
        std::os::unix::fs::chown(&home, Some(NOBODY), Some(NOBODY)).expect("change the owner");
        let mut slurm = Self { daemons: Vec::new(), hosts };
        for index in 0..nodes {
            slurm.start_node(index);
        }
        let expected = format!("{nodes} idle");
        wait_for("idle nodes", || {
            let states = slurm.run("sinfo", &["--noheader", "--partition=main", "--format=%D %t"]);
            (states.stdout.trim() == expected).then_some(())
        });
        slurm
    }

    /// Starts the daemons of a host, including after it was killed and booted.
    pub fn start_node(&mut self, index: usize) {
        let host = &self.hosts[index];
        let dir = self.hosts.path().join("slurm");
        let script = format!(
            "mkdir -p /run/munge /etc/slurm && mount --bind {dir} /etc/slurm && \
            exec munged --foreground --force --key-file={dir}/munge.key --pid-file=/run/munge/munged.pid \
            --log-file=/run/munge/munged.log --seed-file=/run/munge/munged.seed",
            dir = dir.display()
        );
        let munged = Process::spawn_inside(host.command("sh").args(["-c", &script]));
        wait_for("munged", || {
            let answers = host.command("munge").arg("-n").output().expect("run munge").status.success();
            assert!(answers || is_alive(munged.pid()), "munged exited: {}", munged.stderr());
            answers.then_some(())
        });
        self.daemons.push(munged);
        if index == 0 {
            self.daemons.push(Process::spawn_inside(host.command("slurmctld").arg("-D")));
        }
        self.daemons.push(Process::spawn_inside(host.command("slurmd").arg("-D")));
    }

    /// Returns the nodes: `h0` and so on.
    pub fn hosts(&self) -> &Hosts {
        &self.hosts
    }

    /// Returns a directory of the ordinary user [`NOBODY`], which all nodes see.
    pub fn home(&self) -> PathBuf {
        self.hosts.shared().join("nobody")
    }

    /// Returns a command of the ordinary user on `h0`, such as `srun`, in the user's directory. Start it with
    /// [`Process::spawn_inside`].
    pub fn command(&self, program: &str) -> Command {
        let mut command = self.hosts[0].command_in(&self.home(), "setpriv");
        command.args([format!("--reuid={NOBODY}"), format!("--regid={NOBODY}"), "--clear-groups".into()]);
        command.arg(program).env("XDG_RUNTIME_DIR", format!("/run/user/{NOBODY}")).env("HOME", self.home());
        command
    }

    /// Runs such a command to its end.
    pub fn run(&self, program: &str, args: &[&str]) -> Output {
        Process::spawn_inside(self.command(program).args(args)).wait()
    }

    /// Submits a batch script. Returns the job's number.
    ///
    /// # Panics
    /// If it is refused.
    pub fn submit(&self, options: &[&str], script: &str) -> String {
        let path = self.home().join("batch.sh");
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).expect("write a script");
        let path = path.display().to_string();
        let output = self.run("sbatch", &[options, &["--parsable", &path]].concat());
        assert_eq!(output.code, 0, "sbatch: {}", output.stderr);
        output.stdout.trim().to_owned()
    }

    /// Returns a job's state, such as `RUNNING`; empty once Slurm has forgotten the job.
    pub fn state(&self, job: &str) -> String {
        let output = self.run("scontrol", &["show", "--oneliner", "job", job]);
        let state = output.stdout.split_whitespace().find_map(|field| field.strip_prefix("JobState="));
        state.unwrap_or_default().to_owned()
    }

    /// Waits until a job has this state.
    pub fn wait_for_state(&self, job: &str, state: &str) {
        wait_for(&format!("job {job} to be {state}"), || (self.state(job) == state).then_some(()));
    }
}

fn config(nodes: usize, dir: &Path) -> String {
    let dir = dir.display();
    let addresses: Vec<String> = (0..nodes).map(|index| format!("10.77.0.{}", 10 + index)).collect();
    let names: Vec<String> = (0..nodes).map(|index| format!("h{index}")).collect();
    let (addresses, names) = (addresses.join(","), names.join(","));
    format!(
        "ClusterName=test\nSlurmctldHost=h0(10.77.0.10)\nSlurmUser=root\nAuthType=auth/munge\n\
        StateSaveLocation={dir}/state\nSlurmdSpoolDir={dir}/spool-%n\nSlurmctldPidFile=/run/slurmctld.pid\n\
        SlurmdPidFile=/run/slurmd.pid\nSlurmctldLogFile={dir}/slurmctld.log\nSlurmdLogFile={dir}/%n.log\n\
        ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nSelectType=select/cons_tres\n\
        SelectTypeParameters=CR_Core\nSlurmdParameters=config_overrides\nReturnToService=2\nMpiDefault=none\n\
        KillWait=5\nSlurmdTimeout=10\nPreemptType=preempt/partition_prio\nPreemptMode=REQUEUE\nJobRequeue=1\n\
        NodeName={names} NodeAddr={addresses} CPUs={CPUS} RealMemory=1000 State=UNKNOWN\n\
        PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime=5 State=UP\n\
        PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=off State=UP\n"
    )
}

/// Creates MUNGE's key, for this cluster only.
fn key() -> Vec<u8> {
    use std::io::Read;
    let mut key = vec![0; 1024];
    let mut random = std::fs::File::open("/dev/urandom").expect("open the random generator");
    random.read_exact(&mut key).expect("read random bytes");
    key
}
