//! Evaluates commands against the state: returns the records that carry a command out, or the reason for a refusal.
//! Pure.

use xlaunch_proto::v1::{DrainRequest, UpdateRequest};
use xlaunch_spec::quantities::{bytes_text, counted};

use super::{End, Entry, Hold, Jobs, Phase, Record, Submitted, bounded};
use crate::commands::CommandError;
use crate::view::Caller;

/// The rules by which jobs are accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AdmissionRules<'a> {
    pub(crate) allow_commands: bool,
    pub(crate) allow_root: bool,
    /// Tells in messages where these two keys are set and how a change is applied: `in FILE, then ...`.
    pub(crate) how_to_change: &'a str,
    pub(crate) max_per_user: u32,
    /// The daemon's own user if the daemon does not run as root, because it cannot run jobs of other users then.
    pub(crate) only_user: Option<u32>,
    /// Number of GPUs that a job can get on an otherwise idle node.
    pub(crate) gpus: u32,
    pub(crate) cpu_workers: u32,
    pub(crate) cores: u32,
    /// Memory of the node in bytes.
    pub(crate) memory: u64,
    /// The same as in [`Resources`](super::schedule::Resources), as is the next field.
    pub(crate) memory_per_user: Option<u64>,
    pub(crate) memory_per_gpu: u64,
}

impl Jobs {
    /// Checks that the caller may submit `count` jobs like this one, whose id and time are not set yet.
    pub(crate) fn admit(
        &self,
        caller: &Caller,
        wanted: &Submitted,
        count: usize,
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
        check_priority(caller, wanted.priority)?;
        fits_on_node(wanted, rules)?;
        let unfinished = self
            .jobs
            .values()
            .filter(|entry| entry.submitted.uid == caller.uid && !matches!(entry.phase, Phase::Ended { .. }))
            .count();
        let limit = rules.max_per_user;
        if limit > 0 && unfinished + count > limit as usize {
            return Err(CommandError::LimitReached(match count {
                1 => format!(
                    "you have {limit} queued or running jobs, the most allowed (jobs.max_per_user): wait for one to end"
                ),
                _ => format!(
                    "{count} jobs are too many: you have {unfinished} queued or running jobs of at most {limit} \
                     (jobs.max_per_user); submit fewer, or wait for jobs to end"
                ),
            }));
        }
        Ok(())
    }

    /// Returns the record that cancels this job; `None` if it has already ended or been cancelled.
    pub(crate) fn cancel(&self, caller: &Caller, job: u64, at: u64) -> Result<Option<Record>, CommandError> {
        let entry =
            self.jobs.get(&job).filter(|entry| caller.may_see(entry.submitted.uid, &entry.submitted.user));
        let Some(Entry { phase, .. }) = entry else { return Err(CommandError::JobNotFound(job)) };
        let uid = caller.uid;
        Ok(match phase {
            Phase::Queued { .. } => {
                let reason = format!("cancelled by user {} before it started", caller.label());
                Some(Record::ended(job, End::Cancelled, reason, at))
            }
            Phase::Active { cancelled: None, .. } => {
                let user = caller.name.clone().into_owned();
                Some(Record::Cancelled { job, uid, user, at })
            }
            Phase::Active { .. } | Phase::Ended { .. } => None,
        })
    }

    /// Returns the records that hold or release this job or change its priority; empty if nothing changes.
    pub(crate) fn update(
        &self,
        caller: &Caller,
        wanted: UpdateRequest,
        at: u64,
    ) -> Result<Vec<Record>, CommandError> {
        let (job, uid) = (wanted.job, caller.uid);
        let entry =
            self.jobs.get(&job).filter(|entry| caller.may_see(entry.submitted.uid, &entry.submitted.user));
        let Some(Entry { submitted, phase }) = entry else { return Err(CommandError::JobNotFound(job)) };
        let invalid = |why: &str| Err(CommandError::Invalid(format!("job {job} {why}")));
        match phase {
            Phase::Queued { .. } => {}
            Phase::Active { .. } => {
                return invalid(
                    "has started: only a queued job can be held, released or given another priority",
                );
            }
            Phase::Ended { .. } => return invalid("has ended"),
        }
        let mut records = Vec::new();
        match (wanted.held, &submitted.held) {
            (Some(true), held) => {
                let admin = caller.admin && uid != submitted.uid;
                // A user must not weaken an administrator's hold.
                if held.as_ref().is_none_or(|held| admin && !held.admin) {
                    let user = caller.name.clone().into_owned();
                    records.push(Record::Held { job, uid, user, admin, at });
                }
            }
            (Some(false), Some(Hold { admin: true, .. })) if !caller.admin => {
                return Err(CommandError::NotAllowed(format!(
                    "job {job} is held by an administrator: only administrators may release it"
                )));
            }
            (Some(false), Some(_)) => records.push(Record::Released { job, uid, at }),
            (Some(false) | None, _) => {}
        }
        if let Some(priority) = wanted.priority.filter(|priority| *priority != submitted.priority) {
            check_priority(caller, priority)?;
            records.push(Record::Reprioritised { job, priority, uid, at });
        }
        Ok(records)
    }

