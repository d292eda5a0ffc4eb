//! Decides when there are enough members for an attempt, and assigns their node ranks.
//!
//! An attempt begins with the maximum number of nodes, or with fewer when the last call is over. Members keep their
//! node rank from attempt to attempt. A new member gets the rank that it asks for, or else a free one, assigned in
//! order of addresses. Ranks move down only if the group has become smaller.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use xlaunch_proto::v1::coordinator_message::Body as ToAgent;
use xlaunch_proto::v1::{GroupEnd, Prepare, Waiting};
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::quantities::{ranges_text, seconds};

use super::{Coordinator, Member, MemberId, Phase, Stage};

/// Interval between the lines that say who is missing.
const NOTICE_INTERVAL: Duration = Duration::from_secs(10);
/// Length of the last call after the loss of a node: its replacement is either there already or will take long.
const LAST_CALL_AFTER_LOSS: Duration = Duration::from_secs(3);

pub(super) fn phase(join_timeout: Duration, now: Instant) -> Phase {
    Phase::Gathering { deadline: now + join_timeout, last_call: None, next_notice: now + NOTICE_INTERVAL }
}

impl Coordinator {
    /// Starts over because the members changed before the attempt had begun. The attempt gets another number, so that
    /// replies to the earlier preparation, for other ranks, are ignored.
    pub(super) fn prepare_again(&mut self, now: Instant) {
        self.attempt += 1;
        self.start_gathering(now);
    }

    pub(super) fn start_gathering(&mut self, now: Instant) {
        for member in self.members.values_mut() {
            member.stage = Stage::Idle;
        }
        self.phase = phase(seconds(self.rules.join_timeout), now);
        self.release_leaving();
        self.gather(now);
    }

    pub(super) fn gather(&mut self, now: Instant) {
        let Some((least, most)) = self.reference.as_ref().map(|it| (it.min_nodes, it.max_nodes)) else {
            return;
        };
        let found = u32::try_from(self.candidates().count()).unwrap_or(u32::MAX);
        let last_call_timeout =
            if self.after_loss { LAST_CALL_AFTER_LOSS } else { seconds(self.rules.last_call_timeout) };
        let Phase::Gathering { deadline, last_call, next_notice } = &mut self.phase else { return };
        if found >= least {
            last_call.get_or_insert(now + last_call_timeout);
        } else {
            *last_call = None;
        }
        // A group as large as before has already waited through one last call.
        let is_as_before = self.nodes > 0 && found >= self.nodes.max(least);
        if found >= most || is_as_before || last_call.is_some_and(|due| now >= due) {
            return self.prepare(now);
        }
        if found < least && now >= *deadline {
            return self.give_up();
        }
        if now >= *next_notice {
            *next_notice = now + NOTICE_INTERVAL;
            let text = format!("waiting for {}", self.missing());
            let ids: Vec<_> = self.members.keys().copied().collect();
            ids.into_iter()
                .for_each(|id| self.send(id, ToAgent::Waiting(Waiting { text: text.clone(), spare: false })));
        }
    }

    /// Members that can take part in an attempt. A member whose connection has closed is left out, since it may not
    /// come back.
    fn candidates(&self) -> impl Iterator<Item = (&MemberId, &Member)> {
        self.members.iter().filter(|(_, member)| member.leaving.is_none() && member.closed.is_none())
    }

    /// Ends the job because not enough nodes have joined.
    fn give_up(&mut self) {
        let lost = self.last_root.as_ref().filter(|_| self.after_loss);
        let missing = self.missing();
        let (exit, root) = match lost {
            Some(lost) => (ExitCode::Retryable, format!("{}; no other node replaced it", lost.text())),
            None => (ExitCode::Rendezvous, format!("the rendezvous failed: {missing} did not join in time")),
        };
        self.end(GroupEnd { exit_code: exit.code().into(), root, ..GroupEnd::default() });
    }

    /// Describes who is missing: `nodes 1, 3 of 4`, or `2 more nodes (1 of at least 3 here: host)`.
    fn missing(&self) -> String {
        let Some(reference) = &self.reference else { return "the first node".into() };
        let (least, most) = (reference.min_nodes, reference.max_nodes);
        let here: Vec<&Member> = self.candidates().map(|(_, member)| member).collect();
        if self.rules.fixed_ranks {
            let ranks: BTreeSet<u32> = here.iter().filter_map(|member| member.greeting.node_rank).collect();
            let missing: Vec<u32> = (0..most).filter(|rank| !ranks.contains(rank)).collect();
            let noun = if missing.len() == 1 { "node" } else { "nodes" };
            // Out of thousands of nodes, naming a few is enough.
            let (named, rest) = missing.split_at(missing.len().min(20));
            let more = if rest.is_empty() { String::new() } else { format!(" and {} more", rest.len()) };
            return format!("{noun} {}{more} of {most}", ranges_text(named));
        }
        let found = u32::try_from(here.len()).unwrap_or(u32::MAX);
        let hosts: Vec<&str> = here.iter().take(20).map(|member| member.greeting.host.as_str()).collect();
        let wanted = if found < least { least - found } else { most - found };
        let noun = if wanted == 1 { "node" } else { "nodes" };
        let needed = if found < least { format!("at least {least}") } else { format!("up to {most}") };
        format!("{wanted} more {noun} ({found} of {needed} here: {})", hosts.join(", "))
    }

