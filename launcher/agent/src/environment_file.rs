//! Writes `environment.json` to the directory of a training run: the software, hardware and data that the run used.
//!
//! ```text
//! { "version": 1, "run": "20261123-041500", "started_unix_seconds": 1795407300,
//!   "xlaunch": { "version": "0.2.0", "commit": "3db4f2e..." },
//!   "command_line": "xlaunch train.toml", "working_directory": "/home/ada/gpt",
//!   "host": { "name": "node-17", "kernel": "Linux 6.8.0", "architecture": "x86_64", "cpu": "AMD EPYC 9654",
//!             "cpus": 192, "memory_bytes": 1622722981888 },
//!   "driver": { "version": "570.86.15", "cuda": "12.8" },
//!   "gpus": [{ "index": 0, "uuid": "GPU-...", "name": "NVIDIA H100 80GB HBM3", "memory_bytes": 85520809984 }],
//!   "device": "cuda", "world_size": 8,
//!   "data": { "train": { "tokens": 9500000, "hash": "0f3a..." }, "validation": { "tokens": 500000, "hash": "..." } },
//!   "continues": { "run": "20261122-171100", "step": 500, "checkpoint": "/home/ada/..." } }
//! ```
//! The file is written once, when the run starts; restarts do not change it. `driver`, `commit` and `continues` are
//! null if unknown or absent. `gpus` lists the GPUs that the job may use. Values of environment variables are never
//! included, because they may contain secrets.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;
use serde::Serialize;
use serde_json::{Value, json};

use crate::resolved_command::quote_line;
use xlaunch_host::clock;
use xlaunch_host::devices::{self, Placement};
use xlaunch_host::libraries::Libraries;
use xlaunch_host::memory;
use xlaunch_spec::lineage::{ENVIRONMENT_FILE, Fingerprint, STARTED};

/// Longest time that the end of a job waits for the driver to describe the GPUs.
const DRIVER_TIMEOUT: Duration = Duration::from_secs(5);

/// The launcher's knowledge about a run that starts.
#[derive(Clone, Debug)]
pub struct Facts {
    /// Id of the run.
    pub run: String,
    /// The commit that xlaunch was built from.
    pub commit: Option<&'static str>,
    /// The devices of the workers.
    pub placement: Placement,
    /// Number of ranks on all nodes when the run starts.
    pub world: u32,
    /// Fingerprints of the data, by name of the split.
    pub data: BTreeMap<&'static str, Fingerprint>,
    /// Libraries of workers on GPUs.
    pub libraries: Option<Libraries>,
    /// The run that this one continues.
    pub parent: Option<Parent>,
}

/// The run that another run continues.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Parent {
    /// Id of the run; empty if its checkpoint does not contain the id.
    pub run: String,
    /// The last step before the continuing run took over.
    pub step: u64,
    /// The checkpoint, as an absolute path.
    pub checkpoint: PathBuf,
}

/// Handle of a file that is being written.
#[derive(Debug)]
pub struct Writing(Receiver<io::Result<()>>);

/// Writes the file on a thread of its own: NVML takes a moment to load, and workers need not wait for it.
pub fn write(dir: &Path, facts: Facts) -> io::Result<Writing> {
    let dir = dir.to_owned();
    let started = clock::unix().as_secs();
    let (sender, result) = channel();
    std::thread::Builder::new().name("environment".into()).spawn(move || {
        // The receiver may have timed out.
        let _ = sender.send(write_json(&dir.join(ENVIRONMENT_FILE), &describe(&facts, started)));
    })?;
    Ok(Writing(result))
}

impl Writing {
    /// Waits until the file is written, with a timeout: a broken GPU can block NVML forever, but must not block the end
    /// of a job.
    pub fn finish(self) -> io::Result<()> {
        let result = self.0.recv_timeout(DRIVER_TIMEOUT);
        result.unwrap_or_else(|_| Err(io::Error::other("the driver does not answer")))
    }
}

/// Writes a file atomically, so that readers never see a part of it.
pub(crate) fn write_json(path: &Path, value: &Value) -> io::Result<()> {
    let new = path.with_extension("tmp");
    fs_err::write(&new, format!("{value:#}\n"))?;
    fs_err::rename(&new, path)
}