    /// Returns the record that takes the node (if no GPUs are named) or GPUs out of service or, with `undo`, puts them
    /// back. GPUs that were drained individually, for example by the doctor, stay drained when the node is put back.
    /// `known` are the node's GPUs by index and UUID.
    pub(crate) fn drain(
        caller: &Caller,
        request: &DrainRequest,
        known: &[(u32, String)],
        at: u64,
    ) -> Result<Record, CommandError> {
        if !caller.admin {
            return Err(CommandError::NotAllowed("only administrators may drain a node or its GPUs".into()));
        }
        let DrainRequest { gpus, undo, reason } = request;
        let gpus = find_gpus(gpus, known)?;
        if *undo && gpus.is_empty() {
            return Ok(Record::Resumed { uid: caller.uid, at });
        }
        let reason = if reason.is_empty() { "by an administrator" } else { reason };
        Ok(Record::Drained { gpus, undo: *undo, reason: bounded(reason.into()), uid: caller.uid, at })
    }
}

/// Returns the UUIDs of the GPUs with these UUIDs or indices. `known` are the node's GPUs by index and UUID.
pub(super) fn find_gpus(named: &[String], known: &[(u32, String)]) -> Result<Vec<String>, CommandError> {
    let find = |named: &String| {
        let found = known.iter().find(|(index, uuid)| uuid == named || index.to_string() == *named);
        found.map(|(_, uuid)| uuid.clone()).ok_or_else(|| {
            let all: Vec<_> = known.iter().map(|(index, uuid)| format!("{index} ({uuid})")).collect();
            let all = if all.is_empty() { "none".into() } else { all.join(", ") };
            CommandError::Invalid(format!("there is no GPU `{named}` on this node; its GPUs: {all}"))
        })
    };
    named.iter().map(find).collect()
}

fn check_priority(caller: &Caller, priority: i32) -> Result<(), CommandError> {
    if priority > 0 && !caller.admin {
        Err(CommandError::NotAllowed("only administrators may set a priority above 0".into()))
    } else {
        Ok(())
    }
}

/// Refuses a job that could not start on an otherwise idle node.
fn fits_on_node(wanted: &Submitted, rules: &AdmissionRules<'_>) -> Result<(), CommandError> {
    let too_large = |wants: String, has: String, key: &str| {
        Err(CommandError::Invalid(format!(
            "the job requests {wants}, but a job can get at most {has} on this node{key}"
        )))
    };
    if wanted.gpus > rules.gpus {
        return too_large(counted(wanted.gpus.into(), "GPU"), rules.gpus.to_string(), "");
    }
    let cpus = wanted.scheduling.cpus.unwrap_or(0);
    if cpus > rules.cores {
        return too_large(counted(cpus.into(), "CPU"), rules.cores.to_string(), "");
    }
    let workers = wanted.scheduling.cpus.unwrap_or(wanted.workers);
    if wanted.gpus == 0 && workers > rules.cpu_workers {
        let what = if wanted.scheduling.cpus.is_some() { "CPUs" } else { "CPU workers" };
        return too_large(format!("{workers} {what}"), rules.cpu_workers.to_string(), " (jobs.cpu_workers)");
    }
    let memory = wanted.scheduling.memory_bytes.unwrap_or(0);
    if memory > rules.memory {
        return too_large(format!("{} of memory", bytes_text(memory)), bytes_text(rules.memory), "");
    }
    let beside_gpus = super::schedule::memory_beside_gpus(wanted, rules.memory_per_gpu);
    if let Some(most) = rules.memory_per_user.filter(|most| beside_gpus > *most) {
        let most = most.saturating_add(memory - beside_gpus);
        let key = " (jobs.max_memory_per_user)";
        return too_large(format!("{} of memory", bytes_text(memory)), bytes_text(most), key);
    }
    Ok(())
}
