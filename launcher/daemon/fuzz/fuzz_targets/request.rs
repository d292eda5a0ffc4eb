//! Fuzzes requests, which any user may send: they are decoded, checked, resolved, admitted, and written to the journal.
//! Accepted requests must be bounded and be read back as they were written.
#![no_main]

mod patch;

use std::borrow::Cow;
use std::sync::LazyLock;
use std::time::Duration;

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use patch::Document;
use prost::Message;
use serde_json::Value;
use xlaunch_daemon::files::Description;
use xlaunch_daemon::fuzz::{History, Node, submit};
use xlaunch_daemon::view::Caller;
use xlaunch_spec::command::{CommandSpec, Program};
use xlaunch_proto::convert::node::{JobLogs, Submit, Work};
use xlaunch_spec::job::JobSpec;
use xlaunch_proto::v1::{
    self, CancelRequest, Dependency, DrainRequest, GetRequest, HistoryRequest, JobLogsRequest, ListRequest,
    SubmitRequest, UpdateRequest, WarningSignal, submit_request,
};

/// Limit on the message about a refused request. Clients accept headers of 16 KiB.
const MAX_REFUSAL_BYTES: usize = 4096;

#[derive(Arbitrary, Debug)]
struct Input<'a> {
    request: Request<'a>,
    /// Bytes of the encoded request to overwrite.
    damage: Option<(u16, &'a [u8])>,
    gpus: u8,
    cpu_workers: u8,
    allow_commands: bool,
    admin: bool,
}

#[derive(Arbitrary, Debug)]
enum Request<'a> {
    Wire(&'a [u8]),
    Submit(Submission<'a>),
    Drain(Vec<&'a str>, bool, &'a str),
}

#[derive(Arbitrary, Debug)]
struct Submission<'a> {
    request_id: Option<&'a str>,
    version: &'a str,
    work_dir: Option<&'a str>,
    environment: Vec<&'a [u8]>,
    name: &'a str,
    priority: i16,
    gpus: Option<u16>,
    trainer: bool,
    work: Document<'a>,
    scheduling: Option<Scheduling>,
}

#[derive(Arbitrary, Debug)]
struct Scheduling {
    held: bool,
    time_limit: Option<u32>,
    warning: Option<(i8, u16)>,
    memory: Option<u64>,
    cpus: Option<u8>,
    after: Vec<(u8, u8)>,
    array: Vec<u16>,
    array_parallel: u8,
    requeue: bool,
}

static TRAINER: LazyLock<Value> =
    LazyLock::new(|| serde_json::from_slice(&JobSpec::default().to_json()).expect("JSON"));
static COMMAND: LazyLock<Value> = LazyLock::new(|| {
    let spec = CommandSpec::new(Program::Script("train.py".into()), vec!["--lr".into(), "1".into()]);
    serde_json::from_slice(&spec.to_json()).expect("JSON")
});

impl Submission<'_> {
    fn message(&self) -> SubmitRequest {
        let work = if self.trainer {
submit_request::Work::TrainerSpecJson(self.work.text(&TRAINER))
} else {
submit_request::Work::CommandSpecJson(self.work.text(&COMMAND))
};
        let mut request = SubmitRequest {
            request_id: self.request_id.unwrap_or("r").into(),
            version: self.version.into(),
            work_dir: self.work_dir.unwrap_or("/w").into(),
            environment: self.environment.iter().map(|variable| variable.to_vec()).collect(),
            work: Some(work),
            name: self.name.into(),
            priority: self.priority.into(),
            gpus: self.gpus.map(u32::from),
            ..SubmitRequest::default()
        };
        if let Some(scheduling) = &self.scheduling {
            scheduling.add_to(&mut request);
        }
        request
    }
}

impl Scheduling {
    fn add_to(&self, request: &mut SubmitRequest) {
        let dependency =
            |&(job, condition): &(u8, u8)| Dependency {
                job: job.into(),
                condition: (condition % 5).into(),
                met: None,
            };
        request.held = self.held;
        request.array_indices = self.array.iter().copied().map(u32::from).collect();
        request.array_parallel = self.array_parallel.into();
        request.scheduling = Some(v1::Scheduling {
            time_limit_seconds: self.time_limit.map(u64::from),
            warning: self.warning.map(|(signal, seconds)| WarningSignal {
                signal: signal.into(),
                seconds_before: seconds.into(),
            }),
            memory_bytes: self.memory,
            cpus: self.cpus.map(u32::from),
            after: self.after.iter().map(dependency).collect(),
            requeue: self.requeue,
        });
    }
}

