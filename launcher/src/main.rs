//! The `xlaunch` binary: the command line; `xlaunch worker`, one rank of the built-in trainer; and, under its own name,
//! the reaper that cleans up after a launcher that was killed.
//!
//! - [`cli`]: subcommands and torchrun's flags; [`client`]: gRPC clients of agents and the daemon; [`render`]: tables;
//! - [`mod@bench`]: the measurements of `xlaunch bench`; [`report`]: training runs as a page;
//! - [`serve`]: the API of `xlaunch serve`;
//! - [`ssh`]: launches on several hosts; [`runtime`]: tokio's runtime, and reports of panics.
#![forbid(unsafe_code)]

mod bench;
mod cli;
mod client;
mod error_file;
mod render;
mod report;
mod runtime;
mod serve;
mod ssh;

use std::io::Write;
use std::process::ExitCode;

use xlaunch_agent::worker_environment;
use xlaunch_host::spawn;

fn main() -> ExitCode {
    runtime::report_panics();
    runtime::with_large_stack(run)
}

fn run() -> ExitCode {
    if std::env::args_os().next().is_some_and(|name| name == spawn::reaper::NAME) {
        return spawn::reaper::main();
    }
    if std::env::args_os().next().is_some_and(|name| name == spawn::terminal::RELAY_NAME) {
        return spawn::terminal::relay_main();
    }
    spawn::sys::unblock_signals();
    if std::env::args_os().nth(1).is_some_and(|argument| argument == "worker") {
        let rank_threads =
            std::env::args_os().nth(2).is_some_and(|it| it == worker_environment::RANK_THREADS);
        return xlaunch_worker::main(rank_threads).into();
    }
    let exit = cli::main();
    // If the stream is closed, the exit code still reports the result.
    let _ = std::io::stdout().flush();
    spawn::sys::exit_at_once(exit.code())
}
