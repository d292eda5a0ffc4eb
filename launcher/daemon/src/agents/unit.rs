//! Runs agents as transient systemd units, over D-Bus (org.freedesktop.systemd1).
//!
//! The daemon trusts only the state of the unit: a job's user can neither leave the unit's cgroup nor change its state.
//! The agent is the main process. After it has exited, systemd kills the remaining processes of the cgroup, and only
//! then is the unit inactive. A reference keeps the unit loaded until the daemon has read its resource usage.

use std::fmt::Display;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;
use tokio::io::unix::AsyncFd;
use zbus::{Fd, OwnedObjectPath, Variant, proxy};

use super::process;
use super::start::{DOCTOR, ExaminationStart, HookStart, JobStart, Stdio, took_too_long};
use crate::state::Usage;

/// Interval at which a unit is polled after its main process has exited until it is inactive, and while its main
/// process is unknown.
const UNIT_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Time for systemd to unload the unit of an earlier start of the job, which has the same name.
const UNIT_NAME_TIMEOUT: Duration = Duration::from_secs(5);
/// Time that `TimeoutStopSec=` of the unit exceeds the shutdown timeout of the workers.
const UNIT_STOP_MARGIN: Duration = Duration::from_secs(30);
/// `LimitNOFILE=` of the unit, unless pam_limits sets another value.
const MAX_OPEN_FILES: u64 = 1 << 20;
/// PAM applies the limits of limits.conf(5) if this file exists; see `deploy/optional/pam-xlaunch`.
const PAM_SERVICE: &str = "/etc/pam.d/xlaunch";
/// Devices that every job on a node with GPUs may use: driver devices that are not tied to a GPU, and devices of
/// networks between GPUs. `DevicePolicy=closed` also allows `/dev/null`, terminals and similar devices.
const SHARED_DEVICES: [&str; 10] = [
    "/dev/nvidiactl",
    "/dev/nvidia-uvm",
    "/dev/nvidia-uvm-tools",
    "/dev/nvidia-modeset",
    "char-nvidia-caps",
    "char-nvidia-caps-imex-channels",
    "char-infiniband_verbs",
    "/dev/infiniband/rdma_cm",
    "/dev/gdrdrv",
    "/dev/fuse",
];

/// Value of `ExecStart=`: program, arguments, whether to ignore a failure.
type Exec<'a> = (&'a str, Vec<&'a str>, bool);
type Property<'a> = (&'static str, Variant<'a>);
/// An entry of a list of units. The first element is the name.
type Listed = (String, String, String, String, String, String, OwnedObjectPath, u32, String, OwnedObjectPath);
/// Value of `ExecStart=` with its last run. The second element has the arguments.
type ExecStarted = (String, Vec<String>, bool, u64, u64, u64, u64, u32, i32, i32);

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

    fn list_units_by_patterns(&self, states: &[&str], patterns: &[&str]) -> zbus::Result<Vec<Listed>>;

    fn kill_unit(&self, name: &str, who: &str, signal: i32) -> zbus::Result<()>;

    fn ref_unit(&self, name: &str) -> zbus::Result<()>;

    fn unref_unit(&self, name: &str) -> zbus::Result<()>;
}

#[proxy(interface = "org.freedesktop.systemd1.Unit", default_service = "org.freedesktop.systemd1")]
trait UnitState {
    #[zbus(property(emits_changed_signal = "false"))]
    fn active_state(&self) -> zbus::Result<String>;

    /// The pending systemd job of the unit. Its number is 0 if there is none.
    #[zbus(property(emits_changed_signal = "false"))]
    fn job(&self) -> zbus::Result<(u32, OwnedObjectPath)>;
}

#[proxy(interface = "org.freedesktop.systemd1.Service", default_service = "org.freedesktop.systemd1")]
trait Service {
    #[zbus(property(emits_changed_signal = "false"), name = "MainPID")]
    fn main_pid(&self) -> zbus::Result<u32>;

