//! Environment variables that the agent sets for a worker, and variables that users may set.

use std::net::IpAddr;
use std::path::PathBuf;

use xlaunch_proto::env;
use xlaunch_spec::ids::{Attempt, LocalRank, Rank, WorldSize};

use crate::error::{Result, WorkerError};

/// This worker's place in the job.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are named after the variables")]
pub struct Environment {
    pub rank: Rank,
    pub local_rank: LocalRank,
    pub world_size: WorldSize,
    pub attempt: Attempt,
    pub agent_socket: PathBuf,
    /// The address at which other nodes reach this one; `None` if the job has one node.
    pub advertised_address: Option<IpAddr>,
    /// Ranks below this one can see the run directory of rank 0, and write checkpoints there.
    pub writers: u32,
    /// Descriptors of memory files for snapshots; empty if there are none.
    pub snapshot_fds: Vec<u32>,
    /// Descriptor of the file in which the training thread records its activity.
    pub activity_fd: Option<u32>,
    pub device: Device,
    /// Threads of the CPU back end.
    pub threads: usize,
    /// The pool's debug mode fills new buffers with this byte.
    pub pool_debug: Option<u8>,
    /// Directory for a trace of the pool's requests during the first step.
    pub pool_trace: Option<PathBuf>,
    /// Number of the step, from 1, whose kernels are timed.
    pub profile: Option<u64>,
    /// True to print which variant was selected for each GPU operation.
    pub log_fallback: bool,
}

/// The device that this worker computes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// The CPU, on `threads` cores.
    Cpu,
    /// The CUDA device with this ordinal in this process.
    Cuda(usize),
}

impl Environment {
    /// Returns whether all ranks can see the run directory.
    pub fn is_shared(&self) -> bool {
        self.writers >= self.world_size.0
    }

    /// Returns the environment of another rank of this node that runs as a thread of the same process. Its activity is
    /// not recorded.
    pub(crate) fn of_thread(&self, local_rank: u32) -> Self {
        let device = match self.device {
            Device::Cpu => Device::Cpu,
            Device::Cuda(first) => Device::Cuda(first + local_rank as usize),
        };
        Self {
            rank: Rank(self.rank.0 + local_rank),
            local_rank: LocalRank(local_rank),
            device,
            activity_fd: self.activity_fd.filter(|_| local_rank == 0),
            ..self.clone()
        }
    }

    /// Reads the variables with `get`.
    pub fn read(get: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let text =
            |name: &str| get(name).ok_or_else(|| WorkerError::Environment(format!("{name} is not set")));
        let number = |name: &str| -> Result<u32> {
            let value = text(name)?;
            value.parse().map_err(|_| WorkerError::Environment(format!("{name} is `{value}`, not a number")))
        };
        let device = match text(env::DEVICE)?.as_str() {
            "cpu" => Device::Cpu,
            other => match other.strip_prefix("cuda:").and_then(|ordinal| ordinal.parse().ok()) {
                Some(ordinal) => Device::Cuda(ordinal),
                None => {
                    return Err(WorkerError::Environment(format!(
                        "{} is `{other}`, expected `cpu` or `cuda:N`",
                        env::DEVICE
                    )));
                }
            },
        };
        let advertised_address = get(env::ADVERTISED_ADDRESS).map(|value| ip_address(&value)).transpose()?;
        let world_size = number("WORLD_SIZE")?;
        let writers = get(env::WRITERS).map(|_| number(env::WRITERS)).transpose()?.unwrap_or(world_size);
        let threads = get("OMP_NUM_THREADS").and_then(|threads| threads.parse().ok()).unwrap_or(1);
        let pool_debug = get(env::POOL_DEBUG).map(|value| fill_byte(&value)).transpose()?;
        let profile = get(env::PROFILE).map(|value| step_number(&value)).transpose()?;
        let log_fallback = get(env::LOG_FALLBACK).map(|value| switch(&value)).transpose()?;
        Ok(Self {
            rank: Rank(number("RANK")?),
            local_rank: LocalRank(number("LOCAL_RANK")?),
            world_size: WorldSize(world_size),
            attempt: Attempt(number(env::ATTEMPT)?),
            agent_socket: text(env::AGENT_SOCKET)?.into(),
            advertised_address,
            // Rank 0 always writes.
            writers: writers.clamp(1, world_size.max(1)),
            snapshot_fds: get(env::SNAPSHOT_FDS).map_or(Ok(Vec::new()), |value| descriptors(&value))?,
            activity_fd: get(env::ACTIVITY_FD).and_then(|fd| fd.parse().ok()),
            device,
            threads: threads.max(1),
            pool_debug,
            pool_trace: get(env::POOL_TRACE).map(PathBuf::from),
            profile,
            log_fallback: log_fallback.unwrap_or(false),
        })
    }
}

fn ip_address(value: &str) -> Result<IpAddr> {
    value.parse().map_err(|_| {
        WorkerError::Environment(format!("{} is `{value}`, not an IP address", env::ADVERTISED_ADDRESS))
    })
}

