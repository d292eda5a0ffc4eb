//! Agents as transient units of systemd, over D-Bus (org.freedesktop.systemd1).

use std::time::Duration;

use zbus::{OwnedObjectPath, Variant, proxy};

use super::{Gone, Start};

/// Between looks at a unit whose agent has not said who it is.
const LOOK: Duration = Duration::from_millis(300);
/// What systemd gives an agent to end, beyond what it gives its workers.
const MORE_PATIENCE: Duration = Duration::from_secs(30);
/// Files that the processes of a job may open, each.
const FILES: u64 = 1 << 20;

/// One of the commands of a unit: program, arguments, whether its failure is none.
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

pub(super) async fn start(bus: &zbus::Connection, start: Start) -> zbus::Result<Gone> {
    let program = std::env::current_exe().map_err(|error| zbus::Error::InputOutput(error.into()))?;
    // After an upgrade, the daemon that still runs is the old one: the new one lies where it lay.
    let program = program.to_string_lossy();
    let program = program.strip_suffix(" (deleted)").unwrap_or(&program).to_owned();
    // systemd fills in variables. (ExecStartEx can do without, but up to systemd 252 such a unit is lost at a daemon-reload.)
    let dir = start.dir.to_string_lossy().replace('$', "$$");
    let exec: Vec<Exec<'_>> = vec![(&program, vec![&program, "agent", &dir], false)];
    let end = Duration::from_secs_f64(start.patience.clamp(0.0, 1e6)) + MORE_PATIENCE;
    let unit = name(start.job);
    let properties = [
        ("Description", Variant::from(format!("xlaunch job {} ({})", start.job, start.name))),
        ("Type", "exec".into()),
        // When the system goes down, a last checkpoint is written before the file systems of others go.
        ("After", vec!["remote-fs.target"].into()),
        ("ExecStart", exec.into()),
        ("User", start.uid.to_string().into()),
        ("StandardInputFile", start.order.to_string_lossy().into_owned().into()),
        // It writes to its own files; what goes wrong before is the journal's.
        ("StandardOutput", "null".into()),
        ("StandardError", "journal".into()),
        // SIGTERM goes to the agent, which gives workers their time; then everything is killed.
        ("KillMode", "mixed".into()),
        ("TimeoutStopUSec", u64::try_from(end.as_micros()).unwrap_or(u64::MAX).into()),
        ("Delegate", true.into()),
        ("OOMPolicy", "continue".into()),
        ("CollectMode", "inactive-or-failed".into()),
        // Memory that network cards read has to stay where it is.
        ("LimitMEMLOCK", u64::MAX.into()),
        ("LimitNOFILE", FILES.into()),
        // Loaders of data start as many processes and threads as they like.
        ("TasksMax", u64::MAX.into()),
    ];
    let manager = ManagerProxy::new(bus).await?;
    manager.start_transient_unit(&unit, "fail", &properties, &[]).await?;
    let bus = bus.clone();
    Ok(Box::pin(async move {
        loop {
            tokio::time::sleep(LOOK).await;
            match state(&bus, &unit).await {
                Ok(Some(_)) => {}
                Ok(None) => return "its unit has ended".into(),
                // A bus that does not answer says nothing of the unit.
                Err(_) => {}
            }
        }
    }))
}

/// The state of a unit that runs or is about to; `None` where there is nothing of it.
async fn state(bus: &zbus::Connection, unit: &str) -> zbus::Result<Option<String>> {
    let path = match ManagerProxy::new(bus).await?.get_unit(unit).await {
        Ok(path) => path,
        Err(zbus::Error::MethodError(..) | zbus::Error::FDO(_)) => return Ok(None),
        Err(error) => return Err(error),
    };
    let proxy = UnitProxy::builder(bus).path(path).build().await?;
    match proxy.active_state().await {
        Ok(state) if state == "inactive" || state == "failed" => Ok(None),
        Ok(state) => Ok(Some(state)),
        // It went in between.
        Err(zbus::Error::MethodError(..) | zbus::Error::FDO(_)) => Ok(None),
        Err(error) => Err(error),
    }
}

pub(super) async fn kill(bus: &zbus::Connection, job: u64) {
    if let Ok(manager) = ManagerProxy::new(bus).await {
        // A unit that is gone needs no signal.
        let _ = manager.kill_unit(&name(job), "all", rustix::process::Signal::KILL.as_raw()).await;
    }
}
