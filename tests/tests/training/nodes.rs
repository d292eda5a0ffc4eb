//! Training on several nodes from the perspective of workers: real workers, with agents that are scripted here. Each
//! node has its own service of an agent; the rendezvous of nodes is the coordinator's, called directly.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Instant;

use tokio::process::Command;
use tokio::sync::{mpsc, watch};
use tonic::Status;
use xlaunch_agent::rendezvous::Rendezvous;
use xlaunch_agent::rendezvous::barrier::{JoinBarrier, JoinOutcome};
use xlaunch_agent::rendezvous::message::Message;
use xlaunch_agent::rendezvous::service;
use xlaunch_agent::status::board::{Board, Launch};
use xlaunch_cluster::group_rendezvous::{GroupProgress, GroupRendezvous};
use xlaunch_proto::env;
use xlaunch_proto::v1::agent_command::Command as WorkerCommand;
use xlaunch_proto::v1::worker_report::Report;
use xlaunch_proto::v1::{
    AgentCommand, CommitCheckpoint, FailedAck, GetJobReply, HeartbeatAck, JobKind, SavedFile,
};
use xlaunch_spec::ids::RingKey;
use xlaunch_spec::job::{JobSpec, Shard};
use xlaunch_tests::{HANG_TIMEOUT, Job, xlaunch_path};

use crate::preferences;

xlaunch_harness::tests! {
    two_nodes_train_like_one,
    nodes_without_the_directory_of_rank_0_get_its_state,
    nodes_without_the_directory_of_rank_0_compare_pairs_with_its_reference,
    sharded_optimizer_without_a_shared_directory_is_refused;
}

const MODEL: &str = "checkpoints/step-00000008/model.safetensors";

/// A group of nodes that trains.
struct Group<'a> {
    job: &'a Job,
    spec: JobSpec,
    /// Number of ranks of each node.
    nodes: Vec<u32>,
    /// Number of ranks that share the directory of rank 0; `None` if all do.
    writers: Option<u32>,
    /// Checkpoint to resume from, by node.
    resume_from: Vec<PathBuf>,
}

/// Results of a group's training.
#[derive(Debug, Default)]
struct Ended {
    /// Losses by step, as bits.
    losses: BTreeMap<u64, u32>,
    /// Exit codes by rank.
    codes: Vec<Option<i32>>,
    /// Standard error of ranks that failed.
    errors: Vec<String>,
}

fn two_nodes_train_like_one() {
    let job = Job::new();
    let product = reference(&job);
    let one = group(&job, &[4]).train("one");
    let two = group(&job, &[2, 2]).train("two");
    assert_eq!((&two.codes, &two.errors), (&vec![Some(0); 4], &Vec::new()));
    assert_eq!((one.losses.len(), &one.losses), (8, &two.losses));
    let models = ["one-0", "two-0"].map(|node| std::fs::read(job.path().join(node).join(MODEL)).unwrap());
    assert!(models.iter().all(|model| *model == std::fs::read(product.join(MODEL)).unwrap()));
}

fn nodes_without_the_directory_of_rank_0_get_its_state() {
    let job = Job::new();
    let product = reference(&job);
    let whole = group(&job, &[4]).train("whole");
    // One start from scratch, and one in the middle. Nodes may have different numbers of ranks.
    let afresh = Group { writers: Some(1), ..group(&job, &[1, 3]) }.train("afresh");
    assert_eq!(afresh.losses, whole.losses);
    let mut resumed = Group { writers: Some(2), ..group(&job, &[2, 2]) };
    // The warm-up of the continued run reaches all ranks, too.
    resumed.spec.train.warmup = None;
    resumed.resume_from =
        vec![product.join("checkpoints/step-00000004"), "/nonexistent/step-00000004".into()];
    let resumed = resumed.train("resumed");
    assert_eq!(resumed.codes, [Some(0); 4], "{:?}", resumed.errors);
    let rest: BTreeMap<u64, u32> = whole.losses.into_iter().filter(|(step, _)| *step > 4).collect();
    assert_eq!((rest.len(), resumed.losses), (4, rest));
    for run in ["afresh", "resumed"] {
        let node = |rank: u32| job.path().join(format!("{run}-{rank}"));
        assert_eq!(
            std::fs::read(node(0).join(MODEL)).unwrap(),
            std::fs::read(product.join(MODEL)).unwrap(),
            "{run}"
        );
        assert!(!node(1).join("checkpoints").exists(), "{run}: ranks of another node write nothing");
    }
    assert!(
        job.path().join("resumed-0/checkpoints/step-00000008/optimizer-00001-of-00002.safetensors").exists()
    );
}

