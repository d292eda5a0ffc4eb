//! The `xlaunch` binary: `xlaunch worker` is one rank of the built-in trainer, everything else is the launcher, and, under its
//! own name, the launcher's guard.
#![forbid(unsafe_code)]

use std::path::Path;
use std::process::ExitCode;

use xlaunch::{Preflight, Refusal, Trainer};
use xlaunch_proto::spec::JobSpec;

fn main() -> ExitCode {
    if std::env::args_os().next().is_some_and(|name| name == xlaunch::spawn::guard::NAME) {
        return xlaunch::spawn::guard::main();
    }
    if std::env::args_os().nth(1).is_some_and(|argument| argument == "worker") {
        return xlaunch_worker::main().into();
    }
    let newest_checkpoint = xlaunch_worker::newest_checkpoint;
    xlaunch::cli::main(Trainer { preflight, newest_checkpoint }).into()
}

fn preflight(spec: &JobSpec, job_dir: &Path) -> Result<Preflight, Refusal> {
    let ready = xlaunch_worker::preflight(spec, job_dir)
        .map_err(|refusal| Refusal::new(refusal.exit, refusal.message))?;
    Ok(Preflight { resume_from: ready.resume_from, warnings: ready.warnings })
}
