//! Failures of ranks and nodes, their order and their consequences.

use super::*;

fn peer_failures(said: &[(MemberId, ToAgent)]) -> Vec<(MemberId, &str)> {
    let failure = |(id, message): &'_ (MemberId, ToAgent)| match message {
        ToAgent::PeerFailed(failed) => Some((*id, failed.message.as_str().to_owned())),
        _ => None,
    };
    said.iter().filter_map(failure).map(|(id, text)| (id, &*Box::leak(text.into_boxed_str()))).collect()
}

#[test]
fn failure_of_a_rank_ends_the_attempt_on_the_other_nodes_at_once() {
    let mut group = Group::running(3, 0);
    group.fail(2, 3, false);
    let said = group.take();
    let text = "node 1 (h1): rank 3: exit code 3";
    assert_eq!(peer_failures(&said), [(1, text), (3, text)]);
    group.all_end(&[1, 2, 3], 1);
    let ends = group.ends();
    assert_eq!(ends.len(), 3);
    assert!(
        ends.iter().all(|(_, end)| (end.exit_code, end.node_rank, end.root.as_str()) == (1, Some(1), text))
    );
    assert!(group.coordinator.is_over());
}

#[test]
fn lost_peers_are_consequences_of_a_failure_reported_later_by_another_node() {
    let mut group = Group::running(3, 0);
    group.fail(1, 0, true);
    assert_eq!(peer_failures(&group.take()), [], "its cause may still come");
    group.now += SECOND;
    group.fail(3, 4, false);
    let text = "node 2 (h2): rank 4: exit code 3";
    assert_eq!(peer_failures(&group.take()), [(1, text), (2, text)]);
    group.all_end(&[1, 2, 3], 1);
    assert_eq!(group.ends()[0].1.root, text);
}

#[test]
fn messages_about_another_attempt_change_nothing() {
    let mut group = Group::running(2, 3);
    group.fail(2, 2, false);
    group.all_end(&[1, 2], 1);
    let prepares = group.take().into_iter().filter(|(_, it)| matches!(it, ToAgent::Prepare(_)));
    assert_eq!(prepares.count(), 2);
    // Both nodes report for the previous attempt that they are ready: the new one must not begin.
    for id in [1, 2] {
        let prepared = NodePrepared { master_port: 20_000, shared: true, ..NodePrepared::default() };
        group.tell(id, FromAgent::Prepared(prepared));
    }
    assert_eq!(group.take(), []);
    for id in [1, 2] {
        let (attempt, master_port) = (1, 20_000);
        let prepared = NodePrepared { attempt, master_port, shared: true, ..NodePrepared::default() };
        group.tell(id, FromAgent::Prepared(prepared));
    }
    assert!(group.take().iter().all(|(_, it)| matches!(it, ToAgent::Begin(_))));
    for attempt in [0, 2] {
        let cause = Some(cause(0, false));
        group.tell(1, FromAgent::Failed(NodeFailed { attempt, cause }));
        group.tell(1, FromAgent::Ended(NodeEnded { attempt, exit_code: 1, ..NodeEnded::default() }));
    }
    group.wait(3 * SECOND, &[1, 2]);
    assert_eq!(group.take(), []);
}

#[test]
fn lost_peer_without_a_cause_ends_the_attempt_within_two_seconds() {
    let mut group = Group::running(2, 0);
    group.fail(1, 0, true);
    group.wait(2 * SECOND, &[1, 2]);
    assert_eq!(peer_failures(&group.take()), [(2, "node 0 (h0): rank 0: exit code 3")]);
}

