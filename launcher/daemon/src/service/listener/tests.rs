use std::os::unix::fs::PermissionsExt;

use tokio::net::UnixStream;
use xlaunch_host::net::peer_credentials;

use super::*;

#[tokio::test]
async fn socket_is_private_and_replaces_only_that_of_a_dead_daemon() {
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
    assert_eq!(peer_credentials(&accepted.unwrap().0).unwrap().uid, rustix::process::getuid().as_raw());
    drop(connected);

    let file = dir.path().join("file");
    fs_err::write(&file, "precious").unwrap();
    assert_eq!(bind(&file, None).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    assert_eq!(fs_err::read_to_string(&file).unwrap(), "precious");
    assert!(bind(&dir.path().join("d".repeat(200)), None).unwrap_err().to_string().contains("too long"));
}

#[tokio::test]
async fn group_members_can_connect() {
    use std::os::unix::fs::MetadataExt;
    let group = Group::from_gid(rustix::process::getgid().as_raw().into()).unwrap();
    let group = group.expect("the group of this process has no name");
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("xlaunch.sock");
    let _listener = bind(&socket, Some(&group.name)).unwrap();
    let found = fs_err::metadata(&socket).unwrap();
    // The daemon of an ordinary user is theirs alone.
    let mode = if rustix::process::getuid().is_root() { 0o660 } else { 0o600 };
    assert_eq!((found.mode() & 0o777, found.gid()), (mode, group.gid.as_raw()));
}

#[tokio::test]
async fn deleted_socket_is_restored() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("run/xlaunch.sock");
    fs_err::create_dir(dir.path().join("run")).unwrap();
    let listener = bind(&socket, None).unwrap();
    let identify = |stream: &UnixStream| peer_credentials(stream).map(Some);
    let mut incoming = accept(listener, None, Connections::new(LIMITS, FIRST_CALL_TIMEOUT), identify);
    for deleted in [socket.clone(), dir.path().join("run")] {
        let _first = UnixStream::connect(&socket).await.unwrap();
        incoming.next().await.unwrap().unwrap();
        if deleted.is_dir() { fs_err::remove_dir_all(&deleted) } else { fs_err::remove_file(&deleted) }
            .unwrap();
        let connected = async {
            while UnixStream::connect(&socket).await.is_err() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), connected).await.expect("the socket is not restored");
        incoming.next().await.unwrap().unwrap();
    }
}
