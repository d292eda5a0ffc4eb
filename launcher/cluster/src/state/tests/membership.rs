//! Membership: who is admitted, with which rank, and when there are enough members.

use xlaunch_proto::v1::{Query, QueryReply, Setting};

use super::*;

fn dynamic(address: u32, nodes: (u32, u32)) -> Greeting {
    let rules = GroupRules { fixed_ranks: false, ..rules(3) };
    Greeting { node_rank: None, ..greeting(Some(address), nodes, rules) }
}

fn ranks(asked: &[(MemberId, Prepare)]) -> Vec<(MemberId, u32)> {
    let mut ranks: Vec<_> = asked.iter().map(|(id, prepare)| (*id, prepare.node_rank)).collect();
    ranks.sort_unstable();
    ranks
}

#[test]
fn static_group_begins_when_its_last_node_is_there() {
    let mut group = Group::new();
    for rank in [2, 0] {
        group.greet(u64::from(rank), greeting(Some(rank), (3, 3), rules(0)));
        assert_eq!(group.prepare_all(), []);
    }
    group.greet(1, Greeting { workers: 5, ..greeting(Some(1), (3, 3), rules(0)) });
    let asked = group.prepare_all();
    let of = |id| asked.iter().find(|(member, _)| *member == id).unwrap().1.clone();
    assert_eq!((of(0).first_rank, of(1).first_rank, of(2).first_rank, of(2).world_size), (0, 2, 7, 9));
    assert_eq!((of(0).next_address.as_str(), of(2).next_address.as_str()), ("10.0.0.1", "10.0.0.0"));
    assert!(asked.iter().all(|(_, prepare)| prepare.master_address == "10.0.0.0" && prepare.nodes == 3));
}

fn settings(values: &[(&str, &str)]) -> Vec<Setting> {
    let setting = |(name, value): &(&str, &str)| Setting { name: (*name).into(), value: (*value).into() };
    values.iter().map(setting).collect()
}

#[test]
fn many_and_long_differences_are_cut() {
    let mut group = Group::new();
    let all = |value: &str| -> Vec<Setting> {
        (0..20).map(|index| Setting { name: format!("k{index:02}"), value: value.repeat(200) }).collect()
    };
    let of = |rank, value| Greeting { settings: all(value), ..greeting(Some(rank), (2, 2), rules(0)) };
    group.greet(1, of(0, "x"));
    group.take();
    group.greet(2, Greeting { work: vec![2], ..of(1, "y") });
    let said = group.take();
    let (_, text) = said.iter().find_map(refusal).unwrap();
    assert!(text.ends_with(" and 12 more") && text.len() < 2500, "{text}");
    assert!(
        text.contains(&format!("k07 is {}... instead of {}...", "y".repeat(100), "x".repeat(100))),
        "{text}"
    );
}

