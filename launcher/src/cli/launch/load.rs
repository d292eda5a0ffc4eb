//! The description of a training job, from all layers of its configuration.

use std::path::PathBuf;

use xlaunch_agent::config::{self, Layer, Override};
use xlaunch_agent::stderr::print_line;
use xlaunch_host::devices::{self, Node, Placement};
use xlaunch_spec::job::JobSpec;
use xlaunch_spec::refusal::Refusal;
use xlaunch_worker::FillInError;

/// A launch of the built-in trainer.
#[derive(Clone, Debug)]
pub(crate) struct Launch {
    /// Path of the training configuration.
    pub(in crate::cli) config: PathBuf,
    /// Workers to start. Default: one per GPU, or 1 without GPUs.
    pub(in crate::cli) nproc: Option<u32>,
    /// Overrides `section.key=value`; later ones take precedence.
    pub(in crate::cli) set: Vec<String>,
    /// `auto` for the newest checkpoint of this job, or the path of a checkpoint.
    pub(in crate::cli) resume: Option<String>,
    /// True to check the job and report the memory that it needs instead of starting it.
    pub(in crate::cli) dry_run: bool,
}

/// Resolves and validates everything that does not need the tokens of the data.
pub(in crate::cli) fn prepare(
    launch: &Launch,
    fill_in: impl FnOnce(&mut JobSpec) -> Result<(), FillInError>,
) -> Result<(JobSpec, Placement), Refusal> {
    let mut spec = load(launch, fill_in)?;
    let placement = devices::place(&spec, &Node::inspect())?;
    // All ranks compare the digest of the description, so it must contain the actual number of workers.
    spec.launch.nproc = Some(placement.workers);
    Ok((spec, placement))
}

/// Returns the job description from all layers of configuration and the data that it names, not yet placed on devices.
pub(in crate::cli) fn load(
    launch: &Launch,
    fill_in: impl FnOnce(&mut JobSpec) -> Result<(), FillInError>,
) -> Result<JobSpec, Refusal> {
    let mut overrides = Override::from_environment(std::env::vars_os())?;
    let flag = |key: &str, value: String, source: String| Override {
        key: key.into(),
        value,
        source,
        layer: Layer::Flags,
    };
    for argument in &launch.set {
        overrides.push(Override::from_flag(argument)?);
    }
    if let Some(nproc) = launch.nproc {
        overrides.push(flag("launch.nproc", nproc.to_string(), format!("--nproc {nproc}")));
    }
    if let Some(resume) = &launch.resume {
        overrides.push(flag("checkpoint.resume", format!("{resume:?}"), format!("--resume={resume}")));
    }
    let loaded = config::load(&launch.config, &overrides)?;
    loaded.warnings.iter().for_each(|warning| print_line(format_args!("warning: {warning}")));
    let (mut spec, sources) = (loaded.spec, loaded.sources);
    fill_in(&mut spec).map_err(|error| match error {
        FillInError::Invalid(invalid) => sources.error(&invalid).into(),
        FillInError::Refused(refusal) => refusal,
    })?;
    // The filled-in values must obey the same rules.
    spec.check().map_err(|invalid| sources.error(&invalid))?;
    Ok(spec)
}
