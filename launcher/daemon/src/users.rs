//! Accounts in the system's user database. Lookups block, and may be slow if the database is a network service.

use std::io;

use nix::errno::Errno;
use nix::unistd::{Uid, User, getgid, getuid};

/// The account of a user who submits a job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Account {
    pub name: String,
    /// Id of the primary group.
    pub gid: u32,
}

/// Looks up the account with this user id. The daemon's own user has one in any case, unless it is root. Blocks.
pub(crate) fn find(uid: u32) -> io::Result<Option<Account>> {
    let user = known(User::from_uid(Uid::from_raw(uid)))?;
    let account = user.map(|user| Account { name: user.name, gid: user.gid.as_raw() });
    Ok(account.or_else(|| of_daemon(uid, getuid().as_raw(), getgid().as_raw())))
}

/// Returns the result of a lookup. A database that does not exist, as in a minimal container, has no entries.
pub(crate) fn known<T>(found: nix::Result<Option<T>>) -> io::Result<Option<T>> {
    match found {
        Err(Errno::ENOENT) => Ok(None),
        found => Ok(found?),
    }
}

/// Returns an account for the user of a daemon in a container, where any user id can run programs. Its jobs have the
/// same user and group as the daemon, so they get nothing that belongs to someone else.
fn of_daemon(uid: u32, own: u32, gid: u32) -> Option<Account> {
    (uid == own && own != 0).then(|| Account { name: uid.to_string(), gid })
}

/// Returns the label of a user in messages: the name, or the user id if it has no account. Blocks.
pub(crate) fn label(uid: u32) -> String {
    find(uid).ok().flatten().map_or_else(|| uid.to_string(), |account| account.name)
}

/// Checks that a user id still belongs to the user of this name, and returns the problem if it does not: after an
/// account is removed, its user id may be given to another user. Jobs of version 0.1 have no user name; any account is
/// accepted.
pub(crate) fn mismatch(uid: u32, user: &str, found: Option<&Account>) -> Option<String> {
    match found {
        None if user.is_empty() => Some(format!("user id {uid} has no account on this node")),
        None => Some(format!("user id {uid} has no account on this node any more; it was that of `{user}`")),
        Some(account) if user.is_empty() || account.name == user => None,
        Some(Account { name, .. }) => Some(format!(
            "user id {uid} belonged to `{user}` when the job was submitted, and belongs to `{name}` now"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_id_that_was_given_to_another_user_is_a_mismatch() {
        let bob = Account { name: "bob".into(), gid: 1 };
        assert_eq!(mismatch(1001, "bob", Some(&bob)), None);
        assert_eq!(mismatch(1001, "", Some(&bob)), None, "a job of version 0.1");
        let given = mismatch(1001, "anna", Some(&bob)).unwrap();
        assert!(given.contains("belonged to `anna`") && given.contains("belongs to `bob` now"), "{given}");
        assert!(mismatch(1001, "anna", None).unwrap().contains("no account on this node any more"));
    }

    #[test]
    fn only_the_daemons_own_user_needs_no_account_unless_it_is_root() {
        let own = Account { name: "7".into(), gid: 8 };
        assert_eq!(of_daemon(7, 7, 8), Some(own));
        assert_eq!([of_daemon(6, 7, 8), of_daemon(0, 0, 8)], [None, None]);
    }

    #[test]
    fn missing_database_has_no_entries() {
        assert_eq!(known::<()>(Err(Errno::ENOENT)).unwrap(), None);
        assert!(known::<()>(Err(Errno::EIO)).is_err());
        assert_eq!(known(Ok(Some(7))).unwrap(), Some(7));
    }

    #[test]
    fn user_is_called_by_name_or_number() {
        assert_eq!((label(0).as_str(), label(3_999_999_999).as_str()), ("root", "3999999999"));
    }
}
