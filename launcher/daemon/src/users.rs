//! Users by number, as the system knows them.

use std::collections::BTreeMap;

use nix::unistd::{Uid, User};

/// Names that were looked up. The system's answer may take a while, so each is asked for once.
#[derive(Debug, Default)]
pub(super) struct Users(BTreeMap<u32, String>);

impl Users {
    /// The user's name; empty for one without.
    pub(super) fn name(&mut self, uid: u32) -> String {
        self.0.entry(uid).or_insert_with(|| find(uid).map(|user| user.name).unwrap_or_default()).clone()
    }
}

/// The user's first group; of a number without a user, the group of the same number.
pub(super) fn gid(uid: u32) -> u32 {
    find(uid).map_or(uid, |user| user.gid.as_raw())
}

fn find(uid: u32) -> Option<User> {
    tokio::task::block_in_place(|| User::from_uid(Uid::from_raw(uid))).ok().flatten()
}
