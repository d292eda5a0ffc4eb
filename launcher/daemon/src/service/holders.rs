//! Determines the holder that connections and calls count against, because one person can call with thousands of user
//! ids from user namespaces.
//!
//! Subordinate ids (subuid(5)) count against their owner, and all ids without an account against a common holder.
//! Accounts are looked up in the background, since the user database may be slow; until then an id counts by itself.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use nix::unistd::User;

use super::lock;

/// Holder of ids without an account. No process has this id.
pub(super) const WITHOUT_ACCOUNT: u32 = u32::MAX;
const SUBORDINATE_IDS: &str = "/etc/subuid";
/// Interval between checks whether the file has changed.
const RELOAD_INTERVAL: Duration = Duration::from_secs(5);
/// Time for which a lookup is valid. An account may be created later for an id that has already called.
const ACCOUNT_TTL: Duration = Duration::from_secs(60);
/// Limit on the ids remembered, which bounds the memory.
const MAX_KNOWN_IDS: usize = 4096;

/// Finds the holders of user ids.
#[derive(Debug)]
pub(super) struct Holders {
    path: PathBuf,
    ranges: Mutex<Ranges>,
    accounts: Mutex<HashMap<u32, (Known, Instant)>>,
}

/// Contents of the file when it was last read.
#[derive(Debug, Default)]
struct Ranges {
    checked: Option<Instant>,
    modified: Option<SystemTime>,
    /// Ranges of ids: first id, number of ids, owner.
    ranges: Arc<[(u32, u32, u32)]>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    BeingLookedUp,
    Account,
    NoAccount,
}

/// The holder that an id counts against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Holder {
    Known(u32),
    /// The id counts by itself until the caller has looked it up and called [`Holders::looked_up`].
    LookUp,
}

impl Holders {
    pub(super) fn new() -> Self {
        Self::read_from(SUBORDINATE_IDS.into())
    }

    fn read_from(path: PathBuf) -> Self {
        Self { path, ranges: Mutex::default(), accounts: Mutex::default() }
    }

    /// Returns the holder that this id counts against.
    pub(super) fn of(&self, uid: u32, now: Instant) -> Holder {
        let in_range = |(first, count, _): &&(u32, u32, u32)| uid >= *first && uid - first < *count;
        if let Some((.., owner)) = self.ranges(now).iter().find(in_range) {
            return Holder::Known(*owner);
        }
        let mut accounts = lock(&self.accounts);
        match accounts.get(&uid) {
            Some((Known::NoAccount, at)) if now.duration_since(*at) < ACCOUNT_TTL => {
                Holder::Known(WITHOUT_ACCOUNT)
            }
            Some((Known::Account | Known::BeingLookedUp, at)) if now.duration_since(*at) < ACCOUNT_TTL => {
                Holder::Known(uid)
            }
            _ => {
                if accounts.len() >= MAX_KNOWN_IDS {
                    accounts.retain(|_, (_, at)| now.duration_since(*at) < ACCOUNT_TTL);
                }
                if accounts.len() >= MAX_KNOWN_IDS {
                    return Holder::Known(WITHOUT_ACCOUNT);
                }
                accounts.insert(uid, (Known::BeingLookedUp, now));
                Holder::LookUp
            }
        }
    }

    /// Stores whether an id has an account.
    pub(super) fn looked_up(&self, uid: u32, has_account: bool, now: Instant) {
        let known = if has_account { Known::Account } else { Known::NoAccount };
        lock(&self.accounts).insert(uid, (known, now));
    }

    fn ranges(&self, now: Instant) -> Arc<[(u32, u32, u32)]> {
        let mut known = lock(&self.ranges);
        if known.checked.is_none_or(|checked| now.duration_since(checked) >= RELOAD_INTERVAL) {
            known.checked = Some(now);
            let modified = std::fs::metadata(&self.path).and_then(|found| found.modified()).ok();
            if modified != known.modified {
                known.modified = modified;
                known.ranges = parse(&read(&self.path), local_uid);
            }
        }
        known.ranges.clone()
    }
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

/// Returns the id of a local account. Owners of ranges in the file are local, so no network service is queried.
fn local_uid(name: &str) -> Option<u32> {
    let users = read(Path::new("/etc/passwd"));
    let local = users.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next()? == name).then(|| fields.nth(1)?.parse().ok())?
    });
    local.or_else(|| User::from_name(name).ok().flatten().map(|user| user.uid.as_raw()))
}

/// Parses lines `OWNER:FIRST:COUNT`. A range with an unknown owner gets its first id as owner.
fn parse(text: &str, uid_of: impl Fn(&str) -> Option<u32>) -> Arc<[(u32, u32, u32)]> {
    let range = |line: &str| {
        let mut fields = line.trim().split(':');
        let (owner, first, count) =
            (fields.next()?, fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
        let owner = owner.parse().ok().or_else(|| uid_of(owner)).unwrap_or(first);
        Some((first, count, owner))
    };
    text.lines().filter_map(range).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subordinate_ids_are_counted_to_their_owner() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("subuid");
        fs_err::write(&file, "1001:100000:65536\n# comment\nnobody-knows:300000:10\nx\n1001:500000:1\n")
            .unwrap();
        let holders = Holders::read_from(file.clone());
        let now = Instant::now();
        let of = |uid| holders.of(uid, now);
        for uid in [100_000, 165_535, 500_000] {
            assert_eq!(of(uid), Holder::Known(1001), "{uid}");
        }
        assert_eq!(of(300_009), Holder::Known(300_000), "of an unknown owner");
        assert_eq!([99_999, 165_536, 300_010].map(of), [Holder::LookUp; 3]);
        // The file is replaced.
        fs_err::remove_file(&file).unwrap();
        assert_eq!(of(100_000), Holder::Known(1001));
        assert_eq!(holders.of(100_000, now + RELOAD_INTERVAL), Holder::LookUp);
    }

    #[test]
    fn ids_without_an_account_are_counted_together() {
        let holders = Holders::read_from("/no/such/file".into());
        let now = Instant::now();
        assert_eq!([7, 8].map(|uid| holders.of(uid, now)), [Holder::LookUp; 2]);
        assert_eq!(holders.of(7, now), Holder::Known(7), "while it is looked up");
        holders.looked_up(7, true, now);
        holders.looked_up(8, false, now);
        assert_eq!(
            [7, 8].map(|uid| holders.of(uid, now)),
            [Holder::Known(7), Holder::Known(WITHOUT_ACCOUNT)]
        );
        assert_eq!(holders.of(8, now + ACCOUNT_TTL), Holder::LookUp, "it may have one by now");
    }

    #[test]
    fn ids_beyond_the_limit_are_counted_together() {
        let holders = Holders::read_from("/no/such/file".into());
        let now = Instant::now();
        (0..MAX_KNOWN_IDS as u32).for_each(|uid| holders.looked_up(uid, true, now));
        assert_eq!(holders.of(1 << 20, now), Holder::Known(WITHOUT_ACCOUNT));
    }
}