    #[zbus(property(emits_changed_signal = "false"))]
    fn user(&self) -> zbus::Result<String>;

    #[zbus(property(emits_changed_signal = "false"))]
    fn kill_mode(&self) -> zbus::Result<String>;

    #[zbus(property(emits_changed_signal = "false"))]
    fn exec_start(&self) -> zbus::Result<Vec<ExecStarted>>;

    #[zbus(property(emits_changed_signal = "false"))]
    fn result(&self) -> zbus::Result<String>;

    #[zbus(property(emits_changed_signal = "false"))]
    fn exec_main_status(&self) -> zbus::Result<i32>;

    #[zbus(property(emits_changed_signal = "false"), name = "CPUUsageNSec")]
    fn cpu_usage_nsec(&self) -> zbus::Result<u64>;

    #[zbus(property(emits_changed_signal = "false"))]
    fn memory_current(&self) -> zbus::Result<u64>;

    /// Available since systemd 256.
    #[zbus(property(emits_changed_signal = "false"))]
    fn memory_peak(&self) -> zbus::Result<u64>;
}

/// The unit of a job. This daemon or an earlier one has started it.
#[derive(Debug)]
pub(crate) struct Unit {
    bus: zbus::Connection,
    name: String,
    /// The agent, if its process could be opened.
    main: Option<AsyncFd<OwnedFd>>,
}

fn name(job: u64) -> String {
    format!("xlaunch-job-{job}.service")
}

fn job_of(name: &str) -> Option<u64> {
    name.strip_prefix("xlaunch-job-")?.strip_suffix(".service")?.parse().ok()
}

/// Returns the jobs whose units run an agent in the directory that `dir` returns, each with the user id that it runs
/// as.
pub(super) async fn running(
    bus: &zbus::Connection,
    dir: impl Fn(u64) -> PathBuf,
) -> zbus::Result<Vec<(u64, u32)>> {
    let states = ["active", "activating", "reloading", "deactivating"];
    let units =
        ManagerProxy::new(bus).await?.list_units_by_patterns(&states, &["xlaunch-job-*.service"]).await?;
    let mut running = Vec::new();
    for job in units.iter().filter_map(|unit| job_of(&unit.0)) {
        let unit = Unit { bus: bus.clone(), name: name(job), main: None };
        // An error means that the unit has ended since it was listed.
        let Ok(service) = unit.service().await else { continue };
        let (Ok(exec), Ok(user)) = (service.exec_start().await, service.user().await) else { continue };
        // Units of a daemon with another state directory can have the same names.
        let is_own = exec.iter().any(|(_, arguments, ..)| arguments.last().map(Path::new) == Some(&dir(job)));
        running.extend(user.parse().ok().filter(|_| is_own).map(|uid: u32| (job, uid)));
    }
    Ok(running)
}

/// Returns `KillMode=` of a service.
pub(crate) async fn kill_mode(bus: zbus::Connection, service: &str) -> zbus::Result<String> {
    Unit { bus, name: service.into(), main: None }.service().await?.kill_mode().await
}

impl Unit {
    /// Starts the agent of a job in a new unit. It reads its description from `input`.
    pub(super) async fn start(
        bus: &zbus::Connection,
        start: &JobStart,
        dir: &Path,
        input: OwnedFd,
    ) -> zbus::Result<Self> {
        let program = program()?;
        // systemd expands variables in ExecStart. ExecStartEx can turn that off, but systemd up to version 252 loses
        // such units at a daemon-reload.
        let dir = dir.to_string_lossy().replace('$', "$$");
        let exec: Vec<Exec<'_>> = vec![(&program, vec![&program, "agent", &dir], false)];
        let mut properties = properties(start, input);
        properties.push(("ExecStart", exec.into()));
        let mut unit = Self::transient(bus, name(start.job), &properties).await?;
        unit.open_main().await;
        Ok(unit)
    }

