//! Validation of requests to the daemon of a node.
//!
//! Any user of the node may send any bytes. All lengths are bounded here, so that the daemon does not have to.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::scheduling::Scheduling;
use super::{Logs, WireError};
use crate::v1;
use xlaunch_spec::command::CommandSpec;
use xlaunch_spec::job::JobSpec;

const MAX_REQUEST_ID_BYTES: usize = 64;
const MAX_VERSION_BYTES: usize = 64;
const MAX_NAME_BYTES: usize = 256;
const MAX_PATH_BYTES: usize = 4096;
const MAX_REASON_BYTES: usize = 1024;
/// Maximum total size of the variables of an environment.
const MAX_ENVIRONMENT_BYTES: usize = 256 << 10;
/// Maximum number of GPUs: more than any node has.
const MAX_GPUS: u32 = 1024;
const MAX_UUID_BYTES: usize = 128;
/// Default timeout of an examination, in seconds.
const DEFAULT_EXAMINATION_TIMEOUT: u64 = 600;
const MAX_EXAMINATION_TIMEOUT: u64 = 86_400;
/// Highest priority; the lowest one is its negative.
const MAX_PRIORITY: i32 = 1000;
/// Maximum size of an error message. It may quote the request, and is sent back in a header of limited size.
const MAX_PROBLEM_BYTES: usize = 1024;

/// The work of a job. The daemon also stores this on disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Work {
    /// The built-in trainer.
    Trainer(Box<JobSpec>),
    /// Any other command.
    Command(Box<CommandSpec>),
}

/// A checked [`v1::SubmitRequest`].
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "the fields are those of the message")]
pub struct Submit {
    pub request_id: String,
    pub version: String,
    pub work_dir: PathBuf,
    pub environment: Vec<Vec<u8>>,
    pub work: Work,
    pub name: String,
    pub priority: i32,
    pub gpus: Option<u32>,
    pub scheduling: Scheduling,
}

impl TryFrom<v1::SubmitRequest> for Submit {
    type Error = WireError;

    fn try_from(wire: v1::SubmitRequest) -> Result<Self, WireError> {
        within("request_id", wire.request_id.len(), MAX_REQUEST_ID_BYTES)?;
        let printable = wire.request_id.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ');
        if wire.request_id.is_empty() || !printable {
            return Err(content(
                "request_id",
                format!("is not 1 to {MAX_REQUEST_ID_BYTES} printable ASCII characters"),
            ));
        }
        check_priority(wire.priority)?;
        if let Some(gpus) = wire.gpus.filter(|gpus| *gpus > MAX_GPUS) {
            let expected = format!("at most {MAX_GPUS}");
            return Err(WireError::Range { field: "gpus", got: gpus.into(), expected });
        }
        Ok(Self {
            scheduling: Scheduling::of(&wire)?,
            request_id: wire.request_id,
            version: text("version", wire.version, MAX_VERSION_BYTES)?,
            work_dir: work_dir(wire.work_dir)?,
            environment: environment(wire.environment)?,
            work: work(wire.work)?,
            name: text("name", wire.name, MAX_NAME_BYTES)?,
            priority: wire.priority,
            gpus: wire.gpus,
        })
    }
}

/// A checked [`v1::UpdateRequest`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are those of the message")]
pub struct Update {
    pub job: u64,
    pub held: Option<bool>,
    pub priority: Option<i32>,
}

impl TryFrom<v1::UpdateRequest> for Update {
    type Error = WireError;

    fn try_from(wire: v1::UpdateRequest) -> Result<Self, WireError> {
        let v1::UpdateRequest { job, held, priority } = wire;
        priority.map_or(Ok(()), check_priority)?;
        Ok(Self { job, held, priority })
    }
}

/// A checked [`v1::JobLogsRequest`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are those of the message")]
pub struct JobLogs {
    pub job: u64,
    pub logs: Logs,
}

impl TryFrom<v1::JobLogsRequest> for JobLogs {
    type Error = WireError;

    fn try_from(wire: v1::JobLogsRequest) -> Result<Self, WireError> {
        let logs = wire.logs.ok_or_else(|| content("logs", "is missing".into()))?;
        Ok(Self { job: wire.job, logs: logs.try_into()? })
    }
}

/// A checked [`v1::DrainRequest`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are those of the message")]
pub struct Drain {
    pub gpus: Vec<String>,
    pub undo: bool,
    pub reason: String,
}

impl TryFrom<v1::DrainRequest> for Drain {
    type Error = WireError;

