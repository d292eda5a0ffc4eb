//! What becomes of orders: whoever is answered sees what they have ordered.

use tracing::info;
use xlaunch_proto::convert::node::Submit;
use xlaunch_proto::v1::{Job, NodeStatus};

use super::Manager;
use crate::files::Description;
use crate::orders::{Answer, Order, Refused};
use crate::state::orders::Rules;
use crate::state::{Jobs, Record};
use crate::view::Caller;
use crate::{submission, users};
use xlaunch_agent::clock::unix_ms;

impl Manager {
    /// Whoever is answered sees what they have ordered: it is shown first.
    pub(super) fn order(&mut self, order: Order) {
        match order {
            Order::Submit { caller, submission, answer } => {
                let done = self.submit(caller, *submission);
                self.answer(answer, done);
            }
            Order::Cancel { caller, job, answer } => {
                let done = self.cancel(caller, job);
                self.answer(answer, done);
            }
            Order::Drain { caller, gpus, undo, reason, answer } => {
                let done = self.drain(caller, &gpus, undo, &reason);
                self.answer(answer, done);
            }
        }
    }

    fn answer<T>(&mut self, answer: Answer<T>, done: Result<T, Refused>) {
        self.settle();
        // A caller that is gone needs no answer.
        let _ = answer.send(done);
    }

    fn submit(&mut self, caller: Caller, submission: Submit) -> Result<(Job, bool), Refused> {
        if let Some(job) = self.jobs.of_request(caller.uid, &submission.request_id) {
            return Ok((self.now(job)?, true));
        }
        let present = u32::try_from(self.gpus.borrow().gpus.len()).unwrap_or(u32::MAX);
        let (mut submitted, mut description) =
            submission::understand(submission, caller.uid, present)?;
        self.jobs.admit(caller, &submitted, &self.rules())?;
        let job = self.jobs.submitted + 1;
        (submitted.job, submitted.at, description.job) = (job, unix_ms(), job);
        self.create(&description, caller.uid)?;
        self.write(Record::Submitted(Box::new(submitted)))?;
        Ok((self.now(job)?, false))
    }

    fn create(&self, description: &Description, uid: u32) -> Result<(), Refused> {
        let created = tokio::task::block_in_place(|| self.dirs.create(description, uid, users::gid(uid)));
        created.map_err(|error| Refused::Broken(format!("the job's directory cannot be made: {error}")))
    }

    fn cancel(&mut self, caller: Caller, job: u64) -> Result<Job, Refused> {
        if let Some(record) = self.jobs.cancel(caller, job, unix_ms())? {
            self.write(record)?;
            info!(job, uid = caller.uid, "job {job} is cancelled by user {}", caller.uid);
            if let Some(live) = self.live.get(&job) {
                live.stop.send_replace(true);
            }
        }
        self.now(job)
    }

    fn drain(
        &mut self,
        caller: Caller,
        gpus: &[String],
        undo: bool,
        reason: &str,
    ) -> Result<NodeStatus, Refused> {
        let known: Vec<_> = self.gpus.borrow().gpus.iter().map(|gpu| (gpu.index, gpu.uuid.clone())).collect();
        self.write(Jobs::drained(caller, gpus, undo, reason, &known, unix_ms())?)?;
        let what = if gpus.is_empty() { "the node".into() } else { format!("GPU {}", gpus.join(", ")) };
        let done = if undo { "takes jobs again" } else { "is drained" };
        info!(uid = caller.uid, reason, "{what} {done}");
        Ok(self.node())
    }

    fn rules(&self) -> Rules {
        let config = self.config.borrow();
        let own = rustix::process::getuid();
        let gpus = self.gpus.borrow().gpus.iter().filter(|gpu| !gpu.is_among(&config.leave_gpus)).count();
        let gpus = u32::try_from(gpus).unwrap_or(u32::MAX);
        Rules {
            allow_commands: config.allow_commands(own.is_root()),
            allow_root: config.allow_root,
            max_per_user: config.max_per_user,
            only_user: (!own.is_root()).then(|| own.as_raw()),
            gpus: if config.max_gpus_per_user > 0 { gpus.min(config.max_gpus_per_user) } else { gpus },
            cpu_workers: config.cpu_workers.unwrap_or(self.cores),
        }
    }
}
