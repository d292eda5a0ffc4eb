//! Runs the operator's programs around a job: before the job starts (prolog), after its processes are gone and before
//! its GPUs are freed (epilog), and after its end is recorded (on_end).
//!
//! ```text
//! Starting --> prolog --> agent ... exited --> epilog --> Ended --> on_end
//!                '--> failed: the node is drained, the job waits
//! ```
//! If a prolog that runs as the job's user fails, the job fails instead: the user can make such a prolog fail, so its
//! failure says nothing about the node.
//!
//! After a daemon has been killed, the next one runs the prolog again when it restarts the job, and the epilog when it
//! finds that the job has ended. So hooks run at least once for each start. Under systemd, each hook is a unit of its
//! own, outside the confinement of the daemon's unit; otherwise it is a process in its own session. A hook that takes
//! too long is killed.

use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process_group};

use super::facts::Facts;
use super::hook_output::HookStream;
use super::start::{HookStart, took_too_long};
use super::unit::Unit;
use super::{AgentStarter, user_to_switch_to};
use crate::config::{HooksSection, RunAs, check};
use crate::{trusted_path, users};
use xlaunch_host::spawn::sys;

const HOOK_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The moment at which a hook runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moment {
    Prolog,
    Epilog,
    OnEnd,
}

impl Moment {
    fn name(self) -> &'static str {
        match self {
            Self::Prolog => "prolog",
            Self::Epilog => "epilog",
            Self::OnEnd => "on_end",
        }
    }
}

impl HooksSection {
    /// Returns whether a failure of the prolog is a problem of the node rather than of the job.
    pub(crate) fn is_prolog_of_node(&self) -> bool {
        let is_unusable =
            |program: &Path| check::problem_of(program).is_some() || trusted_path::check(program).is_err();
        let cannot_run = || self.prolog.as_deref().is_some_and(is_unusable);
        self.prolog_as == RunAs::Root || cannot_run()
    }

    /// Runs the hook for this moment, if there is one.
    ///
    /// # Errors
    /// The hook cannot be started, fails or takes too long; the text says which.
    pub(crate) async fn run(
        &self,
        moment: Moment,
        facts: &Facts,
        starter: &AgentStarter,
    ) -> Result<(), String> {
        let (program, run_as) = match moment {
            Moment::Prolog => (&self.prolog, self.prolog_as),
            Moment::Epilog => (&self.epilog, self.epilog_as),
            Moment::OnEnd => (&self.on_end, self.on_end_as),
        };
        let Some(program) = program else { return Ok(()) };
        let failed = |what: String| format!("the node's {} {what}", moment.name());
        // Checked at each run, because the program may have been replaced since the daemon was started.
        trusted_path::check(program).map_err(|error| failed(format!("failed to start: {error}")))?;
        if run_as == RunAs::User {
            let (uid, user) = (facts.uid, facts.user.clone());
            let found = tokio::task::spawn_blocking(move || users::find(uid)).await;
            let account = found.map_err(io::Error::other).flatten();
            let account = account.map_err(|error| failed(format!("failed to start: {error}")))?;
            if let Some(problem) = users::mismatch(uid, &user, account.as_ref()) {
                return Err(failed(format!("did not run: {problem}")));
            }
        }
        let mut environment = vec![("PATH".to_owned(), HOOK_PATH.to_owned())];
        environment.extend_from_slice(&facts.variables);
        let hook = HookStart {
            job: facts.job,
            uid: (run_as == RunAs::User).then_some(facts.uid),
            moment: moment.name(),
            program: program.clone(),
            environment,
            timeout: self.timeout.0,
        };
        match starter {
            AgentStarter::Detached(_) => run_detached(&hook).await,
            AgentStarter::Systemd(bus) => {
                let done = Unit::run_hook(bus, &hook).await;
                done.unwrap_or_else(|error| Err(format!("failed to start: {error}")))
            }
        }
        .map_err(failed)
    }
}

