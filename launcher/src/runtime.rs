//! Starts the asynchronous runtime, and reports panics.
//!
//! tokio panics if the system refuses a thread or a file descriptor, and then waits for the threads that it has
//! started. So resources are first requested in a way that returns errors; if another process takes them in between,
//! the panic hook ends the process.

use std::cell::Cell;
use std::io;
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind};
use std::sync::mpsc::channel;
use std::time::Duration;

use rustix::process::{Resource, getrlimit};
use tokio::runtime::{Builder, Runtime};
use xlaunch_host::system_errors;
use xlaunch_spec::exit::ExitCode;

use xlaunch_agent::stderr::print_line;

/// Number of threads that serve connections, so that connections do not delay the task that owns the job.
const WORKER_THREADS: usize = 2;
/// Number of pipes to open as a test: they have as many descriptors as the runtime needs.
const PROBED_PIPES: usize = 4;
/// Threads for blocking calls are kept as long as the process runs, so that a later call does not fail or wait forever
/// because the limit on processes has been reached meanwhile.
const THREAD_KEEP_ALIVE: Duration = Duration::from_secs(365 * 24 * 3600);

/// Size of the stack that is large enough for every command, also in a debug build.
const STACK_BYTES: usize = 8 << 20;

thread_local! {
    /// True if this thread is starting the runtime.
    static STARTING: Cell<bool> = const { Cell::new(false) };
}

/// The threads that a command needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Threads {
    /// Only the calling thread: for queries, which then work even if no thread can be started.
    One,
    /// Several threads.
    Several,
}

/// Runs `work` on this thread or, if the limit on its stack is lower than most systems have it (`ulimit -s`), on
/// another one, as an overflow of the stack would end the process.
pub(crate) fn with_large_stack(work: fn() -> std::process::ExitCode) -> std::process::ExitCode {
    if getrlimit(Resource::Stack).current.is_none_or(|limit| limit >= STACK_BYTES as u64) {
        return work();
    }
    let thread = std::thread::Builder::new().name("main".into()).stack_size(STACK_BYTES).spawn(work);
    match thread.map(std::thread::JoinHandle::join) {
        Ok(exit) => exit.unwrap_or_else(|_| ExitCode::Internal.into()),
        Err(error) => {
            print_line(format_args!("error: failed to start: {}", system_errors::describe(&error)));
            ExitCode::Internal.into()
        }
    }
}

/// Runs `work` to its end. A panic ends it with [`ExitCode::Internal`], after its values have been dropped.
pub(crate) fn run(threads: Threads, work: impl Future<Output = ExitCode>) -> ExitCode {
    let runtime = match start(threads) {
        Ok(runtime) => runtime,
        Err(error) => {
            print_line(format_args!("error: failed to start: {}", system_errors::describe(&error)));
            return ExitCode::Internal;
        }
    };
    let exit = catch_unwind(AssertUnwindSafe(|| runtime.block_on(work)));
    // Log threads may still be blocked on a pipe that an orphan holds open. They end with the process.
    runtime.shutdown_background();
    exit.unwrap_or(ExitCode::Internal)
}

fn start(threads: Threads) -> io::Result<Runtime> {
    let pipes = (0..PROBED_PIPES).map(|_| io::pipe()).collect::<io::Result<Vec<_>>>()?;
    drop(pipes);
    let several = threads == Threads::Several;
    if several {
        start_threads(WORKER_THREADS + 1)?;
    }
    let mut builder = if several { Builder::new_multi_thread() } else { Builder::new_current_thread() };
    builder.worker_threads(WORKER_THREADS).thread_keep_alive(THREAD_KEEP_ALIVE).enable_all();
    STARTING.set(true);
    let runtime = builder.build()?;
    if several {
        // Starts the first thread for blocking calls.
        drop(runtime.spawn_blocking(|| ()));
    }
    STARTING.set(false);
    Ok(runtime)
}

/// Starts `count` threads at the same time, and ends them, to test that the system allows them.
fn start_threads(count: usize) -> io::Result<()> {
    let mut threads = Vec::new();
    let started = (0..count).try_for_each(|_| {
        let (end, wait) = channel::<()>();
        let thread = std::thread::Builder::new().spawn(move || {
            // Returns when the sender is dropped.
            let _ = wait.recv();
        })?;
        threads.push((end, thread));
        Ok(())
    });
    for (end, thread) in threads {
        drop(end);
        // The thread cannot panic.
        let _ = thread.join();
    }
    started
}

/// Reports panics of any thread in one line, with a backtrace if `RUST_BACKTRACE` is set.
pub(crate) fn report_panics() {
    std::panic::set_hook(Box::new(|panic| {
        print_line(format_args!("error: {}", panic_message(panic)));
        let backtrace = std::backtrace::Backtrace::capture();
        if backtrace.status() == std::backtrace::BacktraceStatus::Captured && !is_exhausted(panic) {
            print_line(format_args!("{backtrace}"));
        }
        if STARTING.get() {
            #[expect(
                clippy::exit,
                reason = "unwinding would wait for the threads that the runtime has started"
            )]
            std::process::exit(ExitCode::Internal.code().into());
        }
    }));
}

fn panic_message(panic: &PanicHookInfo<'_>) -> String {
    if is_exhausted(panic) {
        return format!(
            "failed to start a thread: {}",
            system_errors::describe(&rustix::io::Errno::AGAIN.into())
        );
    }
    let place = panic.location().map_or(String::new(), |at| format!(" at {}:{}", at.file(), at.line()));
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("unnamed");
    format!("internal error in thread `{name}`{place}: {}; please report it", payload(panic))
}

fn payload<'a>(panic: &'a PanicHookInfo<'_>) -> &'a str {
    let payload = panic.payload();
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("unknown panic")
}

/// Returns whether a library has panicked because the system refused a thread.
fn is_exhausted(panic: &PanicHookInfo<'_>) -> bool {
    let text = payload(panic);
    text.contains("thread") && text.contains(&rustix::io::Errno::AGAIN.to_string())
}
