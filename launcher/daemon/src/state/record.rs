//! The records of the journal: events of jobs and of the node.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize, Serializer};
use serde_json::json;
use xlaunch_proto::v1::Scheduling;

/// Maximum length of a reason, a report or a command line.
pub(crate) const MAX_TEXT_BYTES: usize = 4096;

/// Resource usage of a job, over all its processes, measured by systemd or by the job's agent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    pub cpu_ms: u64,
    /// `None` if unknown: the unit has no memory controller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak_memory_bytes: Option<u64>,
}

impl Usage {
    /// Returns the usage of several starts together. Those whose usage is unknown do not count.
    pub(crate) fn total(earlier: Option<Self>, last: Option<Self>) -> Option<Self> {
        let (Some(one), Some(other)) = (earlier, last) else { return earlier.or(last) };
        let peak_memory_bytes = one.peak_memory_bytes.max(other.peak_memory_bytes);
        Some(Self { cpu_ms: one.cpu_ms.saturating_add(other.cpu_ms), peak_memory_bytes })
    }
}

/// A change of a job or the node. Times are in milliseconds on the node's clock (`clock`). Later versions only add
/// fields, with defaults. An unknown kind of record was written by a newer version.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "record", rename_all = "snake_case")]
pub(crate) enum Record {
    /// A job was added to the queue.
    Submitted(Box<Submitted>),
    /// An array was added to the queue: one job per index. The jobs equal `first`, except for their ids, which count up
    /// from that of `first`.
    SubmittedArray {
        first: Box<Submitted>,
        indices: Vec<u32>,
    },
    /// A queued job was held: it does not start before it is released. `admin`: only administrators can release it.
    Held {
        job: u64,
        uid: u32,
        #[serde(default, skip_serializing_if = "String::is_empty")]
        user: String,
        admin: bool,
        at: u64,
    },
    Released {
        job: u64,
        uid: u32,
        at: u64,
    },
    Reprioritised {
        job: u64,
        priority: i32,
        uid: u32,
        at: u64,
    },
    /// The agent is about to be started, and may be running from now on. `start` counts from 1.
    Starting {
        job: u64,
        start: u32,
        gpus: Vec<String>,
        boot: String,
        at: u64,
    },
    /// The warning signal before the time limit is about to be sent to the workers.
    Warned {
        job: u64,
        at: u64,
    },
    /// An active job has reached its time limit and is stopped.
    TimeLimitReached {
        job: u64,
        at: u64,
    },
    /// A user cancelled an active job.
    Cancelled {
        job: u64,
        uid: u32,
        #[serde(default, skip_serializing_if = "String::is_empty")]
        user: String,
        at: u64,
    },
    /// The job has ended. `exit` is `None` if the agent left no result. `order` counts ended jobs from 1; 0 stands for
    /// the next number.
    Ended {
        job: u64,
        end: End,
        exit: Option<u8>,
        reason: String,
        report: String,
        at: u64,
        #[serde(default, skip_serializing_if = "is_zero")]
        order: u64,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        usage: Option<Usage>,
    },
    /// The job is back in the queue, because its agent never ran or, if `lost`, has disappeared. `at` is 0 if the job
    /// held no resources.
    Requeued {
        job: u64,
        reason: String,
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        lost: bool,
        #[serde(default, skip_serializing_if = "is_zero")]
        at: u64,
        /// Usage of the start that was lost.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        usage: Option<Usage>,
    },
    /// The whole node is back in service. Drained GPUs stay drained.
    Resumed {
        uid: u32,
        at: u64,
    },
    /// GPUs (the whole node if the list is empty) were taken out of service or, with `undo`, put back. Up to version
    /// 0.2, `undo` of the whole node put all GPUs back too.
    Drained {
        gpus: Vec<String>,
        undo: bool,
        reason: String,
        uid: u32,
        at: u64,
    },
    /// These ended jobs are in the accounting file.
    Accounted {
        jobs: Vec<u64>,
    },
    /// The job was removed, with its files.
    Forgotten {
        job: u64,
    },
    /// Totals since the node's first job, including forgotten jobs. The first record of a rewritten journal.
    Counted {
        submitted: u64,
        ended: u64,
    },
    /// The node's clock was at `offset` when this boot began. `latest` is the latest time in earlier records.
    Clock {
        boot: String,
        offset: u64,
        latest: u64,
    },
    /// The decayed usage of a user at this time, in GPU seconds. Part of a rewritten journal.
    Used {
        uid: u32,
        gpu_seconds: f64,
        at: u64,
    },
    /// The half-life of usage has changed.
    HalfLife {
        seconds: u64,
    },
}

