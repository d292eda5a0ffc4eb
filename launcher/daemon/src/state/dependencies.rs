//! Dependencies between jobs. Pure.
//!
//! The outcome of a dependency is stored with the waiting job when the dependency ends, so that it outlives the
//! dependency. A job can depend only on earlier jobs, so there are no cycles.

use std::collections::{BTreeMap, BTreeSet};

use xlaunch_proto::v1::{Dependency, DependencyCondition};

use super::{End, Entry, Jobs, Phase, Submitted};
use crate::commands::CommandError;
use crate::view::Caller;

/// Waiting jobs, by the job that they wait for.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Dependents(BTreeMap<u64, BTreeSet<u64>>);

impl Dependents {
    pub(super) fn add(&mut self, submitted: &Submitted) {
        for dependency in submitted.open_dependencies() {
            self.0.entry(dependency).or_default().insert(submitted.job);
        }
    }

    pub(super) fn remove(&mut self, submitted: &Submitted) {
        for dependency in submitted.open_dependencies() {
            if let Some(waiting) = self.0.get_mut(&dependency) {
                waiting.remove(&submitted.job);
                if waiting.is_empty() {
                    self.0.remove(&dependency);
                }
            }
        }
    }
}

impl Submitted {
    fn open_dependencies(&self) -> impl Iterator<Item = u64> {
        let open = self.scheduling.after.iter().filter(|it| it.met.is_none() && it.job < self.job);
        open.map(|dependency| dependency.job)
    }

    /// Returns whether all dependencies are met.
    pub(super) fn is_free_of_dependencies(&self) -> bool {
        self.scheduling.after.iter().all(|dependency| dependency.met == Some(true))
    }
}

fn is_met(condition: DependencyCondition, end: End) -> bool {
    match condition {
        DependencyCondition::Ok | DependencyCondition::Unspecified => end == End::Done,
        DependencyCondition::Any => true,
        DependencyCondition::Fail => end != End::Done,
    }
}

impl Jobs {
    /// Sets the outcomes of the dependencies of a new job.
    ///
    /// # Errors
    /// A dependency is not a job that the caller may see.
    pub(crate) fn look_up_dependencies(
        &self,
        caller: &Caller,
        after: &mut [Dependency],
    ) -> Result<(), CommandError> {
        for dependency in after {
            let entry = self.jobs.get(&dependency.job);
            let entry = entry.filter(|entry| caller.may_see(entry.submitted.uid, &entry.submitted.user));
            dependency.met = match entry.ok_or(CommandError::JobNotFound(dependency.job))?.phase {
                Phase::Ended { end, .. } => Some(is_met(dependency.condition(), end)),
                Phase::Queued { .. } | Phase::Active { .. } => None,
            };
        }
        Ok(())
    }

    /// Stores the outcome of an ended job with the jobs that wait for it, and removes its own dependencies.
    pub(super) fn settle_dependents(&mut self, job: u64, end: End) {
        if let Some(Entry { submitted, .. }) = self.jobs.get(&job) {
            self.dependents.remove(submitted);
        }
        for waiting in self.dependents.0.remove(&job).unwrap_or_default() {
            let Some(entry) = self.jobs.get_mut(&waiting) else { continue };
            for dependency in entry.submitted.scheduling.after.iter_mut().filter(|it| it.job == job) {
                dependency.met = dependency.met.or(Some(is_met(dependency.condition(), end)));
            }
        }
    }

    /// Returns queued jobs that can never start because a dependency was not met, each with the reason.
    pub(crate) fn unsatisfiable(&self) -> Vec<(u64, String)> {
        let failed = |(job, entry): (&u64, &Entry)| {
            let Phase::Queued { .. } = entry.phase else { return None };
            let dependency = entry.submitted.scheduling.after.iter().find(|it| it.met == Some(false))?;
            let how = if dependency.condition() == DependencyCondition::Ok {
                "did not succeed"
            } else {
                "did not fail"
            };
            Some((*job, format!("dependency not met: job {} {how}", dependency.job)))
        };
        self.jobs.iter().filter_map(failed).collect()
    }
}
