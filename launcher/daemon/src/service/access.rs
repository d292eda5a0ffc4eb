//! Who a caller is, and how much of the daemon a user may hold at a time.
//!
//! The kernel tells the user of a connection; whether they administer the node, the system's user database tells. That may
//! be a server elsewhere, slow or gone: it is asked on threads for blocking work, few at a time, and remembered for a few
//! seconds. As long as it does not answer, nobody but root and the daemon's own user is an administrator.

use std::collections::HashMap;
use std::ffi::CString;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::unistd::{Group, Uid, User, getgrouplist};
use tokio::sync::Semaphore;

use crate::view::Caller;

/// How long an answer of the user database counts.
const FRESH: Duration = Duration::from_secs(5);
/// How long a caller waits for one.
const PATIENCE: Duration = Duration::from_secs(2);
/// Questions to it at a time.
const QUESTIONS: usize = 4;
/// Users that are remembered: a user may have many ids in namespaces of their own.
const USERS: usize = 4096;

/// Tells administrators from others. Clones share what is known.
#[derive(Clone)]
pub struct Access(Arc<Inner>);

type IsMember = dyn Fn(u32) -> io::Result<bool> + Send + Sync;

struct Inner {
    own: u32,
    is_member: Box<IsMember>,
    known: Mutex<HashMap<u32, (bool, Instant)>>,
    questions: Arc<Semaphore>,
}

impl Access {
    /// Root, the user of this process and the members of `admin_group` are administrators.
    pub fn new(admin_group: impl Into<String>) -> Self {
        let group = admin_group.into();
        let own = rustix::process::getuid().as_raw();
        Self::with(own, move |uid| is_member(&group, uid))
    }

    pub(super) fn with(
        own: u32,
        is_member: impl Fn(u32) -> io::Result<bool> + Send + Sync + 'static,
    ) -> Self {
        let (known, questions) = (Mutex::default(), Arc::new(Semaphore::new(QUESTIONS)));
        Self(Arc::new(Inner { own, is_member: Box::new(is_member), known, questions }))
    }

    /// What this user may do.
    pub async fn caller(&self, uid: u32) -> Caller {
        let admin = uid == 0 || uid == self.0.own || self.is_admin(uid).await;
        Caller { uid, admin }
    }

    async fn is_admin(&self, uid: u32) -> bool {
        if let Some(known) = self.0.known(uid) {
            return known;
        }
        let answer = tokio::time::timeout(PATIENCE, self.ask(uid)).await;
        answer.unwrap_or_else(|_| {
            tracing::warn!(uid, "the user database does not answer: no administrator for now");
            // Others need not wait as long; a late answer replaces this one.
            self.0.remember(uid, false);
            false
        })
    }

    async fn ask(&self, uid: u32) -> bool {
        // The semaphore is never closed.
        let Ok(question) = self.0.questions.clone().acquire_owned().await else { return false };
        // Another call of the same user may have waited for the same answer.
        if let Some(known) = self.0.known(uid) {
            return known;
        }
        let inner = self.0.clone();
        let asking = tokio::task::spawn_blocking(move || {
            let answer = (inner.is_member)(uid).unwrap_or_else(|error| {
                tracing::warn!(uid, %error, "the user database has no answer: no administrator for now");
                false
            });
            inner.remember(uid, answer);
            // Held by the thread, not by who waits: threads that hang stay few.
            drop(question);
            answer
        });
        asking.await.unwrap_or(false)
    }
}

impl Inner {
    fn known(&self, uid: u32) -> Option<bool> {
        let known = lock(&self.known);
        known.get(&uid).filter(|(_, at)| at.elapsed() < FRESH).map(|(answer, _)| *answer)
    }

    fn remember(&self, uid: u32, answer: bool) {
        let mut known = lock(&self.known);
        if known.len() >= USERS {
            known.clear();
        }
        known.insert(uid, (answer, Instant::now()));
    }
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Access").field("own", &self.0.own).finish_non_exhaustive()
    }
}

/// Whether the user belongs to the group. Users and groups that do not exist have and are no members.
fn is_member(group: &str, uid: u32) -> io::Result<bool> {
    let Some(group) = Group::from_name(group)? else { return Ok(false) };
    let Some(user) = User::from_uid(Uid::from_raw(uid))? else { return Ok(false) };
    Ok(getgrouplist(&CString::new(user.name)?, user.gid)?.contains(&group.gid))
}

