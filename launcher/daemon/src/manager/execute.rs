//! Executes commands. The view is published before the reply is sent, so that callers see the effect of their commands.

use std::collections::BTreeMap;

use tracing::info;
use xlaunch_proto::convert::node::Submit;
use xlaunch_proto::v1::{DrainRequest, Job, NodeStatus};

use super::Manager;
use crate::allowed_variables;
use crate::commands::{Change, Command, CommandError, JobChange, Reply, Submission};
use crate::gpus::GpuFacts;
use crate::runtime::Stop;
use crate::state::{Element, Hold, Jobs, Record};
use crate::submission::{self, MAX_NAME_BYTES};
use crate::users::Account;
use crate::view::Caller;

/// Joins changes to different jobs that follow each other: they are written to the disk and published together. One by
/// one, changes to a long array would take minutes on a slow disk.
fn joined(commands: impl Iterator<Item = Command>) -> Vec<Command> {
    let mut joined: Vec<Command> = Vec::new();
    for command in commands {
        match (command, joined.last_mut()) {
            // A change is checked against the job as its earlier changes left it.
            (Command::Change(new), Some(Command::Change(changes)))
                if new.iter().all(|new| changes.iter().all(|earlier| earlier.job != new.job)) =>
            {
                changes.extend(new);
            }
            (command, _) => joined.push(command),
        }
    }
    joined
}

impl Manager {
    pub(super) fn execute_all(&mut self, commands: impl Iterator<Item = Command>) {
        joined(commands).into_iter().for_each(|command| self.execute(command));
    }

    fn execute(&mut self, command: Command) {
        match command {
            Command::Submit { caller, account, submission, reply } => {
                let result = self.submit(&caller, account, *submission);
                self.reply(reply, result);
            }
            Command::Change(changes) => self.change(changes),
            Command::Drain { caller, drain, reply } => {
                let result = self.drain(&caller, &drain);
                self.reply(reply, result);
            }
            Command::Examine { caller, examine, reply } => {
                let result = self.examine(&caller, &examine);
                self.reply(reply, result);
            }
        }
    }

    fn reply<T>(&mut self, reply: Reply<T>, result: Result<T, CommandError>) {
        self.settle();
        // The caller may have disconnected.
        let _ = reply.send(result);
    }

    fn submit(
        &mut self,
        caller: &Caller,
        account: Account,
        mut submission: Submit,
    ) -> Result<Submission, CommandError> {
        let request = &mut submission.request;
        if let Some(job) = self.jobs.job_of_request(caller.uid, &account.name, &request.request_id) {
            return Ok(Submission { jobs: self.messages_of(job)?, repeated: true, warnings: Vec::new() });
        }
        let (held, parallel) = (request.held, request.array_parallel);
        let indices = std::mem::take(&mut request.array_indices);
        let name = request.name.clone();
        self.jobs.look_up_dependencies(caller, &mut request.scheduling.get_or_insert_default().after)?;
        let (mut submitted, mut description) =
            submission::resolve(submission, caller.uid, &self.node_limits())?;
        let rules = self.admission_rules();
        self.jobs.admit(caller, &submitted, indices.len().max(1), &rules)?;
        let withheld = if rules.allow_commands {
            Vec::new()
        } else {
            allowed_variables::withheld(&description.environment)
        };
        let warnings = warnings(&withheld, &name, &submitted.name);
        let job = self.jobs.submitted + 1;
        (submitted.job, submitted.at, description.job) = (job, self.now(), job);
        (submitted.user, submitted.gid) = (account.name, account.gid);
        submitted.held =
            held.then(|| Hold { uid: caller.uid, admin: false, user: caller.name.clone().into_owned() });
        let is_array = !indices.is_empty();
        let last = job.saturating_add(indices.len().saturating_sub(1) as u64);
        tokio::task::block_in_place(|| {
            self.setup.dirs.check_socket(last)?;
            self.setup.ids.reserve(last)?;
            if is_array {
                self.setup.dirs.create_array(&description)
            } else {
                self.setup.dirs.create(&description, caller.uid, account.gid)
            }
        })
        .map_err(|error| CommandError::Unavailable(format!("failed to store the submission: {error}")))?;
        self.write(if is_array {
            submitted.array = Some(Element { first: job, index: 0, parallel });
            Record::SubmittedArray { first: Box::new(submitted), indices }
        } else {
            Record::Submitted(Box::new(submitted))
        })?;
        Ok(Submission { jobs: self.messages_of(job)?, repeated: false, warnings })
    }

    /// Returns the job, or all jobs of its array that have not been forgotten.
    fn messages_of(&self, first: u64) -> Result<Vec<Job>, CommandError> {
        let of_array = self.jobs.array(first);
        let jobs = if of_array.is_empty() { vec![first] } else { of_array };
        let positions = self.queue_positions();
        jobs.into_iter().map(|job| self.job_message_at(job, &positions)).collect()
    }

