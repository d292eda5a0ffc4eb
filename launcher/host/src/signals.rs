//! Signals to xlaunch, as one stream for the driver's task.
//!
//! Workers are in process groups of their own, so signals from the terminal reach only xlaunch, which passes them on.
//! The job decides which signals stop it. SIGUSR1 and SIGUSR2, unless they are among those, are forwarded to the
//! workers: schedulers use them to announce the end of an allocation. The trainer takes SIGUSR1 as a request for a
//! checkpoint. SIGTSTP stops the workers, then xlaunch itself; SIGCONT continues both. Ctrl-Z has no effect on a
//! terminal without a shell that could continue them. SIGWINCH is forwarded to workers with a terminal of their own,
//! which gets the new size first. A SIGHUP that was ignored when xlaunch started stays ignored, for `nohup`. An ignored
//! SIGINT does not: shells ignore it for background commands, but a SIGINT sent to one of them explicitly is intended.
//!
//! A launch listens from its beginning, before it has anything to stop: the kernel does not deliver signals without a
//! handler to PID 1, which a launch in a container often is.

use std::pin::pin;

use rustix::process::{Signal, getpid, kill_process};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::refusal::Refusal;

use crate::process::ignores;
use crate::spawn::{short_signal_name, terminal};
use crate::system_errors;

/// The meaning of a signal for the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SignalRequest {
    /// Stop the job.
    Stop(Signal),
    /// Send the signal to the workers.
    Forward(Signal),
    /// Suspend the workers, then xlaunch.
    Suspend,
    /// Continue the workers.
    Resume,
    /// Tell the workers the new size of the terminal.
    Resize,
}

/// Signals to this process, in the order of arrival.
#[derive(Debug)]
pub struct Signals(mpsc::UnboundedReceiver<SignalRequest>);

impl Signals {
    /// Replaces the default actions of the signals that stop the job, and of those that are passed on.
    ///
    /// # Errors
    /// System errors, in words for the user.
    pub fn listen(stopping: &[Signal]) -> Result<Self, Refusal> {
        listen(stopping).map(Self).map_err(|error| {
            let message = format!("failed to listen for signals: {}", system_errors::describe(&error));
            Refusal::new(ExitCode::Internal, message)
        })
    }

    /// The next signal; waits forever if there can be none.
    pub async fn next(&mut self) -> SignalRequest {
        match self.0.recv().await {
            Some(request) => request,
            None => std::future::pending().await,
        }
    }

    /// Returns whether a signal waits to be returned by [`next`](Self::next).
    pub fn has_pending(&self) -> bool {
        !self.0.is_empty()
    }

    /// Completes `work`, which precedes the first worker of this node, unless a signal ends the launch before.
    /// `notify` shows the user a line.
    ///
    /// # Errors
    /// The errors of `work`, and [`ExitCode::Signal`] after a signal, which was received `when`.
    pub async fn unless_stopped<T>(
        &mut self,
        when: &str,
        notify: impl Fn(&str),
        work: impl Future<Output = Result<T, Refusal>>,
    ) -> Result<T, Refusal> {
        let mut work = pin!(work);
        loop {
            let request = tokio::select! {
                request = self.next() => request,
                result = &mut work => return result,
            };
            match request {
                SignalRequest::Stop(signal) => return Err(stopped(signal, when)),
                SignalRequest::Forward(signal) => {
                    let name = short_signal_name(signal.as_raw());
                    notify(&format!("{name} has no effect yet: no worker runs here"));
                }
                SignalRequest::Suspend => suspend_this_process(),
                SignalRequest::Resume | SignalRequest::Resize => {}
            }
        }
    }
}

fn stopped(signal: Signal, when: &str) -> Refusal {
    let name = short_signal_name(signal.as_raw());
    let number = u8::try_from(signal.as_raw()).unwrap_or_default();
    Refusal::new(ExitCode::Signal(number), format!("stopped by {name} {when}: the job never began here"))
}

/// Waits for a SIGINT or SIGTERM and returns it, for a client that has something to say before it ends
/// ([`die_of`](crate::spawn::sys::die_of)). A signal that was ignored when this process started stays ignored: shells
/// ignore SIGINT for background commands.
///
/// # Errors
/// System errors.
pub async fn interrupted() -> std::io::Result<Signal> {
    let listen = |wanted: Signal| -> std::io::Result<_> {
        let kind = SignalKind::from_raw(wanted.as_raw());
        let mut signals = if is_ignored(wanted) { None } else { Some(signal(kind)?) };
        Ok(async move {
            match &mut signals {
                Some(signals) => signals.recv().await,
                None => std::future::pending().await,
            };
            wanted
        })
    };
    let (int, term) = (listen(Signal::INT)?, listen(Signal::TERM)?);
    Ok(tokio::select! {
        signal = int => signal,
        signal = term => signal,
    })
}

/// Makes writes beyond the limit on file sizes (`ulimit -f`) fail with an error, which is reported like that of a full
/// disk. By default, SIGXFSZ ends the process without a message. Programs that this process starts have the default.
///
/// # Errors
/// System errors.
pub fn survive_file_size_limit() -> std::io::Result<()> {
    // The handler stays installed without the stream. Unlike an ignored signal, it is not inherited through exec.
    signal(SignalKind::from_raw(Signal::XFSZ.as_raw())).map(drop)
}

/// Stops this process until SIGCONT, as the default action of SIGTSTP would.
pub fn suspend_this_process() {
    // This process exists.
    let _ = kill_process(getpid(), Signal::STOP);
}

fn listen(stopping: &[Signal]) -> std::io::Result<mpsc::UnboundedReceiver<SignalRequest>> {
    survive_file_size_limit()?;
    let forwarded = [Signal::USR1, Signal::USR2].into_iter().filter(|signal| !stopping.contains(signal));
    let all = stopping.iter().map(|signal| (*signal, SignalRequest::Stop(*signal)));
    let all = all.chain(forwarded.map(|signal| (signal, SignalRequest::Forward(signal))));
    let all = all.chain([
        (Signal::TSTP, SignalRequest::Suspend),
        (Signal::CONT, SignalRequest::Resume),
        (Signal::WINCH, SignalRequest::Resize),
    ]);
    let nohup = is_ignored(Signal::HUP);
    let (requests, stream) = mpsc::unbounded_channel();
    for (number, request) in all.filter(|(signal, _)| !(nohup && *signal == Signal::HUP)) {
        let mut signals = signal(SignalKind::from_raw(number.as_raw()))?;
        let requests = requests.clone();
        tokio::spawn(async move {
            // The receiver is gone when the job is over.
            while signals.recv().await.is_some() {
                if !is_without_effect(request) && requests.send(request).is_err() {
                    return;
                }
            }
        });
    }
    Ok(stream)
}

/// Returns whether this is Ctrl-Z on a terminal without a shell that could continue xlaunch. The kernel ignores it then
/// for programs that do not handle it.
fn is_without_effect(request: SignalRequest) -> bool {
    request == SignalRequest::Suspend && terminal::is_in_foreground() && !terminal::has_shell()
}

/// Returns whether this process ignores the signal, as its parent may have wanted.
pub fn is_ignored(signal: Signal) -> bool {
    // Without /proc, no job begins.
    ignores(std::process::id(), signal)
}