    fn try_from(wire: v1::DrainRequest) -> Result<Self, WireError> {
        let gpus = gpus(wire.gpus)?;
        Ok(Self { gpus, undo: wire.undo, reason: text("reason", wire.reason, MAX_REASON_BYTES)? })
    }
}

/// A checked [`v1::ExamineRequest`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are those of the message")]
pub struct Examine {
    pub gpus: Vec<String>,
    pub timeout: Duration,
}

impl TryFrom<v1::ExamineRequest> for Examine {
    type Error = WireError;

    fn try_from(wire: v1::ExamineRequest) -> Result<Self, WireError> {
        let got = wire.timeout_seconds.unwrap_or(DEFAULT_EXAMINATION_TIMEOUT);
        if !(1..=MAX_EXAMINATION_TIMEOUT).contains(&got) {
            let expected = format!("1 to {MAX_EXAMINATION_TIMEOUT}");
            return Err(WireError::Range { field: "timeout_seconds", got, expected });
        }
        Ok(Self { gpus: gpus(wire.gpus)?, timeout: Duration::from_secs(got) })
    }
}

fn gpus(wire: Vec<String>) -> Result<Vec<String>, WireError> {
    if wire.len() > MAX_GPUS as usize {
        let (got, expected) = (wire.len() as u64, format!("at most {MAX_GPUS}"));
        return Err(WireError::Range { field: "gpus", got, expected });
    }
    wire.into_iter().map(|uuid| text("gpus", uuid, MAX_UUID_BYTES)).collect()
}

fn check_priority(priority: i32) -> Result<(), WireError> {
    if priority.unsigned_abs() > MAX_PRIORITY.unsigned_abs() {
        let problem = format!("is {priority}, expected -{MAX_PRIORITY} to {MAX_PRIORITY}");
        return Err(content("priority", problem));
    }
    Ok(())
}

fn work_dir(path: String) -> Result<PathBuf, WireError> {
    let path = text("work_dir", path, MAX_PATH_BYTES)?;
    if !path.starts_with('/') {
        return Err(content("work_dir", "is not an absolute path".into()));
    }
    Ok(path.into())
}

