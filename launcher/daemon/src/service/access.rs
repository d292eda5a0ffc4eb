//! Authorizes callers, and enforces quotas on the resources that a user can hold in the daemon at a time.
//!
//! The kernel reports the user id of a connection. The user's name, and whether the user is an administrator, is looked
//! up in the system's user database, which may be a network service that is slow or down. Lookups run on a few blocking
//! threads and are cached for a few seconds. While the database does not respond, only root and the daemon's own user
//! are administrators, known users keep their names, and users whose names are unknown are refused.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ffi::CString;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nix::unistd::{Group, Uid, User, getgrouplist};
use tokio::sync::Semaphore;
use tonic::Status;

use super::holders::{Holder, Holders, WITHOUT_ACCOUNT};
use super::lock;
use crate::commands::CommandError;
use crate::users::{self, Account};
use crate::view::Caller;
use xlaunch_host::net::Connections;

const MEMBERSHIP_CACHE_TTL: Duration = Duration::from_secs(5);
/// Time that a call waits for the user database.
const MEMBERSHIP_LOOKUP_TIMEOUT: Duration = Duration::from_secs(2);
/// Time that a submission waits for the user database.
const ACCOUNT_LOOKUP_TIMEOUT: Duration = Duration::from_secs(20);
const MAX_CONCURRENT_LOOKUPS: usize = 4;
/// Limit on the size of the cache. One person can call with many user ids, from user namespaces.
const MAX_CACHED_USERS: usize = 4096;

/// Distinguishes administrators from other users. Clones share the cache.
#[derive(Clone)]
pub struct Access(Arc<Inner>);

type IsMember = dyn Fn(u32) -> io::Result<bool> + Send + Sync;
type FindAccount = dyn Fn(u32) -> io::Result<Option<Account>> + Send + Sync;

/// The entry of a user id in the user database.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Identity {
    /// Name of the user; empty if the id has no account.
    name: String,
    admin: bool,
}

struct Inner {
    own: u32,
    is_member: Box<IsMember>,
    find_account: Box<FindAccount>,
    cache: Mutex<HashMap<u32, (Identity, Instant)>>,
    lookups: Arc<Semaphore>,
    holders: Holders,
    /// Limits lookups that no call waits for, so that they do not delay others.
    background: Semaphore,
}

impl Access {
    /// Administrators are root, the user of this process and the members of `admin_group`.
    pub fn new(admin_group: impl Into<String>) -> Self {
        let group = admin_group.into();
        let own = rustix::process::getuid().as_raw();
        Self::with(own, move |uid| is_member(&group, uid), users::find)
    }

    pub(super) fn with(
        own: u32,
        is_member: impl Fn(u32) -> io::Result<bool> + Send + Sync + 'static,
        find_account: impl Fn(u32) -> io::Result<Option<Account>> + Send + Sync + 'static,
    ) -> Self {
        let (cache, lookups) = (Mutex::default(), Arc::new(Semaphore::new(MAX_CONCURRENT_LOOKUPS)));
        let (is_member, find_account) = (Box::new(is_member), Box::new(find_account));
        let (holders, background) = (Holders::new(), Semaphore::new(1));
        Self(Arc::new(Inner { own, is_member, find_account, cache, lookups, holders, background }))
    }

    /// Returns whether the user was an administrator when last looked up. Makes no lookup itself.
    pub(super) fn is_known_admin(&self, uid: u32) -> bool {
        uid == 0 || uid == self.0.own || lock(&self.0.cache).get(&uid).is_some_and(|(known, _)| known.admin)
    }

    /// Returns the user that a connection of `uid` counts against. If that needs a lookup, it is made in the
    /// background, and the connection is recounted afterwards.
    pub(super) fn holder(&self, uid: u32, open: &Connections) -> u32 {
        if uid == 0 || uid == self.0.own {
            return uid;
        }
        match self.0.holders.of(uid, Instant::now()) {
            Holder::Known(holder) => holder,
            Holder::LookUp => {
                let (access, open) = (self.clone(), open.clone());
                tokio::spawn(async move { access.look_up_holder(uid, &open).await });
                uid
            }
        }
    }

    async fn look_up_holder(&self, uid: u32, open: &Connections) {
        // The semaphore is never closed.
        let Ok(_turn) = self.0.background.acquire().await else { return };
        let found = self.in_database(move |database| (database.find_account)(uid)).await;
        // While the database does not respond, ids are assumed to have accounts.
        let has_account = !matches!(found, Some(Ok(None)));
        self.0.holders.looked_up(uid, has_account, Instant::now());
        if !has_account {
            open.recount(uid, WITHOUT_ACCOUNT);
        }
    }

