//! Groups of several nodes: membership, the beginning and end of attempts, and restarts.

mod choose;
mod failures;
mod membership;

use xlaunch_proto::v1::{Begin, NodeEnded, NodeFailed, Prepare, StopRequested, Welcome};

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn rules(restarts: u32) -> GroupRules {
    GroupRules {
        max_restarts: restarts,
        fixed_ranks: true,
        join_timeout: 600.0,
        last_call_timeout: 30.0,
        heartbeat_interval: 1.0,
        lease: 12.0,
        ..GroupRules::default()
    }
}

/// The agent of a node with two workers.
fn greeting(rank: Option<u32>, nodes: (u32, u32), rules: GroupRules) -> Greeting {
    let number = rank.unwrap_or(0);
    Greeting {
        instance: vec![0],
        version: "1".into(),
        work: vec![1],
        work_text: "train.py".into(),
        node_rank: rank,
        host: format!("h{number}"),
        address: format!("10.0.0.{number}"),
        workers: 2,
        min_nodes: nodes.0,
        max_nodes: nodes.1,
        new: true,
        rules: Some(rules),
        ..Greeting::default()
    }
}

/// A coordinator, its clock, and the messages that it has sent, with their recipients.
struct Group {
    coordinator: Coordinator,
    now: Instant,
    said: Vec<(MemberId, ToAgent)>,
}

impl Group {
    fn new() -> Self {
        let now = Instant::now();
        let coordinator = Coordinator::new("run".into(), 1, || [7; 32], now);
        Self { coordinator, now, said: Vec::new() }
    }

    /// `count` nodes of a static group, members 1, 2, ... (none hosts the coordinator), all running.
    fn running(count: u32, restarts: u32) -> Self {
        let mut group = Self::new();
        for rank in 0..count {
            group.greet(u64::from(rank) + 1, greeting(Some(rank), (count, count), rules(restarts)));
        }
        group.prepare_all();
        group
    }

    fn input(&mut self, input: Input) {
        for output in self.coordinator.handle(input, self.now) {
            if let Output::Send(id, message) = output {
                self.said.push((id, message));
            }
        }
    }

    fn greet(&mut self, id: MemberId, greeting: Greeting) {
        self.input(Input::Greeted(id, greeting));
    }

    fn tell(&mut self, id: MemberId, message: FromAgent) {
        self.input(Input::Message(id, message));
    }

    /// Lets time pass, during which these members are alive.
    fn wait(&mut self, time: Duration, alive: &[MemberId]) {
        let end = self.now + time;
        while self.now < end {
            self.now += Duration::from_millis(250);
            alive.iter().for_each(|id| self.input(Input::Heard(*id)));
            self.input(Input::Tick);
        }
    }

    /// Members that were asked to prepare report that they are ready. Returns those that begin.
    fn prepare_all(&mut self) -> Vec<(MemberId, Prepare)> {
        let asked: Vec<(MemberId, Prepare)> = self
            .take()
            .into_iter()
            .filter_map(|(id, message)| match message {
                ToAgent::Prepare(prepare) => Some((id, prepare)),
                _ => None,
            })
            .collect();
        for (id, prepare) in &asked {
            let (attempt, port) = (prepare.attempt, if prepare.node_rank == 0 { 20_000 } else { 0 });
            let prepared =
                NodePrepared { attempt, master_port: port, shared: true, ..NodePrepared::default() };
            self.tell(*id, FromAgent::Prepared(prepared));
        }
        let begun: Vec<MemberId> = self
            .take()
            .into_iter()
            .filter_map(|(id, message)| match message {
                ToAgent::Begin(Begin { master_port: 20_000, .. }) => Some(id),
                _ => None,
            })
            .collect();
        let mut ids: Vec<MemberId> = asked.iter().map(|(id, _)| *id).collect();
        ids.sort_unstable();
        assert_eq!(begun, ids);
        asked
    }

    fn take(&mut self) -> Vec<(MemberId, ToAgent)> {
        std::mem::take(&mut self.said)
    }

    /// A rank fails: by itself, or because it has lost another one.
    fn fail(&mut self, id: MemberId, rank: u32, consequence: bool) {
        let cause = Some(cause(rank, consequence));
        self.tell(id, FromAgent::Failed(NodeFailed { attempt: self.coordinator.attempt, cause }));
    }

    /// All workers of these members are gone.
    fn all_end(&mut self, ids: &[MemberId], exit_code: u32) {
        let attempt = self.coordinator.attempt;
        for id in ids {
            let ended = NodeEnded { attempt, progressed: true, exit_code, ..NodeEnded::default() };
            self.tell(*id, FromAgent::Ended(ended));
        }
    }

    fn stop(&mut self, id: MemberId, signal: u32) {
        self.tell(id, FromAgent::StopRequested(StopRequested { signal }));
    }

    /// Ends that members were told about.
    fn ends(&mut self) -> Vec<(MemberId, GroupEnd)> {
        let end = |(id, message)| match message {
            ToAgent::End(end) => Some((id, end)),
            _ => None,
        };
        self.take().into_iter().filter_map(end).collect()
    }
}

fn cause(rank: u32, consequence: bool) -> RootCause {
    RootCause {
        rank: Some(rank),
        message: "exit code 3".into(),
        code: Some(3),
        exit_code: 1,
        consequence,
        counted_as: "error".into(),
        ..RootCause::default()
    }
}

fn refusal((id, message): &(MemberId, ToAgent)) -> Option<(MemberId, &str)> {
    match message {
        ToAgent::Welcome(Welcome { refusal, .. }) if !refusal.is_empty() => Some((*id, refusal)),
        _ => None,
    }
}
