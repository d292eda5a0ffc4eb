//! Checks the parts of `daemon.toml` that depend on the node: hooks, groups and GPUs, which must exist, and the lengths
//! of sockets' paths. `xlaunch daemon --check` prints all findings. At start-up, the daemon refuses a hook that cannot
//! run.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use nix::unistd::Group;
use xlaunch_spec::job::Invalid;
use xlaunch_spec::quantities::time_text;

use super::{DaemonConfig, HooksSection, JobsSection};
use crate::files::{agent_socket, check_socket};
use crate::gpus::{GpuMonitor, Inventory};
use xlaunch_agent::config::ConfigError;

/// Directories that `xlaunch.service` hides from the daemon but not from hooks, which run in units of their own.
const HIDDEN_IN_SERVICE: [&str; 5] = ["/home", "/root", "/run/user", "/tmp", "/var/tmp"];
/// The paths of the sockets of all jobs up to this one must be short enough.
const LAST_CHECKED_JOB: u64 = 999_999;

/// The result of a check.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    /// Problems that keep the daemon from starting, or from doing what the file says.
    pub(crate) errors: Vec<String>,
    pub(crate) warnings: Vec<String>,
}

/// Reads and checks the file at `path`, or the default file.
pub(crate) fn check(path: Option<&Path>) -> Findings {
    let config = match super::load(path) {
        Ok(config) => config,
        Err(error) => return Findings { errors: vec![error.to_string()], ..Findings::default() },
    };
    let errors = path_errors(path, &config, LAST_CHECKED_JOB).iter().map(ToString::to_string).collect();
    let mut findings = Findings { errors, warnings: Vec::new() };
    let inventory = GpuMonitor::poll_once();
    findings.errors.extend(unknown_gpus(&config.jobs, &inventory));
    findings.warnings.extend(default_time_above_max(&config.jobs));
    if !inventory.problem.is_empty() {
        findings.warnings.push(format!("the GPUs are unknown: {}", inventory.problem));
    }
    if rustix::process::geteuid().is_root() {
        let groups = [
            ("daemon.socket_group", &config.daemon.socket_group),
            ("daemon.admin_group", &config.daemon.admin_group),
        ];
        let missing = groups.iter().filter(|(_, name)| !matches!(Group::from_name(name), Ok(Some(_))));
        findings.warnings.extend(missing.map(|(key, name)| format!("{key}: group `{name}` does not exist")));
    }
    findings
}

/// Returns an error for each hook that cannot run, and for each key that gives a socket too long a path, up to that of
/// this job.
pub(crate) fn path_errors(path: Option<&Path>, config: &DaemonConfig, job: u64) -> Vec<ConfigError> {
    let mut errors = hook_errors(path, config);
    errors.extend(socket_errors(path, config, job));
    errors
}

/// Returns an error for each hook that cannot run.
fn hook_errors(path: Option<&Path>, config: &DaemonConfig) -> Vec<ConfigError> {
    let HooksSection { prolog, epilog, on_end, .. } = &config.hooks;
    let hooks = [("hooks.prolog", prolog), ("hooks.epilog", epilog), ("hooks.on_end", on_end)];
    let problem = |(key, program): (&'static str, &Option<PathBuf>)| {
        Some(Invalid::new(key, problem_of(program.as_deref()?)?, "an executable file".into()))
    };
    with_places(path, hooks.into_iter().filter_map(problem))
}

/// Returns an error for each key that gives a socket too long a path, up to that of this job.
fn socket_errors(path: Option<&Path>, config: &DaemonConfig, job: u64) -> Vec<ConfigError> {
    let (root, environment) = (rustix::process::geteuid().is_root(), |name: &str| std::env::var_os(name));
    // A default that depends on the environment may be missing here only.
    let state_dir = config.daemon.state_dir(root, environment).ok();
    let page = config.web.listen.as_deref().and_then(|listen| listen.strip_prefix("unix:"));
    let sockets = [
        ("daemon.state_dir", state_dir.map(|dir| agent_socket(&dir, job))),
        ("daemon.socket", config.daemon.socket(root, environment).ok()),
        ("web.listen", page.map(PathBuf::from)),
    ];
    let problem = |(key, socket): (&'static str, Option<PathBuf>)| {
        let error = check_socket(&socket?).err()?;
        Some(Invalid::new(key, error.to_string(), "a shorter path".into()))
    };
    with_places(path, sockets.into_iter().filter_map(problem))
}

/// Adds line and column of each key, if the file sets it.
fn with_places(path: Option<&Path>, invalid: impl Iterator<Item = Invalid>) -> Vec<ConfigError> {
    let file = super::file(path).unwrap_or_default();
    let text = fs_err::read_to_string(&file).unwrap_or_default();
    invalid.map(|invalid| ConfigError::invalid(&file, &text, &invalid)).collect()
}