    /// Looks up a user as a caller.
    ///
    /// # Errors
    /// The user database does not respond, so it is unknown whose jobs the caller may see.
    pub(super) async fn caller(&self, uid: u32) -> Result<Caller, CommandError> {
        let admin = uid == 0 || uid == self.0.own;
        match self.identity(uid).await {
            Some(Identity { name, admin: member }) => {
                Ok(Caller { uid, name: name.into(), admin: admin || member })
            }
            None if admin => Ok(Caller { uid, name: Cow::Borrowed(""), admin }),
            None => Err(CommandError::Unavailable(format!(
                "failed to look up user id {uid} in the user database: it does not answer; try again"
            ))),
        }
    }

    /// Looks up the account of a user who submits a job.
    ///
    /// A user id without an account is refused, because its job would get a group that belongs to someone else. The ids
    /// of user namespaces, of which one person can have many, have no accounts either.
    pub(super) async fn account(&self, uid: u32) -> Result<Account, CommandError> {
        let unavailable = |why: &dyn fmt::Display| {
            CommandError::Unavailable(format!("failed to look up user id {uid} in the user database: {why}"))
        };
        let look_up = self.in_database(move |database| (database.find_account)(uid));
        match tokio::time::timeout(ACCOUNT_LOOKUP_TIMEOUT, look_up).await {
            Ok(Some(Ok(Some(account)))) => Ok(account),
            Ok(Some(Ok(None))) => {
                Err(CommandError::NotAllowed(format!("user id {uid} has no account on this node")))
            }
            Ok(Some(Err(error))) => Err(unavailable(&error)),
            Ok(None) => Err(unavailable(&"the lookup failed")),
            Err(_) => Err(unavailable(&"it does not answer")),
        }
    }

    /// Returns the identity of a user; `None` if it is unknown.
    async fn identity(&self, uid: u32) -> Option<Identity> {
        if let Some(cached) = self.0.cached(uid) {
            return Some(cached);
        }
        let found = tokio::time::timeout(MEMBERSHIP_LOOKUP_TIMEOUT, self.look_up(uid)).await;
        found.ok().flatten().or_else(|| {
            tracing::warn!(uid, "the user database does not answer; treating the caller as an ordinary user");
            // Cached, so that later calls of this user do not wait again. A late answer of the database replaces the
            // entry.
            self.0.degrade(uid)
        })
    }

    async fn look_up(&self, uid: u32) -> Option<Identity> {
        let found = self.in_database(move |database| {
            // Another call of the same user may have filled the cache in the meantime.
            if let Some(cached) = database.cached(uid) {
                return Some(cached);
            }
            let failed = |error: io::Error| tracing::warn!(uid, %error, "user database lookup failed");
            let account = (database.find_account)(uid).map_err(failed).ok()?;
            let admin = (database.is_member)(uid).map_err(failed).unwrap_or(false);
            let found = Identity { name: account.map(|account| account.name).unwrap_or_default(), admin };
            database.cache(uid, found.clone());
            Some(found)
        });
        found.await.flatten()
    }

    /// Runs a lookup on one of the few blocking threads. `None` if it panicked.
    async fn in_database<T: Send + 'static>(
        &self,
        lookup: impl FnOnce(&Inner) -> T + Send + 'static,
    ) -> Option<T> {
        // The semaphore is never closed.
        let permit = self.0.lookups.clone().acquire_owned().await.ok()?;
        let inner = self.0.clone();
        let done = tokio::task::spawn_blocking(move || {
            let found = lookup(&inner);
            // The permit is held by the thread rather than by the waiting call, which limits the number of hanging
            // threads.
            drop(permit);
            found
        });
        done.await.ok()
    }
}

impl Inner {
    fn cached(&self, uid: u32) -> Option<Identity> {
        let cache = lock(&self.cache);
        let known = cache.get(&uid).filter(|(_, at)| at.elapsed() < MEMBERSHIP_CACHE_TTL);
        known.map(|(identity, _)| identity.clone())
    }

    fn cache(&self, uid: u32, identity: Identity) {
        let mut cache = lock(&self.cache);
        if cache.len() >= MAX_CACHED_USERS {
            // Administrators are kept: they are few, and `is_known_admin` needs them.
            cache.retain(|_, (known, _)| known.admin);
        }
        cache.insert(uid, (identity, Instant::now()));
    }