fn describe(facts: &Facts, started: u64) -> Value {
    let arguments: Vec<_> = std::env::args_os().collect();
    let system = rustix::system::uname();
    let text = |text: &std::ffi::CStr| text.to_string_lossy().into_owned();
    let nvml = if facts.placement.cuda { Nvml::init().ok() } else { None };
    json!({
        "version": 1,
        "run": facts.run,
        STARTED: started,
        "xlaunch": { "version": xlaunch_proto::VERSION, "commit": facts.commit },
        "command_line": quote_line(arguments.iter().map(|argument| argument.as_os_str())),
        "working_directory": std::env::current_dir().ok().map(|dir| dir.to_string_lossy().into_owned()),
        "host": {
            "name": devices::host_name(),
            "kernel": format!("{} {}", text(system.sysname()), text(system.release())),
            "architecture": text(system.machine()),
            "cpu": devices::platform(false),
            "cpus": std::thread::available_parallelism().map_or(1, usize::from),
            "memory_bytes": memory::total(),
        },
        "driver": nvml.as_ref().and_then(driver),
        "gpus": nvml.as_ref().map(|nvml| gpus(nvml, facts)).unwrap_or_default(),
        "libraries": facts.libraries.as_ref().map(Libraries::to_json),
        "device": if facts.placement.cuda { "cuda" } else { "cpu" },
        "world_size": facts.world,
        "data": facts.data,
        "continues": facts.parent,
    })
}

fn driver(nvml: &Nvml) -> Option<Value> {
    let version = nvml.sys_driver_version().ok()?;
    // Version 12.8 is reported as 12080.
    let cuda = nvml.sys_cuda_driver_version().ok();
    let cuda = cuda.map(|version| format!("{}.{}", version / 1000, version % 1000 / 10));
    Some(json!({ "version": version, "cuda": cuda }))
}

/// The GPUs of the job; empty if NVML fails for one of them.
fn gpus(nvml: &Nvml, facts: &Facts) -> Vec<Value> {
    let all = (0..nvml.device_count().unwrap_or(0)).map(|index| {
        let device = nvml.device_by_index(index)?;
        let uuid = device.uuid()?;
        let gpu = json!({
            "index": index, "uuid": uuid, "name": device.name()?, "memory_bytes": device.memory_info()?.total,
        });
        Ok(((uuid, index.to_string()), gpu))
    });
    let all: Vec<((String, String), Value)> = all.collect::<Result<_, NvmlError>>().unwrap_or_default();
    let names: Vec<(String, String)> = all.iter().map(|(names, _)| names.clone()).collect();
    let inherited = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let chosen = facts.placement.visible.as_deref().or(inherited.as_deref());
    let visible = devices::visible_addresses(&names, chosen);
    let visible = visible.iter().filter_map(|index| all.get(index.parse::<usize>().ok()?));
    visible.take(facts.placement.workers as usize).map(|(_, gpu)| gpu.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_describes_the_run_and_has_no_environment_variables() {
        let dir = tempfile::tempdir().unwrap();
        let data = Fingerprint { tokens: 7, hash: "0f".into() };
        let facts = Facts {
            run: "20261123-041500".into(),
            commit: Some("3db4f2e"),
            placement: Placement { workers: 2, cuda: false, visible: None, threads: 1 },
            world: 4,
            libraries: None,
            data: [("train", data)].into(),
            parent: Some(Parent { run: "a".into(), step: 5, checkpoint: "/x/step-00000005".into() }),
        };
        write(dir.path(), facts).unwrap().finish().unwrap();
        let path = dir.path().join(ENVIRONMENT_FILE);
        let text = fs_err::read_to_string(&path).unwrap();
        let read: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(read["data"], json!({ "train": { "tokens": 7, "hash": "0f" } }));
        assert_eq!(read["continues"], json!({ "run": "a", "step": 5, "checkpoint": "/x/step-00000005" }));
        assert_eq!(read["xlaunch"], json!({ "version": xlaunch_proto::VERSION, "commit": "3db4f2e" }));
        assert_eq!(
            (&read["world_size"], &read["gpus"], &read["driver"]),
            (&json!(4), &json!([]), &json!(null))
        );
        assert!(read["host"]["memory_bytes"].as_u64() > Some(0) && read["started_unix_seconds"].is_u64());
        assert!(!text.contains(&std::env::var("PATH").unwrap()));
        assert_eq!(fs_err::read_dir(dir.path()).unwrap().count(), 1);
    }
}
