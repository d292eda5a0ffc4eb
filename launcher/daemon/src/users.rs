//! Lookups in the system's user database. It may be a network service and slow, hence `block_in_place`.

use std::collections::BTreeMap;

use nix::unistd::{Uid, User};

/// User names, each looked up once.
#[derive(Debug, Default)]
pub(super) struct Users(BTreeMap<u32, String>);

impl Users {
    /// The user's name; empty if the user is unknown.
    pub(super) fn name(&mut self, uid: u32) -> String {
        self.0.entry(uid).or_insert_with(|| find(uid).map(|user| user.name).unwrap_or_default()).clone()
    }

    /// The user in messages: the name if [`name`](Self::name) has found it, otherwise the number. Makes no lookup.
    pub(super) fn label(&self, uid: u32) -> String {
        match self.0.get(&uid) {
            Some(name) if !name.is_empty() => name.clone(),
            _ if uid == 0 => "root".into(),
            _ => uid.to_string(),
        }
    }
}

/// The user's primary group. An unknown user has the group with the same number.
pub(super) fn gid(uid: u32) -> u32 {
    find(uid).map_or(uid, |user| user.gid.as_raw())
}

fn find(uid: u32) -> Option<User> {
    tokio::task::block_in_place(|| User::from_uid(Uid::from_raw(uid))).ok().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_is_the_name_of_a_known_user_and_the_number_of_another() {
        let users = Users([(1000, "anna".to_owned()), (1001, String::new())].into());
        assert_eq!([0, 1000, 1001, 1002].map(|uid| users.label(uid)), ["root", "anna", "1001", "1002"]);
    }
}