    /// Makes a user with a known name an ordinary user until the cache entry expires.
    fn degrade(&self, uid: u32) -> Option<Identity> {
        let known = lock(&self.cache).get(&uid).map(|(identity, _)| identity.clone())?;
        let degraded = Identity { admin: false, ..known };
        self.cache(uid, degraded.clone());
        Some(degraded)
    }
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Access").field("own", &self.0.own).finish_non_exhaustive()
    }
}

/// Returns whether the user belongs to the group; false if either does not exist.
fn is_member(group: &str, uid: u32) -> io::Result<bool> {
    let Some(group) = users::known(Group::from_name(group))? else { return Ok(false) };
    let Some(user) = users::known(User::from_uid(Uid::from_raw(uid)))? else { return Ok(false) };
    Ok(getgrouplist(&CString::new(user.name)?, user.gid)?.contains(&group.gid))
}

/// Units that each user can get beyond the total, so that a few users cannot take all of them.
const ASSURED_UNITS: usize = 4;

/// A limit per user and a limit for all users.
#[derive(Clone, Debug)]
pub(super) struct Quota(Arc<QuotaInner>);

#[derive(Debug)]
struct QuotaInner {
    /// Names the limited units in messages to the user, such as "calls".
    what: &'static str,
    per_user: usize,
    total: usize,
    /// Units held, by user and whether the user is reserved.
    held: Mutex<HashMap<(u32, bool), usize>>,
}

/// Releases its unit of the quota when dropped.
#[derive(Debug)]
pub(super) struct QuotaGuard {
    quota: Quota,
    holder: (u32, bool),
}

impl Quota {
    pub(super) fn new(what: &'static str, (per_user, total): (usize, usize)) -> Self {
        Self(Arc::new(QuotaInner { what, per_user, total, held: Mutex::default() }))
    }

    /// Acquires one unit for a user. `reserved` users have a separate total.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED` with the number of units in use: the user's limit or the total is reached.
    pub(super) fn acquire(&self, uid: u32, reserved: bool) -> Result<QuotaGuard, Status> {
        let mut held = lock(&self.0.held);
        let own = held.get(&(uid, reserved)).copied().unwrap_or(0);
        if own >= self.0.per_user {
            return Err(self.busy(own));
        }
        let total = held.iter().filter(|((_, class), _)| *class == reserved).map(|(_, count)| count).sum();
        // Users with accounts are few, so this bounds the total too.
        let is_assured = uid != WITHOUT_ACCOUNT && own < ASSURED_UNITS.min(self.0.per_user / 8);
        if total >= self.0.total && !is_assured {
            return Err(self.busy(total));
        }
        held.insert((uid, reserved), own + 1);
        Ok(QuotaGuard { quota: self.clone(), holder: (uid, reserved) })
    }

    fn busy(&self, count: usize) -> Status {
        Status::resource_exhausted(format!(
            "too many {}: {count} are in progress; end some of them, or try again",
            self.0.what
        ))
    }
}

