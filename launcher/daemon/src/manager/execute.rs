//! Executes commands. The view is published before the reply is sent, so that callers see the effect of their commands.

use tracing::info;
use xlaunch_proto::convert::node::Submit;
use xlaunch_proto::v1::{DrainRequest, Job, NodeStatus, UpdateRequest};

use super::Manager;
use crate::allowed_variables;
use crate::commands::{Command, CommandError, Reply, Submission};
use crate::gpus::GpuFacts;
use crate::runtime::Stop;
use crate::state::{Element, Hold, Jobs, Record};
use crate::submission::{self, MAX_NAME_BYTES};
use crate::users::Account;
use crate::view::Caller;

impl Manager {
    pub(super) fn execute(&mut self, command: Command) {
        match command {
            Command::Submit { caller, account, submission, reply } => {
                let result = self.submit(&caller, account, *submission);
                self.reply(reply, result);
            }
            Command::Cancel { caller, job, force, reply } => {
                let result = self.cancel(&caller, job, force);
                self.reply(reply, result);
            }
            Command::Update { caller, update, reply } => {
                let result = self.update(&caller, update);
                self.reply(reply, result);
            }
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

    fn update(&mut self, caller: &Caller, update: UpdateRequest) -> Result<Job, CommandError> {
        for record in self.jobs.update(caller, update, self.now())? {
            self.write(record)?;
        }
        self.job_message(update.job)
    }

    fn cancel(&mut self, caller: &Caller, job: u64, force: bool) -> Result<Job, CommandError> {
        if let Some(record) = self.jobs.cancel(caller, job, self.now())? {
            self.write(record)?;
            info!(job, uid = caller.uid, "job {job} is cancelled by user {}", caller.label());
        }
        // Also applies to a job that was cancelled before, as it may have to be killed now. `Jobs::cancel` has checked
        // the caller.
        if self.jobs.cancelled_by(job).is_some()
            && let Some(runtime) = self.runtime.get(&job)
        {
            runtime.stop.send_modify(|stop| *stop = (*stop).max(if force { Stop::Kill } else { Stop::Ask }));
        }
        self.job_message(job)
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
