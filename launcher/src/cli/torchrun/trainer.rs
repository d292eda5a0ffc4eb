//! Flags of the built-in trainer: each one overrides a key of the training configuration.

use std::ffi::OsStr;

use super::reader::Reader;
use super::{flags, values};
use crate::cli::launch::Launch;

/// Flags that training configurations share with commands.
const SHARED_FLAGS: [&str; 3] = ["nproc-per-node", "max-restarts", "shutdown-timeout"];

/// The launch of the configuration at `config`.
pub(super) fn launch(reader: &Reader<'_>, config: &OsStr) -> Result<Launch, String> {
    let flags = [&SHARED_FLAGS[..], &flags::TRAINING].concat();
    let applies = |name: &str| flags.contains(&name) || flags::several_nodes().any(|flag| flag == name);
    if let Some(other) = reader.line.given.iter().find(|given| !applies(given.flag.name)) {
        let allowed = flags.iter().map(|name| format!("--{name}")).collect::<Vec<_>>().join(", ");
        return Err(format!(
            "{} does not apply to training configurations such as {}; they take {allowed} and the flags for several \
             nodes",
            other.written,
            config.display()
        ));
    }
    let mut set = Vec::new();
    for value in reader.repeated("set").flatten() {
        set.push(
            value.to_str().ok_or_else(|| format!("--set {}: expected UTF-8", value.display()))?.to_owned(),
        );
    }
    if let Some(restarts) = reader.parsed("max-restarts", values::whole)? {
        set.push(format!("launch.max_restarts={restarts}"));
    }
    if let Some(timeout) = reader.parsed("shutdown-timeout", values::seconds)? {
        set.push(format!("launch.shutdown_timeout={:?}", timeout.as_secs_f64()));
    }
    for (flag, key) in [("resume-changed", "resume_changed"), ("overwrite", "overwrite")] {
        if reader.line.last(flag).is_some() {
            set.push(format!("checkpoint.{key}=true"));
        }
    }
    let resume = match reader.repeated("resume").last() {
        Some(Some(path)) => Some(path.to_str().ok_or("--resume: expected UTF-8")?.to_owned()),
        Some(None) => Some("auto".into()),
        None => None,
    };
    if resume.is_some() && reader.line.last("overwrite").is_some() {
        return Err(
            "--resume and --overwrite cannot be combined: one continues, the other starts afresh".into()
        );
    }
    let nproc = reader.parsed("nproc-per-node", values::trainer_workers)?.flatten();
    if reader.parsed("nproc-per-node", |text| Ok(text == "gpu"))? == Some(true) {
        // Otherwise a node without GPUs would train on its CPU.
        set.push("engine.device=\"cuda\"".into());
    }
    let dry_run = reader.line.last("dry-run").is_some();
    Ok(Launch { config: config.into(), nproc, set, resume, dry_run })
}
