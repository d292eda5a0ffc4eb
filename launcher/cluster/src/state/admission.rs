//! Decides who may become a member of the group.
//!
//! A fixed rank has one holder. An agent that claims a held rank waits. If the holder shows that it is alive, the claim
//! is refused; if the holder is lost, the claimant replaces it. Waiting helps because, after a power loss or the death
//! of an agent, the next agent is often there before the lease is over.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use xlaunch_proto::v1::coordinator_message::Body as ToAgent;
use xlaunch_proto::v1::{Greeting, GroupRules, Setting, Welcome};
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::quantities::seconds;

use super::{Coordinator, Member, MemberId, Output, Phase, Stage, gathering, name, policy::Policy};
use xlaunch_host::escape::escaped;
use xlaunch_host::redact::REDACTED;
use xlaunch_spec::command::Restarts;

/// Maximum number of differing settings named in a refusal.
const MAX_DIFFERENCES: usize = 8;
/// Longer values are shortened.
const MAX_VALUE_CHARS: usize = 100;

/// An agent that waits for a rank held by a member.
#[derive(Debug)]
pub(super) struct Claim {
    id: MemberId,
    greeting: Greeting,
    /// Anything heard from the holder after this shows that it is alive.
    pub(super) since: Instant,
}

impl Coordinator {
    pub(super) fn greeted(&mut self, id: MemberId, greeting: Greeting, now: Instant) {
        if let Some(refusal) = self.refusal(&greeting) {
            return self.refuse(id, refusal);
        }
        if let Some((holder, member)) = self.holder(&greeting) {
            if member.hosts_coordinator {
                let refusal = taken(&greeting, &member.greeting);
                return self.refuse(id, refusal);
            }
            if member.closed.is_none() {
                return self.claims.push(Claim { id, greeting, since: now });
            }
            // The holder's connection has closed, so it will not come back.
            self.lose(holder, now);
        }
        if self.reference.is_none() {
            self.adopt(&greeting, now);
        }
        let welcome = Welcome {
            run_id: self.run_id.clone(),
            heartbeat_interval: self.rules.heartbeat_interval,
            lease: self.rules.lease,
            ..Welcome::default()
        };
        self.send(id, ToAgent::Welcome(welcome));
        let member = Member {
            hosts_coordinator: id == Self::HOST,
            stop_requests: 0,
            greeting,
            node_rank: None,
            first_rank: 0,
            stage: Stage::Idle,
            last_heard: now,
            closed: None,
            leaving: None,
        };
        self.members.insert(id, member);
        if matches!(self.phase, Phase::Preparing { .. } | Phase::Running) && self.nodes >= self.most() {
            self.tell_spare(id);
        }
        self.grow();
    }

    fn refuse(&mut self, id: MemberId, refusal: String) {
        let exit_code = match &self.phase {
            Phase::Ended(end) if end.exit_code != 0 => end.exit_code,
            _ => ExitCode::Rendezvous.code().into(),
        };
        self.send(id, ToAgent::Welcome(Welcome { refusal, exit_code, ..Welcome::default() }));
        self.outputs.push(Output::Forget(id));
    }

    /// Decides on the waiting claims for which the state of the holder is now clear.
    pub(super) fn settle_claims(&mut self, now: Instant) {
        for claim in std::mem::take(&mut self.claims) {
            match self.holder(&claim.greeting).map(|(_, member)| member) {
                Some(member) if member.closed.is_none() && !self.is_over() => {
                    if member.last_heard > claim.since {
                        let refusal = taken(&claim.greeting, &member.greeting);
                        self.refuse(claim.id, refusal);
                    } else {
                        self.claims.push(claim);
                    }
                }
                _ => self.greeted(claim.id, claim.greeting, now),
            }
        }
    }

    /// Drops the claim of an agent that has closed its connection. Returns whether there was one.
    pub(super) fn withdraw_claim(&mut self, id: MemberId) -> bool {
        let before = self.claims.len();
        self.claims.retain(|claim| claim.id != id);
        self.claims.len() < before
    }

    /// Id of the member in whose process the coordinator runs.
    pub const HOST: MemberId = 0;

    /// Adopts the first member's rules for the group.
    fn adopt(&mut self, greeting: &Greeting, now: Instant) {
        let rules = greeting.rules.clone().unwrap_or_default();
        let restarts = Restarts {
            most: rules.max_restarts,
            window: seconds(rules.restart_window),
            not_after: rules.final_codes.iter().copied().collect(),
            free: rules.free_codes.iter().copied().collect(),
        };
        self.policy = Policy::new(restarts, rules.trainer, self.policy.seed());
        self.phase = gathering::phase(seconds(rules.join_timeout), now);
        self.rules = rules;
        if !greeting.run_id.is_empty() {
            self.run_id.clone_from(&greeting.run_id);
        }
        self.reference = Some(greeting.clone());
    }

    /// Returns the reason why this agent cannot be a member.
    fn refusal(&self, greeting: &Greeting) -> Option<String> {
        if let Phase::Ended(end) = &self.phase {
            let why = if end.root.is_empty() { String::new() } else { format!(": {}", end.root) };
            return Some(format!("the job has ended{why}"));
        }
        if !greeting.new {
            // Its workers, if it had any, have been replaced.
            return Some("the node was considered lost".into());
        }
        if let Some(problem) = malformed(greeting) {
            return Some(problem);
        }
        if self.is_for_run && !greeting.run_id.is_empty() && greeting.run_id != self.run_id {
            let own = name(greeting.node_rank, &greeting.host);
            let (its, expected) = (quoted(&greeting.run_id), quoted(&self.run_id));
            return Some(format!("{own} has the run id {its}, the coordinator has {expected}"));
        }
        if let Some(difference) = self.reference.as_ref().and_then(|it| difference(greeting, it)) {
            return Some(difference);
        }
        let rules = greeting.rules.as_ref()?;
        let rank = greeting.node_rank.filter(|_| rules.fixed_ranks)?;
        if rank >= greeting.max_nodes {
            return Some(format!(
                "node rank {rank} does not exist in a group of {} nodes",
                greeting.max_nodes
            ));
        }
        None
    }

