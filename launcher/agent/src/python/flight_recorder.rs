//! PyTorch's flight recorder: a ring buffer of each rank's last collectives, which NCCL process groups keep and dump.
//!
//! Environment variables set it up. Each rank creates a pipe at `TORCH_NCCL_DEBUG_INFO_PIPE_FILE` + rank + `.pipe`,
//! which its monitoring thread reads every second. Any data there makes the thread write a dump to
//! `TORCH_NCCL_DEBUG_INFO_TEMP_FILE` + rank. Gloo process groups have no such thread.

use std::ffi::OsString;
use std::io::Write;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::time::Duration;

use fs_err::os::unix::fs::OpenOptionsExt;
use rustix::fs::OFlags;

/// Time from [`FlightRecorders::trigger`] to the complete dump: up to a second until the monitoring thread notices, and
/// the time to write the dump.
const DUMP_TIME: Duration = Duration::from_secs(3);

/// Variable with the path prefix of dumps. Its value differs between workers.
pub(crate) const DUMP_FILE: &str = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE";
const PIPE: &str = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE";
/// Capacity of the ring buffer, in events.
const BUFFER_SIZE: &str = "2000";
/// Name prefix of dumps and pipes, followed by the rank.
const STEM: &str = "nccl_trace_rank_";

/// Returns the variables that a worker needs and does not inherit. Dumps go to its log directory `dir`, pipes to the
/// directory of `socket`, which is local. In the table, each variable is followed by its alias in newer versions.
pub(crate) fn variables(
    inherited: &dyn Fn(&str) -> Option<OsString>,
    dir: &Path,
    socket: &Path,
) -> Vec<(&'static str, OsString)> {
    let wanted: [(&'static str, &str, OsString); 4] = [
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE", BUFFER_SIZE.into()),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_ON_TIMEOUT", "1".into()),
        (DUMP_FILE, "TORCH_FR_DUMP_TEMP_FILE", dir.join(STEM).into()),
        (PIPE, PIPE, socket.with_file_name(STEM).into()),
    ];
    let is_unset = |name: &str| inherited(name).is_none();
    let unset = wanted.into_iter().filter(|(name, newer, _)| is_unset(name) && is_unset(newer));
    unset.map(|(name, _, value)| (name, value)).collect()
}

/// The flight recorders of the workers of a launch.
#[derive(Clone, Debug)]
pub(crate) struct FlightRecorders {
    /// Path prefix of the pipes.
    pipes: OsString,
}

impl FlightRecorders {
    /// Creates the handle for workers with these inherited variables.
    pub(crate) fn new(inherited: impl Fn(&str) -> Option<OsString>, socket: &Path) -> Self {
        Self { pipes: inherited(PIPE).unwrap_or_else(|| socket.with_file_name(STEM).into()) }
    }

    /// Makes ranks dump their flight recorders, and waits [`DUMP_TIME`] for that. Returns the number of ranks that
    /// listen, which are those with an NCCL process group. Blocks.
    pub(crate) fn dump(&self, ranks: impl Iterator<Item = u32>) -> usize {
        let told = ranks.filter(|rank| self.trigger(*rank)).count();
        if told > 0 {
            std::thread::sleep(DUMP_TIME);
        }
        told
    }

    fn trigger(&self, rank: u32) -> bool {
        let mut pipe = self.pipes.clone();
        pipe.push(format!("{rank}.pipe"));
        write_to_pipe(Path::new(&pipe)).is_ok()
    }
}

fn write_to_pipe(pipe: &Path) -> std::io::Result<()> {
    let flags = OFlags::NONBLOCK | OFlags::NOFOLLOW;
    // Fails if no process reads from the pipe.
    let mut file =
        fs_err::OpenOptions::new().write(true).custom_flags(flags.bits().cast_signed()).open(pipe)?;
    if file.metadata()?.file_type().is_fifo() {
        file.write_all(b"1")
    } else {
        Err(std::io::ErrorKind::InvalidInput.into())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    fn set(inherited: &[&str]) -> Vec<(&'static str, OsString)> {
        let find = |name: &str| inherited.contains(&name).then(|| OsString::from("x"));
        variables(&find, Path::new("/logs/1"), Path::new("/run/agent.sock"))
    }

    #[test]
    fn variables_are_set_unless_inherited_under_either_name() {
        let all: [(&str, OsString); 4] = [
            ("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000".into()),
            ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1".into()),
            ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "/logs/1/nccl_trace_rank_".into()),
            ("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "/run/nccl_trace_rank_".into()),
        ];
        assert_eq!(set(&[]), all);
        assert_eq!(set(&["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT"]), all[2..]);
        assert_eq!(set(&[PIPE, "TORCH_FR_DUMP_TEMP_FILE"]), all[..2]);
    }

    #[test]
    fn rank_that_listens_is_told_to_dump() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent.sock");
        let recorders = FlightRecorders::new(|_| None, &socket);
        assert!(!recorders.trigger(3), "there is no pipe");
        let pipe = dir.path().join("nccl_trace_rank_3.pipe");
        let mode = rustix::fs::Mode::RWXU;
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        assert!(!recorders.trigger(3), "nothing reads");
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        let mut reader = fs_err::OpenOptions::new().read(true).custom_flags(flags).open(&pipe).unwrap();
        assert!(recorders.trigger(3));
        assert_eq!(reader.read(&mut [0; 128]).unwrap(), 1);
        let stem = dir.path().join("nccl_trace_rank_");
        let chosen = FlightRecorders::new(
            |name| (name == PIPE).then(|| stem.clone().into()),
            Path::new("/nowhere/agent.sock"),
        );
        assert!(chosen.trigger(3), "the user has chosen the place");
        fs_err::write(dir.path().join("nccl_trace_rank_4.pipe"), "").unwrap();
        assert!(!recorders.trigger(4), "a file is not a pipe");
    }
}
