use std::os::unix::fs::PermissionsExt;

use tokio::io::AsyncReadExt;

use super::*;

/// Connections of users, without sockets of their own.
struct Case {
    open: Connections,
    /// With the callers' ends.
    held: BTreeMap<u64, (Connection, Vec<InProgress>, UnixStream)>,
}

impl Case {
    fn new() -> Self {
        Self { open: Connections::default(), held: BTreeMap::new() }
    }

    /// Whether the user got one more.
    fn connect(&mut self, uid: u32, busy: bool) -> bool {
        let (stream, far) = UnixStream::pair().unwrap();
        let Some(connection) = self.open.add(stream, uid, None).unwrap() else { return false };
        let calls = busy.then(|| connection.peer.calls()).into_iter().collect();
        self.held.insert(connection._held.number, (connection, calls, far));
        true
    }

    fn numbers(&self, uid: u32) -> Vec<u64> {
        lock(&self.open.0).of(uid).map(|(number, _)| number).collect()
    }
}

#[tokio::test]
async fn the_oldest_idle_connection_of_a_user_makes_room_for_their_newest() {
    let mut case = Case::new();
    assert!(case.connect(1, true));
    (1..EACH).for_each(|_| assert!(case.connect(1, false)));
    assert!(case.connect(1, false));
    let numbers = case.numbers(1);
    assert_eq!((numbers.len(), numbers[0], numbers[1]), (EACH, 0, 2), "1 has gone, 0 is busy");
    assert!(case.connect(2, false), "others are not concerned");
    for number in case.numbers(1) {
        let (connection, calls, _) = case.held.get_mut(&number).unwrap();
        calls.push(connection.peer.calls());
    }
    assert!(!case.connect(1, false), "all of theirs are busy");
    assert_eq!(case.numbers(2).len(), 1);
    case.held.pop_first();
    assert!(case.connect(1, false), "one is closed");
}

#[tokio::test]
async fn users_who_hold_everything_keep_nobody_out() {
    let mut case = Case::new();
    for uid in 1..=8 {
        (0..EACH).for_each(|_| assert!(case.connect(uid, true)));
    }
    for count in 1..EACH - 8 {
        assert!(case.connect(9, true));
        assert_eq!((case.numbers(9).len(), lock(&case.open.0).entries.len()), (count, ALL));
    }
    let fewest = (1..=8).map(|uid| case.numbers(uid).len()).min().unwrap();
    assert!(fewest >= ALL / 9, "{fewest}");
}

#[tokio::test]
async fn who_never_speaks_has_to_go() {
    let mut case = Case::new();
    assert!(case.connect(1, false) && case.connect(1, true) && case.connect(2, false));
    case.open.end_silent(Instant::now());
    assert_eq!(case.numbers(1), [0, 1]);
    case.open.end_silent(Instant::now() + SILENCE);
    assert_eq!((case.numbers(1), case.numbers(2)), (vec![1], vec![]));
    let (.., far) = case.held.get_mut(&0).unwrap();
    let end = tokio::time::timeout(Duration::from_secs(60), far.read(&mut [0])).await;
    assert_eq!(end.expect("the caller sees the end").unwrap(), 0);
}

#[tokio::test]
async fn the_socket_is_private_and_replaces_that_of_a_dead_daemon_alone() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("xlaunch.sock");
    let first = bind(&socket, Some("no-such-group")).unwrap();
    assert_eq!(fs_err::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
    let error = bind(&socket, None).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::AddrInUse, "{error}");
    UnixStream::connect(&socket).await.unwrap();
    drop(first);
    let second = bind(&socket, None).unwrap();
    let (connected, accepted) = tokio::join!(UnixStream::connect(&socket), second.accept());
    assert_eq!(peer(&accepted.unwrap().0).unwrap().0, rustix::process::getuid().as_raw());
    drop(connected);

    let file = dir.path().join("file");
    fs_err::write(&file, "precious").unwrap();
    assert_eq!(bind(&file, None).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    assert_eq!(fs_err::read_to_string(&file).unwrap(), "precious");
    assert!(bind(&dir.path().join("d".repeat(200)), None).unwrap_err().to_string().contains("too long"));
}

#[tokio::test]
async fn the_members_of_a_group_reach_the_daemon_of_root() {
    use std::os::unix::fs::MetadataExt;
    let group = Group::from_gid(rustix::process::getgid().as_raw().into()).unwrap();
    let (true, Some(group)) = (rustix::process::getuid().is_root(), group) else {
        return eprintln!("skipped: this is not root, or the group has no name");
    };
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("xlaunch.sock");
    let _listener = bind(&socket, Some(&group.name)).unwrap();
    let found = fs_err::metadata(&socket).unwrap();
    assert_eq!((found.mode() & 0o777, found.gid()), (0o660, group.gid.as_raw()));
}