#[test]
fn node_that_differs_is_refused_with_both_values_while_the_others_wait() {
    let base = || greeting(Some(1), (2, 2), rules(0));
    let cases = [
        (Greeting { version: "2".into(), ..base() }, "node 1 (h1) has xlaunch 2, node 0 (h0) has 1"),
        (Greeting { run_id: "x".into(), ..base() }, "node 1 (h1) has the run id `x`, node 0 (h0) has none"),
        (
            Greeting { work: vec![2], work_text: "other.py".into(), ..base() },
            "node 1 (h1) runs `other.py`, node 0 (h0) runs `train.py`",
        ),
        (
            Greeting {
                work: vec![0xab],
                settings: settings(&[("a", "1"), ("b", "x\n"), ("d", "4")]),
                ..base()
            },
            "node 1 (h1) has a different configuration than node 0 (h0): b is x\\n instead of 2, c is unset \
             instead of 3, d is 4 instead of unset",
        ),
        (greeting(Some(1), (3, 3), rules(0)), "node 1 (h1) has --nnodes 3, node 0 (h0) has 2"),
        (greeting(Some(2), (2, 2), rules(0)), "node rank 2 does not exist in a group of 2 nodes"),
        (
            Greeting { host: "x".into(), ..greeting(Some(0), (2, 2), rules(0)) },
            "node rank 0 of x (10.0.0.0) is taken by h0 (10.0.0.0)",
        ),
        (Greeting { workers: 0, ..base() }, "the greeting is malformed"),
    ];
    let mut group = Group::new();
    let first = settings(&[("a", "1"), ("b", "2"), ("c", "3")]);
    group.greet(1, Greeting { settings: first, ..greeting(Some(0), (2, 2), rules(0)) });
    for (id, (greeting, expected)) in (2..).zip(cases) {
        group.take();
        group.greet(id, greeting);
        group.wait(SECOND, &[1]);
        let said = group.take();
        assert_eq!(said.iter().filter_map(refusal).collect::<Vec<_>>(), [(id, expected)]);
    }
    group.greet(20, base());
    assert_eq!(ranks(&group.prepare_all()), [(1, 0), (20, 1)]);
}

#[test]
fn node_with_another_secret_is_refused_without_showing_it() {
    let text = "train.py --api-key '[redacted]'";
    let (mut group, of) = (Group::new(), |rank: u32| Greeting {
        work: vec![u8::try_from(rank).unwrap()],
        work_text: text.into(),
        ..greeting(Some(rank), (2, 2), rules(0))
    });
    group.greet(1, of(0));
    group.take();
    group.greet(2, of(1));
    let said = group.take();
    let expected = format!(
        "node 1 (h1) has a different configuration than node 0 (h0): a value that looks like a secret, and is not \
         shown, in `{text}`"
    );
    assert_eq!(said.iter().filter_map(refusal).collect::<Vec<_>>(), [(2, &*expected)]);
}

#[test]
fn missing_nodes_are_named_every_ten_seconds_and_at_the_deadline() {
    let mut group = Group::new();
    let rules = GroupRules { join_timeout: 25.0, ..rules(0) };
    for rank in [1, 3] {
        group.greet(u64::from(rank), greeting(Some(rank), (4, 4), rules.clone()));
    }
    group.take();
    group.wait(24 * SECOND, &[1, 3]);
    let waiting: Vec<_> = group.take();
    assert_eq!(waiting.len(), 4, "{waiting:?}");
    let text = |message: &ToAgent| matches!(message, ToAgent::Waiting(it) if it.text == "waiting for nodes 0, 2 of 4");
    assert!(waiting.iter().all(|(_, message)| text(message)), "{waiting:?}");
    group.wait(2 * SECOND, &[1, 3]);
    let ends = group.ends();
    assert_eq!(ends.iter().map(|(id, end)| (*id, end.exit_code)).collect::<Vec<_>>(), [(1, 69), (3, 69)]);
    assert!(ends[0].1.root.contains("nodes 0, 2 of 4 did not join in time"), "{ends:?}");
}

#[test]
fn elastic_group_begins_with_fewer_nodes_after_the_last_call() {
    let mut group = Group::new();
    group.greet(1, dynamic(9, (2, 3)));
    group.wait(40 * SECOND, &[1]);
    group.greet(2, dynamic(4, (2, 3)));
    group.take();
    group.wait(29 * SECOND, &[1, 2]);
    assert_eq!(group.prepare_all(), []);
    group.wait(2 * SECOND, &[1, 2]);
    // Ranks follow the addresses.
    assert_eq!(ranks(&group.prepare_all()), [(1, 1), (2, 0)]);
}

