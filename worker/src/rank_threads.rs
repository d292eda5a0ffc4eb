//! Runs all ranks of a job as threads of one process, which then has a CUDA context per GPU. Used only by `xlaunch
//! bench train --threads`, which compares this with a process per rank.
//!
//! Each thread runs the session of its rank, with its own connection to the agent, device, pool and communicator. Only
//! the driver, libraries and the host allocator are shared, and their effect is what the comparison measures.
//!
//! The fail points are those set for rank 0, and any thread may reach them.
//!
//! A thread cannot be killed, so the process ends with the first rank that fails: the others may wait for that rank
//! forever.

use std::panic::{catch_unwind, resume_unwind};
use std::sync::mpsc::channel;
use std::thread;

use xlaunch_spec::exit::ExitCode;

use crate::environment::Environment;
use crate::error::{Result, WorkerError};

/// Stack size of a rank's thread in bytes: the size of a main thread's stack, on which a rank normally runs. The
/// default for threads is a quarter of that, and NVRTC and cuDNN use the same stack.
const RANK_STACK_BYTES: usize = 8 << 20;

/// Runs `session` for each rank on its own thread. `first` is the environment of rank 0.
pub(crate) fn run(first: &Environment, session: fn(&Environment) -> Result<ExitCode>) -> Result<ExitCode> {
    let (sender, ends) = channel();
    for rank in 0..first.world_size.0 {
        let (environment, sender) = (first.of_thread(rank), sender.clone());
        let run = move || {
            let end = catch_unwind(|| session(&environment));
            // The receiver is gone if another rank has failed.
            let _ = sender.send((rank, end));
        };
        let thread = thread::Builder::new().name(format!("rank {rank}")).stack_size(RANK_STACK_BYTES);
        thread.spawn(run).map_err(|source| WorkerError::Io {
            what: format!("failed to start the thread of rank {rank}"),
            source,
        })?;
    }
    drop(sender);
    let mut exit = ExitCode::Done;
    for (rank, end) in ends {
        match end {
            Ok(Ok(ExitCode::Done)) => {}
            Ok(Ok(other)) => exit = other,
            Ok(Err(error)) => return Err(WorkerError::OfRank { rank, error: Box::new(error) }),
            // The panic was printed by its thread.
            Err(panic) => resume_unwind(panic),
        }
    }
    Ok(exit)
}

#[cfg(test)]
mod tests {
    use xlaunch_proto::env;
    use xlaunch_spec::ids::Rank;

    use super::*;

    fn environment() -> Environment {
        let variable = |name: &str| match name {
            "RANK" | "LOCAL_RANK" | env::ATTEMPT => Some("0".into()),
            "WORLD_SIZE" => Some("3".into()),
            env::DEVICE => Some("cpu".into()),
            env::AGENT_SOCKET => Some("/run/agent.sock".into()),
            _ => None,
        };
        Environment::read(variable).unwrap()
    }

    #[test]
    fn all_ranks_run_and_a_stopped_one_decides_the_exit_code() {
        assert_eq!(run(&environment(), |_| Ok(ExitCode::Done)).unwrap(), ExitCode::Done);
        let one_stops = |environment: &Environment| match environment.rank {
            Rank(1) => Ok(ExitCode::Stopped),
            _ => Ok(ExitCode::Done),
        };
        assert_eq!(run(&environment(), one_stops).unwrap(), ExitCode::Stopped);
    }

    #[test]
    fn failed_rank_is_named_while_others_still_wait() {
        let one_fails = |environment: &Environment| match environment.rank {
            Rank(1) => Err(WorkerError::Rendezvous("no".into())),
            _ => loop {
                thread::park();
            },
        };
        let error = run(&environment(), one_fails).unwrap_err();
        assert_eq!(error.to_string(), "rank 1: rendezvous failed: no");
        assert_eq!(error.exit(), ExitCode::Rendezvous);
    }

    #[test]
    fn panic_of_a_rank_ends_the_process_while_others_still_wait() {
        let one_panics = |environment: &Environment| match environment.rank {
            Rank(2) => panic!("of rank 2"),
            _ => loop {
                thread::park();
            },
        };
        let panic = catch_unwind(|| run(&environment(), one_panics)).unwrap_err();
        assert_eq!(panic.downcast_ref(), Some(&"of rank 2"));
    }
}
