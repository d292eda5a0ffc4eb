//! Describes the work of this agent for the nodes of its job, as a [`Greeting`] without its place among them: what all
//! of them must agree on, and the rules for restarts and membership.

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::time::Duration;

use xlaunch_cluster::link::new_instance;
use xlaunch_host::{devices, redact};
use xlaunch_proto::v1::{Greeting, GroupRules, Setting};
use xlaunch_spec::command::{Backend, CommandSpec, GroupSpec, Restarts, quote_line};
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::ids::Digest;
use xlaunch_spec::job::JobSpec;

use crate::resolved_command::ResolvedCommand;
use crate::run_dir;

/// Describes a training job. `declared` is the configuration as the user wrote it, given if initial weights
/// complete it: only node rank 0 needs to have the weights.
pub fn of_trainer(
    spec: &JobSpec,
    declared: Option<&JobSpec>,
    workers: u32,
    group: Option<&GroupSpec>,
) -> Greeting {
    let run_id = group.and_then(|group| group.run_id.clone());
    let completed = if declared.is_some() { spec.to_json() } else { Vec::new() };
    let common = declared.unwrap_or(spec);
    Greeting {
        work: common.digest().0.to_vec(),
        settings: settings(common.values()),
        completed,
        work_text: format!("job {}", spec.job.name),
        workers,
        rules: Some(trainer_rules(spec, group)),
        ..greeting(Some(&spec.runs_dir()), run_id)
    }
}

/// Describes a command. Nodes may differ in the path of the interpreter and in where they write logs.
pub fn of_command(command: &ResolvedCommand, group: Option<&GroupSpec>) -> Greeting {
    let spec = &command.spec;
    let program = command.argv.first().and_then(|program| Path::new(program).file_name());
    let words: Vec<&OsStr> =
        program.into_iter().chain(command.argv.iter().skip(1).map(OsString::as_os_str)).collect();
    let text = quote_line(redact::words(words.iter().copied()).iter().map(OsString::as_os_str));
    let rules = command_rules(spec, group);
    // A script that came through a pipe is a file of this process, so its path differs between nodes.
    let own_files = format!("/proc/{}/fd/", std::process::id());
    let shared = words.iter().map(|word| match word.to_str() {
        Some(text) if text.starts_with(&own_files) => OsStr::new("-"),
        _ => *word,
    });
    let common = format!("{}\0{}\0{rules:?}", quote_line(shared), spec.role);
    let run_id = group.map_or_else(|| spec.run_id.clone(), |group| group.run_id.clone());
    let role = ("--role".to_owned(), spec.role.clone());
    Greeting {
        work: Digest::of(common.as_bytes()).0.to_vec(),
        settings: settings(std::iter::once(role).chain(by_flag(&rules))),
        work_text: text,
        workers: command.nproc,
        rules: Some(rules),
        ..greeting(spec.logs.kept_in(), run_id)
    }
}

/// `parent` contains the directories of runs, if they are kept.
fn greeting(parent: Option<&Path>, run_id: Option<String>) -> Greeting {
    let of_run = parent.zip(run_id.as_deref());
    Greeting {
        instance: new_instance(),
        version: xlaunch_proto::VERSION.into(),
        host: devices::host_name(),
        free_run: of_run.map_or(1, |(parent, run_id)| run_dir::free_run(parent, run_id)),
        run_id: run_id.unwrap_or_default(),
        new: true,
        ..Greeting::default()
    }
}

fn settings(values: impl IntoIterator<Item = (String, String)>) -> Vec<Setting> {
    let mut settings: Vec<Setting> = values
        .into_iter()
        .map(|(name, value)| Setting { value: redact::value(&name, &value), name })
        .collect();
    settings.sort_by(|one, other| one.name.cmp(&other.name));
    settings
}