#[test]
fn node_that_joins_pauses_the_others_and_all_begin_again_outside_the_budget() {
    let mut group = Group::new();
    [1, 2].into_iter().for_each(|id| group.greet(id, dynamic(id as u32, (2, 3))));
    group.wait(31 * SECOND, &[1, 2]);
    group.prepare_all();
    group.greet(3, dynamic(0, (2, 3)));
    let paused: Vec<_> = group.take().into_iter().filter(|(_, it)| matches!(it, ToAgent::Pause(_))).collect();
    assert_eq!(paused.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [1, 2]);
    group.all_end(&[1, 2], 143);
    let asked = group.prepare_all();
    // Members that were there before keep their ranks.
    assert_eq!(ranks(&asked), [(1, 0), (2, 1), (3, 2)]);
    assert!(
        asked.iter().all(|(_, prepare)| (prepare.attempt, prepare.restarts, prepare.world_size) == (1, 0, 6))
    );
}

#[test]
fn node_beyond_the_maximum_is_told_that_it_is_a_spare_at_every_attempt() {
    let spares = |said: Vec<(MemberId, ToAgent)>| -> Vec<MemberId> {
        let is_spare = |message: &ToAgent| matches!(message, ToAgent::Waiting(it) if it.spare);
        said.into_iter().filter(|(_, message)| is_spare(message)).map(|(id, _)| id).collect()
    };
    let mut group = Group::new();
    (1..=2).for_each(|id| group.greet(id, dynamic(id as u32, (1, 2))));
    group.prepare_all();
    group.greet(3, dynamic(3, (1, 2)));
    assert_eq!(spares(group.take()), [3]);
    group.fail(1, 0, false);
    group.all_end(&[1, 2], 1);
    group.wait(2 * SECOND, &[1, 2, 3]);
    assert_eq!(spares(group.take()), [3]);
    // A node that joins below the maximum is not a spare.
    let mut group = Group::new();
    group.greet(1, dynamic(1, (1, 2)));
    group.wait(40 * SECOND, &[1]);
    group.prepare_all();
    group.greet(2, dynamic(2, (1, 2)));
    assert!(spares(group.take()).is_empty());
}

#[test]
fn spare_takes_the_rank_of_a_lost_node_at_once() {
    let mut group = Group::new();
    [1, 2, 3].into_iter().for_each(|id| group.greet(id, dynamic(id as u32, (2, 2))));
    assert_eq!(ranks(&group.prepare_all()), [(1, 0), (2, 1)]);
    let states: Vec<_> = group.coordinator.nodes(group.now).iter().map(|node| node.state()).collect();
    assert_eq!(states, [MemberState::Active, MemberState::Active, MemberState::Spare]);
    group.input(Input::Disconnected(1));
    group.wait(2 * SECOND, &[2, 3]);
    group.all_end(&[2], 75);
    let asked = group.prepare_all();
    assert_eq!(ranks(&asked), [(2, 1), (3, 0)]);
    assert_eq!((asked[0].1.attempt, asked[0].1.restarts), (1, 1));
}

#[test]
fn node_leaves_after_sigterm_if_enough_remain_and_ranks_move_down() {
    let mut group = Group::new();
    [1, 2, 3].into_iter().for_each(|id| group.greet(id, dynamic(id as u32, (2, 3))));
    group.prepare_all();
    group.stop(2, 15);
    assert!(group.take().iter().all(|(_, message)| matches!(message, ToAgent::Pause(_))));
    group.all_end(&[1, 2, 3], 143);
    let said = group.take();
    let ended = said.iter().find(|(_, it)| matches!(it, ToAgent::End(_)));
    assert!(matches!(ended, Some((2, ToAgent::End(GroupEnd { exit_code: 143, .. })))), "{said:?}");
    group.said = said;
    assert_eq!(ranks(&group.prepare_all()), [(1, 0), (3, 1)]);
    let left =
        group.said.iter().find_map(|(_, it)| if let ToAgent::End(end) = it { Some(end) } else { None });
    assert!(left.is_none_or(|end| end.stopped), "{left:?}");
    // Without another one, too few would remain.
    group.stop(1, 15);
    assert!(matches!(group.take()[..], [(1, ToAgent::Stop(_)), (3, ToAgent::Stop(_))]));
}

