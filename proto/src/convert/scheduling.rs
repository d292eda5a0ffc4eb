//! Validation of the part of a submission that controls when a job runs and what it reserves.

use serde::{Deserialize, Serialize};

use super::WireError;
use super::node::{content, within};
use crate::v1;

/// Maximum number of jobs of an array.
pub const MAX_ARRAY_JOBS: usize = 1000;
/// Maximum index in an array.
pub const MAX_ARRAY_INDEX: u32 = 1_000_000;
const MAX_DEPENDENCIES: usize = 100;
/// Maximum time: ten years, in seconds, so that no sum of times overflows.
const MAX_TIME_SECONDS: u64 = 10 * 366 * 86_400;
/// Maximum number of cores: more than any node has.
const MAX_CPUS: u32 = 1 << 16;
const MAX_MEMORY_BYTES: u64 = 1 << 50;
/// The highest signal with a name; higher ones are real-time signals.
const MAX_SIGNAL: i32 = 31;
const SIGKILL: i32 = 9;
const SIGSTOP: i32 = 19;

/// The user's settings of when a job runs and what it reserves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are those of the message")]
pub struct Scheduling {
    pub held: bool,
    pub time_limit_seconds: Option<u64>,
    pub warning: Option<Warning>,
    pub memory_bytes: Option<u64>,
    pub cpus: Option<u32>,
    pub after: Vec<(u64, Condition)>,
    pub array_indices: Vec<u32>,
    pub array_parallel: u32,
    pub requeue: bool,
}

/// A signal to the workers of a job before its time limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Warning {
    /// Number of the signal on Linux.
    pub signal: i32,
    /// Number of seconds before the time limit at which the signal is sent.
    pub before: u64,
}

/// Required end of a job that another one depends on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Condition {
    /// The job is done.
    #[default]
    Ok,
    /// The job has ended in any way.
    Any,
    /// The job failed, was cancelled or was lost.
    Fail,
}

impl Scheduling {
    /// Reads the settings from a submission.
    ///
    /// # Errors
    /// A value is outside its range.
    pub fn of(wire: &v1::SubmitRequest) -> Result<Self, WireError> {
        range("time_limit_seconds", wire.time_limit_seconds, 1, MAX_TIME_SECONDS)?;
        range("memory_bytes", wire.memory_bytes, 1, MAX_MEMORY_BYTES)?;
        range("cpus", wire.cpus.map(u64::from), 1, MAX_CPUS.into())?;
        within("after", wire.after.len(), MAX_DEPENDENCIES)?;
        Ok(Self {
            held: wire.held,
            time_limit_seconds: wire.time_limit_seconds,
            warning: wire.warning.as_ref().map(warning).transpose()?,
            memory_bytes: wire.memory_bytes,
            cpus: wire.cpus,
            after: wire.after.iter().map(dependency).collect::<Result<_, _>>()?,
            array_indices: array_indices(&wire.array_indices)?,
            array_parallel: wire.array_parallel,
            requeue: wire.requeue,
        })
    }
}

fn range(field: &'static str, got: Option<u64>, least: u64, most: u64) -> Result<(), WireError> {
    match got.filter(|got| !(least..=most).contains(got)) {
        Some(got) => Err(WireError::Range { field, got, expected: format!("{least} to {most}") }),
        None => Ok(()),
    }
}

fn warning(wire: &v1::WarningSignal) -> Result<Warning, WireError> {
    let v1::WarningSignal { signal, seconds_before } = *wire;
    check_signal("warning.signal", signal)?;
    range("warning.seconds_before", Some(seconds_before), 1, MAX_TIME_SECONDS)?;
    Ok(Warning { signal, before: seconds_before })
}

/// Refuses numbers that are not signals, and signals that a worker cannot handle.
pub fn check_signal(field: &'static str, signal: i32) -> Result<(), WireError> {
    match signal {
        SIGKILL | SIGSTOP => Err(content(field, format!("is {signal}, a signal that no process can handle"))),
        1..=MAX_SIGNAL => Ok(()),
        _ => Err(content(field, format!("is {signal}, expected 1 to {MAX_SIGNAL}"))),
    }
}

fn dependency(wire: &v1::Dependency) -> Result<(u64, Condition), WireError> {
    use v1::DependencyCondition::{Any, Fail, Ok as Done, Unspecified};
    let condition = match wire.condition() {
        Done => Condition::Ok,
        Any => Condition::Any,
        Fail => Condition::Fail,
        Unspecified => return Err(content("after.condition", "is missing".into())),
    };
    Ok((wire.job, condition))
}

fn array_indices(indices: &[u32]) -> Result<Vec<u32>, WireError> {
    within("array_indices", indices.len(), MAX_ARRAY_JOBS)?;
    if let Some(index) = indices.iter().find(|index| **index > MAX_ARRAY_INDEX) {
        let expected = format!("at most {MAX_ARRAY_INDEX}");
        return Err(WireError::Range { field: "array_indices", got: u64::from(*index), expected });
    }
    let mut sorted = indices.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    if sorted.len() != indices.len() {
        return Err(content("array_indices", "has an index twice".into()));
    }
    Ok(indices.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(change: impl FnOnce(&mut v1::SubmitRequest)) -> String {
        let mut wire = v1::SubmitRequest::default();
        change(&mut wire);
        Scheduling::of(&wire).unwrap_err().to_string()
    }

    #[test]
    fn submission_without_options_reserves_nothing() {
        assert_eq!(Scheduling::of(&v1::SubmitRequest::default()).unwrap(), Scheduling::default());
    }

    #[test]
    fn values_out_of_range_are_refused_with_the_field_name() {
        let starts =
            |text: String, field: &str| assert!(text.starts_with(&format!("field {field} ")), "{text}");
        starts(refusal(|wire| wire.time_limit_seconds = Some(0)), "time_limit_seconds");
        starts(refusal(|wire| wire.time_limit_seconds = Some(u64::MAX)), "time_limit_seconds");
        starts(refusal(|wire| wire.memory_bytes = Some(0)), "memory_bytes");
        starts(refusal(|wire| wire.cpus = Some(0)), "cpus");
        for signal in [0, -1, 32, SIGKILL, SIGSTOP] {
            let warning = Some(v1::WarningSignal { signal, seconds_before: 60 });
            starts(refusal(|wire| wire.warning = warning), "warning.signal");
        }
        let warning = Some(v1::WarningSignal { signal: 10, seconds_before: 0 });
        starts(refusal(|wire| wire.warning = warning), "warning.seconds_before");
        let dependency = v1::Dependency { job: 1, condition: 0 };
        starts(refusal(|wire| wire.after = vec![dependency]), "after.condition");
        starts(refusal(|wire| wire.after = vec![v1::Dependency::default(); MAX_DEPENDENCIES + 1]), "after");
        starts(refusal(|wire| wire.array_indices = vec![3, 3]), "array_indices");
        starts(refusal(|wire| wire.array_indices = vec![MAX_ARRAY_INDEX + 1]), "array_indices");
        starts(refusal(|wire| wire.array_indices = (0..1001).collect()), "array_indices");
    }
}