fn descriptors(value: &str) -> Result<Vec<u32>> {
    let numbers = value.split(',').map(str::parse).collect::<std::result::Result<_, _>>();
    numbers.map_err(|_| {
        WorkerError::Environment(format!("{} is `{value}`, not a list of descriptors", env::SNAPSHOT_FDS))
    })
}

/// Parses a byte in decimal, or in hexadecimal with the prefix `0x`.
fn fill_byte(value: &str) -> Result<u8> {
    let byte = match value.strip_prefix("0x") {
        Some(digits) => u8::from_str_radix(digits, 16),
        None => value.parse(),
    };
    byte.map_err(|_| {
        WorkerError::Setting(format!("{} is `{value}`, not a byte such as `0xff`", env::POOL_DEBUG))
    })
}

fn step_number(value: &str) -> Result<u64> {
    value.parse().ok().filter(|step| *step > 0).ok_or_else(|| {
        WorkerError::Setting(format!("{} is `{value}`, not a step number, from 1", env::PROFILE))
    })
}

fn switch(value: &str) -> Result<bool> {
    match value {
        "1" => Ok(true),
        "0" => Ok(false),
        _ => Err(WorkerError::Setting(format!("{} is `{value}`, not 0 or 1", env::LOG_FALLBACK))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variable(name: &str) -> Option<String> {
        let value = match name {
            "RANK" => "3",
            "LOCAL_RANK" => "1",
            "WORLD_SIZE" => "4",
            env::ATTEMPT => "0",
            env::AGENT_SOCKET => "/run/agent.sock",
            env::DEVICE => "cuda:1",
            _ => return None,
        };
        Some(value.into())
    }

    #[test]
    fn ranks_and_device_are_read() {
        let environment = Environment::read(variable).unwrap();
        assert_eq!(
            (environment.rank, environment.device, environment.threads),
            (Rank(3), Device::Cuda(1), 1)
        );
    }

    #[test]
    fn threads_of_a_process_have_consecutive_ranks_and_devices() {
        let first = Environment::read(|name| match name {
            "RANK" | "LOCAL_RANK" => Some("0".into()),
            env::DEVICE => Some("cuda:0".into()),
            env::ACTIVITY_FD => Some("5".into()),
            _ => variable(name),
        });
        let first = first.unwrap();
        assert_eq!(first.of_thread(0), first);
        let other = first.of_thread(2);
        assert_eq!((other.rank, other.local_rank, other.device), (Rank(2), LocalRank(2), Device::Cuda(2)));
        // Two threads writing to the same record would overwrite each other's data.
        assert_eq!((first.activity_fd, other.activity_fd), (Some(5), None));
    }

    #[test]
    fn all_ranks_write_unless_the_agent_says_how_many() {
        let writers = |value: Option<&'static str>| {
            let with = |name: &str| if name == env::WRITERS { value.map(Into::into) } else { variable(name) };
            Environment::read(with).unwrap().writers
        };
        assert_eq!([None, Some("2"), Some("0"), Some("9")].map(writers), [4, 2, 1, 4]);
    }

    #[test]
    fn missing_or_invalid_variable_is_named() {
        let without = |missing: &'static str| move |name: &str| variable(name).filter(|_| name != missing);
        for name in ["RANK", "WORLD_SIZE", env::AGENT_SOCKET, env::DEVICE] {
            let error = Environment::read(without(name)).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
        for (value, byte) in [("0x7f", Some(0x7f)), ("12", Some(12)), ("0x100", None), ("yes", None)] {
            let with = |name: &str| if name == env::POOL_DEBUG { Some(value.into()) } else { variable(name) };
            let read = Environment::read(with).map(|environment| environment.pool_debug);
            assert_eq!(read.ok(), byte.map(Some), "{value}");
        }
        for (value, step) in [("1", Some(1)), ("0", None), ("last", None)] {
            let with = |name: &str| if name == env::PROFILE { Some(value.into()) } else { variable(name) };
            let read = Environment::read(with).map(|environment| environment.profile);
            assert_eq!(read.ok(), step.map(Some), "{value}");
        }
        for (value, on) in [("1", Some(true)), ("0", Some(false)), ("on", None)] {
            let with =
                |name: &str| if name == env::LOG_FALLBACK { Some(value.into()) } else { variable(name) };
            let read = Environment::read(with).map(|environment| environment.log_fallback);
            assert_eq!(read.ok(), on, "{value}");
        }
        for (name, value) in [(env::ADVERTISED_ADDRESS, "node-1"), (env::WRITERS, "some")] {
            let with = |wanted: &str| if wanted == name { Some(value.into()) } else { variable(wanted) };
            let error = Environment::read(with).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains(value), "{error}");
        }
        let invalid = |name: &str| if name == env::DEVICE { Some("tpu".into()) } else { variable(name) };
        assert!(Environment::read(invalid).unwrap_err().to_string().contains("tpu"));
    }
}
