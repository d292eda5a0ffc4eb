//! PyTorch's flight recorder: a ring of the last collectives of each rank, which NCCL process groups keep and dump.
//!
//! It is set up by environment variables. Each rank makes a pipe at `TORCH_NCCL_DEBUG_INFO_PIPE_FILE` + rank + `.pipe`,
//! which its monitoring thread reads every second; whatever is written there makes it write a dump to
//! `TORCH_NCCL_DEBUG_INFO_TEMP_FILE` + rank. Process groups of gloo have no such thread.

use std::ffi::OsString;
use std::io::Write;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::time::Duration;

use fs_err::os::unix::fs::OpenOptionsExt;
use rustix::fs::OFlags;

/// Time from [`trigger`] to the complete dump: a second for the monitoring thread to notice, and to write it.
pub(crate) const DUMP_TIME: Duration = Duration::from_secs(3);

const PIPE: &str = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE";
/// Events that the ring holds.
const BUFFER_SIZE: &str = "2000";
/// Start of the names of dumps and pipes; the rank follows.
const STEM: &str = "nccl_trace_rank_";

/// What a worker gets unless it inherits it. Dumps go to its log directory `dir`, pipes to the directory of `socket`,
/// which is local. Each variable is followed by another name of it in newer versions.
pub(super) fn variables(
    inherited: &dyn Fn(&str) -> Option<OsString>,
    dir: &Path,
    socket: &Path,
) -> Vec<(&'static str, OsString)> {
    let wanted: [(&'static str, &str, OsString); 4] = [
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE", BUFFER_SIZE.into()),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_ON_TIMEOUT", "1".into()),
        ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE", dir.join(STEM).into()),
        (PIPE, PIPE, socket.with_file_name(STEM).into()),
    ];
    let is_unset = |name: &str| inherited(name).is_none();
    let unset = wanted.into_iter().filter(|(name, newer, _)| is_unset(name) && is_unset(newer));
    unset.map(|(name, _, value)| (name, value)).collect()
}

/// Makes a rank dump its flight recorder. Whether it listens: it has a process group of NCCL. Never waits.
pub(crate) fn trigger(inherited: Option<OsString>, socket: &Path, rank: u32) -> bool {
    let mut pipe = inherited.unwrap_or_else(|| socket.with_file_name(STEM).into());
    pipe.push(format!("{rank}.pipe"));
    write_to_pipe(Path::new(&pipe)).is_ok()
}

/// The name of the variable for the `inherited` argument of [`trigger`].
pub(crate) const PIPE_VARIABLE: &str = PIPE;

fn write_to_pipe(pipe: &Path) -> std::io::Result<()> {
    let flags = OFlags::NONBLOCK | OFlags::NOFOLLOW;
    // Fails if nothing reads from the pipe.
    let mut file =
        fs_err::OpenOptions::new().write(true).custom_flags(flags.bits().cast_signed()).open(pipe)?;
    match file.metadata()?.file_type().is_fifo() {
        true => file.write_all(b"1"),
        false => Err(std::io::ErrorKind::InvalidInput.into()),
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
        assert!(!trigger(None, &socket, 3), "there is no pipe");
        let pipe = dir.path().join("nccl_trace_rank_3.pipe");
        let mode = rustix::fs::Mode::RWXU;
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        assert!(!trigger(None, &socket, 3), "nothing reads");
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        let mut reader = fs_err::OpenOptions::new().read(true).custom_flags(flags).open(&pipe).unwrap();
        assert!(trigger(None, &socket, 3));
        assert_eq!(reader.read(&mut [0; 128]).unwrap(), 1);
        let stem = dir.path().join("nccl_trace_rank_").into_os_string();
        assert!(trigger(Some(stem), Path::new("/nowhere/agent.sock"), 3), "the user has chosen the place");
        fs_err::write(dir.path().join("nccl_trace_rank_4.pipe"), "").unwrap();
        assert!(!trigger(None, &socket, 4), "a file is not a pipe");
    }
}