    /// Returns the member that holds this agent's fixed rank.
    fn holder(&self, greeting: &Greeting) -> Option<(MemberId, &Member)> {
        let rank = greeting.node_rank.filter(|_| self.rules.fixed_ranks)?;
        let holder = self.members.iter().find(|(_, member)| member.greeting.node_rank == Some(rank));
        holder.map(|(id, member)| (*id, member))
    }
}

fn taken(greeting: &Greeting, holder: &Greeting) -> String {
    let rank = greeting.node_rank.unwrap_or_default();
    format!(
        "node rank {rank} of {} ({}) is taken by {} ({})",
        greeting.host, greeting.address, holder.host, holder.address
    )
}

fn malformed(greeting: &Greeting) -> Option<String> {
    let rules = greeting.rules.as_ref();
    let times = |rules: &GroupRules| {
        let all = [rules.join_timeout, rules.last_call_timeout, rules.restart_window, rules.lease];
        all.iter().all(|value| (0.0..=1e9).contains(value)) && rules.lease > 0.0
    };
    let is_valid = rules.is_some_and(times)
        && greeting.workers > 0
        && (1..=greeting.max_nodes).contains(&greeting.min_nodes)
        && !(rules.is_some_and(|rules| rules.fixed_ranks) && greeting.node_rank.is_none());
    (!is_valid).then(|| "the greeting is malformed".into())
}

/// Describes how an agent differs from the first member.
fn difference(greeting: &Greeting, first: &Greeting) -> Option<String> {
    let (own, other) = (name(greeting.node_rank, &greeting.host), name(first.node_rank, &first.host));
    let differ = |what: &str, a: &str, b: &str| Some(format!("{own} has {what} {a}, {other} has {b}"));
    if greeting.version != first.version {
        return differ("xlaunch", &greeting.version, &first.version);
    }
    if greeting.run_id != first.run_id {
        return differ("the run id", &quoted(&greeting.run_id), &quoted(&first.run_id));
    }
    let nodes = |it: &Greeting| {
        if it.min_nodes == it.max_nodes {
            it.max_nodes.to_string()
        } else {
            format!("{}:{}", it.min_nodes, it.max_nodes)
        }
    };
    if nodes(greeting) != nodes(first) {
        return differ("--nnodes", &nodes(greeting), &nodes(first));
    }
    if greeting.work == first.work {
        return None;
    }
    if greeting.work_text != first.work_text {
        return Some(format!("{own} runs `{}`, {other} runs `{}`", greeting.work_text, first.work_text));
    }
    let differing = differing_settings(&greeting.settings, &first.settings)
        .or_else(|| {
            hidden(greeting).map(|of| format!("a value that looks like a secret, and is not shown, in {of}"))
        })
        .unwrap_or_else(|| "its digest differs".into());
    Some(format!("{own} has a different configuration than {other}: {differing}"))
}

/// Names a setting or a command line from which an agent has left out a value, which may be what differs.
fn hidden(greeting: &Greeting) -> Option<String> {
    let mut settings = greeting.settings.iter();
    let setting = settings.find(|setting| setting.value.contains(REDACTED)).map(|setting| &setting.name);
    let text = || Some(&greeting.work_text).filter(|text| text.contains(REDACTED));
    setting.or_else(text).map(|text| format!("`{}`", shortened(text)))
}

/// Lists the differences: `train.lr is 0.001 instead of 0.0003, train.batch is 8 instead of 16 and 3 more`. `None` if
/// there is none.
fn differing_settings(own: &[Setting], other: &[Setting]) -> Option<String> {
    let by_name = |settings: &[Setting]| -> BTreeMap<String, String> {
        settings.iter().map(|setting| (setting.name.clone(), setting.value.clone())).collect()
    };
    let (own, other) = (by_name(own), by_name(other));
    let names: BTreeSet<&String> = own.keys().chain(other.keys()).collect();
    let differing: Vec<&String> =
        names.into_iter().filter(|name| own.get(*name) != other.get(*name)).collect();
    let value = |settings: &BTreeMap<String, String>, name: &String| {
        settings.get(name).map_or_else(|| "unset".into(), |value| shortened(value))
    };
    let named: Vec<String> = differing
        .iter()
        .take(MAX_DIFFERENCES)
        .map(|name| format!("{} is {} instead of {}", escaped(name), value(&own, name), value(&other, name)))
        .collect();
    Some(match differing.len().saturating_sub(MAX_DIFFERENCES) {
        0 if named.is_empty() => return None,
        0 => named.join(", "),
        more => format!("{} and {more} more", named.join(", ")),
    })
}

fn shortened(value: &str) -> String {
    match value.char_indices().nth(MAX_VALUE_CHARS) {
        Some((end, _)) => format!("{}...", escaped(&value[..end])),
        None => escaped(value),
    }
}

fn quoted(text: &str) -> String {
    if text.is_empty() { "none".into() } else { format!("`{text}`") }
}
