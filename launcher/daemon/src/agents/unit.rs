//! Agents as transient systemd units, over D-Bus (org.freedesktop.systemd1).

use std::time::Duration;

use zbus::{OwnedObjectPath, Variant, proxy};

use super::{AgentExit, AgentStart};

/// A unit is polled until its agent has introduced itself.
const UNIT_POLL_INTERVAL: Duration = Duration::from_millis(300);
/// `TimeoutStopSec=` of the unit beyond the shutdown timeout of the workers.
const UNIT_STOP_MARGIN: Duration = Duration::from_secs(30);
/// `LimitNOFILE=` of the unit.
const MAX_OPEN_FILES: u64 = 1 << 20;

/// An `ExecStart=`: program, arguments, whether to ignore a failure.
type Exec<'a> = (&'a str, Vec<&'a str>, bool);

#[proxy(
    interface = "org.freedesktop.systemd1.Manager",
    default_service = "org.freedesktop.systemd1",
    default_path = "/org/freedesktop/systemd1"
)]
trait Manager {
    fn start_transient_unit(
        &self,
        name: &str,
        mode: &str,
        properties: &[(&str, Variant<'_>)],
        aux: &[(&str, &[(&str, Variant<'_>)])],
    ) -> zbus::Result<OwnedObjectPath>;

    fn get_unit(&self, name: &str) -> zbus::Result<OwnedObjectPath>;

    fn kill_unit(&self, name: &str, who: &str, signal: i32) -> zbus::Result<()>;
}

#[proxy(interface = "org.freedesktop.systemd1.Unit", default_service = "org.freedesktop.systemd1")]
trait Unit {
    #[zbus(property(emits_changed_signal = "false"))]
    fn active_state(&self) -> zbus::Result<String>;
}

fn name(job: u64) -> String {
    format!("xlaunch-job-{job}.service")
}

pub(super) async fn start(bus: &zbus::Connection, start: AgentStart) -> zbus::Result<AgentExit> {
    let program = std::env::current_exe().map_err(|error| zbus::Error::InputOutput(error.into()))?;
    // After an upgrade, the kernel marks the path of the running, replaced binary. The new one is at the path before
    // it.
    let program = program.to_string_lossy();
    let program = program.strip_suffix(" (deleted)").unwrap_or(&program).to_owned();
    // systemd expands variables in ExecStart. ExecStartEx can turn that off, but systemd up to version 252 loses such a
    // unit at a daemon-reload.
    let dir = start.dir.to_string_lossy().replace('$', "$$");
    let exec: Vec<Exec<'_>> = vec![(&program, vec![&program, "agent", &dir], false)];
    let stop_timeout = start.shutdown_timeout + UNIT_STOP_MARGIN;
    let unit = name(start.job);
    let mut properties = vec![
        ("Description", Variant::from(format!("xlaunch job {} ({})", start.job, start.name))),
        ("Type", "exec".into()),
        // At a shutdown of the system, the last checkpoint is written before remote file systems are unmounted.
        ("After", vec!["remote-fs.target"].into()),
        ("ExecStart", exec.into()),
        ("User", start.uid.to_string().into()),
        // All jobs of a user share what the operator grants: drop-ins of `xlaunch-user-.slice` apply to each of them.
        ("Slice", format!("xlaunch-user-{}.slice", start.uid).into()),
        ("StandardInputFile", start.input_path.to_string_lossy().into_owned().into()),
        // The agent writes to agent.log.
        ("StandardOutput", "null".into()),
        ("StandardError", "null".into()),
        // SIGTERM goes to the agent only, which stops the workers; after the timeout all processes are killed.
        ("KillMode", "mixed".into()),
        ("TimeoutStopUSec", u64::try_from(stop_timeout.as_micros()).unwrap_or(u64::MAX).into()),
        ("Delegate", true.into()),
        ("OOMPolicy", "continue".into()),
        ("CollectMode", "inactive-or-failed".into()),
        // RDMA registers pinned memory.
        ("LimitMEMLOCK", u64::MAX.into()),
        ("LimitNOFILE", MAX_OPEN_FILES.into()),
        // Data loaders start many processes and threads.
        ("TasksMax", u64::MAX.into()),
    ];
    // Microseconds of CPU time per second.
    properties.extend(start.cpus.map(|cpus| ("CPUQuotaPerSecUSec", (u64::from(cpus) * 1_000_000).into())));
    properties.extend(start.memory.map(|bytes| ("MemoryMax", bytes.into())));
    let manager = ManagerProxy::new(bus).await?;
    manager.start_transient_unit(&unit, "fail", &properties, &[]).await?;
    let bus = bus.clone();
    Ok(Box::pin(async move {
        loop {
            tokio::time::sleep(UNIT_POLL_INTERVAL).await;
            // An error of the bus says nothing about the unit.
            if matches!(is_active(&bus, &unit).await, Ok(false)) {
                return "its unit has stopped".into();
            }
        }
    }))
}

/// Whether the unit exists and is neither inactive nor failed.
async fn is_active(bus: &zbus::Connection, unit: &str) -> zbus::Result<bool> {
    let state = async {
        let path = ManagerProxy::new(bus).await?.get_unit(unit).await?;
        UnitProxy::builder(bus).path(path).build().await?.active_state().await
    };
    match state.await {
        Ok(state) => Ok(state != "inactive" && state != "failed"),
        // systemd answers that there is no such unit, or no longer.
        Err(zbus::Error::MethodError(..) | zbus::Error::FDO(_)) => Ok(false),
        Err(error) => Err(error),
    }
}

pub(super) async fn kill(bus: &zbus::Connection, job: u64) {
    if let Ok(manager) = ManagerProxy::new(bus).await {
        // The unit may have stopped.
        let _ = manager.kill_unit(&name(job), "all", rustix::process::Signal::KILL.as_raw()).await;
    }
}