fn nodes_without_the_directory_of_rank_0_compare_pairs_with_its_reference() {
    let job = preferences::job();
    preferences::run_ok(&job, "4", &["train.steps=8", "checkpoint.every=4"]);
    let first = job.run_dir().join("checkpoints/step-00000004");
    let whole = group(&job, &[4]).train("whole");
    let afresh = Group { writers: Some(1), ..group(&job, &[1, 3]) }.train("afresh");
    assert_eq!((whole.losses.len(), afresh.losses), (8, whole.losses.clone()));
    let mut resumed = Group { writers: Some(2), ..group(&job, &[2, 2]) };
    resumed.resume_from = vec![first, "/nonexistent/step-00000004".into()];
    let rest: BTreeMap<u64, u32> = whole.losses.into_iter().filter(|(step, _)| *step > 4).collect();
    assert_eq!((rest.len(), resumed.train("resumed").losses), (4, rest));
}

fn sharded_optimizer_without_a_shared_directory_is_refused() {
    let job = Job::new();
    reference(&job);
    let mut sharded = Group { writers: Some(2), ..group(&job, &[2, 2]) };
    sharded.spec.comm.shard = Shard::Optimizer;
    let ended = sharded.train("sharded");
    assert_eq!(ended.codes, [Some(2); 4]);
    assert!(ended.losses.is_empty());
    for text in ["`comm.shard = ", "`job.output`", "ranks 2-3 cannot"] {
        let all = ended.errors.len() == 4 && ended.errors.iter().all(|error| error.contains(text));
        assert!(all, "{text}: {:?}", ended.errors);
    }
}

/// Trains with four ranks under `xlaunch`. Returns the directory of the run.
fn reference(job: &Job) -> PathBuf {
    job.run_ok(&["--nproc", "4", "--set", "checkpoint.every=4"]);
    job.path().join("runs/train/latest").canonicalize().unwrap()
}

/// Creates a group with a shared directory and the job of [`reference`].
fn group<'a>(job: &'a Job, nodes: &[u32]) -> Group<'a> {
    let json = std::fs::read(job.path().join("runs/train/latest/job.json")).unwrap();
    let spec = serde_json::from_slice(&json).unwrap();
    Group { job, spec, nodes: nodes.to_vec(), writers: None, resume_from: Vec::new() }
}