#[test]
fn agent_that_is_gone_is_the_root_cause_although_others_fail_first() {
    let mut group = Group::running(2, 0);
    group.now += 5 * SECOND;
    group.input(Input::Heard(2));
    group.input(Input::Heard(1));
    group.input(Input::Disconnected(2));
    group.fail(1, 0, true);
    group.wait(2 * SECOND, &[1]);
    assert!(peer_failures(&group.take()).contains(&(1, "node 1 (h1): the agent is gone")));
    group.all_end(&[1], 75);
    let ends = group.ends();
    assert_eq!((ends[0].1.exit_code, ends[0].1.root.as_str()), (75, "node 1 (h1): the agent is gone"));
}

#[test]
fn agent_that_connects_again_within_a_second_has_lost_nothing() {
    let mut group = Group::running(2, 0);
    group.input(Input::Disconnected(2));
    group.wait(SECOND / 2, &[1]);
    group.input(Input::Connected(2));
    group.wait(10 * SECOND, &[1, 2]);
    assert_eq!(group.take(), []);
}

#[test]
fn silence_of_less_than_the_lease_is_shown_and_more_is_a_loss() {
    let mut group = Group::running(2, 0);
    group.wait(4 * SECOND, &[1]);
    let state = |group: &Group| group.coordinator.nodes(group.now)[1].state();
    assert_eq!((state(&group), group.take().len()), (MemberState::Silent, 0));
    group.wait(7 * SECOND, &[1, 2]);
    assert_eq!(state(&group), MemberState::Active);
    group.wait(12 * SECOND, &[1]);
    assert_eq!(peer_failures(&group.take()), [(1, "node 1 (h1): the node was silent for 12 s")]);
}

#[test]
fn resumed_coordinator_first_reads_messages_sent_during_its_suspension() {
    let mut group = Group::running(2, 0);
    group.now += 20 * SECOND;
    group.input(Input::Tick);
    group.input(Input::Heard(1));
    group.wait(11 * SECOND, &[1]);
    assert_eq!(group.take(), []);
    group.wait(SECOND, &[1]);
    assert_eq!(peer_failures(&group.take()), [(1, "node 1 (h1): the node was silent for 12 s")]);
}

#[test]
fn suspended_coordinator_is_the_cause_if_nodes_have_ended_their_workers() {
    let cut_off = || RootCause {
        message: "no contact with the coordinator for 11 s".into(),
        exit_code: 75,
        consequence: true,
        infrastructure: true,
        counted_as: "peer".into(),
        ..RootCause::default()
    };
    let expected = "node 0 (h0): the coordinator did not run for 20 s: suspended, or its host is overloaded";
    // Member 0 hosts the coordinator. The other one reports that its workers have ended, or has given up.
    for gives_up in [false, true] {
        let mut group = Group::new();
        group.greet(0, greeting(Some(0), (2, 2), rules(0)));
        group.greet(1, greeting(Some(1), (2, 2), rules(0)));
        group.prepare_all();
        group.wait(SECOND, &[1]);
        group.now += 20 * SECOND;
        if gives_up {
            group.input(Input::Disconnected(1));
            group.wait(2 * SECOND, &[]);
        } else {
            group.tell(1, FromAgent::Failed(NodeFailed { attempt: 0, cause: Some(cut_off()) }));
        }
        let said = group.take();
        assert!(peer_failures(&said).contains(&(0, expected)), "{said:?}");
        group.all_end(if gives_up { &[0] } else { &[0, 1] }, 75);
        let ends = group.ends();
        assert_eq!((ends[0].1.exit_code, ends[0].1.root.as_str()), (75, expected));
    }
    // A suspension long ago, or a short one, explains nothing.
    for (suspended, later) in [(20, 30), (3, 0)] {
        let mut group = Group::new();
        group.greet(0, greeting(Some(0), (2, 2), rules(0)));
        group.greet(1, greeting(Some(1), (2, 2), rules(0)));
        group.prepare_all();
        group.now += suspended * SECOND;
        group.wait(later * SECOND, &[1]);
        group.tell(1, FromAgent::Failed(NodeFailed { attempt: 0, cause: Some(cut_off()) }));
        group.all_end(&[0, 1], 75);
        assert_eq!(group.ends()[0].1.root, "node 1 (h1): no contact with the coordinator for 11 s");
    }
}