#[test]
fn stop_that_coincides_with_a_pause_ends_the_job_as_any_stop_does() {
    for trainer in [true, false] {
        let mut group = Group::new();
        for id in [1, 2] {
            let rules = GroupRules { trainer, fixed_ranks: false, ..rules(3) };
            group.greet(id, Greeting { rules: Some(rules), ..dynamic(id as u32, (2, 3)) });
        }
        group.wait(31 * SECOND, &[1, 2]);
        group.prepare_all();
        group.greet(
            3,
            Greeting { rules: group.coordinator.reference.clone().unwrap().rules, ..dynamic(3, (2, 3)) },
        );
        // Node 1 has already ended for the pause when the stop arrives; node 2 ends at the same time.
        group.all_end(&[1], 143);
        group.stop(2, 2);
        group.all_end(&[2], 143);
        let codes: Vec<_> = group.ends().iter().map(|(id, end)| (*id, end.exit_code)).collect();
        let code = if trainer { 143 } else { 130 };
        assert_eq!(codes, [(1, code), (2, code), (3, code)]);
    }
}

/// A training job of up to two nodes in which only the members in `sharing` see the checkpoints of others.
struct Checkpoints<'a> {
    group: Group,
    sharing: &'a [MemberId],
}

impl Checkpoints<'_> {
    fn join(&mut self, id: MemberId) {
        let rules = GroupRules { trainer: true, fixed_ranks: false, ..rules(3) };
        let base = dynamic(id as u32, (1, 2));
        self.group.greet(id, Greeting { rules: Some(rules), instance: vec![id as u8], ..base });
    }

    /// Members report that they are ready. Returns the members that begin, each with the number of ranks that write
    /// checkpoints.
    fn prepare(&mut self) -> Vec<(MemberId, u32)> {
        for (id, message) in self.group.take() {
            if let ToAgent::Prepare(Prepare { attempt, checkpoints_instance, .. }) = message {
                let shared = self.sharing.contains(&id) || checkpoints_instance == [id as u8];
                let prepared = NodePrepared { attempt, shared, ..NodePrepared::default() };
                self.group.tell(id, FromAgent::Prepared(prepared));
            }
        }
        let begun = self.group.said.iter().filter_map(|(id, message)| match message {
            ToAgent::Begin(begin) => Some((*id, begin.writers)),
            _ => None,
        });
        begun.collect()
    }
}

#[test]
fn node_without_the_checkpoints_ends_the_job_rather_than_start_afresh() {
    // The node with the checkpoints is killed, or leaves, while another one joins.
    for leaves in [false, true] {
        let mut job = Checkpoints { group: Group::new(), sharing: &[] };
        job.join(1);
        job.group.wait(31 * SECOND, &[1]);
        assert_eq!(job.prepare(), [(1, 2)]);
        job.join(2);
        if leaves {
            job.group.stop(1, 15);
            job.group.all_end(&[1], 143);
            job.group.wait(31 * SECOND, &[2]);
        } else {
            job.group.input(Input::Disconnected(1));
            job.group.wait(10 * SECOND, &[2]);
        }
        assert_eq!(job.prepare(), []);
        let ends = job.group.ends();
        let (id, end) = ends.last().unwrap();
        assert_eq!((*id, end.exit_code), (2, 75), "{ends:?}");
        assert!(end.root.contains("does not see the checkpoints"), "{end:?}");
    }
}

#[test]
fn node_that_sees_the_checkpoints_takes_over_from_the_one_that_leaves() {
    let mut job = Checkpoints { group: Group::new(), sharing: &[2] };
    job.join(1);
    job.group.wait(31 * SECOND, &[1]);
    job.prepare();
    job.join(2);
    job.group.all_end(&[1], 143);
    assert_eq!(job.prepare(), [(1, 4), (2, 4)]);
    job.group.stop(1, 15);
    job.group.all_end(&[1, 2], 143);
    assert_eq!(job.prepare(), [(2, 2)]);
}

