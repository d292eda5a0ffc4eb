//! Facts about a job, for its hooks.

use crate::state::{Entry, Phase};
use xlaunch_proto::v1::{JobKind, NodeJobState};

/// Facts about a job that a hook gets as environment variables.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Facts {
    pub(super) job: u64,
    pub(super) uid: u32,
    pub(super) user: String,
    pub(super) variables: Vec<(String, String)>,
}

impl Facts {
    /// Collects the facts about a job in its current phase.
    pub(crate) fn of(entry: &Entry) -> Self {
        let submitted = &entry.submitted;
        let kind = if submitted.trainer { JobKind::Trainer } else { JobKind::Command };
        let mut variables = vec![
            ("ID", submitted.job.to_string()),
            ("NAME", submitted.name.clone()),
            ("KIND", kind.label().to_owned()),
            ("USER", submitted.user.clone()),
            ("UID", submitted.uid.to_string()),
            ("WORK_DIR", submitted.work_dir.clone()),
            ("WORKERS", submitted.workers.to_string()),
        ];
        match &entry.phase {
            Phase::Queued { .. } => {}
            Phase::Active { start, gpus, .. } => {
                variables.push(("START", start.to_string()));
                variables.push(("GPUS", gpus.join(",")));
            }
            Phase::Ended { end, exit, reason, gpus, start, .. } => {
                variables.extend((*start > 0).then(|| ("START", start.to_string())));
                variables.push(("GPUS", gpus.join(",")));
                variables.push(("STATE", NodeJobState::from(*end).label().to_owned()));
                variables.extend(exit.map(|exit| ("EXIT_CODE", exit.to_string())));
                variables.push(("REASON", reason.clone()));
            }
        }
        // Users choose some of these values.
        variables.iter_mut().for_each(|(_, value)| value.retain(|letter| !letter.is_control()));
        // For one release, variables are also set under their former names without `HOOK`. A launch in a hook would
        // take those for keys of `[job]`, but ignores them as long as those with the new names have the same values.
        let named = |prefix: &str| {
            let name = |(name, value): &(&str, String)| (format!("{prefix}{name}"), value.clone());
            variables.iter().map(name).collect::<Vec<_>>()
        };
        let variables = [named("XLAUNCH_HOOK_JOB_"), named("XLAUNCH_JOB_")].concat();
        Self { job: submitted.job, uid: submitted.uid, user: submitted.user.clone(), variables }
    }
}