impl Drop for QuotaGuard {
    fn drop(&mut self) {
        let mut held = lock(&self.quota.0.held);
        match held.get_mut(&self.holder) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(held.remove(&self.holder)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn root_daemon_user_and_group_members_are_admins_and_lookups_are_cached() {
        let asked = Arc::new(AtomicUsize::new(0));
        let access = Access::with(
            900,
            {
                let asked = asked.clone();
                move |uid| {
                    asked.fetch_add(1, Ordering::SeqCst);
                    Ok(uid == 1001)
                }
            },
            |uid| Ok((uid != 1002).then(|| Account { name: format!("u{uid}"), gid: 1 })),
        );
        for (uid, admin) in [(0, true), (900, true), (1001, true), (1002, false), (1001, true)] {
            let name = if uid == 1002 { String::new() } else { format!("u{uid}") };
            assert_eq!(access.caller(uid).await, Ok(Caller { uid, name: name.into(), admin }));
        }
        let calls: Vec<_> = (0..50)
            .map(|_| {
                tokio::spawn({
                    let access = access.clone();
                    async move { access.caller(1003).await.unwrap().admin }
                })
            })
            .collect();
        for call in calls {
            assert!(!call.await.unwrap());
        }
        // Several lookups of user 1003 may run before the first one is cached.
        assert!(asked.load(Ordering::SeqCst) <= 4 + MAX_CONCURRENT_LOOKUPS);
    }

    #[tokio::test]
    async fn hanging_user_database_grants_nothing_and_delays_no_other_user() {
        let (release, hang) = mpsc::channel::<()>();
        let hang = Mutex::new(hang);
        let access = Access::with(
            900,
            move |uid| {
                if uid >= 2000 {
                    // This lookup hangs until the test is over.
                    let _ = lock(&hang).recv();
                }
                Ok(true)
            },
            |_| Ok(None),
        );
        // There are fewer hanging lookups than can run concurrently.
        let hanging: Vec<_> = (2000..2002)
            .map(|uid| {
                tokio::spawn({
                    let access = access.clone();
                    async move { access.caller(uid).await }
                })
            })
            .collect();
        assert!(access.caller(1001).await.unwrap().admin && access.caller(0).await.unwrap().admin);
        for call in hanging {
            assert!(matches!(call.await.unwrap(), Err(CommandError::Unavailable(_))));
        }
        drop(release);
    }

    #[tokio::test]
    async fn user_keeps_the_known_name_while_the_database_is_down() {
        let calls = AtomicUsize::new(0);
        let access = Access::with(
            900,
            |_| Ok(true),
            move |_| match calls.fetch_add(1, Ordering::SeqCst) {
                0 => Ok(Some(Account { name: "anna".into(), gid: 1 })),
                _ => Err(io::Error::other("down")),
            },
        );
        assert!(access.caller(1001).await.unwrap().admin);
        let expired = Instant::now().checked_sub(MEMBERSHIP_CACHE_TTL).unwrap();
        lock(&access.0.cache).get_mut(&1001).unwrap().1 = expired;
        let caller = access.caller(1001).await.unwrap();
        assert_eq!((&*caller.name, caller.admin), ("anna", false));
        assert!(access.caller(1002).await.is_err(), "whose jobs it may see is unknown");
    }

    #[tokio::test]
    async fn only_users_with_an_account_submit() {
        let access = Access::new("no-such-group");
        assert_eq!(access.account(0).await.unwrap().name, "root");
        let refused = access.account(3_999_999_999).await.unwrap_err();
        assert!(
            matches!(&refused, CommandError::NotAllowed(text) if text.contains("no account")),
            "{refused}"
        );
        let broken = Access::with(900, |_| Ok(false), |_| Err(io::Error::other("down")));
        assert!(matches!(broken.account(1).await, Err(CommandError::Unavailable(_))));
    }

    #[test]
    fn group_membership_is_read_from_the_system() {
        let root = User::from_uid(Uid::from_raw(0)).unwrap().expect("the user database has no root");
        let group = Group::from_gid(root.gid).unwrap().expect("root's group has no name");
        assert!(is_member(&group.name, 0).unwrap());
        assert!(!is_member("no-such-group", 0).unwrap());
        assert!(!is_member(&group.name, 3_999_999_999).unwrap());
    }

    #[test]
    fn quota_limits_each_user_and_all() {
        let quota = Quota::new("calls", (2, 3));
        let acquire = |uid| quota.acquire(uid, false);
        let (first, _second) = (acquire(1).unwrap(), acquire(1).unwrap());
        let in_progress = |refused: Result<_, Status>| refused.unwrap_err().message().to_owned();
        assert!(in_progress(acquire(1)).starts_with("too many calls: 2 are"));
        let _other = acquire(2).unwrap();
        assert!(in_progress(acquire(3)).starts_with("too many calls: 3 are"));
        assert!(quota.acquire(0, true).is_ok(), "administrators are counted apart");
        drop(first);
        assert!(acquire(3).is_ok() && acquire(1).is_ok());
    }

    #[test]
    fn full_quota_leaves_some_units_to_other_users() {
        let quota = Quota::new("calls", (128, 512));
        let taken: Vec<_> = (1..=4).flat_map(|uid| (0..128).map(move |_| uid)).collect();
        let _taken: Vec<_> = taken.into_iter().map(|uid| quota.acquire(uid, false).unwrap()).collect();
        let own: Vec<_> = (0..8).map(|_| quota.acquire(5, false)).filter_map(Result::ok).collect();
        assert_eq!(own.len(), ASSURED_UNITS);
        let refused = quota.acquire(WITHOUT_ACCOUNT, false).unwrap_err();
        assert!(refused.message().starts_with("too many calls: 516 are"), "{refused}");
    }
}
