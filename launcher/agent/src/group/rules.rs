//! Derives the rules for a job's restarts and membership from its description.

use std::time::Duration;

use xlaunch_proto::v1::GroupRules;
use xlaunch_spec::command::GroupSpec;
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::job::JobSpec;

use crate::command::{ResolvedCommand, Restarts};

/// Returns the rules of a training job.
pub fn of_trainer(spec: &JobSpec, group: Option<&GroupSpec>) -> GroupRules {
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
pub fn of_command(spec: &ResolvedCommand, group: Option<&GroupSpec>) -> GroupRules {
    rules(false, &spec.restarts, group)
}

/// Returns the rules of a command, each with the flag that sets it.
pub fn by_flag(rules: &GroupRules) -> [(String, String); 7] {
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
        fixed_ranks: group.is_some_and(|group| group.backend == xlaunch_spec::command::Backend::Static),
        join_timeout: time(|group| group.join_timeout, 600.0),
        last_call_timeout: time(|group| group.last_call_timeout, 0.0),
        heartbeat_interval: time(|group| group.keep_alive_interval, 1.0),
        lease: time(GroupSpec::loss_timeout, 12.0),
        // Only for training: a command's launch that is ended by a signal exits with that signal's code, by convention.
        sigterm_is_preemption: trainer && group.is_some_and(|group| group.sigterm_is_preemption),
    }
}