#[test]
fn agent_of_the_same_rank_replaces_one_whose_connection_has_closed() {
    let mut group = Group::running(2, 3);
    group.input(Input::Disconnected(2));
    group.greet(9, greeting(Some(1), (2, 2), rules(3)));
    assert!(group.take().iter().any(|(id, it)| *id == 1 && matches!(it, ToAgent::PeerFailed(_))));
    group.all_end(&[1], 75);
    assert_eq!(ranks(&group.prepare_all()), [(1, 0), (9, 1)]);
}

#[test]
fn agent_of_the_same_rank_waits_until_the_holder_is_lost_or_shows_that_it_lives() {
    let claim = || greeting(Some(1), (2, 2), rules(3));
    let mut group = Group::running(2, 3);
    group.input(Input::Heard(2));
    // One claimant waits, another gives up.
    group.greet(9, claim());
    group.greet(10, claim());
    group.input(Input::Disconnected(10));
    group.wait(11 * SECOND, &[1]);
    assert_eq!(group.take(), []);
    group.wait(2 * SECOND, &[1]);
    assert!(group.take().iter().any(|(id, it)| *id == 1 && matches!(it, ToAgent::PeerFailed(_))));
    group.all_end(&[1], 75);
    assert_eq!(ranks(&group.prepare_all()), [(1, 0), (9, 1)]);

    group.greet(11, claim());
    group.input(Input::Heard(9));
    assert_eq!(group.take(), []);
    group.now += SECOND;
    group.input(Input::Heard(9));
    let said = group.take();
    let expected = "node rank 1 of h1 (10.0.0.1) is taken by h1 (10.0.0.1)";
    assert_eq!(said.iter().filter_map(refusal).collect::<Vec<_>>(), [(11, expected)]);
    group.input(Input::Heard(9));
    assert_eq!(group.take(), []);
}

#[test]
fn agent_that_waits_for_a_rank_learns_that_the_loss_of_its_holder_has_ended_the_job() {
    let mut group = Group::running(2, 0);
    group.greet(9, greeting(Some(1), (2, 2), rules(0)));
    group.wait(13 * SECOND, &[1]);
    group.all_end(&[1], 75);
    let ends = group.ends();
    assert_eq!(ends.iter().map(|(id, end)| (*id, end.exit_code)).collect::<Vec<_>>(), [(1, 75), (9, 75)]);
}

#[test]
fn node_that_cannot_reach_the_next_one_is_named() {
    let mut group = Group::new();
    [0, 1].into_iter().for_each(|rank| group.greet(rank, greeting(Some(rank as u32), (2, 2), rules(0))));
    group.take();
    let problem = "cannot reach h0 at 10.0.0.0 port 7: timed out";
    group.tell(1, FromAgent::Prepared(NodePrepared { problem: problem.into(), ..NodePrepared::default() }));
    let ends = group.ends();
    assert_eq!((ends.len(), ends[0].1.exit_code), (2, 69));
    assert_eq!(ends[0].1.root, format!("the group: node 1 (h1) {problem}"));
}

fn states(group: &Group) -> Vec<(Option<u32>, MemberState)> {
    group.coordinator.nodes(group.now).iter().map(|node| (node.node_rank, node.state())).collect()
}

