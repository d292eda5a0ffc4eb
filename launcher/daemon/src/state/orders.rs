//! What becomes of an order: the record that does it, or why not. Pure.

use super::{End, Entry, Jobs, Phase, Record, Submitted};
use crate::orders::Refused;
use crate::view::Caller;

/// Whose jobs are taken, and how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "as in daemon.toml")]
pub struct Rules {
    pub allow_commands: bool,
    pub allow_root: bool,
    pub max_per_user: u32,
    /// Where the daemon is not root: its own user, whose jobs it can run alone.
    pub only_user: Option<u32>,
    /// GPUs that could be had if nobody else were there, and workers of CPU jobs.
    pub gpus: u32,
    pub cpu_workers: u32,
}

impl Jobs {
    /// Whether this job is taken; its id and time are filled in later.
    pub fn admit(&self, caller: Caller, wanted: &Submitted, rules: &Rules) -> Result<(), Refused> {
        let not_allowed = |text: &str| Err(Refused::NotAllowed(text.into()));
        if rules.only_user.is_some_and(|user| user != caller.uid) {
            return not_allowed("this daemon runs as an ordinary user and takes jobs of that user alone");
        }
        if caller.uid == 0 && !rules.allow_root {
            return not_allowed(
                "jobs of root are not taken here: submit as an ordinary user (jobs.allow_root in daemon.toml)",
            );
        }
        if !wanted.trainer && !rules.allow_commands {
            return not_allowed(
                "commands are not taken here, training jobs are (jobs.allow_commands in daemon.toml)",
            );
        }
        if wanted.priority > 0 && !caller.admin {
            return not_allowed("a priority above 0 is for administrators");
        }
        if wanted.gpus > rules.gpus {
            let (wants, has) = (wanted.gpus, rules.gpus);
            return Err(Refused::Invalid(format!(
                "the job wants {wants} GPUs, and jobs can have {has} here"
            )));
        }
        if wanted.gpus == 0 && wanted.workers > rules.cpu_workers {
            let (wants, has) = (wanted.workers, rules.cpu_workers);
            return Err(Refused::Invalid(format!(
                "the job wants {wants} workers on the CPU, and there is room for {has} here (jobs.cpu_workers)"
            )));
        }
        let own = self
            .jobs
            .values()
            .filter(|entry| entry.submitted.uid == caller.uid && !matches!(entry.phase, Phase::Ended { .. }));
        if rules.max_per_user > 0 && own.count() >= rules.max_per_user as usize {
            let most = rules.max_per_user;
            return Err(Refused::Full(format!("{most} of your jobs wait or run, and no more may at a time")));
        }
        Ok(())
    }

    /// What cancels this job; nothing where it is over, or ends already.
    pub fn cancel(&self, caller: Caller, job: u64, at: u64) -> Result<Option<Record>, Refused> {
        let entry = self.jobs.get(&job).filter(|entry| caller.may_see(entry.submitted.uid));
        let Some(Entry { phase, .. }) = entry else { return Err(Refused::NoJob(job)) };
        let uid = caller.uid;
        Ok(match phase {
            Phase::Queued { .. } => Some(Record::Ended {
                job,
                end: End::Cancelled,
                exit: None,
                reason: format!("cancelled by user {uid} before it started"),
                report: String::new(),
                at,
            }),
            Phase::Active { cancelled: None, .. } => Some(Record::Cancelled { job, uid, at }),
            Phase::Active { .. } | Phase::Ended { .. } => None,
        })
    }

    /// What takes the node or GPUs out of service, or back. `known` are the node's GPUs by index and UUID.
    pub fn drained(
        caller: Caller,
        gpus: &[String],
        undo: bool,
        reason: &str,
        known: &[(u32, String)],
        at: u64,
    ) -> Result<Record, Refused> {
        if !caller.admin {
            return Err(Refused::NotAllowed("draining is for administrators".into()));
        }
        let find = |named: &String| {
            let found = known.iter().find(|(index, uuid)| uuid == named || index.to_string() == *named);
            found.map(|(_, uuid)| uuid.clone()).ok_or_else(|| {
                let all: Vec<_> = known.iter().map(|(index, uuid)| format!("{index} ({uuid})")).collect();
                let all = if all.is_empty() { "none".into() } else { all.join(", ") };
                Refused::Invalid(format!("there is no GPU {named} here; there are: {all}"))
            })
        };
        let gpus = gpus.iter().map(find).collect::<Result<_, _>>()?;
        let reason = if reason.is_empty() { "by an administrator" } else { reason };
        Ok(Record::Drained { gpus, undo, reason: reason.into(), uid: caller.uid, at })
    }
}
