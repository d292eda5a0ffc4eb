//! The work that the agents of one job must agree on, and the rules that the coordinator applies to it.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use xlaunch_proto::v1::{GroupRules, Setting};
use xlaunch_spec::command::GroupSpec;
use xlaunch_spec::ids::Digest;
use xlaunch_spec::job::JobSpec;

use super::link::new_instance;
use super::rules;
use crate::command::{ResolvedCommand, quote_line};
use crate::{redact, run_dir};

/// The work that an agent is about to run.
#[derive(Clone, Debug)]
pub struct Work {
    /// Random id of the agent's process.
    pub instance: Vec<u8>,
    /// Digest of the settings that all nodes must have in common.
    pub digest: Vec<u8>,
    /// The settings behind [`digest`](Self::digest), one by one, to name those that differ. Without secrets, as other
    /// nodes show them.
    pub settings: Vec<Setting>,
    /// The configuration as completed by files of this node; empty if there was nothing to complete.
    pub completed: Vec<u8>,
    /// Short description for messages, without secrets.
    pub text: String,
    /// Number of workers on this node.
    pub workers: u32,
    /// Rules for restarts and membership.
    pub rules: GroupRules,
    /// Run id, if the user chose one. Otherwise the coordinator chooses it.
    pub run_id: Option<String>,
    /// The number of the first run with that id that has no directory on this node.
    pub free_run: u32,
}

impl Work {
    /// Describes a training job. `declared` is the configuration as the user wrote it, given if initial weights
    /// complete it: only node rank 0 needs to have the weights.
    pub fn of_trainer(
        spec: &JobSpec,
        declared: Option<&JobSpec>,
        workers: u32,
        group: Option<&GroupSpec>,
    ) -> Self {
        let run_id = group.and_then(|group| group.run_id.clone());
        let completed = if declared.is_some() { spec.to_json() } else { Vec::new() };
        let common = declared.unwrap_or(spec);
        Self {
            instance: new_instance(),
            digest: common.digest().0.to_vec(),
            settings: settings(common.values()),
            completed,
            text: format!("job {}", spec.job.name),
            workers,
            rules: rules::of_trainer(spec, group),
            free_run: free_run(Some(&run_dir::job_dir(spec)), run_id.as_deref()),
            run_id,
        }
    }

    /// Describes a command. Nodes may differ in the path of the interpreter and in where they write logs.
    pub fn of_command(spec: &ResolvedCommand, group: Option<&GroupSpec>) -> Self {
        let program = spec.argv.first().and_then(|program| Path::new(program).file_name());
        let words: Vec<&OsStr> =
            program.into_iter().chain(spec.argv.iter().skip(1).map(OsString::as_os_str)).collect();
        let text = quote_line(redact::words(words.iter().copied()).iter().map(OsString::as_os_str));
        let rules = rules::of_command(spec, group);
        let common = format!("{}\0{}\0{rules:?}", quote_line(words), spec.role);
        let run_id = group.map_or_else(|| spec.run_id.clone(), |group| group.run_id.clone());
        let digest = Digest::of(common.as_bytes()).0.to_vec();
        let role = ("--role".to_owned(), spec.role.clone());
        Self {
            instance: new_instance(),
            digest,
            settings: settings(std::iter::once(role).chain(rules::by_flag(&rules))),
            completed: Vec::new(),
            text,
            workers: spec.nproc,
            rules,
            free_run: free_run(spec.logs.dir.as_deref(), run_id.as_deref()),
            run_id,
        }
    }
}

/// `parent` contains the directories of runs, if they are kept.
fn free_run(parent: Option<&Path>, run_id: Option<&str>) -> u32 {
    parent.zip(run_id).map_or(1, |(parent, run_id)| run_dir::free_run(parent, run_id))
}

fn settings(values: impl IntoIterator<Item = (String, String)>) -> Vec<Setting> {
    let mut settings: Vec<Setting> = values
        .into_iter()
        .map(|(name, value)| Setting { value: redact::value(&name, &value), name })
        .collect();
    settings.sort_by(|one, other| one.name.cmp(&other.name));
    settings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::tests::spec as command;

    fn work(arguments: &[&str]) -> Work {
        let mut spec = command("train");
        spec.argv.extend(arguments.iter().map(OsString::from));
        Work::of_command(&spec, None)
    }

    #[test]
    fn secret_arguments_count_as_a_difference_and_leave_the_node_hidden() {
        let (one, other) = (work(&["--api-key", "tr0ub4dor"]), work(&["--api-key", "correct"]));
        assert!(one.digest != other.digest && one.text == other.text, "{}", one.text);
        assert!(one.text.ends_with("--api-key '[redacted]'") && !format!("{one:?}").contains("tr0ub4dor"));
    }
}
