//! Examinations of idle GPUs: reserves the GPUs, starts the process, and drains GPUs that have failed.

use std::time::Duration;

use tokio::sync::mpsc;
use tracing::{info, warn};
use xlaunch_host::doctor::{Finding, Level};
use xlaunch_proto::v1::{self, ExaminationState, ExamineReply, ExamineRequest, ExaminedGpu, FindingLevel};

use super::Manager;
use crate::agents::examination::EXIT_TIMEOUT;
use crate::agents::start::ExaminationStart;
use crate::commands::CommandError;
use crate::state::Record;
use crate::state::examination::{Choice, Examination, ExaminationEnd, Verdict};
use crate::state::schedule::GpuSlot;
use crate::view::Caller;

/// Number of messages about an examination: one at its start, one at its end.
const REPLIES: usize = 2;

/// A running examination.
#[derive(Debug)]
pub(super) struct Running {
    uid: u32,
    choices: Vec<Choice>,
    /// Receives the results. The caller may have disconnected.
    replies: mpsc::Sender<ExamineReply>,
}

impl Manager {
    pub(super) fn examine(
        &mut self,
        caller: &Caller,
        examine: &ExamineRequest,
    ) -> Result<mpsc::Receiver<ExamineReply>, CommandError> {
        let indices: Vec<u32> = self.setup.gpus.borrow().gpus.iter().map(|gpu| gpu.status.index).collect();
        let known: Vec<(u32, GpuSlot)> = indices.into_iter().zip(self.resources().gpus).collect();
        let choices = self.jobs.choose(caller, &examine.gpus, &known)?;
        let gpus: Vec<String> =
            choices.iter().filter(|gpu| gpu.skipped.is_none()).map(|gpu| gpu.uuid.clone()).collect();
        let (replies, receiver) = mpsc::channel(REPLIES);
        let started = |choice: &Choice| match &choice.skipped {
            Some(reason) => message(choice, ExaminationState::Skipped, reason),
            None => message(choice, ExaminationState::Examined, ""),
        };
        let reply = ExamineReply {
            gpus: choices.iter().map(started).collect(),
            done: gpus.is_empty(),
            ..ExamineReply::default()
        };
        // The channel has space for both messages.
        let _ = replies.try_send(reply);
        if gpus.is_empty() {
            return Ok(receiver);
        }
        info!(uid = caller.uid, "GPU {} is examined", gpus.join(", "));
        let longest = examine.timeout().saturating_add(EXIT_TIMEOUT);
        let longest = u64::try_from(longest.as_millis()).unwrap_or(u64::MAX);
        self.jobs.examination =
            Some(Examination { gpus: gpus.clone(), until: self.now().saturating_add(longest) });
        self.examination = Some(Running { uid: caller.uid, choices, replies });
        self.start_examination(gpus, examine.timeout());
        Ok(receiver)
    }

    fn start_examination(&self, gpus: Vec<String>, timeout: Duration) {
        let start = ExaminationStart { gpus, dir: self.setup.doctor_dir.clone(), timeout };
        let (starter, endings) = (self.setup.starter.clone(), self.endings.clone());
        tokio::spawn(async move {
            // Fails if the daemon is shutting down.
            let _ = endings.send(starter.examine(&start).await).await;
        });
    }

    pub(super) fn on_examined(&mut self, ending: ExaminationEnd) {
        self.jobs.examination = None;
        // The last poll still saw the processes of the examination, which would now count as foreign.
        self.setup.gpu_monitor.poll_now();
        let Some(Running { uid, choices, replies }) = self.examination.take() else { return };
        let mut gpus = Vec::new();
        for choice in &choices {
            if let Some(reason) = &choice.skipped {
                gpus.push(message(choice, ExaminationState::Skipped, reason));
                continue;
            }
            let uuid = &choice.uuid;
            let (result, gpu) = match ending.verdict(choice.index, uuid) {
                Verdict::Passed => {
                    info!("GPU {uuid} has passed its examination");
                    (0, message(choice, ExaminationState::Passed, ""))
                }
                Verdict::Failed(reason) => {
                    warn!(reason, "GPU {uuid} has failed its examination and is drained");
                    let (gpus, undo, at) = (vec![uuid.clone()], false, self.now());
                    self.record_event(Record::Drained { gpus, undo, reason: reason.clone(), uid, at });
                    (1, message(choice, ExaminationState::Failed, &reason))
                }
                Verdict::Unknown(reason) => {
                    warn!(reason, "GPU {uuid} was examined without a result");
                    (2, message(choice, ExaminationState::Unknown, &reason))
                }
            };
            self.examined[result] += 1;
            gpus.push(gpu);
        }
        let findings = match ending {
            ExaminationEnd::Report(report) => report.findings.into_iter().map(finding_message).collect(),
            ExaminationEnd::TimedOut(_) | ExaminationEnd::Broken(_) => Vec::new(),
        };
        // The caller may have disconnected.
        let _ = replies.try_send(ExamineReply { gpus, done: true, findings });
    }
}

fn message(choice: &Choice, state: ExaminationState, reason: &str) -> ExaminedGpu {
    ExaminedGpu {
        index: choice.index,
        uuid: choice.uuid.clone(),
        state: state.into(),
        reason: reason.to_owned(),
    }
}

fn finding_message(finding: Finding) -> v1::Finding {
    let level = match finding.level {
        Level::Ok => FindingLevel::Ok,
        Level::Warning => FindingLevel::Warning,
        Level::Failure => FindingLevel::Failure,
    };
    v1::Finding {
        level: level.into(),
        check: finding.check.into_owned(),
        gpu_index: finding.gpu.as_ref().map(|gpu| gpu.index),
        gpu_uuid: finding.gpu.map(|gpu| gpu.uuid).unwrap_or_default(),
        message: finding.message,
        help: finding.help.map(|help| help.into_owned()).unwrap_or_default(),
    }
}
