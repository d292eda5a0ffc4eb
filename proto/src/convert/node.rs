//! Validation of requests to the daemon of a node.
//!
//! Any user of the node may send any bytes. All lengths are bounded here, so that the daemon does not have to.

use std::collections::BTreeSet;
use std::time::Duration;

use serde::{Deserialize, Serialize};

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
/// Maximum number of jobs of an array, and of jobs that a job waits for.
pub const MAX_ARRAY_JOBS: usize = 1000;
/// Maximum index in an array.
const MAX_ARRAY_INDEX: u32 = 1_000_000;
/// Maximum time: ten years, in seconds, so that no sum of times overflows.
const MAX_TIME_SECONDS: u64 = 10 * 366 * 86_400;
/// Maximum number of cores: more than any node has.
const MAX_CPUS: u32 = 1 << 16;
const MAX_MEMORY_BYTES: u64 = 1 << 50;
/// The highest signal with a name; higher ones are real-time signals.
const MAX_SIGNAL: i32 = 31;
const SIGKILL: i32 = 9;
const SIGSTOP: i32 = 19;
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
pub struct Submit {
    /// The request without its work.
    pub request: v1::SubmitRequest,
    /// The checked work.
    pub work: Work,
}

impl TryFrom<v1::SubmitRequest> for Submit {
    type Error = WireError;

    fn try_from(mut wire: v1::SubmitRequest) -> Result<Self, WireError> {
        within("request_id", wire.request_id.len(), "bytes", MAX_REQUEST_ID_BYTES)?;
        let printable = wire.request_id.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ');
        if wire.request_id.is_empty() || !printable {
            return Err(content(
                "request_id",
                format!("is not 1 to {MAX_REQUEST_ID_BYTES} printable ASCII characters"),
            ));
        }
        check_priority(wire.priority)?;
        range("gpus", wire.gpus.map(u64::from), 0, MAX_GPUS.into())?;
        range("umask", wire.umask.map(u64::from), 0, 0o777)?;
        wire.scheduling.as_ref().map_or(Ok(()), check_scheduling)?;
        check_array_indices(&wire.array_indices)?;
        check_text("version", &wire.version, MAX_VERSION_BYTES)?;
        check_text("work_dir", &wire.work_dir, MAX_PATH_BYTES)?;
        if !wire.work_dir.starts_with('/') {
            return Err(content("work_dir", "is not an absolute path".into()));
        }
        check_environment(&wire.environment)?;
        let work = work(wire.work.take())?;
        check_text("name", &wire.name, MAX_NAME_BYTES)?;
        Ok(Self { request: wire, work })
    }
}

impl v1::UpdateRequest {
    /// Refuses a priority outside its range.
    pub fn check(&self) -> Result<(), WireError> {
        self.priority.map_or(Ok(()), check_priority)
    }
}

impl v1::DrainRequest {
    /// Refuses lists and texts that are too long.
    pub fn check(&self) -> Result<(), WireError> {
        check_gpus(&self.gpus)?;
        check_text("reason", &self.reason, MAX_REASON_BYTES)
    }
}

impl v1::ExamineRequest {
    /// Refuses a list that is too long and a timeout outside its range.
    pub fn check(&self) -> Result<(), WireError> {
        range("timeout_seconds", self.timeout_seconds, 1, MAX_EXAMINATION_TIMEOUT)?;
        check_gpus(&self.gpus)
    }

    /// Returns the time after which GPUs without a result are drained.
    pub fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout_seconds.unwrap_or(DEFAULT_EXAMINATION_TIMEOUT))
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

fn check_gpus(gpus: &[String]) -> Result<(), WireError> {
    range("gpus", Some(gpus.len() as u64), 0, MAX_GPUS.into())?;
    gpus.iter().try_for_each(|uuid| check_text("gpus", uuid, MAX_UUID_BYTES))
}