fuzz_target!(|input: Input<'_>| {
    let mut bytes = match &input.request {
        Request::Wire(bytes) => bytes.to_vec(),
        Request::Submit(submission) => submission.message().encode_to_vec(),
        Request::Drain(gpus, undo, reason) => {
            let gpus = gpus.iter().map(|gpu| (*gpu).into()).collect();
            DrainRequest { gpus, undo: *undo, reason: (*reason).into() }.encode_to_vec()
        }
    };
    if let Some((at, damage)) = input.damage
        && let Some(range) = bytes.get_mut(usize::from(at)..usize::from(at) + damage.len())
    {
        range.copy_from_slice(damage);
    }
    let _ = (ListRequest::decode(&*bytes), GetRequest::decode(&*bytes), CancelRequest::decode(&*bytes));
    let _ = (HistoryRequest::decode(&*bytes), UpdateRequest::decode(&*bytes));
    if let Ok(drain) = DrainRequest::decode(&*bytes)
        && drain.check().is_ok()
    {
        assert!(drain.gpus.len() <= 1024 && drain.reason.len() <= 1024);
        assert!(drain.gpus.iter().all(|gpu| gpu.len() <= 128));
    }
    checked::<JobLogsRequest, JobLogs>(&bytes);
    if let Some(submission) = checked::<SubmitRequest, Submit>(&bytes) {
        let node = Node {
            gpus: (input.gpus % 9).into(),
            cpu_workers: u32::from(input.cpu_workers) + 1,
            allow_commands: input.allow_commands,
            max_grace: Duration::from_secs(120),
        };
        admitted(submission, &Caller { uid: 1000, name: Cow::Borrowed(""), admin: input.admin }, node);
    }
});

/// Decodes a message and converts it to its checked form.
fn checked<M: Message + Default, T: TryFrom<M, Error: std::fmt::Display>>(bytes: &[u8]) -> Option<T> {
    let checked = T::try_from(M::decode(bytes).ok()?).map_err(|error| error.to_string());
    checked.inspect_err(|error| assert!(error.len() <= MAX_REFUSAL_BYTES, "{error}")).ok()
}

fn admitted(submission: Submit, caller: &Caller, node: Node) {
    let request = &submission.request;
    assert!((1..=64).contains(&request.request_id.len()) && request.name.len() <= 256);
    assert!(request.environment.iter().map(|variable| variable.len() + 1).sum::<usize>() <= 256 << 10);
    let dependencies = request.scheduling.as_ref().map_or(0, |scheduling| scheduling.after.len());
    assert!(request.array_indices.len() <= 1000 && dependencies <= 100);
    let work = match &submission.work {
        Work::Trainer(spec) => spec.check().is_ok(),
        Work::Command(spec) => spec.check().is_ok(),
    };
    assert!(work, "an accepted description is valid");

    let mut history = History::default();
    let (submitted, description) = match submit(&history, caller, submission, node) {
        Ok(accepted) => accepted,
        Err(refusal) => return assert!(refusal.to_string().len() <= MAX_REFUSAL_BYTES, "{refusal}"),
    };
    assert!((1..=64).contains(&submitted.name.len()) && submitted.name.is_ascii());
    assert!(!submitted.name.contains('/') && !submitted.name.starts_with('.'));
    assert!(submitted.command_line.len() <= 4096 && submitted.work_dir.len() <= 4096);
    assert!(submitted.gpus <= node.gpus && submitted.workers > 0);
    assert!(submitted.gpus > 0 || submitted.workers <= node.cpu_workers, "{} workers", submitted.workers);
    assert!((0.0..=node.max_grace.as_secs_f64()).contains(&submitted.shutdown_timeout));
    assert!(submitted.priority <= 0 || caller.admin);
    assert!(submitted.trainer || node.allow_commands);

    let json = serde_json::to_vec(&description).expect("plain data");
    assert!(json.len() <= 4 << 20, "{} bytes in the job's directory", json.len());
    assert_eq!(serde_json::from_slice::<Description>(&json).expect("as written"), description);
    let scheduling = &submitted.scheduling;
    assert!(scheduling.cpus != Some(0) && scheduling.memory_bytes != Some(0));
    assert!(scheduling.after.is_empty(), "there is no other job");
    let (job, held) = (submitted.job, submitted.held.is_some());
    history.add(submitted);
    let journal = history.encode();
    assert!(journal.len() <= 64 << 10, "{} bytes in the journal", journal.len());
    assert_eq!(History::parse(&journal).expect("as written"), history);
    let expected = if held { (Vec::new(), vec![job]) } else { (vec![job], Vec::new()) };
    assert_eq!(history.schedule(node), expected, "what is admitted can start");
    assert!(history.messages().0[0].encoded_len() <= 16 << 10);
}