/// So many at a time for each user, and for all.
#[derive(Clone, Debug)]
pub(super) struct Quota(Arc<QuotaInner>);

#[derive(Debug)]
struct QuotaInner {
    each: usize,
    all: usize,
    held: Mutex<HashMap<u32, usize>>,
}

/// One of them, until it is dropped.
#[derive(Debug)]
pub(super) struct Held {
    quota: Quota,
    uid: u32,
}

impl Quota {
    pub(super) fn new(each: usize, all: usize) -> Self {
        Self(Arc::new(QuotaInner { each, all, held: Mutex::default() }))
    }

    /// One more for this user, or how many there are already that count against them.
    pub(super) fn take(&self, uid: u32) -> Result<Held, usize> {
        let mut held = lock(&self.0.held);
        let (own, total) = (held.get(&uid).copied().unwrap_or(0), held.values().sum::<usize>());
        if own >= self.0.each {
            return Err(own);
        }
        if total >= self.0.all {
            return Err(total);
        }
        held.insert(uid, own + 1);
        Ok(Held { quota: self.clone(), uid })
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut held = lock(&self.quota.0.held);
        match held.get_mut(&self.uid) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(held.remove(&self.uid)),
        }
    }
}

/// What a panic has left is still counted right: each change is one step.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn root_the_daemons_user_and_members_administer_and_are_asked_about_once() {
        let asked = Arc::new(AtomicUsize::new(0));
        let access = Access::with(900, {
            let asked = asked.clone();
            move |uid| {
                asked.fetch_add(1, Ordering::SeqCst);
                Ok(uid == 1001)
            }
        });
        for (uid, admin) in [(0, true), (900, true), (1001, true), (1002, false), (1001, true)] {
            assert_eq!(access.caller(uid).await, Caller { uid, admin });
        }
        let calls: Vec<_> = (0..50)
            .map(|_| {
                tokio::spawn({
                    let access = access.clone();
                    async move { access.caller(1003).await.admin }
                })
            })
            .collect();
        for call in calls {
            assert!(!call.await.unwrap());
        }
        // More than one question about 1003 may be on its way before the first answer is.
        assert!(asked.load(Ordering::SeqCst) <= 2 + QUESTIONS);
    }

    #[tokio::test]
    async fn a_user_database_that_hangs_makes_no_administrators_and_holds_up_nobody_else() {
        let (release, hang) = mpsc::channel::<()>();
        let hang = Mutex::new(hang);
        let access = Access::with(900, move |uid| {
            if uid >= 2000 {
                // Until the test is over.
                let _ = lock(&hang).recv();
            }
            Ok(true)
        });
        // Fewer than there are threads for questions.
        let hanging: Vec<_> = (2000..2002)
            .map(|uid| {
                tokio::spawn({
                    let access = access.clone();
                    async move { access.caller(uid).await.admin }
                })
            })
            .collect();
        assert!(access.caller(1001).await.admin && access.caller(0).await.admin);
        for call in hanging {
            assert!(!call.await.unwrap());
        }
        drop(release);
    }

    #[test]
    fn the_systems_groups_are_understood() {
        let root = User::from_uid(Uid::from_raw(0)).unwrap();
        let group = root.and_then(|root| Group::from_gid(root.gid).unwrap());
        let Some(group) = group else {
            return eprintln!("skipped: root has no entry in the user database");
        };
        assert!(is_member(&group.name, 0).unwrap());
        assert!(!is_member("no-such-group", 0).unwrap());
        assert!(!is_member(&group.name, 3_999_999_999).unwrap());
    }

    #[test]
    fn a_user_can_use_up_their_own_share_alone() {
        let quota = Quota::new(2, 3);
        let (first, _second) = (quota.take(1).unwrap(), quota.take(1).unwrap());
        assert_eq!(quota.take(1).unwrap_err(), 2);
        let _other = quota.take(2).unwrap();
        assert_eq!(quota.take(3).unwrap_err(), 3);
        drop(first);
        assert!(quota.take(3).is_ok() && quota.take(1).is_ok());
    }
}