    /// Chooses the members of the next attempt and tells them to prepare.
    fn prepare(&mut self, now: Instant) {
        let most = self.most();
        let chosen = self.choose(most as usize);
        self.nodes = u32::try_from(chosen.len()).unwrap_or(u32::MAX);
        for member in self.members.values_mut() {
            (member.node_rank, member.stage) = (None, Stage::Idle);
        }
        let mut world = 0;
        for (rank, id) in (0..).zip(&chosen) {
            if let Some(member) = self.members.get_mut(id) {
                (member.node_rank, member.first_rank, member.stage) = (Some(rank), world, Stage::Preparing);
                world += member.greeting.workers;
            }
        }
        let run_number = self.run_number();
        for (index, id) in chosen.iter().enumerate() {
            let Some((master, own)) = self.members.get(&chosen[0]).zip(self.members.get(id)) else {
                continue;
            };
            let next = self.members.get(&chosen[(index + 1) % chosen.len()]).filter(|_| chosen.len() > 1);
            let next = next.map(|member| &member.greeting);
            let prepare = Prepare {
                attempt: self.attempt,
                restarts: self.restarts,
                node_rank: own.node_rank.unwrap_or(0),
                nodes: self.nodes,
                first_rank: own.first_rank,
                world_size: world,
                next_host: next.map_or_else(String::new, |next| next.host.clone()),
                next_address: next.map_or_else(String::new, |next| next.address.clone()),
                next_probe_port: next.map_or(0, |next| next.probe_port),
                master_address: master.greeting.address.clone(),
                master_completed: master.greeting.completed.clone(),
                checkpoints_instance: self.keeper.as_ref().unwrap_or(&master.greeting.instance).clone(),
                run_number,
            };
            self.outputs.push(super::Output::Send(*id, ToAgent::Prepare(prepare)));
        }
        // Keeps the most recent losses, one per place that is still free.
        let places = most.saturating_sub(self.nodes) as usize;
        self.lost.drain(..self.lost.len().saturating_sub(places));
        let spares: Vec<_> =
            self.members.iter().filter(|(_, it)| it.node_rank.is_none()).map(|(id, _)| *id).collect();
        spares.into_iter().for_each(|id| self.tell_spare(id));
        self.after_loss = false;
        self.phase = Phase::Preparing { deadline: now + seconds(self.rules.join_timeout) };
    }

    /// Returns the number of the run's directory, which is free on all members of the first attempt. Nodes that join
    /// later get the same number.
    fn run_number(&mut self) -> u32 {
        let free = self.members.values().map(|member| member.greeting.free_run).max().unwrap_or(0);
        *self.run_number.get_or_insert(free.max(1))
    }

    /// Tells a member that the attempt is full without it.
    pub(super) fn tell_spare(&mut self, id: MemberId) {
        let text = format!("this node is a spare: the job has {} of {} nodes", self.nodes, self.most());
        self.send(id, ToAgent::Waiting(Waiting { text, spare: true }));
    }

    /// Maximum number of nodes in the job.
    pub(super) fn most(&self) -> u32 {
        self.reference.as_ref().map_or(1, |reference| reference.max_nodes)
    }

    /// Chooses at most `most` members. Returns them by node rank.
    pub(super) fn choose(&self, most: usize) -> Vec<MemberId> {
        let mut candidates: Vec<_> = self.candidates().collect();
        let address =
            |member: &Member| (member.greeting.address.parse::<IpAddr>().ok(), member.greeting.host.clone());
        // Members that had a rank come first: spares wait until one is free.
        candidates.sort_by_key(|(id, member)| {
            let wish = member.greeting.node_rank.unwrap_or(u32::MAX);
            (member.node_rank.is_none(), member.node_rank, wish, address(member), **id)
        });
        candidates.truncate(most);
        let mut places: Vec<Option<MemberId>> = vec![None; candidates.len()];
        let mut place = |wish: Option<u32>, id: MemberId| {
            let free = wish.and_then(|rank| places.get_mut(rank as usize)).filter(|place| place.is_none());
            free.map(|place| *place = Some(id)).is_some()
        };
        candidates.retain(|(id, member)| !place(member.node_rank, **id));
        candidates.retain(|(id, member)| !place(member.greeting.node_rank, **id));
        let mut rest = candidates.into_iter().map(|(id, _)| *id);
        places.into_iter().filter_map(|place| place.or_else(|| rest.next())).collect()
    }
}
