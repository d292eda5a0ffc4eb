//! Commands against the state: the record that carries one out, or why it is refused. Pure.

use super::{End, Entry, Jobs, Phase, Record, Submitted, bounded};
use crate::commands::CommandError;
use crate::view::Caller;

/// Which jobs are accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AdmissionRules<'a> {
    pub(crate) allow_commands: bool,
    pub(crate) allow_root: bool,
    /// Where these two keys are set and how a change is applied, for messages: `in FILE, then ...`.
    pub(crate) how_to_change: &'a str,
    pub(crate) max_per_user: u32,
    /// The daemon's own user if the daemon is not root: it cannot run jobs of others.
    pub(crate) only_user: Option<u32>,
    /// Number of GPUs that a job can get on an otherwise idle node.
    pub(crate) gpus: u32,
    pub(crate) cpu_workers: u32,
}

impl Jobs {
    /// Whether the caller may submit this job, whose id and time are not set yet.
    pub(crate) fn admit(
        &self,
        caller: Caller,
        wanted: &Submitted,
        rules: &AdmissionRules<'_>,
    ) -> Result<(), CommandError> {
        let not_allowed = |text: &str| Err(CommandError::NotAllowed(text.into()));
        let how_to_change = rules.how_to_change;
        if rules.only_user.is_some_and(|user| user != caller.uid) {
            return not_allowed(
                "this daemon does not run as root and accepts only jobs of its own user; start your own with `xlaunch \
                 daemon --foreground`",
            );
        }
        if caller.uid == 0 && !rules.allow_root {
            return not_allowed(&format!(
                "root may not submit jobs here: submit as an ordinary user, or set jobs.allow_root = true \
                 {how_to_change}"
            ));
        }
        if !wanted.trainer && !rules.allow_commands {
            return not_allowed(&format!(
                "only training jobs are accepted here, not commands: an administrator can set jobs.allow_commands = \
                 true {how_to_change}"
            ));
        }
        if wanted.priority > 0 && !caller.admin {
            return not_allowed("only administrators may set a priority above 0");
        }
        if wanted.gpus > rules.gpus {
            let (wants, has) = (wanted.gpus, rules.gpus);
            return Err(CommandError::Invalid(format!(
                "the job wants {wants} GPUs, and a job can get at most {has} here"
            )));
        }
        if wanted.gpus == 0 && wanted.workers > rules.cpu_workers {
            let (wants, has) = (wanted.workers, rules.cpu_workers);
            return Err(CommandError::Invalid(format!(
                "the job wants {wants} CPU workers, and a job can get at most {has} here (jobs.cpu_workers)"
            )));
        }
        let unfinished = self
            .jobs
            .values()
            .filter(|entry| entry.submitted.uid == caller.uid && !matches!(entry.phase, Phase::Ended { .. }));
        let limit = rules.max_per_user;
        if limit > 0 && unfinished.count() >= limit as usize {
            return Err(CommandError::LimitReached(format!(
                "you have {limit} queued or running jobs, the most allowed (jobs.max_per_user): wait for one to end"
            )));
        }
        Ok(())
    }

    /// The record that cancels this job; `None` if it has ended or is cancelled already.
    pub(crate) fn cancel(&self, caller: Caller, job: u64, at: u64) -> Result<Option<Record>, CommandError> {
        let entry = self.jobs.get(&job).filter(|entry| caller.may_see(entry.submitted.uid));
        let Some(Entry { phase, .. }) = entry else { return Err(CommandError::JobNotFound(job)) };
        let uid = caller.uid;
        Ok(match phase {
            Phase::Queued { .. } => Some(Record::Ended {
                job,
                end: End::Cancelled,
                exit: None,
                reason: format!("cancelled by user {} before it started", self.user_label(uid)),
                report: String::new(),
                at,
                order: 0,
                usage: None,
            }),
            Phase::Active { cancelled: None, .. } => Some(Record::Cancelled { job, uid, at }),
            Phase::Active { .. } | Phase::Ended { .. } => None,
        })
    }

    /// The record that takes the node (if `gpus` is empty) or GPUs out of service, or with `undo` puts them back.
    /// `known` are the node's GPUs by index and UUID.
    pub(crate) fn drain(
        caller: Caller,
        gpus: &[String],
        undo: bool,
        reason: &str,
        known: &[(u32, String)],
        at: u64,
    ) -> Result<Record, CommandError> {
        if !caller.admin {
            return Err(CommandError::NotAllowed("only administrators may drain a node or its GPUs".into()));
        }
        let find = |named: &String| {
            let found = known.iter().find(|(index, uuid)| uuid == named || index.to_string() == *named);
            found.map(|(_, uuid)| uuid.clone()).ok_or_else(|| {
                let all: Vec<_> = known.iter().map(|(index, uuid)| format!("{index} ({uuid})")).collect();
                let all = if all.is_empty() { "none".into() } else { all.join(", ") };
                CommandError::Invalid(format!("there is no GPU `{named}` on this node; its GPUs: {all}"))
            })
        };
        let gpus = gpus.iter().map(find).collect::<Result<_, _>>()?;
        let reason = if reason.is_empty() { "by an administrator" } else { reason };
        Ok(Record::Drained { gpus, undo, reason: bounded(reason.into()), uid: caller.uid, at })
    }
}