    /// Runs a hook of the operator in a unit. The inner error is a predicate, such as `failed: ...`.
    pub(super) async fn run_hook(
        bus: &zbus::Connection,
        hook: &HookStart,
    ) -> zbus::Result<Result<(), String>> {
        let program = hook.program.to_string_lossy().replace('$', "$$");
        let exec: Vec<Exec<'_>> = vec![(&program, vec![&program], false)];
        let description = format!("xlaunch {} of job {}", hook.moment, hook.job);
        let mut properties = common_properties(description, hook.uid, &hook.environment);
        properties.extend([
            ("Type", "oneshot".into()),
            ("ExecStart", exec.into()),
            ("TimeoutStartUSec", microseconds(hook.timeout)),
            // systemd has already sent SIGTERM at the start timeout.
            ("TimeoutStopUSec", microseconds(Duration::from_secs(1))),
        ]);
        let name = format!("xlaunch-{}-{}.service", hook.moment, hook.job);
        let unit = Self::transient(bus, name, &properties).await?;
        unit.exited().await;
        let service = unit.service().await?;
        let done = match service.result().await?.as_str() {
            "success" => Ok(()),
            "timeout" => Err(took_too_long(hook.timeout)),
            result => Err(format!("failed: {result}, exit status {}", service.exec_main_status().await?)),
        };
        unit.release().await;
        Ok(done)
    }

    /// Starts the process that examines GPUs, as root.
    pub(super) async fn start_doctor(
        bus: &zbus::Connection,
        start: &ExaminationStart,
        stdio: Stdio,
    ) -> zbus::Result<Self> {
        let program = program()?;
        let exec: Vec<Exec<'_>> = vec![(&program, [&[program.as_str()], &DOCTOR[..]].concat(), false)];
        let mut properties = common_properties("xlaunch doctor".into(), None, &start.environment());
        properties.extend([
            ("Type", "exec".into()),
            ("ExecStart", exec.into()),
            ("WorkingDirectory", start.temporary().to_string_lossy().into_owned().into()),
            ("StandardInputFileDescriptor", Fd::from(stdio.input).into()),
            ("StandardOutputFileDescriptor", Fd::from(stdio.output).into()),
            ("StandardErrorFileDescriptor", Fd::from(stdio.errors).into()),
            ("KillMode", "mixed".into()),
            ("LimitMEMLOCK", u64::MAX.into()),
        ]);
        let mut unit = Self::transient(bus, "xlaunch-doctor.service".into(), &properties).await?;
        unit.open_main().await;
        Ok(unit)
    }