impl Group<'_> {
    /// Trains to the end. Node N has the directory `NAME-N`, or `NAME-0` if it is shared.
    fn train(self, name: &str) -> Ended {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async { tokio::time::timeout(HANG_TIMEOUT, self.run(name)).await.unwrap() })
    }

    fn dir(&self, name: &str, node: usize) -> PathBuf {
        let node = if self.writers.is_some() { node } else { 0 };
        self.job.path().join(format!("{name}-{node}"))
    }

    async fn run(&self, name: &str) -> Ended {
        let world: u32 = self.nodes.iter().sum();
        let nodes = u32::try_from(self.nodes.len()).unwrap();
        let mut rendezvous = GroupRendezvous::new(nodes, world, RingKey::random().unwrap());
        let (messages, mut inbox) = mpsc::channel(100);
        let (mut barriers, mut services, mut workers) = (Vec::new(), Vec::new(), Vec::new());
        for (node, ranks) in self.nodes.iter().enumerate() {
            std::fs::create_dir_all(self.dir(name, node)).unwrap();
            let first = u32::try_from(workers.len()).unwrap();
            let deadline = Instant::now() + HANG_TIMEOUT;
            let local = Rendezvous::new(first..first + ranks, world, 0, self.spec.digest(), deadline);
            barriers.push(JoinBarrier::new(local));
            let socket = self.job.path().join(format!("{name}-{node}.sock"));
            let (sender, mut of_node) = mpsc::channel(100);
            services.push(service::serve(&socket, sender, watch::Sender::new(board())).await.unwrap());
            let messages = messages.clone();
            tokio::spawn(async move {
                while let Some(message) = of_node.recv().await {
                    let _ = messages.send((node, message)).await;
                }
            });
            workers
                .extend((0..*ranks).map(|local_rank| self.worker(first + local_rank, local_rank, &socket)));
        }
        let (exits, mut exited) = mpsc::channel(workers.len());
        for (rank, worker) in workers.into_iter().enumerate() {
            let exits = exits.clone();
            tokio::spawn(async move {
                let output = worker.wait_with_output().await.unwrap();
                exits.send((rank, output)).await.unwrap();
            });
        }
        let mut ended = Ended { codes: vec![None; world as usize], ..Ended::default() };
        let (mut left, mut saves, mut commands) = (world, BTreeMap::new(), BTreeMap::new());
        while left > 0 {
            tokio::select! {
                // Reports precede the exit of their worker.
                biased;
                Some((node, message)) = inbox.recv() => match message {
                    Message::GetJob(_, reply) => drop(reply.send(Ok(self.get_job(name, node)))),
                    Message::Join(join, reply) => match barriers[node].join(join, reply) {
                        JoinOutcome::Complete(joined) => {
                            let node = u32::try_from(node).unwrap();
                            if let GroupProgress::Complete(replies) = rendezvous.join(node, joined) {
                                barriers.iter_mut().zip(&replies).for_each(|(node, reply)| node.finish(reply));
                            }
                        }
                        outcome => assert_eq!(outcome, JoinOutcome::Waiting),
                    },
                    Message::SessionOpened { rank, commands: sender, .. } => {
                        commands.insert(rank, sender);
                    }
                    // Closes the session: the worker waits for that.
                    Message::Report { rank, report: Report::Finished(_), .. } => drop(commands.remove(&rank)),
                    Message::Report { rank, report, .. } => {
                        let reply = self.report(rank, report, &mut ended, &mut saves);
                        if let Some((to, command)) = reply {
                            send(&commands, to, command).await;
                        }
                    }
                    _ => {}
                },
                Some((rank, output)) = exited.recv() => {
                    ended.codes[rank] = output.status.code();
                    if !output.status.success() {
                        ended.errors.push(String::from_utf8_lossy(&output.stderr).into_owned());
                    }
                    left -= 1;
                }
            }
        }
        ended
    }

    fn worker(&self, rank: u32, local_rank: u32, socket: &Path) -> tokio::process::Child {
        let world: u32 = self.nodes.iter().sum();
        let mut command = Command::new(xlaunch_path());
        command.arg("worker").current_dir(self.job.path()).stdin(Stdio::null());
        command.stderr(Stdio::piped()).kill_on_drop(true);
        command.env("RANK", rank.to_string()).env("LOCAL_RANK", local_rank.to_string());
        command.env("WORLD_SIZE", world.to_string()).env("OMP_NUM_THREADS", "1");
        command.env(env::ATTEMPT, "0").env(env::DEVICE, "cpu").env(env::AGENT_SOCKET, socket);
        if self.nodes.len() > 1 {
            command.env(env::ADVERTISED_ADDRESS, "127.0.0.1");
        }
        if let Some(writers) = self.writers {
            command.env(env::WRITERS, writers.to_string());
        }
        command.spawn().unwrap()
    }

    fn get_job(&self, name: &str, node: usize) -> GetJobReply {
        let text = |path: &Path| path.to_str().unwrap().to_owned();
        GetJobReply {
            spec_json: self.spec.to_json(),
            run_dir: text(&self.dir(name, node)),
            resume_from: self.resume_from.get(node).map(|path| text(path)).unwrap_or_default(),
            run_id: name.into(),
            ..GetJobReply::default()
        }
    }

    /// Handles a report like an agent, as far as the workers need it. Returns the rank to which it sends a command.
    fn report(
        &self,
        rank: u32,
        report: Report,
        ended: &mut Ended,
        saves: &mut BTreeMap<u64, BTreeMap<u32, Vec<SavedFile>>>,
    ) -> Option<(u32, WorkerCommand)> {
        match report {
            Report::Step(step) if rank == 0 => drop(ended.losses.insert(step.step, step.loss.to_bits())),
            Report::ShardSaved(shard) => {
                let writers = self.writers.unwrap_or_else(|| self.nodes.iter().sum());
                assert!(rank < writers && shard.error.is_empty(), "rank {rank}: {shard:?}");
                let parts = saves.entry(shard.step).or_default();
                parts.insert(rank, shard.files);
                if parts.len() == writers as usize {
                    let files = parts.values().flatten().cloned().collect();
                    let commit = CommitCheckpoint { step: shard.step, files, error: String::new() };
                    return Some((0, WorkerCommand::CommitCheckpoint(commit)));
                }
            }
            Report::Heartbeat(_) => return Some((rank, WorkerCommand::HeartbeatAck(HeartbeatAck {}))),
            Report::Failed(_) => return Some((rank, WorkerCommand::FailedAck(FailedAck {}))),
            _ => {}
        }
        None
    }
}

type Commands = BTreeMap<u32, mpsc::Sender<Result<AgentCommand, Status>>>;

async fn send(commands: &Commands, rank: u32, command: WorkerCommand) {
    // The worker may have ended.
    let Some(worker) = commands.get(&rank) else { return };
    let _ = worker.send(Ok(AgentCommand { command: Some(command) })).await;
}

fn board() -> Board {
    Board::new(Launch {
        kind: JobKind::Trainer,
        id: "nodes".into(),
        name: "nodes".into(),
        command_line: String::new(),
        max_restarts: 0,
        total_steps: 0,
        log_dir: PathBuf::new(),
        stall_timeout: HANG_TIMEOUT,
    })
}
