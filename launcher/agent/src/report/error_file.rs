//! Contents of the launcher's own `TORCHELASTIC_ERROR_FILE`, which is read by the program that started the launcher: an
//! outer agent, or a cluster's job controller. Pure.
//!
//! The format is that of `torch.distributed.elastic.multiprocessing.errors`. As with torchrun, the error file of the
//! rank that failed first is passed on with its exit code added, and a signal that ends the launch is reported as an
//! exception of its own. If that rank has written no error file, torchrun writes nothing; xlaunch writes its failure
//! report.

use serde_json::{Value, json};
use xlaunch_spec::exit::ExitCode;

use super::{reason, text};
use crate::ending::Ending;
use xlaunch_host::spawn::Exit;
use xlaunch_spec::refusal::Refusal;

/// Returns the contents after a job that the process `pid` ran; `None` if the job did not fail.
pub fn of_ending(ending: &Ending, pid: u32, unix_seconds: u64) -> Option<String> {
    let code = i32::from(ending.exit.code());
    let root = ending.root.as_ref();
    let contents = match (ending.exit, root) {
        (ExitCode::Done, _) => return None,
        (ExitCode::Signal(signal), None) => {
            let message = format!("SignalException: Process {pid} got signal: {signal}");
            error(&message, &message, None, unix_seconds)
        }
        _ => {
            let code = root.and_then(|root| root.status).map_or(code, error_code);
            let of_rank = root.and_then(|root| ending.evidence_of(root));
            let written = of_rank.and_then(|evidence| passed_on(evidence.error_file.as_ref()?, code));
            written.unwrap_or_else(|| {
                let message = reason(ending);
                let report = text(ending).unwrap_or_else(|| message.clone());
                error(&message, &report, Some(code), unix_seconds)
            })
        }
    };
    Some(contents.to_string())
}

/// Returns the contents if nothing was started; `None` if that is not a failure.
pub fn of_refusal(refusal: &Refusal, unix_seconds: u64) -> Option<String> {
    let Refusal { exit, message } = refusal;
    let code = i32::from(exit.code());
    (*exit != ExitCode::Done).then(|| error(message, message, Some(code), unix_seconds).to_string())
}

/// Adds the exit code to a worker's file, which the worker itself could not know.
fn passed_on(file: &str, code: i32) -> Option<Value> {
    let mut value: Value = serde_json::from_str(file).ok()?;
    if let Value::Object(message) = value.get_mut("message")? {
        message.insert("errorCode".into(), json!(code));
    }
    Some(value)
}

/// Exit code of a process, or the negated number of the signal that killed it.
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