    /// Starts a transient unit. If systemd has not yet unloaded an earlier unit of the same name, waits for that.
    async fn transient(
        bus: &zbus::Connection,
        name: String,
        properties: &[(&str, Variant<'_>)],
    ) -> zbus::Result<Self> {
        let manager = ManagerProxy::new(bus).await?;
        let deadline = tokio::time::Instant::now() + UNIT_NAME_TIMEOUT;
        loop {
            match manager.start_transient_unit(&name, "fail", properties, &[]).await {
                Err(error) if is_unit_exists(&error) && tokio::time::Instant::now() < deadline => {
                    tokio::time::sleep(UNIT_POLL_INTERVAL).await;
                }
                Err(error) if is_unit_exists(&error) => return Err(zbus::Error::Failure(in_use(&name))),
                Err(error) => return Err(error),
                Ok(_) => return Ok(Self { bus: bus.clone(), name, main: None }),
            }
        }
    }

    /// Finds the unit of a job, if it is active.
    pub(super) async fn find(bus: &zbus::Connection, job: u64) -> zbus::Result<Option<Self>> {
        let mut unit = Self { bus: bus.clone(), name: name(job), main: None };
        if !unit.is_active().await? {
            return Ok(None);
        }
        // Errors are ignored: if the unit has ended since, it is inactive or gone, which `exited` notices.
        let _ = ManagerProxy::new(bus).await?.ref_unit(&unit.name).await;
        unit.open_main().await;
        Ok(Some(unit))
    }

    /// Opens the main process, if systemd has already forked it. Its exit is then noticed immediately.
    async fn open_main(&mut self) {
        let pid = async { self.service().await?.main_pid().await };
        self.main = pid.await.ok().filter(|pid| *pid > 0).and_then(process::open);
    }

    /// Waits until the unit is inactive, which means that no process of the job runs any more.
    pub(super) async fn exited(&self) {
        if let Some(main) = &self.main {
            // An error counts as an exit; the state of the unit decides.
            let _ = main.readable().await;
        }
        // An error of the bus says nothing about the unit.
        while !matches!(self.is_active().await, Ok(false)) {
            tokio::time::sleep(UNIT_POLL_INTERVAL).await;
        }
    }

    /// Returns whether the main process is known and runs.
    pub(super) fn runs(&self) -> bool {
        self.main.as_ref().is_some_and(process::is_alive)
    }

    /// Kills all processes of the unit.
    pub(super) async fn kill(&self) {
        if let Ok(manager) = ManagerProxy::new(&self.bus).await {
            // The unit may have stopped.
            let _ = manager.kill_unit(&self.name, "all", Signal::KILL.as_raw()).await;
        }
    }

    pub(super) async fn usage(&self) -> Option<Usage> {
        let service = self.service().await.ok()?;
        // An unavailable counter has the maximum value.
        let known = |value: zbus::Result<u64>| value.ok().filter(|value| *value != u64::MAX);
        Some(Usage {
            cpu_ms: known(service.cpu_usage_nsec().await)? / 1_000_000,
            peak_memory_bytes: match known(service.memory_peak().await) {
                None => known(service.memory_current().await),
                peak => peak,
            },
        })
    }

    /// Drops the reference, so that systemd can unload the unit.
    pub(super) async fn release(self) {
        if let Ok(manager) = ManagerProxy::new(&self.bus).await {
            // An error means that the reference is already gone.
            let _ = manager.unref_unit(&self.name).await;
        }
    }

    /// Returns whether the unit exists and is neither inactive nor failed, or is about to be started.
    async fn is_active(&self) -> zbus::Result<bool> {
        let state = async {
            let path = ManagerProxy::new(&self.bus).await?.get_unit(&self.name).await?;
            let unit = UnitStateProxy::builder(&self.bus).path(path).build().await?;
            // The pending job is read first: otherwise a start could be missed that ends between both reads.
            let (pending, _) = unit.job().await?;
            Ok((pending != 0, unit.active_state().await?))
        };
        match state.await {
            Ok((is_pending, state)) => Ok(is_pending || (state != "inactive" && state != "failed")),
            // systemd answers that the unit does not exist, or no longer.
            Err(zbus::Error::MethodError(..) | zbus::Error::FDO(_)) => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn service(&self) -> zbus::Result<ServiceProxy<'static>> {
        let path = ManagerProxy::new(&self.bus).await?.get_unit(&self.name).await?;
        ServiceProxy::builder(&self.bus).path(path).build().await
    }
}

/// The path of this program.
fn program() -> zbus::Result<String> {
    let program = std::env::current_exe().map_err(|error| zbus::Error::InputOutput(error.into()))?;
    // After an upgrade, the kernel appends this mark to the path of the replaced binary. The path without it is that of
    // the new binary.
    let program = program.to_string_lossy();
    Ok(program.strip_suffix(" (deleted)").unwrap_or(&program).to_owned())
}

fn is_unit_exists(error: &zbus::Error) -> bool {
    matches!(error, zbus::Error::MethodError(name, ..) if name.as_str() == "org.freedesktop.systemd1.UnitExists")
}

/// Explains why a unit cannot be started under this name. Names contain the number of the job only.
fn in_use(name: &str) -> String {
    format!(
        "unit {name} already exists, from another daemon or an earlier daemon.state_dir: wait until it ends, or end it \
         with `systemctl stop {name}`"
    )
}

/// Returns the properties of a job's unit, except its command.
fn properties<'a>(start: &JobStart, input: OwnedFd) -> Vec<Property<'a>> {
    let description = format!("xlaunch job {} ({})", start.job, start.name);
    let mut properties = common_properties(description, Some(start.uid), &start.environment());
    properties.extend([
        ("Type", "exec".into()),
        // With `PAMName`, some versions of systemd never consider the program started, and would end it after 90 s.
        ("TimeoutStartUSec", u64::MAX.into()),
        // At a shutdown of the system, the last checkpoint is written before remote file systems are unmounted.
        ("After", vec!["remote-fs.target"].into()),
        ("StandardInputFileDescriptor", Fd::from(input).into()),
        // The agent writes to agent.log.
        ("StandardOutput", "null".into()),
        ("StandardError", "null".into()),
        // SIGTERM goes only to the agent, which stops the workers. After the timeout, all processes are killed.
        ("KillMode", "mixed".into()),
        ("TimeoutStopUSec", microseconds(start.shutdown_timeout + UNIT_STOP_MARGIN)),
        ("Delegate", true.into()),
        ("CPUAccounting", true.into()),
        ("MemoryAccounting", true.into()),
        ("OOMPolicy", "continue".into()),
        // RDMA registers pinned memory.
        ("LimitMEMLOCK", u64::MAX.into()),
        ("LimitNOFILE", MAX_OPEN_FILES.into()),
        ("TasksMax", start.max_tasks.into()),
    ]);
    // Microseconds of CPU time per second.
    properties.extend(start.cpus.map(|cpus| ("CPUQuotaPerSecUSec", (u64::from(cpus) * 1_000_000).into())));
    properties.extend(start.memory.map(|bytes| ("MemoryMax", bytes.into())));
    if Path::new(PAM_SERVICE).exists() {
        properties.push(("PAMName", "xlaunch".into()));
    }
    if let Some(nodes) = &start.gpu_nodes {
        let granted = nodes.iter().map(|node| node.to_string_lossy().into_owned());
        let allowed = SHARED_DEVICES.iter().map(|device| (*device).to_owned()).chain(granted);
        let allowed: Vec<_> = allowed.map(|device| (device, "rw".to_owned())).collect();
        properties.push(("DevicePolicy", "closed".into()));
        properties.push(("DeviceAllow", allowed.into()));
    }
    properties
}

/// Returns the properties that all units share. Without a user, a unit runs as root.
fn common_properties<'a>(
    description: String,
    uid: Option<u32>,
    environment: &[(impl Display, String)],
) -> Vec<Property<'a>> {
    let environment = environment.iter().map(|(name, value)| format!("{name}={value}"));
    let mut properties = vec![
        ("Description", Variant::from(description)),
        ("AddRef", true.into()),
        ("CollectMode", "inactive-or-failed".into()),
        ("Environment", environment.collect::<Vec<_>>().into()),
    ];
    if let Some(uid) = uid {
        properties.push(("User", uid.to_string().into()));
        // All jobs of a user share a slice, so that the operator can limit each user with drop-ins of
        // `xlaunch-user-.slice`.
        properties.push(("Slice", format!("xlaunch-user-{uid}.slice").into()));
    }
    properties
}

fn microseconds<'a>(time: Duration) -> Variant<'a> {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_in_use_is_explained_with_the_unit_and_advice() {
        let text = zbus::Error::Failure(in_use(&name(3))).to_string();
        let expected =
            "unit xlaunch-job-3.service already exists, from another daemon or an earlier daemon.state_dir";
        assert!(text.starts_with(expected), "{text}");
        assert!(text.contains("`systemctl stop xlaunch-job-3.service`"), "{text}");
    }
}