fn check_priority(priority: i32) -> Result<(), WireError> {
    if priority.unsigned_abs() > MAX_PRIORITY.unsigned_abs() {
        let problem = format!("is {priority}, expected -{MAX_PRIORITY} to {MAX_PRIORITY}");
        return Err(content("priority", problem));
    }
    Ok(())
}

fn check_scheduling(wire: &v1::Scheduling) -> Result<(), WireError> {
    range("time_limit_seconds", wire.time_limit_seconds, 1, MAX_TIME_SECONDS)?;
    range("memory_bytes", wire.memory_bytes, 1, MAX_MEMORY_BYTES)?;
    range("cpus", wire.cpus.map(u64::from), 1, MAX_CPUS.into())?;
    if let Some(v1::WarningSignal { signal, seconds_before }) = wire.warning {
        check_signal("warning.signal", signal)?;
        range("warning.seconds_before", Some(seconds_before), 1, MAX_TIME_SECONDS)?;
    }
    within("after", wire.after.len(), "jobs", MAX_ARRAY_JOBS)?;
    let unspecified = v1::DependencyCondition::Unspecified;
    if wire.after.iter().any(|dependency| dependency.condition() == unspecified) {
        return Err(content("after.condition", "is missing".into()));
    }
    Ok(())
}

/// Refuses numbers that are not signals, and signals that a worker cannot handle.
pub fn check_signal(field: &'static str, signal: i32) -> Result<(), WireError> {
    match signal {
        SIGKILL | SIGSTOP => Err(content(field, format!("is {signal}, a signal that no process can handle"))),
        1..=MAX_SIGNAL => Ok(()),
        _ => Err(content(field, format!("is {signal}, expected 1 to {MAX_SIGNAL}"))),
    }
}

fn check_array_indices(indices: &[u32]) -> Result<(), WireError> {
    within("array_indices", indices.len(), "indices", MAX_ARRAY_JOBS)?;
    range("array_indices", indices.iter().max().copied().map(u64::from), 0, MAX_ARRAY_INDEX.into())?;
    if indices.iter().collect::<BTreeSet<_>>().len() != indices.len() {
        return Err(content("array_indices", "has an index twice".into()));
    }
    Ok(())
}

