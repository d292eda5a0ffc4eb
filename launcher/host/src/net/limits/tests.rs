use std::collections::BTreeMap;

use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;

use super::super::admission::Replaces;
use super::*;
use crate::spawn::raise_open_file_limit;

const PER_USER: usize = 64;
const TOTAL: usize = 512;
const FIRST_CALL_TIMEOUT: Duration = Duration::from_secs(10);
const LIMITS: Limits =
    Limits { per_holder: PER_USER, total: TOTAL, margin: 1, replaces: Replaces::OwnYielding };

/// Connections of users over socket pairs.
struct Case {
    open: Connections,
    /// Connections with their calls in progress and the peers' ends.
    held: BTreeMap<u64, (Connection<UnixStream>, Vec<CallInProgress>, UnixStream)>,
}

impl Case {
    fn new(limits: Limits) -> Self {
        raise_open_file_limit();
        Self { open: Connections::new(limits, Some(FIRST_CALL_TIMEOUT)), held: BTreeMap::new() }
    }

    /// Returns whether a new connection of the user is admitted.
    fn connect(&mut self, uid: u32, busy: bool) -> bool {
        self.connect_as(Credentials { uid, holder: uid, pid: None, exempt: false, reserved: false }, busy)
    }

    fn connect_as(&mut self, peer: Credentials, busy: bool) -> bool {
        let (stream, far) = UnixStream::pair().unwrap();
        let Some(connection) = self.open.admit(stream, peer).unwrap() else { return false };
        let calls = busy.then(|| connection.peer.begin_call()).into_iter().collect();
        let number = connection._slot.as_ref().unwrap().number;
        self.held.insert(number, (connection, calls, far));
        true
    }

    fn numbers(&self, uid: u32) -> Vec<u64> {
        lock(&self.open.ordinary).iter().filter(|it| it.1 == uid).map(|it| it.0).collect()
    }

    fn total(&self) -> usize {
        lock(&self.open.ordinary).iter().count()
    }
}

#[tokio::test]
async fn new_connection_of_a_user_replaces_their_oldest_idle_one() {
    let mut case = Case::new(LIMITS);
    assert!(case.connect(1, true));
    (1..PER_USER).for_each(|_| assert!(case.connect(1, false)));
    assert!(case.connect(1, false));
    let numbers = case.numbers(1);
    assert_eq!((numbers.len(), numbers[0], numbers[1]), (PER_USER, 0, 2), "1 was closed, 0 is busy");
    assert!(case.connect(2, false), "other users are not affected");
    for number in case.numbers(1) {
        let (connection, calls, _) = case.held.get_mut(&number).unwrap();
        calls.push(connection.peer.begin_call());
    }
    assert!(!case.connect(1, false), "all of theirs are busy");
    assert_eq!(case.numbers(2).len(), 1);
    case.held.pop_first();
    assert!(case.connect(1, false), "one was closed");
}

#[tokio::test]
async fn busy_connections_are_closed_if_the_limits_allow_it() {
    let limits = Limits { per_holder: 2, total: 2, replaces: Replaces::Own, ..LIMITS };
    let mut case = Case::new(limits);
    assert!(case.connect(1, true) && case.connect(1, false) && case.connect(1, true));
    assert_eq!(case.numbers(1), [0, 2], "the idle one first");
    assert!(case.connect(1, true));
    assert_eq!(case.numbers(1), [2, 3], "then the oldest");
}

#[tokio::test]
async fn exempt_connections_do_not_count() {
    let mut case = Case::new(Limits { per_holder: 1, total: 1, ..LIMITS });
    assert!(case.connect(1, true));
    let (stream, _far) = UnixStream::pair().unwrap();
    let worker = case
        .open
        .admit(stream, Credentials { uid: 1, holder: 1, pid: None, exempt: true, reserved: false })
        .unwrap();
    assert!(worker.is_some_and(|connection| connection._slot.is_none()));
    assert_eq!(case.total(), 1);
}

#[tokio::test]
async fn new_connection_replaces_one_of_the_user_with_the_most() {
    let mut case = Case::new(LIMITS);
    for uid in 1..=8 {
        (0..PER_USER).for_each(|_| assert!(case.connect(uid, true)));
    }
    for count in 1..PER_USER - 8 {
        assert!(case.connect(9, true));
        assert_eq!((case.numbers(9).len(), case.total()), (count, TOTAL));
    }
    let fewest = (1..=8).map(|uid| case.numbers(uid).len()).min().unwrap();
    assert!(fewest >= TOTAL / 9, "{fewest}");
}

#[tokio::test]
async fn many_user_ids_with_a_connection_each_do_not_keep_administrators_out() {
    let mut case = Case::new(LIMITS);
    (1000..1000 + TOTAL as u32).for_each(|uid| assert!(case.connect(uid, true)));
    assert!(!case.connect(1, true));
    let root = Credentials { uid: 0, holder: 0, pid: None, exempt: false, reserved: true };
    (0..PER_USER).for_each(|_| assert!(case.connect_as(root, true)));
    assert!(!case.connect_as(root, true), "they have limits, too");
}

#[tokio::test]
async fn connections_without_a_first_call_are_closed() {
    let mut case = Case::new(LIMITS);
    assert!(case.connect(1, false) && case.connect(1, true) && case.connect(2, false));
    case.open.close_unused(Instant::now());
    assert_eq!(case.numbers(1), [0, 1]);
    case.open.close_unused(Instant::now() + FIRST_CALL_TIMEOUT);
    assert_eq!((case.numbers(1), case.numbers(2)), (vec![1], vec![]));
    let (.., far) = case.held.get_mut(&0).unwrap();
    let end = tokio::time::timeout(Duration::from_secs(60), far.read(&mut [0])).await;
    assert_eq!(end.expect("the caller sees the end").unwrap(), 0);
}

#[tokio::test]
async fn many_user_ids_of_one_person_shut_out_nobody() {
    let owned = |uid| Credentials { uid, holder: 7, pid: None, exempt: false, reserved: false };
    let mut case = Case::new(LIMITS);
    let admitted = (100_000..100_600).filter(|uid| case.connect_as(owned(*uid), true)).count();
    assert_eq!((admitted, case.total()), (PER_USER, PER_USER), "all of them are counted to user 7");
    assert!(case.connect(1, true) && !case.connect(7, true));
    // The owner of these ids becomes known only later.
    let mut case = Case::new(LIMITS);
    (100_000..100_600).for_each(|uid| {
        case.connect(uid, true);
    });
    assert!(case.total() == TOTAL && !case.connect(1, true));
    (100_000..100_600).for_each(|uid| case.open.recount(uid, 7));
    assert!(case.connect(1, true), "the holder of the most connections loses one");
}
