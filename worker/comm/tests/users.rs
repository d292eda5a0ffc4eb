//! A rank of a ring connects only to processes of its own user and of root, and accepts no others.
//!
//! Each thread can have its own user, so rank 1 of these rings runs as another user. Permissions of files and sockets
//! do not keep that user out here: the ranks themselves have to.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use rustix::thread::{Uid, set_thread_uid};
use xlaunch_comm::{Ring, RingListener, RingPlace};

xlaunch_harness::suite! {
    needs root:
    rank_of_another_user_cannot_connect,
    socket_of_another_user_is_not_used;
}

const NOBODY: u32 = 65_534;
/// Time for ranks to connect. Ranks that are allowed to connect do so at once.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

fn root() -> xlaunch_harness::Requirement {
    if rustix::process::geteuid().is_root() { Ok(()) } else { Err("needs root".into()) }
}

fn rank_of_another_user_cannot_connect() {
    // Rank 0 connects to a socket of its own user, on which rank 1 listens.
    let error = connect_beside_rank_of_nobody(|listen, become_nobody| {
        let listener = listen();
        become_nobody();
        listener
    });
    assert!(error.contains("rank 1") && error.contains("did not connect"), "{error}");
}

fn socket_of_another_user_is_not_used() {
    let error = connect_beside_rank_of_nobody(|listen, become_nobody| {
        become_nobody();
        listen()
    });
    assert!(error.contains("rank 1") && error.contains(&format!("belongs to user {NOBODY}")), "{error}");
}

/// Returns the error of rank 0 in a ring of two. `prepare` listens as rank 1 and becomes another user, in either order.
fn connect_beside_rank_of_nobody(
    prepare: fn(&dyn Fn() -> RingListener, &dyn Fn()) -> RingListener,
) -> String {
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), Permissions::from_mode(0o777)).unwrap();
    let dir = dir.path();
    let ours = listen(dir, 0);
    let our_address = ours.address().to_owned();
    let (sender, receiver) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let become_nobody = || set_thread_uid(Uid::from_raw(NOBODY)).unwrap();
            let theirs = prepare(&|| listen(dir, 1), &become_nobody);
            sender.send(theirs.address().to_owned()).unwrap();
            // It does not matter whether this rank finds a ring. It listens for longer than rank 0 tries to connect.
            let _ = Ring::connect(theirs, &place(1, &our_address), 2 * CONNECT_TIMEOUT);
        });
        let their_address = receiver.recv().unwrap();
        Ring::connect(ours, &place(0, &their_address), CONNECT_TIMEOUT).unwrap_err().to_string()
    })
}

/// Listens on a socket to which every user can connect.
fn listen(dir: &Path, rank: usize) -> RingListener {
    let listener = RingListener::bind(dir, rank).unwrap();
    let path = listener.address().strip_prefix("unix:").unwrap();
    std::fs::set_permissions(path, Permissions::from_mode(0o777)).unwrap();
    listener
}

fn place(rank: usize, next_address: &str) -> RingPlace<'_> {
    RingPlace { rank, world: 2, next_address, key: &[7; 32] }
}