impl Record {
    /// The end of a job that left no result.
    pub(super) fn ended(job: u64, end: End, reason: String, at: u64) -> Self {
        Self::Ended { job, end, exit: None, reason, report: String::new(), at, order: 0, usage: None }
    }

    /// Returns the ids of the jobs that the record changes.
    pub(crate) fn jobs(&self) -> RangeInclusive<u64> {
        let nothing = RangeInclusive::new(1, 0);
        match self {
            Self::Submitted(submitted) => submitted.job..=submitted.job,
            Self::SubmittedArray { indices, .. } if indices.is_empty() => nothing,
            Self::SubmittedArray { first, indices } => {
                first.job..=first.job.saturating_add(indices.len() as u64 - 1)
            }
            Self::Held { job, .. }
            | Self::Released { job, .. }
            | Self::Reprioritised { job, .. }
            | Self::Starting { job, .. }
            | Self::Warned { job, .. }
            | Self::TimeLimitReached { job, .. }
            | Self::Cancelled { job, .. }
            | Self::Ended { job, .. }
            | Self::Requeued { job, .. }
            | Self::Forgotten { job } => *job..=*job,
            Self::Drained { .. }
            | Self::Resumed { .. }
            | Self::Accounted { .. }
            | Self::Clock { .. }
            | Self::Counted { .. }
            | Self::Used { .. }
            | Self::HalfLife { .. } => nothing,
        }
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it with a reference")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it with a reference")]
fn is_zero_u32(number: &u32) -> bool {
    *number == 0
}

/// Leaves out fields without a value, as most jobs have few.
fn serialize_set_values<S: Serializer>(message: &Scheduling, serializer: S) -> Result<S::Ok, S::Error> {
    let (mut value, unset) = (json!(message), json!(Scheduling::default()));
    if let Some(fields) = value.as_object_mut() {
        fields.retain(|key, value| *value != unset[key]);
    }
    value.serialize(serializer)
}

/// A job as submitted, including later changes while it is queued: hold, priority, outcomes of dependencies. The
/// environment is not in the journal but in the job's directory ([`crate::files`]).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Submitted {
    pub job: u64,
    pub request_id: String,
    pub uid: u32,
    /// Name of the user; empty in records of version 0.1.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub user: String,
    pub name: String,
    /// True if the job runs the built-in trainer rather than a command.
    pub trainer: bool,
    pub priority: i32,
    /// Number of GPUs that the job holds while it runs; 0 for a CPU job.
    pub gpus: u32,
    pub workers: u32,
    /// Time between SIGTERM and SIGKILL of the workers, in seconds.
    #[serde(rename = "patience")]
    pub shutdown_timeout: f64,
    pub command_line: String,
    pub work_dir: String,
    pub at: u64,
    /// Primary group of the user.
    #[serde(skip_serializing_if = "is_zero_u32")]
    pub gid: u32,
    /// The scheduling that was requested, with the node's defaults, and with the outcomes of dependencies.
    #[serde(flatten, serialize_with = "serialize_set_values")]
    pub scheduling: Scheduling,
    /// Usage charged per second while the job runs, in thousandths of a GPU second. Includes the job's part of the
    /// node's cores or memory. 0 in records of version 0.2.
    #[serde(skip_serializing_if = "is_zero_u32")]
    pub rate: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held: Option<Hold>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub array: Option<Element>,
    /// Number of times that the job went back to the queue.
    #[serde(skip_serializing_if = "is_zero_u32")]
    pub requeues: u32,
    /// Run time of the starts before that, in milliseconds.
    #[serde(skip_serializing_if = "is_zero")]
    pub earlier_ms: u64,
    /// Usage of these starts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub earlier_usage: Option<Usage>,
}

/// The user who cancelled a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Canceller {
    pub(crate) uid: u32,
    /// Name of the user; empty in records of version 0.2.
    pub(crate) user: String,
}

/// A hold on a job, and the user who placed it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hold {
    pub uid: u32,
    /// Name of the user; empty in records of version 0.2.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub user: String,
    /// True if an administrator holds the job of another user.
    pub admin: bool,
}

/// The place of a job in its array.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Element {
    /// Id of the array's first job.
    pub first: u64,
    pub index: u32,
    /// Maximum number of the array's jobs that run at a time; 0 for no limit.
    pub parallel: u32,
}

/// Outcome of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum End {
    Done,
    Failed,
    Cancelled,
    Lost,
}

/// Cuts a text from outside to [`MAX_TEXT_BYTES`], as the journal and replies may contain many of them.
pub(crate) fn bounded(mut text: String) -> String {
    if text.len() > MAX_TEXT_BYTES {
        let most = MAX_TEXT_BYTES - "…".len();
        text.truncate((0..=most).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0));
        text.push('…');
    }
    text
}