/// Runs a hook as a process. The error text is a predicate, such as `failed: ...`.
async fn run_detached(hook: &HookStart) -> Result<(), String> {
    let failed = |error: io::Error| format!("failed to start: {}: {error}", hook.program.display());
    let mut command = Command::new(&hook.program);
    command.env_clear().envs(hook.environment.iter().cloned()).current_dir("/");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let user = match hook.uid {
        Some(uid) => tokio::task::block_in_place(|| user_to_switch_to(uid)).map_err(failed)?,
        None => None,
    };
    command.arg0(hook.program.file_name().unwrap_or(Path::new("hook").as_os_str()));
    sys::start_in_session(&mut command, user);
    let mut child = tokio::process::Command::from(command).spawn().map_err(failed)?;
    let output = child.stdout.take().map(|output| HookStream::read(hook, output));
    let errors = child.stderr.take().map(|errors| HookStream::read(hook, errors));
    // The hook leads its session and process group.
    let group = child.id().and_then(|pid| Pid::from_raw(pid.cast_signed()));
    let mut problem = match tokio::time::timeout(hook.timeout, child.wait()).await {
        Ok(Ok(status)) if status.success() => return Ok(()),
        Ok(Ok(status)) => format!("failed: {status}"),
        Ok(Err(error)) => format!("failed: {error}"),
        Err(_) => {
            // The hook may have just exited.
            let _ = group.map(|group| kill_process_group(group, Signal::KILL));
            let _ = child.wait().await;
            took_too_long(hook.timeout)
        }
    };
    // Errors explain a failure better than other output.
    for stream in [errors, output].into_iter().flatten() {
        if let Some(line) = stream.last_line().await {
            problem += &format!(": {line}");
            break;
        }
    }
    Err(problem)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::time::Duration;

    use super::*;
    use crate::config::Span;
    use crate::state::{End, Jobs, Record, Submitted};

    fn ended() -> Facts {
        let mut jobs = Jobs::default();
        let submitted = Submitted { job: 7, uid: 1, name: "n".into(), workers: 2, ..Submitted::default() };
        jobs.apply(Record::Submitted(Box::new(submitted)));
        jobs.apply(Record::Starting { job: 7, start: 4, gpus: vec![], boot: String::new(), at: 1 });
        jobs.apply(Record::Ended {
            job: 7,
            end: End::Failed,
            exit: Some(3),
            reason: "x\n\x1b[2Jy".into(),
            report: String::new(),
            at: 1,
            order: 0,
            usage: None,
        });
        Facts::of(&jobs.jobs[&7])
    }

    async fn run(script: &str, timeout: Duration) -> Result<(), String> {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("hook");
        std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let hooks = HooksSection { on_end: Some(program), timeout: Span(timeout), ..HooksSection::default() };
        let hooks = HooksSection { on_end_as: RunAs::Root, ..hooks };
        hooks.run(Moment::OnEnd, &ended(), &AgentStarter::Detached(None)).await
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn hook_gets_the_facts_of_the_job() {
        let script = "test \"$XLAUNCH_JOB_ID-$XLAUNCH_JOB_STATE-$XLAUNCH_JOB_EXIT_CODE-$XLAUNCH_JOB_WORKERS\" = \
                      7-failed-3-2 && test \"$XLAUNCH_HOOK_JOB_REASON\" = 'x[2Jy' && \
                      test \"$XLAUNCH_HOOK_JOB_ID-$XLAUNCH_HOOK_JOB_START\" = 7-4 && test -z \"$HOME\"";
        run(script, Duration::from_secs(60)).await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn failed_and_slow_hooks_are_reported() {
        let failed = run("exit 4", Duration::from_secs(60)).await.unwrap_err();
        assert_eq!(failed, "the node's on_end failed: exit status: 4");
        let explained =
            run("echo no scratch here; head -c 1000000 /dev/zero; echo; exit 3", Duration::from_secs(60));
        let explained = explained.await.unwrap_err();
        assert!(explained.starts_with("the node's on_end failed: exit status: 3: \\u{0}"), "{explained}");
        let script = "sleep 1000 & echo $! >&2; echo output; exit 3";
        let explained = run(script, Duration::from_secs(60)).await.unwrap_err();
        let left = explained.strip_prefix("the node's on_end failed: exit status: 3: ").unwrap();
        let left = Pid::from_raw(left.parse().unwrap()).unwrap();
        rustix::process::kill_process(left, Signal::KILL).unwrap();
        let slow = run("sleep 1000", Duration::from_millis(50)).await.unwrap_err();
        assert!(slow.starts_with("the node's on_end took longer than"), "{slow}");
        let hooks = HooksSection { prolog: Some("/no/such".into()), ..HooksSection::default() };
        let missing = hooks.run(Moment::Prolog, &ended(), &AgentStarter::Detached(None)).await.unwrap_err();
        assert!(missing.contains("failed to start: /no/such"), "{missing}");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn hook_that_others_can_change_does_not_run() {
        let dir = tempfile::tempdir().unwrap();
        let (program, ran) = (dir.path().join("hook"), dir.path().join("ran"));
        std::fs::write(&program, format!("#!/bin/sh\ntouch {}\n", ran.display())).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o777)).unwrap();
        let hooks = HooksSection { prolog: Some(program), ..HooksSection::default() };
        let refused = hooks.run(Moment::Prolog, &ended(), &AgentStarter::Detached(None)).await.unwrap_err();
        assert!(refused.contains("can be changed by other users") && !ran.exists(), "{refused}");
    }
}
