//! Signals to xlaunch, as one stream for the task that owns the job.
//!
//! Workers are in process groups of their own: what the terminal sends reaches xlaunch alone, which passes it on. A job says
//! which signals end it; SIGUSR1 and SIGUSR2, where they are not among them, go to the workers as they are (schedulers
//! announce the end of an allocation so). SIGTSTP stops the workers, then xlaunch itself; SIGCONT continues both. A SIGHUP
//! that xlaunch was started to ignore stays ignored: `nohup` means what it says. (SIGINT does not: shells let commands in the
//! background ignore it, and who sends it to one of them by its number means it.)

use rustix::process::Signal;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

/// What a signal asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    /// The job is to end.
    End(Signal),
    /// The workers are to get it.
    Pass(Signal),
    /// All are to stop for now.
    Suspend,
    /// They are to go on.
    Continue,
}

/// The signals, from now on, in the order in which they come; nothing else is done about them any more.
pub(crate) fn listen(ending: &[Signal]) -> std::io::Result<mpsc::UnboundedReceiver<Asked>> {
    let passed = [Signal::USR1, Signal::USR2].into_iter().filter(|signal| !ending.contains(signal));
    let all = ending.iter().map(|signal| (*signal, Asked::End(*signal)));
    let all = all.chain(passed.map(|signal| (signal, Asked::Pass(signal))));
    let all = all.chain([(Signal::TSTP, Asked::Suspend), (Signal::CONT, Asked::Continue)]);
    let nohup = ignores(&fs_err::read_to_string("/proc/self/status")?, Signal::HUP);
    let (asked, stream) = mpsc::unbounded_channel();
    for (number, what) in all.filter(|(signal, _)| !(nohup && *signal == Signal::HUP)) {
        let mut signals = signal(SignalKind::from_raw(number.as_raw()))?;
        let asked = asked.clone();
        tokio::spawn(async move {
            // The receiver is gone when the job is over.
            while signals.recv().await.is_some() && asked.send(what).is_ok() {}
        });
    }
    Ok(stream)
}

/// Whether a process with this `/proc/PID/status`, which has a bit for each signal, the lowest for signal 1, ignores it.
fn ignores(status: &str, signal: Signal) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask >> (signal.as_raw() - 1) & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_are_those_of_the_kernels_mask() {
        let status =
            "Name:\tx\nSigBlk:\tffffffffffffffff\nSigIgn:\t0000000000001001\nSigCgt:\t0000000000000002\n";
        assert!(ignores(status, Signal::HUP) && ignores(status, Signal::PIPE));
        assert!(!ignores(status, Signal::INT) && !ignores("Name:\tx\n", Signal::HUP));
    }
}
