//! Merges the statuses of a job's nodes into one. Pure.
//!
//! Each rank's status comes from its own node, and the status of the whole job from the node of rank 0. Host, process,
//! logs and command line are those of the agent that was asked. A rank whose node does not answer is listed with the
//! reason as its hint.

use std::collections::BTreeSet;

use xlaunch_proto::v1::{MemberState, MemberStatus, RankStatus, StatusReply};

/// Returns the status of the job. `own` is the status of the agent that was asked, `others` those of other nodes that
/// have answered.
pub(crate) fn merge(own: StatusReply, nodes: Vec<MemberStatus>, others: Vec<StatusReply>) -> StatusReply {
    // A node without ranks knows no attempt.
    let newest = others.iter().map(|reply| reply.attempt).max();
    let attempt = newest.filter(|_| own.world_size == 0).unwrap_or(own.attempt);
    let others: Vec<StatusReply> = others.into_iter().filter(|reply| reply.attempt == attempt).collect();
    let world = others.iter().map(|reply| reply.world_size).fold(own.world_size, u32::max);
    let mut ranks: Vec<RankStatus> =
        own.ranks.iter().chain(others.iter().flat_map(|reply| &reply.ranks)).cloned().collect();
    let known: BTreeSet<u32> = ranks.iter().map(|rank| rank.rank).collect();
    for node in nodes.iter().filter(|node| is_member(node)) {
        let of_node = node.first_rank..node.first_rank.saturating_add(node.workers).min(world);
        let missing = of_node.enumerate().filter(|(_, rank)| !known.contains(rank));
        ranks.extend(missing.map(|(local, rank)| RankStatus {
            rank,
            local_rank: u32::try_from(local).unwrap_or(u32::MAX),
            node_rank: node.node_rank.unwrap_or(0),
            hint: no_answer(node),
            ..RankStatus::default()
        }));
    }
    ranks.sort_by_key(|rank| rank.rank);
    let leads = |reply: &StatusReply| reply.ranks.iter().any(|rank| rank.rank == 0);
    let leader = others.into_iter().find(leads).unwrap_or_else(|| own.clone());
    StatusReply {
        nodes,
        ranks,
        host: own.host,
        command_line: own.command_line,
        launcher_pid: own.launcher_pid,
        log_dir: own.log_dir,
        started_unix_seconds: own.started_unix_seconds,
        history: own.history,
        spare: own.spare,
        ..leader
    }
}

fn is_member(node: &MemberStatus) -> bool {
    matches!(node.state(), MemberState::Active | MemberState::Silent)
}

fn no_answer(node: &MemberStatus) -> String {
    match node.state() {
        MemberState::Active => format!("{} did not answer in time", node.host),
        state => format!("{} is {}", node.host, state.label()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(host: &str, first: u32, step: u64) -> StatusReply {
        let rank = |rank| RankStatus { rank, node_rank: first / 2, pid: 7, ..RankStatus::default() };
        StatusReply {
            host: host.into(),
            step,
            world_size: 6,
            ranks: vec![rank(first), rank(first + 1)],
            ..StatusReply::default()
        }
    }

    fn node(rank: u32, state: MemberState) -> MemberStatus {
        MemberStatus {
            node_rank: Some(rank),
            host: format!("h{rank}"),
            state: state.into(),
            first_rank: 2 * rank,
            workers: 2,
            ..MemberStatus::default()
        }
    }

    #[test]
    fn status_is_the_same_whatever_node_is_asked() {
        let nodes = || (0..3).map(|rank| node(rank, MemberState::Active)).collect();
        let replies = || vec![reply("h0", 0, 9), reply("h1", 2, 8), reply("h2", 4, 7)];
        let merged = (0..3).map(|own| {
            let mut others = replies();
            let own = others.remove(own);
            (own.host.clone(), merge(own, nodes(), others))
        });
        for (host, merged) in merged {
            let ranks: Vec<u32> = merged.ranks.iter().map(|rank| rank.rank).collect();
            assert_eq!((ranks, merged.step, merged.host), ((0..6).collect(), 9, host));
            assert!(merged.ranks.iter().all(|rank| rank.hint.is_empty()));
        }
    }

    #[test]
    fn ranks_of_nodes_without_an_answer_are_listed_with_the_reason() {
        let states = [MemberState::Active, MemberState::Silent, MemberState::Active, MemberState::Lost];
        let nodes = (0..).zip(states).map(|(rank, state)| node(rank, state)).collect();
        let merged = merge(reply("h0", 0, 9), nodes, Vec::new());
        let hints: Vec<&str> = merged.ranks.iter().map(|rank| rank.hint.as_str()).collect();
        let late = "h2 did not answer in time";
        assert_eq!(hints, ["", "", "h1 is silent", "h1 is silent", late, late]);
        assert_eq!((merged.ranks[3].local_rank, merged.ranks[3].node_rank, merged.nodes.len()), (1, 1, 4));
    }

    #[test]
    fn spare_shows_the_newest_attempt_of_the_others() {
        let nodes = vec![node(0, MemberState::Active), node(1, MemberState::Active)];
        let spare = StatusReply { host: "h2".into(), ..StatusReply::default() };
        let second = |reply| StatusReply { attempt: 1, world_size: 4, ..reply };
        let others = vec![second(reply("h1", 2, 8)), second(reply("h0", 0, 9))];
        let merged = merge(spare.clone(), nodes.clone(), others);
        let pids: Vec<u32> = merged.ranks.iter().map(|rank| rank.pid).collect();
        assert_eq!((pids, merged.attempt, merged.step, &*merged.host), (vec![7; 4], 1, 9, "h2"));
        let silent = merge(spare, nodes, vec![second(reply("h1", 2, 8))]);
        assert_eq!(silent.ranks[0].hint, "h0 did not answer in time");
    }

    #[test]
    fn answers_about_another_attempt_do_not_count() {
        let nodes = vec![node(0, MemberState::Active), node(1, MemberState::Active)];
        let late = StatusReply { attempt: 1, ..reply("h1", 2, 3) };
        let merged = merge(reply("h0", 0, 9), nodes, vec![late]);
        assert!(merged.ranks[2..].iter().all(|rank| rank.pid == 0 && !rank.hint.is_empty()));
    }
}
