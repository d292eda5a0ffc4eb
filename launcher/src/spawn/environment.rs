//! What a worker finds in its environment: torchrun's variables, xlaunch's own, and everything the launcher was given.

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

use xlaunch_proto::env;

use crate::devices::Placement;

/// What the workers of one attempt have in common.
#[derive(Clone, Debug)]
pub struct Group<'a> {
    /// The run's id.
    pub run_id: &'a str,
    /// Where they find the agent.
    pub socket: &'a Path,
    /// Where they compute.
    pub placement: &'a Placement,
    /// This start of the group, from 0.
    pub attempt: u32,
    /// Restarts allowed.
    pub max_restarts: u32,
    /// For frameworks that rendezvous by themselves.
    pub master_port: u16,
}

/// The command of one worker. Everything else in the launcher's environment (`NCCL_*`, `NVSHMEM_*`, `TORCH_*`, ...) is
/// passed on untouched.
pub fn command(group: &Group<'_>, rank: u32) -> std::io::Result<Command> {
    let mut command = match std::env::var_os(env::WORKER_PROGRAM) {
        Some(program) => Command::new(program),
        None => {
            let mut command = Command::new(std::env::current_exe()?);
            command.arg("worker");
            command
        }
    };
    command.envs(variables(group, rank, std::env::var_os("OMP_NUM_THREADS")));
    Ok(command)
}

fn variables(group: &Group<'_>, rank: u32, omp_threads: Option<OsString>) -> Vec<(&'static str, OsString)> {
    let world = group.placement.workers.to_string();
    let rank_text = rank.to_string();
    let device = if group.placement.cuda { format!("cuda:{rank}") } else { "cpu".into() };
    let mut all: Vec<(&'static str, OsString)> = vec![
        ("RANK", rank_text.clone().into()),
        ("LOCAL_RANK", rank_text.clone().into()),
        ("WORLD_SIZE", world.clone().into()),
        ("LOCAL_WORLD_SIZE", world.clone().into()),
        ("GROUP_RANK", "0".into()),
        ("GROUP_WORLD_SIZE", "1".into()),
        ("ROLE_RANK", rank_text.into()),
        ("ROLE_NAME", "default".into()),
        ("ROLE_WORLD_SIZE", world.into()),
        ("MASTER_ADDR", "127.0.0.1".into()),
        ("MASTER_PORT", group.master_port.to_string().into()),
        ("TORCHELASTIC_RESTART_COUNT", group.attempt.to_string().into()),
        ("TORCHELASTIC_MAX_RESTARTS", group.max_restarts.to_string().into()),
        ("TORCHELASTIC_RUN_ID", group.run_id.into()),
        (env::AGENT_SOCKET, group.socket.into()),
        (env::ATTEMPT, group.attempt.to_string().into()),
        (env::JOB_ID, group.run_id.into()),
        (env::DEVICE, device.into()),
    ];
    if omp_threads.is_none() {
        all.push(("OMP_NUM_THREADS", group.placement.threads.to_string().into()));
    }
    if let Some(visible) = &group.placement.visible {
        all.push(("CUDA_VISIBLE_DEVICES", visible.into()));
    }
    all
}

/// A TCP port of the loopback interface that is free now.
pub fn free_port() -> std::io::Result<u16> {
    Ok(std::net::TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}
