//! The launcher's own `TORCHELASTIC_ERROR_FILE`, for whatever has started it: an outer agent, or a cluster's job
//! controller. Pure.
//!
//! The format is that of `torch.distributed.elastic.multiprocessing.errors`. As under torchrun, the file of the rank
//! that failed first is passed on, with its exit code, and a signal that ends the launch is an exception of its own.
//! torchrun writes nothing for a rank that has written no file; here the failure report takes its place.

use serde_json::{Value, json};
use xlaunch_proto::exit::ExitCode;

use super::{Evidence, headline, text};
use crate::Refusal;
use crate::spawn::Exit;
use crate::state::Outcome;

/// The contents after a job of the process `pid`; `None` if it did not fail.
pub fn of_outcome(outcome: &Outcome, evidence: &[Evidence], pid: u32, unix_seconds: u64) -> Option<String> {
    let code = i32::from(outcome.exit.code());
    let root = outcome.root.as_ref();
    let contents = match (outcome.exit, root) {
        (ExitCode::Done, _) => return None,
        (ExitCode::Signal(signal), None) => {
            let message = format!("SignalException: Process {pid} got signal: {signal}");
            error(&message, &message, None, unix_seconds)
        }
        (exit, _) => {
            let code = root.and_then(|root| root.status).map_or(code, error_code);
            let of_rank = root.and_then(|root| evidence.get(root.rank? as usize));
            let written = of_rank.and_then(|evidence| passed_on(evidence.error_file.as_ref()?, code));
            written.unwrap_or_else(|| {
                let message = headline(outcome, evidence).unwrap_or_else(|| exit.meaning().into());
                let report = text(outcome, evidence, None).unwrap_or_else(|| message.clone());
                error(&message, &report, Some(code), unix_seconds)
            })
        }
    };
    Some(contents.to_string())
}

/// The contents if nothing was started; `None` if that is not a failure.
pub fn of_refusal(refusal: &Refusal, unix_seconds: u64) -> Option<String> {
    let Refusal { exit, message } = refusal;
    let code = i32::from(exit.code());
    (*exit != ExitCode::Done).then(|| error(message, message, Some(code), unix_seconds).to_string())
}

/// A worker's file with its exit code, which it could not know.
fn passed_on(file: &str, code: i32) -> Option<Value> {
    let mut value: Value = serde_json::from_str(file).ok()?;
    if let Value::Object(message) = value.get_mut("message")? {
        message.insert("errorCode".into(), json!(code));
    }
    Some(value)
}

/// The exit code of a process, or the negative number of the signal that has ended it.
fn error_code(exit: Exit) -> i32 {
    match exit {
        Exit::Code(code) => code,
        Exit::Signal(signal) => -signal,
        Exit::Unknown => 1,
    }
}

fn error(message: &str, details: &str, code: Option<i32>, unix_seconds: u64) -> Value {
    let mut error = json!({
        "message": message,
        "extraInfo": { "py_callstack": details, "timestamp": unix_seconds.to_string() },
    });
    if let Some(code) = code {
        error["errorCode"] = json!(code);
    }
    json!({ "message": error })
}
