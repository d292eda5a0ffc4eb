//! Pending requests for a checkpoint of a running training job, made by a call or by SIGUSR1. Pure except for the
//! replies to callers.
//!
//! A request is fulfilled by the first checkpoint of the step that was current when it arrived, or of a later step,
//! whatever the reason for that checkpoint.

use tokio::sync::oneshot;
use tonic::Status;
use xlaunch_proto::v1::CheckpointReply;

/// The origin of a request, which decides how the answer is delivered.
#[derive(Debug)]
pub(crate) enum Requester {
    Call(oneshot::Sender<Result<CheckpointReply, Status>>),
    /// A signal; the answer is printed on the console.
    Signal,
}

#[derive(Debug, Default)]
pub(super) struct CheckpointRequests {
    /// Pending requests, each with the number of steps completed when it arrived.
    pending: Vec<(u64, Requester)>,
}

impl CheckpointRequests {
    pub(super) fn add(&mut self, step: u64, requester: Requester) {
        self.pending.push((step, requester));
    }

    /// Answers the requests that a complete checkpoint fulfils. Returns a line for the user, if one was made by a
    /// signal.
    pub(super) fn saved(&mut self, checkpoint: &CheckpointReply) -> Option<String> {
        let met = self.pending.extract_if(.., |(step, _)| checkpoint.step >= *step);
        let answer = || Ok(checkpoint.clone());
        let by_signal = met.fold(false, |found, (_, requester)| requester.answer(answer()) || found);
        by_signal.then(|| format!("saved a checkpoint of step {}: {}", checkpoint.step, checkpoint.path))
    }

    /// Refuses all requests for this reason. Returns a line for the user, if one was made by a signal.
    pub(super) fn fail(&mut self, reason: &str) -> Option<String> {
        let all = self.pending.drain(..);
        let by_signal =
            all.fold(false, |found, (_, requester)| requester.refuse(Status::aborted(reason)) || found);
        by_signal.then(|| refusal(reason))
    }
}

impl Requester {
    /// Refuses a request that was not added. Returns a line for the user, if it was made by a signal.
    pub(super) fn refuse_at_once(self, reason: &str) -> Option<String> {
        self.refuse(Status::failed_precondition(reason)).then(|| refusal(reason))
    }

    fn refuse(self, status: Status) -> bool {
        self.answer(Err(status))
    }

    /// Answers a request. Returns whether the answer must be printed on the console.
    fn answer(self, answer: Result<CheckpointReply, Status>) -> bool {
        match self {
            Self::Call(reply) => {
                // The caller may be gone.
                let _ = reply.send(answer);
                false
            }
            Self::Signal => true,
        }
    }
}

fn refusal(reason: &str) -> String {
    format!("no checkpoint was saved: {reason}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(
        requests: &mut CheckpointRequests,
        step: u64,
    ) -> oneshot::Receiver<Result<CheckpointReply, Status>> {
        let (reply, answer) = oneshot::channel();
        requests.add(step, Requester::Call(reply));
        answer
    }

    fn checkpoint(step: u64) -> CheckpointReply {
        CheckpointReply { step, path: format!("/c/step-{step}"), seconds: 0.5 }
    }

    #[test]
    fn request_is_met_by_the_first_checkpoint_of_its_step_or_later() {
        let mut requests = CheckpointRequests::default();
        let (mut early, mut late) = (call(&mut requests, 7), call(&mut requests, 12));
        assert_eq!(requests.saved(&checkpoint(6)), None);
        assert!(early.try_recv().is_err(), "a checkpoint of an earlier step does not count");
        assert_eq!(requests.saved(&checkpoint(7)), None);
        assert_eq!(early.try_recv().unwrap().unwrap(), checkpoint(7));
        assert!(late.try_recv().is_err());
        let reason = "rank 0 exited before a checkpoint was complete";
        assert_eq!(requests.fail(reason), None);
        assert_eq!(late.try_recv().unwrap().unwrap_err().message(), reason);
    }

    #[test]
    fn request_by_signal_is_answered_on_the_console_once() {
        let mut requests = CheckpointRequests::default();
        requests.add(3, Requester::Signal);
        requests.add(4, Requester::Signal);
        let line = "saved a checkpoint of step 5: /c/step-5".to_owned();
        assert_eq!((requests.saved(&checkpoint(5)), requests.saved(&checkpoint(6))), (Some(line), None));
        requests.add(6, Requester::Signal);
        assert_eq!(requests.fail("the disk is full").unwrap(), "no checkpoint was saved: the disk is full");
    }
}
