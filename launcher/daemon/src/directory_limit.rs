//! Limits the size of job directories, which job users can write to and which are on the same file system as the
//! journal.
//!
//! Directories of running jobs are measured every few seconds, all others every few minutes, because their users can
//! still write there. Between measurements a user can exceed the limit. Therefore the journal allocates its space in
//! advance ([`crate::journal`]).

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::fd::OwnedFd;
use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, fstat, openat, statat};
use rustix::io::Errno;
use tokio::sync::{mpsc, watch};
use tokio::time::MissedTickBehavior;
use xlaunch_spec::quantities::bytes_text;

use crate::agents::follow::AgentEvent;
use crate::files::JobDirs;
use crate::view::NodeView;

const MEASURE_INTERVAL: Duration = Duration::from_secs(10);
/// Number of intervals between measurements of the directories of jobs that do not run.
const INTERVALS_PER_FULL_MEASUREMENT: u64 = 30;
/// A job's directory may take one part in this many of the file system.
const PART_OF_DISK: u64 = 4;
const MAX_ENTRIES: u64 = 200_000;
/// Maximum nesting of directories. Each level takes a descriptor during the measurement.
const MAX_DEPTH: usize = 32;

/// Measures directories until the receiver of the events is dropped.
pub(crate) async fn watch(
    dirs: JobDirs,
    view: watch::Receiver<Arc<NodeView>>,
    events: mpsc::Sender<(u64, AgentEvent)>,
) {
    let mut interval = tokio::time::interval(MEASURE_INTERVAL);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for number in 0_u64.. {
        interval.tick().await;
        let measures_all = number % INTERVALS_PER_FULL_MEASUREMENT == 0;
        let view = view.borrow().clone();
        let runs =
            |job: &u64| view.jobs.get(job).is_some_and(|job| job.job.started_unix_ms > 0 && !job.has_ended());
        let jobs: Vec<u64> = dirs.all().into_iter().filter(|job| measures_all || runs(job)).collect();
        for job in jobs {
            let dir = dirs.agent(job);
            let excess = tokio::task::spawn_blocking(move || excess(&dir)).await;
            let Ok(Ok(Some(excess))) = excess else { continue };
            if events.send((job, AgentEvent::Oversized(excess))).await.is_err() {
                return;
            }
        }
        if events.is_closed() {
            return;
        }
    }
}

/// Describes how a directory exceeds the limits; `None` if it does not.
fn excess(dir: &Path) -> io::Result<Option<String>> {
    let disk = rustix::fs::statvfs(dir)?;
    exceeds(dir, max_bytes(disk.f_blocks.saturating_mul(disk.f_frsize)), MAX_ENTRIES)
}

/// Returns the limit on a directory on a disk of this size. File systems in memory without a limit, and some others,
/// report 0.
fn max_bytes(disk: u64) -> u64 {
    if disk == 0 { u64::MAX } else { disk / PART_OF_DISK }
}

/// [`excess`] with these limits. Links and mount points are not followed.
fn exceeds(dir: &Path, max_bytes: u64, max_entries: u64) -> io::Result<Option<String>> {
    let root = open(CWD, dir)?;
    let device = fstat(&root)?.st_dev;
    let (mut bytes, mut entries) = (0_u64, 0_u64);
    let mut pending = vec![(Dir::read_from(&root)?, root)];
    while let Some((listing, dir)) = pending.last_mut() {
        let Some(entry) = listing.next() else {
            pending.pop();
            continue;
        };
        let entry = entry?;
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        entries += 1;
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
        // The file may be gone.
        let Ok(found) = statat(&*dir, name, flags) else { continue };
        // The kernel counts units of 512 bytes, whatever the block size is.
        bytes = bytes.saturating_add(u64::try_from(found.st_blocks).unwrap_or(0).saturating_mul(512));
        if bytes > max_bytes {
            let most = bytes_text(max_bytes);
            return Ok(Some(format!(
                "its directory holds more than {most}, the part of the node's disk that a job may use"
            )));
        }
        if entries > max_entries {
            return Ok(Some(format!("its directory holds more than {max_entries} files")));
        }
        if FileType::from_raw_mode(found.st_mode) == FileType::Directory && found.st_dev == device {
            let Ok(below) = open(&*dir, name) else { continue };
            if pending.len() == MAX_DEPTH {
                return Ok(Some(format!("its directory has more than {MAX_DEPTH} levels of directories")));
            }
            pending.push((Dir::read_from(&below)?, below));
        }
    }
    Ok(None)
}

fn open(at: impl rustix::fd::AsFd, path: impl rustix::path::Arg) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(at, path, flags, Mode::empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_is_a_part_of_the_disk_if_its_size_is_known() {
        assert_eq!([4000, 0].map(max_bytes), [1000, u64::MAX]);
    }

    #[test]
    fn directory_is_measured_in_bytes_entries_and_depth_and_links_are_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (own, outside) = (dir.path().join("own"), dir.path().join("outside"));
        fs_err::create_dir_all(own.join("a/b")).unwrap();
        fs_err::create_dir(&outside).unwrap();
        fs_err::write(outside.join("large"), vec![1; 1 << 20]).unwrap();
        fs_err::os::unix::fs::symlink(&outside, own.join("link")).unwrap();
        fs_err::write(own.join("a/b/file"), vec![1; 100_000]).unwrap();
        assert_eq!(exceeds(&own, 400_000, 4).unwrap(), None);
        let bytes = exceeds(&own, 50_000, 4).unwrap().unwrap();
        assert!(bytes.contains("holds more than") && bytes.contains("disk"), "{bytes}");
        assert!(exceeds(&own, 400_000, 3).unwrap().unwrap().contains("more than 3 files"));
        // A file with a hole takes no space.
        fs_err::File::create(own.join("sparse")).unwrap().set_len(1 << 30).unwrap();
        assert_eq!(exceeds(&own, 400_000, 5).unwrap(), None);
        fs_err::create_dir_all(own.join("d/".repeat(MAX_DEPTH + 1))).unwrap();
        assert!(exceeds(&own, 1 << 20, 1000).unwrap().unwrap().contains("levels of directories"));
    }
}