fn check_environment(variables: &[Vec<u8>]) -> Result<(), WireError> {
    // The length includes terminating zeros, as the kernel counts arguments and environment.
    let bytes = variables.iter().map(|variable| variable.len() + 1).sum();
    within("environment", bytes, "bytes", MAX_ENVIRONMENT_BYTES)?;
    for variable in variables {
        let name = variable.iter().position(|byte| *byte == b'=');
        if name.is_none_or(|end| end == 0) || variable.contains(&0) {
            let shown = String::from_utf8_lossy(variable).chars().take(32).collect::<String>();
            return Err(content("environment", format!("has {shown:?}, which is not NAME=VALUE")));
        }
    }
    Ok(())
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

/// Checks text that must be displayable on one line.
fn check_text(field: &'static str, value: &str, limit: usize) -> Result<(), WireError> {
    within(field, value.len(), "bytes", limit)?;
    let shown = !value.chars().any(char::is_control);
    shown.then_some(()).ok_or_else(|| content(field, "has control characters".into()))
}

fn range(field: &'static str, got: Option<u64>, least: u64, most: u64) -> Result<(), WireError> {
    let Some(got) = got.filter(|got| !(least..=most).contains(got)) else { return Ok(()) };
    let expected = if least == 0 { format!("at most {most}") } else { format!("{least} to {most}") };
    let unit = [("seconds", " s"), ("bytes", " bytes")].iter().find(|(name, _)| field.contains(name));
    let expected = expected + unit.map_or("", |(_, unit)| unit);
    Err(WireError::Range { field, got, expected })
}

fn within(field: &'static str, got: usize, unit: &'static str, limit: usize) -> Result<(), WireError> {
    if got > limit {
        return Err(WireError::TooLong { field, got, unit, limit });
    }
    Ok(())
}

fn content(field: &'static str, mut problem: String) -> WireError {
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
        assert_eq!(Submit::try_from(submit()).unwrap().request.work_dir, "/home/ann");
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
        starts(update.check().unwrap_err().to_string(), "priority");
    }

    #[test]
    fn scheduling_out_of_range_is_refused_with_the_field_name() {
        let starts =
            |text: String, field: &str| assert!(text.starts_with(&format!("field {field} ")), "{text}");
        let check = |change: &dyn Fn(&mut v1::Scheduling)| {
            refusal(|wire| change(wire.scheduling.get_or_insert_default()))
        };
        starts(check(&|wire| wire.time_limit_seconds = Some(0)), "time_limit_seconds");
        starts(check(&|wire| wire.time_limit_seconds = Some(u64::MAX)), "time_limit_seconds");
        let time = check(&|wire| wire.time_limit_seconds = Some(0));
        assert!(time.ends_with(&format!("expected 1 to {MAX_TIME_SECONDS} s")), "{time}");
        starts(check(&|wire| wire.memory_bytes = Some(0)), "memory_bytes");
        starts(check(&|wire| wire.cpus = Some(0)), "cpus");
        for signal in [0, -1, 32, SIGKILL, SIGSTOP] {
            let warning = Some(v1::WarningSignal { signal, seconds_before: 60 });
            starts(check(&|wire| wire.warning = warning), "warning.signal");
        }
        let warning = Some(v1::WarningSignal { signal: 10, seconds_before: 0 });
        starts(check(&|wire| wire.warning = warning), "warning.seconds_before");
        let dependency = v1::Dependency { job: 1, ..Default::default() };
        starts(check(&|wire| wire.after = vec![dependency]), "after.condition");
        let after = vec![v1::Dependency::default(); MAX_ARRAY_JOBS + 1];
        let too_many = "field after has 1001 jobs, at most 1000 are allowed";
        assert_eq!(check(&|wire| wire.after.clone_from(&after)), too_many);
        starts(refusal(|wire| wire.array_indices = vec![3, 3]), "array_indices");
        starts(refusal(|wire| wire.array_indices = vec![MAX_ARRAY_INDEX + 1]), "array_indices");
        starts(refusal(|wire| wire.array_indices = (0..1001).collect()), "array_indices");
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
        assert!(drain(1024).check().is_ok() && drain(1025).check().is_err());
        assert!(v1::DrainRequest { reason: "x".repeat(1025), ..Default::default() }.check().is_err());
        let examine = |timeout_seconds| {
            let wire = v1::ExamineRequest { gpus: vec!["1".into()], timeout_seconds };
            wire.check().map(|()| wire.timeout().as_secs()).ok()
        };
        assert_eq!([None, Some(5), Some(0), Some(u64::MAX)].map(examine), [Some(600), Some(5), None, None]);
    }

    /// Asserts that an accepted request is within bounds.
    fn assert_bounded(Submit { request, work }: &Submit) {
        assert!((1..=64).contains(&request.request_id.len()) && request.name.len() <= 256);
        assert!(request.work_dir.starts_with('/') && request.work_dir.len() <= 4096);
        assert!(request.environment.iter().all(|variable| variable.contains(&b'=')));
        assert!(request.priority.abs() <= 1000 && request.gpus.unwrap_or(0) <= 1024);
        match work {
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
                if let Ok(drain) = v1::DrainRequest::decode(&**bytes) && drain.check().is_ok() {
                    assert!(drain.gpus.len() <= 1024 && drain.reason.len() <= 1024);
                }
                decode::<v1::JobLogsRequest, JobLogs>(bytes);
                let _ = (v1::ListRequest::decode(&**bytes), v1::GetRequest::decode(&**bytes));
                let _ = (v1::CancelRequest::decode(&**bytes), v1::NodeStatusRequest::decode(&**bytes));
            }
        }
    }
}
