//! Accounts in the system's user database. It may be a network service and slow, so lookups block.

use std::io;

use nix::unistd::{Uid, User};

/// What the daemon needs to know of a user who submits a job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Account {
    pub name: String,
    /// The primary group.
    pub gid: u32,
}

/// The account with this user id. Blocks.
pub(crate) fn find(uid: u32) -> io::Result<Option<Account>> {
    let user = User::from_uid(Uid::from_raw(uid))?;
    Ok(user.map(|user| Account { name: user.name, gid: user.gid.as_raw() }))
}