#[test]
fn status_lists_silent_nodes_and_lost_ones_until_they_are_replaced() {
    let mut group = Group::new();
    for address in 1..=3 {
        group.greet(u64::from(address), dynamic(address, (2, 2)));
    }
    group.prepare_all();
    use MemberState::{Active, Lost, Silent, Spare};
    assert_eq!(states(&group), [(Some(0), Active), (Some(1), Active), (None, Spare)]);
    group.wait(4 * SECOND, &[1, 3]);
    assert_eq!(states(&group), [(Some(0), Active), (Some(1), Silent), (None, Spare)]);
    group.wait(9 * SECOND, &[1, 3]);
    assert_eq!(states(&group), [(Some(0), Active), (Some(1), Lost), (None, Spare)]);
    let silence = group.coordinator.nodes(group.now)[1].seconds_since_heartbeat;
    assert!((12.9..13.1).contains(&silence), "{silence}");
    group.all_end(&[1], 75);
    group.prepare_all();
    assert_eq!(states(&group), [(Some(0), Active), (Some(1), Active)]);
}

#[test]
fn node_that_waits_for_the_next_attempt_is_not_a_spare() {
    use MemberState::{Active, Waiting};
    let mut group = Group::new();
    group.greet(1, dynamic(1, (2, 3)));
    assert_eq!(states(&group), [(None, Waiting)]);
    group.greet(2, dynamic(2, (2, 3)));
    group.wait(31 * SECOND, &[1, 2]);
    group.prepare_all();
    // The others save first.
    group.greet(3, dynamic(3, (2, 3)));
    assert_eq!(states(&group), [(Some(0), Active), (Some(1), Active), (None, Waiting)]);
}

#[test]
fn coordinator_alone_waits_for_its_first_member_without_a_deadline() {
    let mut group = Group::new();
    group.wait(3600 * SECOND, &[]);
    assert_eq!(group.coordinator.deadline(), None);
    group.greet(1, greeting(Some(0), (1, 1), rules(0)));
    assert_eq!(ranks(&group.prepare_all()), [(1, 0)]);
}

#[test]
fn questions_follow_the_node_that_answers_and_say_if_it_is_gone() {
    let mut group = Group::running(3, 0);
    let ask = |rank, node| {
        let question = Some(xlaunch_proto::v1::query::Question::Room(1));
        FromAgent::Query(Query { id: 7, rank, node, question, ..Query::default() })
    };
    let asked = |group: &mut Group, rank, node| {
        group.take();
        group.tell(1, ask(rank, node));
        group.take().into_iter().map(|(id, message)| (id, matches!(message, ToAgent::Query(_)))).collect()
    };
    let check = |group: &mut Group, rank, node, expected: &[(MemberId, bool)]| {
        let asked: Vec<(MemberId, bool)> = asked(group, rank, node);
        assert_eq!(asked, expected, "{rank:?} {node:?}");
    };
    check(&mut group, Some(4), None, &[(3, true)]);
    check(&mut group, Some(4), Some(2), &[(2, true)]);
    check(&mut group, Some(4), Some(9), &[(1, false)]);
    check(&mut group, Some(9), None, &[(1, false)]);
    check(&mut group, None, None, &[(1, false), (2, true), (3, true)]);
    let reply = QueryReply { id: 7, asker: 1, node: 99, ..QueryReply::default() };
    group.tell(3, FromAgent::QueryReply(reply));
    let answered = |(id, message): &(MemberId, ToAgent)| match message {
        ToAgent::QueryReply(reply) => Some((*id, reply.node)),
        _ => None,
    };
    assert_eq!(group.take().iter().find_map(answered), Some((1, 3)));
}

#[test]
fn coordinator_of_one_run_refuses_launches_of_others() {
    let mut group = Group::new();
    group.coordinator = Coordinator::new("run".into(), 1, || [7; 32], group.now).for_run("7".into());
    group.greet(1, Greeting { run_id: "8".into(), ..greeting(Some(0), (1, 1), rules(0)) });
    let expected = "node 0 (h0) has the run id `8`, the coordinator has `7`";
    assert_eq!(group.take().iter().find_map(refusal), Some((1, expected)));
    group.greet(2, greeting(Some(0), (1, 1), rules(0)));
    assert_eq!(ranks(&group.prepare_all()), [(2, 0)]);
}