fn environment(variables: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>, WireError> {
    within("environment", total_bytes(&variables), MAX_ENVIRONMENT_BYTES)?;
    for variable in &variables {
        let name = variable.iter().position(|byte| *byte == b'=');
        if name.is_none_or(|end| end == 0) || variable.contains(&0) {
            let shown = String::from_utf8_lossy(variable).chars().take(32).collect::<String>();
            return Err(content("environment", format!("has {shown:?}, which is not NAME=VALUE")));
        }
    }
    Ok(variables)
}

fn work(work: Option<v1::submit_request::Work>) -> Result<Work, WireError> {
    use v1::submit_request::Work::{CommandSpecJson, TrainerSpecJson};
    match work {
        None => Err(content("work", "is missing; expected a training job or a command".into())),
        Some(TrainerSpecJson(json)) => {
            let spec = JobSpec::from_json(&json)
                .map_err(|error| content("trainer_spec_json", format!("is refused: {error}")))?;
            check_text("job.name", &spec.job.name, MAX_NAME_BYTES)?;
            Ok(Work::Trainer(Box::new(spec)))
        }
        Some(CommandSpecJson(json)) => {
            let spec = CommandSpec::from_json(&json)
                .map_err(|error| content("command_spec_json", format!("is refused: {error}")))?;
            Ok(Work::Command(Box::new(spec)))
        }
    }
}

/// Returns the total length including terminating zeros, as the kernel counts arguments and environment.
fn total_bytes(strings: &[Vec<u8>]) -> usize {
    strings.iter().map(|string| string.len() + 1).sum()
}

/// Checks text that must be displayable on one line.
fn text(field: &'static str, value: String, limit: usize) -> Result<String, WireError> {
    check_text(field, &value, limit).map(|()| value)
}

fn check_text(field: &'static str, value: &str, limit: usize) -> Result<(), WireError> {
    within(field, value.len(), limit)?;
    let shown = !value.chars().any(char::is_control);
    shown.then_some(()).ok_or_else(|| content(field, "has control characters".into()))
}

pub(super) fn within(field: &'static str, got: usize, limit: usize) -> Result<(), WireError> {
    if got > limit {
        return Err(WireError::TooLong { field, got, limit });
    }
    Ok(())
}

pub(super) fn content(field: &'static str, mut problem: String) -> WireError {
    if problem.len() > MAX_PROBLEM_BYTES {
        let end = (0..=MAX_PROBLEM_BYTES).rev().find(|end| problem.is_char_boundary(*end)).unwrap_or(0);
        problem.replace_range(end.., "…");
    }
    WireError::Content { field, problem }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message;
    use v1::submit_request::Work::{CommandSpecJson, TrainerSpecJson};

    use super::*;
    use xlaunch_spec::command::{Nproc, Program};

    fn submit() -> v1::SubmitRequest {
        v1::SubmitRequest {
            request_id: "a 1".into(),
            version: "0.1.0".into(),
            work_dir: "/home/ann".into(),
            environment: vec![b"A=".to_vec(), b"B=\xff=1".to_vec()],
            work: Some(CommandSpecJson(command("train.py").to_json())),
            name: "näme".into(),
            priority: -1000,
            gpus: Some(1024),
            ..Default::default()
        }
    }

    fn command(program: &str) -> CommandSpec {
        CommandSpec::new(Program::Script(program.into()), vec!["--lr".into()])
    }

    /// Returns the error for a valid request with this change.
    fn refusal(change: impl FnOnce(&mut v1::SubmitRequest)) -> String {
        let mut wire = submit();
        change(&mut wire);
        Submit::try_from(wire).unwrap_err().to_string()
    }

    #[test]
    fn submit_at_the_limits_is_accepted_and_beyond_is_refused_with_the_field_name() {
        assert_eq!(Submit::try_from(submit()).unwrap().work_dir, PathBuf::from("/home/ann"));
        let full = v1::SubmitRequest {
            request_id: "x".repeat(64),
            version: "v".repeat(64),
            work_dir: format!("/{}", "d".repeat(4095)),
            environment: vec![[b"A=".to_vec(), vec![b'x'; MAX_ENVIRONMENT_BYTES - 3]].concat()],
            work: Some(TrainerSpecJson(JobSpec::default().to_json())),
            name: "n".repeat(256),
            priority: 1000,
            gpus: None,
            ..Default::default()
        };
        Submit::try_from(full.clone()).unwrap();
        let starts =
            |text: String, field: &str| assert!(text.starts_with(&format!("field {field} ")), "{text}");
        starts(refusal(|wire| wire.request_id.clear()), "request_id");
        starts(refusal(|wire| wire.request_id = "é".into()), "request_id");
        starts(refusal(|wire| wire.request_id = full.request_id + "x"), "request_id");
        starts(refusal(|wire| wire.version = full.version + "x"), "version");
        starts(refusal(|wire| wire.work_dir = full.work_dir + "x"), "work_dir");
        starts(refusal(|wire| wire.work_dir = "here".into()), "work_dir");
        starts(refusal(|wire| wire.work_dir = "/a\0".into()), "work_dir");
        starts(
            refusal(|wire| wire.environment = [full.environment, vec![b"B=".to_vec()]].concat()),
            "environment",
        );
        for variable in [b"=B".as_slice(), b"B", b"", b"B=\0"] {
            starts(refusal(|wire| wire.environment.push(variable.into())), "environment");
        }
        starts(refusal(|wire| wire.work = None), "work");
        starts(refusal(|wire| wire.name = full.name + "x"), "name");
        starts(refusal(|wire| wire.name = "\x1b[2J".into()), "name");
        starts(refusal(|wire| wire.priority = 1001), "priority");
        starts(refusal(|wire| wire.priority = i32::MIN), "priority");
        starts(refusal(|wire| wire.gpus = Some(1025)), "gpus");
        let update = v1::UpdateRequest { job: 1, priority: Some(1001), ..Default::default() };
        starts(Update::try_from(update).unwrap_err().to_string(), "priority");
    }

    #[test]
    fn trainer_spec_is_validated() {
        let mut spec = JobSpec::default();
        let trainer = |json: Vec<u8>| v1::SubmitRequest { work: Some(TrainerSpecJson(json)), ..submit() };
        let submit = Submit::try_from(trainer(spec.to_json())).unwrap();
        assert_eq!(submit.work, Work::Trainer(Box::new(spec.clone())));
        spec.train.batch = 0;
        let error = Submit::try_from(trainer(spec.to_json())).unwrap_err().to_string();
        assert!(error.contains("train.batch"), "{error}");
        spec.train.batch = 1;
        spec.job.name = "a\nb".into();
        let error = Submit::try_from(trainer(spec.to_json())).unwrap_err().to_string();
        assert!(error.contains("job.name"), "{error}");
        let error = Submit::try_from(trainer(vec![b'['; 1 << 20])).unwrap_err().to_string();
        assert!(error.contains("trainer_spec_json"), "{error}");
    }

    #[test]
    fn command_spec_is_validated() {
        let with = |json: Vec<u8>| v1::SubmitRequest { work: Some(CommandSpecJson(json)), ..submit() };
        let spec = command("train.py");
        assert_eq!(
            Submit::try_from(with(spec.to_json())).unwrap().work,
            Work::Command(Box::new(spec.clone()))
        );
        let bad = CommandSpec { nproc: Nproc::Count(0), ..spec };
        for json in [bad.to_json(), b"{}".to_vec(), Vec::new()] {
            let error = Submit::try_from(with(json)).unwrap_err().to_string();
            assert!(error.starts_with("field command_spec_json is refused: "), "{error}");
        }
    }

    #[test]
    fn refusal_quotes_only_the_start_of_a_long_value() {
        let json = format!(r#"{{"version":1,"spec":{{"nproc":"{}"}}}}"#, "é".repeat(100_000));
        let error = refusal(|wire| wire.work = Some(CommandSpecJson(json.into_bytes())));
        assert!(
            error.starts_with("field command_spec_json is refused: ") && error.ends_with("é…"),
            "{error}"
        );
        assert!(error.len() < 1100, "{} bytes", error.len());
    }

    #[test]
    fn empty_logs_request_and_values_out_of_range_are_refused() {
        assert!(JobLogs::try_from(v1::JobLogsRequest { job: 1, logs: None }).is_err());
        let drain = |count| v1::DrainRequest { gpus: vec!["GPU-1".into(); count], ..Default::default() };
        assert!(Drain::try_from(drain(1024)).is_ok() && Drain::try_from(drain(1025)).is_err());
        assert!(
            Drain::try_from(v1::DrainRequest { reason: "x".repeat(1025), ..Default::default() }).is_err()
        );
        let examine = |timeout_seconds| {
            let wire = v1::ExamineRequest { gpus: vec!["1".into()], timeout_seconds };
            Examine::try_from(wire).map(|examine| examine.timeout.as_secs()).ok()
        };
        assert_eq!([None, Some(5), Some(0), Some(u64::MAX)].map(examine), [Some(600), Some(5), None, None]);
    }

    /// Asserts that an accepted request is within bounds.
    fn assert_bounded(submit: &Submit) {
        assert!((1..=64).contains(&submit.request_id.len()) && submit.name.len() <= 256);
        assert!(submit.work_dir.is_absolute() && submit.work_dir.as_os_str().len() <= 4096);
        assert!(submit.environment.iter().all(|variable| variable.contains(&b'=')));
        assert!(submit.priority.abs() <= 1000 && submit.gpus.unwrap_or(0) <= 1024);
        match &submit.work {
            Work::Command(spec) => spec.check().unwrap(),
            Work::Trainer(spec) => spec.check().unwrap(),
        }
    }

    fn decode<M: Message + Default, T: TryFrom<M>>(bytes: &[u8]) -> Option<T> {
        T::try_from(M::decode(bytes).ok()?).ok()
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_refused_or_within_bounds(
            bytes in proptest::collection::vec(any::<u8>(), 0..300),
            at in any::<prop::sample::Index>(),
            cut in any::<prop::sample::Index>(),
            as_trainer in any::<bool>(),
        ) {
            // Random bytes, and a valid request that is partly overwritten and truncated.
            let mut good = submit();
            if as_trainer {
                good.work = Some(TrainerSpecJson(JobSpec::default().to_json()));
            }
            let mut damaged = good.encode_to_vec();
            let at = at.index(damaged.len());
            let end = damaged.len().min(at + bytes.len() % 8);
            damaged[at..end].copy_from_slice(&bytes[..end - at]);
            damaged.truncate(cut.index(2 * damaged.len()));
            for bytes in [&bytes, &damaged] {
                if let Some(submit) = decode::<v1::SubmitRequest, Submit>(bytes) {
                    assert_bounded(&submit);
                }
                if let Some(drain) = decode::<v1::DrainRequest, Drain>(bytes) {
                    assert!(drain.gpus.len() <= 1024 && drain.reason.len() <= 1024);
                }
                decode::<v1::JobLogsRequest, JobLogs>(bytes);
                let _ = (v1::ListRequest::decode(&**bytes), v1::GetRequest::decode(&**bytes));
                let _ = (v1::CancelRequest::decode(&**bytes), v1::NodeStatusRequest::decode(&**bytes));
            }
        }
    }
}