/// Returns the rules of a training job.
fn trainer_rules(spec: &JobSpec, group: Option<&GroupSpec>) -> GroupRules {
    let launch = &spec.launch;
    // A restart repairs neither the configuration nor the data nor a checkpoint, and a diverged run would diverge
    // again.
    let final_codes =
        [ExitCode::Usage, ExitCode::Data, ExitCode::Diverged].map(|exit| i32::from(exit.code()));
    let restarts = Restarts {
        most: launch.max_restarts,
        window: Duration::try_from_secs_f64(launch.restart_window).unwrap_or_default(),
        not_after: final_codes.into(),
        free: [i32::from(ExitCode::DamagedCheckpoint.code())].into(),
    };
    rules(true, &restarts, group)
}

/// Returns the rules of a command.
fn command_rules(spec: &CommandSpec, group: Option<&GroupSpec>) -> GroupRules {
    let not_after = spec.no_restart_codes.clone();
    rules(false, &Restarts { most: spec.max_restarts, not_after, ..Restarts::default() }, group)
}

/// Returns the rules of a command, each with the flag that sets it.
fn by_flag(rules: &GroupRules) -> [(String, String); 7] {
    let codes = |codes: &[i32]| codes.iter().map(i32::to_string).collect::<Vec<_>>().join(",");
    let seconds = |value: f64| format!("{value} s");
    let backend = if rules.fixed_ranks { "static" } else { "c10d" };
    [
        ("--max-restarts", rules.max_restarts.to_string()),
        ("--no-restart-codes", codes(&rules.final_codes)),
        ("--rdzv-backend", backend.into()),
        ("--rdzv-conf join_timeout", seconds(rules.join_timeout)),
        ("--rdzv-conf last_call_timeout", seconds(rules.last_call_timeout)),
        ("--rdzv-conf keep_alive_interval", seconds(rules.heartbeat_interval)),
        ("--rdzv-conf keep_alive_interval x keep_alive_max_attempt", seconds(rules.lease)),
    ]
    .map(|(flag, value)| (flag.to_owned(), value))
}

fn rules(trainer: bool, restarts: &Restarts, group: Option<&GroupSpec>) -> GroupRules {
    let time =
        |of: fn(&GroupSpec) -> Duration, other: f64| group.map_or(other, |group| of(group).as_secs_f64());
    GroupRules {
        trainer,
        max_restarts: restarts.most,
        restart_window: restarts.window.as_secs_f64(),
        final_codes: restarts.not_after.iter().copied().collect(),
        free_codes: restarts.free.iter().copied().collect(),
        fixed_ranks: group.is_some_and(|group| group.backend == Backend::Static),
        join_timeout: time(|group| group.join_timeout, 600.0),
        last_call_timeout: time(|group| group.last_call_timeout, 0.0),
        heartbeat_interval: time(|group| group.keep_alive_interval, 1.0),
        lease: time(GroupSpec::loss_timeout, 12.0),
        // Only for training: a command's launch that is ended by a signal exits with that signal's code, by convention.
        sigterm_is_preemption: trainer && group.is_some_and(|group| group.sigterm_is_preemption),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resolved_command::tests::command;

    fn work(arguments: &[&str]) -> Greeting {
        let mut spec = command("train");
        spec.argv.extend(arguments.iter().map(OsString::from));
        of_command(&spec, None)
    }

    #[test]
    fn script_from_a_pipe_is_the_same_on_all_nodes() {
        let own_file = |number: u32| format!("/proc/{}/fd/{number}", std::process::id());
        assert_eq!(work(&[&own_file(7)]).work, work(&[&own_file(8)]).work);
        assert_ne!(work(&["/proc/self/fd/7"]).work, work(&["/proc/self/fd/8"]).work);
    }

    #[test]
    fn secret_arguments_count_as_a_difference_and_leave_the_node_hidden() {
        let (one, other) = (work(&["--api-key", "tr0ub4dor"]), work(&["--api-key", "correct"]));
        assert!(one.work != other.work && one.work_text == other.work_text, "{}", one.work_text);
        assert!(
            one.work_text.ends_with("--api-key '[redacted]'") && !format!("{one:?}").contains("tr0ub4dor")
        );
    }
}