/// Returns the reason why a hook cannot run, as far as the daemon can tell.
pub(crate) fn problem_of(program: &Path) -> Option<String> {
    let in_service = std::env::var_os("INVOCATION_ID").is_some();
    if in_service && HIDDEN_IN_SERVICE.iter().any(|dir| program.starts_with(dir)) {
        return None;
    }
    let name = program.display();
    match std::fs::metadata(program) {
        Err(error) => Some(format!("{name}: {error}")),
        Ok(found) if !found.is_file() => Some(format!("{name} is not a file")),
        Ok(found) if found.permissions().mode() & 0o111 == 0 => Some(format!("{name} is not executable")),
        Ok(_) => None,
    }
}

/// Returns a warning if jobs cannot get their default time limit.
fn default_time_above_max(jobs: &JobsSection) -> Option<String> {
    let (default, max) = (jobs.default_time?.0, jobs.max_time?.0);
    let (shown, limit) = (time_text(default), time_text(max));
    (default > max)
        .then(|| format!("jobs.default_time: {shown} is more than jobs.max_time: jobs get {limit}"))
}

/// Returns a warning for each item of `jobs.leave_gpus` that matches no GPU: it may be misspelt, in which case jobs
/// would run on the GPU that was meant. Empty if the GPUs are unknown.
pub(crate) fn unknown_gpus(jobs: &JobsSection, inventory: &Inventory) -> Vec<String> {
    if !inventory.problem.is_empty() {
        return Vec::new();
    }
    let is_known =
        |named: &String| inventory.gpus.iter().any(|gpu| gpu.is_among(std::slice::from_ref(named)));
    let unknown = jobs.leave_gpus.iter().filter(|named| !is_known(named));
    unknown.map(|named| format!("jobs.leave_gpus: there is no GPU `{named}` on this node")).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::config::Span;
    use crate::gpus::GpuFacts;
    use xlaunch_proto::v1::Gpu;

    #[test]
    fn hook_that_cannot_run_is_refused_with_its_place() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("daemon.toml");
        let hook = dir.path().join("prolog");
        let errors = || {
            fs_err::write(&file, format!("[hooks]\nprolog = \"{}\"\n", hook.display())).unwrap();
            let config = super::super::load(Some(&file)).unwrap();
            hook_errors(Some(&file), &config).iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
        };
        let missing = errors();
        assert!(missing.contains("daemon.toml:2:10") && missing.contains("No such file"), "{missing}");
        fs_err::write(&hook, "#!/bin/sh\n").unwrap();
        assert!(errors().contains("is not executable"), "{}", errors());
        fs_err::set_permissions(&hook, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(errors(), "");
    }

    #[test]
    fn socket_with_too_long_a_path_is_refused_with_its_place() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("daemon.toml");
        let errors = |line: &str| {
            fs_err::write(&file, line.replace("] ", "]\n")).unwrap();
            let config = super::super::load(Some(&file)).unwrap();
            socket_errors(Some(&file), &config, LAST_CHECKED_JOB)
                .iter()
                .map(ToString::to_string)
                .collect::<Vec<_>>()
        };
        let long = |length: usize| format!("/{}", "x".repeat(length - 1));
        // A socket's path has at most 107 bytes, of which `/jobs/999999/agent/agent.sock` takes 29.
        let keys =
            [("daemon", "state_dir", "", 78), ("daemon", "socket", "", 107), ("web", "listen", "unix:", 107)];
        for (section, key, prefix, longest) in keys {
            let with = |length| errors(&format!("[{section}] {key} = \"{prefix}{}\"\n", long(length)));
            assert_eq!(with(longest), [""; 0], "{key}");
            let error = with(longest + 1).concat();
            assert!(
                error.contains("daemon.toml:2:") && error.contains("is too long for a socket"),
                "{error}"
            );
        }
    }

    #[test]
    fn default_time_that_no_job_can_have_is_pointed_out() {
        let warning = |default: Option<u64>, max: Option<u64>| {
            let [default_time, max_time] =
                [default, max].map(|hours| hours.map(|hours| Span(Duration::from_secs(3600 * hours))));
            default_time_above_max(&JobsSection { default_time, max_time, ..JobsSection::default() })
        };
        let expected = "jobs.default_time: 3h is more than jobs.max_time: jobs get 2h";
        assert_eq!(warning(Some(3), Some(2)).as_deref(), Some(expected));
        assert_eq!(
            [warning(Some(2), Some(2)), warning(Some(3), None), warning(None, Some(2))],
            [const { None }; 3]
        );
    }

    #[test]
    fn misspelt_gpu_is_named_unless_the_gpus_are_unknown() {
        let status = Gpu { uuid: "GPU-a".into(), ..Gpu::default() };
        let gpu = GpuFacts { status, ..GpuFacts::default() };
        let inventory = Inventory { gpus: vec![gpu], problem: String::new() };
        let jobs = JobsSection {
            leave_gpus: ["0", "GPU-a", "1", "GPU-b"].map(str::to_owned).to_vec(),
            ..JobsSection::default()
        };
        let unknown = unknown_gpus(&jobs, &inventory);
        assert_eq!(unknown.len(), 2, "{unknown:?}");
        assert!(unknown[0].contains("no GPU `1`") && unknown[1].contains("no GPU `GPU-b`"), "{unknown:?}");
        assert!(unknown_gpus(&jobs, &Inventory { problem: "x".into(), ..inventory }).is_empty());
    }
}
