//! Signals to xlaunch, as one stream for the driver's task.
//!
//! Workers are in process groups of their own, so signals from the terminal reach only xlaunch, which passes them on.
//! The job decides which signals stop it. SIGUSR1 and SIGUSR2, unless they are among those, are forwarded to the
//! workers: schedulers use them to announce the end of an allocation. The trainer takes SIGUSR1 as a request for a
//! checkpoint. SIGTSTP stops the workers, then xlaunch itself; SIGCONT continues both. A SIGHUP that was ignored when
//! xlaunch started stays ignored, for `nohup`. An ignored SIGINT does not: shells ignore it for background commands,
//! but a SIGINT sent to one of them explicitly is intended.

use rustix::process::Signal;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

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
}

/// Replaces the default actions of all these signals by a stream of requests, in order of arrival.
pub fn listen(stopping: &[Signal]) -> std::io::Result<mpsc::UnboundedReceiver<SignalRequest>> {
    let forwarded = [Signal::USR1, Signal::USR2].into_iter().filter(|signal| !stopping.contains(signal));
    let all = stopping.iter().map(|signal| (*signal, SignalRequest::Stop(*signal)));
    let all = all.chain(forwarded.map(|signal| (signal, SignalRequest::Forward(signal))));
    let all = all.chain([(Signal::TSTP, SignalRequest::Suspend), (Signal::CONT, SignalRequest::Resume)]);
    let nohup = ignores(&fs_err::read_to_string("/proc/self/status")?, Signal::HUP);
    let (requests, stream) = mpsc::unbounded_channel();
    for (number, request) in all.filter(|(signal, _)| !(nohup && *signal == Signal::HUP)) {
        let mut signals = signal(SignalKind::from_raw(number.as_raw()))?;
        let requests = requests.clone();
        tokio::spawn(async move {
            // The receiver is gone when the job is over.
            while signals.recv().await.is_some() && requests.send(request).is_ok() {}
        });
    }
    Ok(stream)
}

/// Returns whether a process with this `/proc/PID/status` ignores the signal. Bit 0 of the mask is signal 1.
fn ignores(status: &str, signal: Signal) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask >> (signal.as_raw() - 1) & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_are_read_from_the_kernels_mask() {
        let status =
            "Name:\tx\nSigBlk:\tffffffffffffffff\nSigIgn:\t0000000000001001\nSigCgt:\t0000000000000002\n";
        assert!(ignores(status, Signal::HUP) && ignores(status, Signal::PIPE));
        assert!(!ignores(status, Signal::INT) && !ignores("Name:\tx\n", Signal::HUP));
    }
}