    /// Makes these changes, each to another job. If the journal cannot be written, all of them fail.
    fn change(&mut self, changes: Vec<JobChange>) {
        let now = self.now();
        let checked: Vec<_> = changes.iter().map(|change| self.records_of(change, now)).collect();
        let records: Vec<Record> = checked.iter().flatten().flatten().cloned().collect();
        let written = self.write_all(records);
        let mut results = Vec::with_capacity(changes.len());
        for (JobChange { caller, job, change, reply }, records) in changes.into_iter().zip(checked) {
            let changed = records.and_then(|records| {
                let changed = !records.is_empty();
                if changed { written.clone() } else { Ok(()) }.map(|()| changed)
            });
            if let (Change::Cancel { force }, Ok(changed)) = (change, &changed) {
                self.stop_cancelled(&caller, job, force, *changed);
            }
            results.push((job, reply, changed));
        }
        // The positions of a long queue take long to compute.
        let queued = results.iter().any(|(job, ..)| self.is_queued(*job));
        let positions = if queued { self.queue_positions() } else { BTreeMap::new() };
        let message = |(job, reply, changed): (u64, Reply<Job>, Result<bool, CommandError>)| {
            (reply, changed.and_then(|_| self.job_message_at(job, &positions)))
        };
        let replies: Vec<_> = results.into_iter().map(message).collect();
        self.settle();
        for (reply, result) in replies {
            // The caller may have disconnected.
            let _ = reply.send(result);
        }
    }

    /// Returns the records of a change; none if the job already is as wanted.
    fn records_of(
        &self,
        JobChange { caller, job, change, .. }: &JobChange,
        now: u64,
    ) -> Result<Vec<Record>, CommandError> {
        match change {
            Change::Cancel { .. } => self.jobs.cancel(caller, *job, now).map(Vec::from_iter),
            Change::Update(update) => self.jobs.update(caller, *update, now),
        }
    }

    /// Stops the processes of a cancelled job. `is_new` says whether this call has cancelled it: it may have been
    /// cancelled before, and have to be killed now. [`Jobs::cancel`] has checked the caller.
    fn stop_cancelled(&mut self, caller: &Caller, job: u64, force: bool, is_new: bool) {
        if is_new {
            info!(job, uid = caller.uid, "job {job} is cancelled by user {}", caller.label());
        }
        if self.jobs.cancelled_by(job).is_some()
            && let Some(runtime) = self.runtime.get(&job)
        {
            runtime.stop.send_modify(|stop| *stop = (*stop).max(if force { Stop::Kill } else { Stop::Ask }));
        }
    }

    fn drain(&mut self, caller: &Caller, drain: &DrainRequest) -> Result<NodeStatus, CommandError> {
        let index_and_uuid = |gpu: &GpuFacts| (gpu.status.index, gpu.status.uuid.clone());
        let known: Vec<_> = self.setup.gpus.borrow().gpus.iter().map(index_and_uuid).collect();
        self.write(Jobs::drain(caller, drain, &known, self.now())?)?;
        let DrainRequest { gpus, undo, reason } = drain;
        let target = if gpus.is_empty() { "the node".into() } else { format!("GPU {}", gpus.join(", ")) };
        let state = if *undo { "back in service" } else { "drained" };
        info!(uid = caller.uid, reason, "{target} is {state}");
        Ok(self.node_message())
    }
}

fn warnings(withheld: &[String], wanted: &str, name: &str) -> Vec<String> {
    let mut warnings = Vec::new();
    if !withheld.is_empty() {
        warnings.push(format!(
            "these variables do not reach training jobs on this node because they could run code (jobs.allow_commands \
             is false): {}",
            withheld.join(", ")
        ));
    }
    if ![name, ""].contains(&wanted) {
        warnings.push(format!(
            "the job is named {name}: names have at most {MAX_NAME_BYTES} ASCII letters, digits, `.`, `_` and `-`"
        ));
    }
    warnings
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use super::*;

    const CALLER: Caller = Caller { uid: 1000, name: Cow::Borrowed(""), admin: false };

    #[test]
    fn changes_to_different_jobs_are_made_together() {
        let change = |job| {
            let (reply, _) = tokio::sync::oneshot::channel();
            let change = Change::Cancel { force: false };
            Command::Change(vec![JobChange { caller: CALLER, job, change, reply }])
        };
        let drain = || {
            let (reply, _) = tokio::sync::oneshot::channel();
            Command::Drain { caller: CALLER, drain: DrainRequest::default(), reply }
        };
        let shown = |command: &Command| match command {
            Command::Change(changes) => changes.iter().map(|change| change.job).collect(),
            _ => Vec::new(),
        };
        let commands = vec![change(1), change(3), change(2), change(3), drain(), change(4), change(5)];
        let found: Vec<Vec<u64>> = joined(commands.into_iter()).iter().map(shown).collect();
        assert_eq!(found, [vec![1, 3, 2], vec![3], vec![], vec![4, 5]]);
    }
}
