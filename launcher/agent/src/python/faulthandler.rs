//! Makes Python programs print their stacks: `faulthandler` writes them to stderr on SIGABRT.
//!
//! `PYTHONFAULTHANDLER=1` in the environment of workers enables that. The handler is written in C, so a program prints
//! its stacks even if it holds the interpreter lock or waits in a driver. Afterwards SIGABRT terminates it.

use rustix::process::Signal;

use xlaunch_host::process::Process;

/// Sends SIGABRT to the Python programs of these workers. Returns whether there are any.
///
/// A worker may be a shell or another launcher around a program, so the signal goes to the outermost Python processes.
/// Their children, such as data loader workers, do not get it: they would print between their parents' lines.
pub(crate) fn print_stacks(workers: &[u32]) -> bool {
    let all = Process::all();
    let programs: Vec<&Process> =
        workers.iter().flat_map(|worker| outermost(&Process::tree(&all, *worker), runs_python)).collect();
    for program in &programs {
        program.signal(Signal::ABORT);
        // A stopped process gets SIGABRT only when it is continued.
        program.signal(Signal::CONT);
    }
    !programs.is_empty()
}

/// Returns the processes of a tree (parents first) for which `is_meant` holds, but not for any of their ancestors.
fn outermost<'a>(tree: &[&'a Process], is_meant: impl Fn(&Process) -> bool) -> Vec<&'a Process> {
    let (mut found, mut below) = (Vec::new(), Vec::new());
    for process in tree {
        if below.contains(&process.parent) {
            below.push(process.pid);
        } else if is_meant(process) {
            found.push(*process);
            below.push(process.pid);
        }
    }
    found
}

fn runs_python(process: &Process) -> bool {
    let program = fs_err::read_link(format!("/proc/{}/exe", process.pid)).unwrap_or_default();
    let name = program.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    ["python", "pypy"].iter().any(|known| name.starts_with(known))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outermost_programs_are_selected_below_shells() {
        let process = |pid, parent| {
            let name = "x".into();
            Process {
                pid,
                parent,
                group: 1,
                session: 1,
                state: 'S',
                threads: 1,
                ticks: 0,
                started: 1,
                pages: 0,
                name,
            }
        };
        // A shell (1) that runs two programs (2, 3); the first has children (4, 5), one of them a program again.
        let all = [process(1, 0), process(2, 1), process(3, 1), process(4, 2), process(5, 4)];
        let tree: Vec<&Process> = all.iter().collect();
        let found = |meant: &[u32]| {
            outermost(&tree, |process| meant.contains(&process.pid))
                .iter()
                .map(|it| it.pid)
                .collect::<Vec<_>>()
        };
        assert_eq!(found(&[2, 3, 5]), [2, 3]);
        assert_eq!(found(&[3, 5]), [3, 5]);
        assert_eq!(found(&[1, 2, 3]), [1]);
        assert_eq!(found(&[]), [] as [u32; 0]);
    }
}