#[test]
fn sigterm_that_announces_a_preemption_ends_the_job_with_75_and_a_users_stop_with_143() {
    for (signal, code) in [(15, 75), (0, 143)] {
        let preempted = GroupRules { sigterm_is_preemption: true, trainer: true, ..rules(0) };
        let mut group = Group::new();
        (0..2).for_each(|rank| {
            group.greet(u64::from(rank), greeting(Some(rank), (2, 2), preempted.clone()));
        });
        group.prepare_all();
        group.stop(1, signal);
        for id in [0, 1] {
            let ended = NodeEnded { r#final: true, exit_code: 143, saved: true, ..NodeEnded::default() };
            group.tell(id, FromAgent::Ended(ended));
        }
        let codes: Vec<_> = group.ends().iter().map(|(_, end)| end.exit_code).collect();
        assert_eq!(codes, [code, code]);
    }
}

#[test]
fn attempt_begins_only_when_every_member_has_ended_the_last_one() {
    let mut group = Group::running(3, 5);
    group.fail(2, 3, false);
    group.all_end(&[1, 2], 1);
    group.wait(5 * SECOND, &[1, 2, 3]);
    assert!(!group.take().iter().any(|(_, message)| matches!(message, ToAgent::Prepare(_))));
    // Messages about the last attempt change nothing in the next one.
    group.all_end(&[3], 1);
    let stale = NodeFailed { attempt: 0, cause: Some(cause(0, false)) };
    assert_eq!(group.prepare_all().len(), 3);
    group.tell(1, FromAgent::Failed(stale));
    assert_eq!(group.take(), []);
}

#[test]
fn lost_node_without_a_replacement_ends_the_job_with_75() {
    let mut group = Group::running(2, 3);
    group.input(Input::Disconnected(2));
    group.wait(2 * SECOND, &[1]);
    group.all_end(&[1], 75);
    group.take();
    group.wait(601 * SECOND, &[1]);
    let ends = group.ends();
    assert_eq!((ends.len(), ends[0].1.exit_code), (1, 75));
    assert_eq!(ends[0].1.root, "node 1 (h1): the agent is gone; no other node replaced it");
}

#[test]
fn job_is_done_when_all_nodes_are_and_stop_reaches_all_nodes() {
    let mut group = Group::running(2, 0);
    group.all_end(&[1], 0);
    assert_eq!(group.ends(), []);
    group.all_end(&[2], 0);
    assert_eq!(group.ends().iter().map(|(_, end)| end.exit_code).collect::<Vec<_>>(), [0, 0]);
    let mut group = Group::running(2, 3);
    group.stop(2, 2);
    assert!(matches!(group.take()[..], [(1, ToAgent::Stop(_)), (2, ToAgent::Stop(_))]));
    // The same interrupt arrives on the second node as well; then a second one follows.
    group.stop(1, 2);
    assert_eq!(group.take(), []);
    group.stop(1, 2);
    assert_eq!(group.take().len(), 2);
    for id in [1, 2] {
        let ended = NodeEnded { r#final: true, exit_code: 130, ..NodeEnded::default() };
        group.tell(id, FromAgent::Ended(ended));
    }
    assert_eq!(group.ends()[1].1.exit_code, 130);
}

#[test]
fn node_that_refuses_the_job_ends_it_everywhere() {
    let mut group = Group::new();
    [0, 1].into_iter().for_each(|rank| group.greet(rank, greeting(Some(rank as u32), (2, 2), rules(5))));
    let refused = xlaunch_proto::v1::NodeRefused { exit_code: 65, message: "bad data".into() };
    group.tell(1, FromAgent::Refused(refused));
    let ends = group.ends();
    assert_eq!((ends[0].1.exit_code, ends[0].1.root.as_str()), (65, "node 1 (h1): bad data"));
}
