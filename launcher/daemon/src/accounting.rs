//! The accounting file: one line of JSON for each ended job, including jobs that the daemon has forgotten.
//!
//! ```text
//! <state>/accounting.jsonl      readable by the daemon only; appended to, never rewritten
//! ```
//! The file is reopened for each operation, so an operator may rename it at any time, as logrotate does. Files in the
//! same directory whose names begin with its name are read too, unless they are compressed.
//!
//! Each job has exactly one line. Once the line is on disk, the journal records that. Until then, writing it is retried
//! after a failure or a restart, unless the file already has a line with this job's id, which also holds for jobs that
//! have not ended in a journal that was restored from a copy. Readers skip a torn line.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use xlaunch_proto::disk::sync_dir;
use xlaunch_proto::v1::{JobAccount, JobKind, NodeJobState};

use super::state::Usage;
use super::state::{Entry, Phase};

const FILE: &str = "accounting.jsonl";
/// Limit on the bytes read for a page, and on the bytes read from the end of each file to find the ids in it.
const MAX_READ_BYTES: u64 = 64 << 20;
/// Number of rotated files that are read: the newest ones.
const MAX_ROTATED_FILES: usize = 8;
/// Rotated files with these extensions are not read.
const COMPRESSED: [&str; 5] = ["gz", "xz", "zst", "bz2", "lz4"];
/// Maximum number of jobs on a page.
const MAX_ACCOUNTS: usize = 1000;

/// A line of the file. Later versions may add fields, but never remove any. Times are in milliseconds since 1970 (UTC),
/// or 0 if unset.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Account {
    /// Sequence number of the job among the ended jobs of the node, counted from 1.
    pub(crate) order: u64,
    pub(crate) job: u64,
    pub(crate) name: String,
    pub(crate) uid: u32,
    pub(crate) user: String,
    pub(crate) kind: String,
    pub(crate) state: String,
    pub(crate) reason: String,
    pub(crate) exit_code: Option<u8>,
    pub(crate) gpus: u32,
    pub(crate) workers: u32,
    pub(crate) submitted_unix_ms: u64,
    pub(crate) started_unix_ms: u64,
    pub(crate) ended_unix_ms: u64,
    /// Run time of all starts together. 0 in lines of version 0.3.
    pub(crate) run_seconds: f64,
    /// Number of starts, more than one if the job was requeued.
    pub(crate) starts: u32,
    /// Number of GPUs times the run time.
    pub(crate) gpu_seconds: f64,
    /// Unknown if the daemon was not running when the job ended.
    #[serde(flatten)]
    pub(crate) usage: Option<Usage>,
}

impl Account {
    /// Creates the account of an ended job. `skew` is the system clock minus the node's clock, in milliseconds.
    pub(crate) fn of(entry: &Entry, skew: i64) -> Option<Self> {
        let Phase::Ended { end, exit, reason, gpus, start, started, at, order, .. } = &entry.phase else {
            return None;
        };
        let submitted = &entry.submitted;
        let kind = if submitted.trainer { JobKind::Trainer } else { JobKind::Command };
        let gpus = u32::try_from(gpus.len()).unwrap_or(u32::MAX);
        let (run_ms, usage) = entry.totals();
        Some(Self {
            order: *order,
            job: submitted.job,
            name: submitted.name.clone(),
            uid: submitted.uid,
            user: submitted.user.clone(),
            kind: kind.label().into(),
            state: NodeJobState::from(*end).label().into(),
            reason: reason.clone(),
            exit_code: *exit,
            gpus,
            workers: submitted.workers,
            submitted_unix_ms: shown(submitted.at, skew),
            started_unix_ms: shown(*started, skew),
            ended_unix_ms: shown(*at, skew),
            run_seconds: seconds(run_ms),
            starts: submitted.requeues.saturating_add(u32::from(*start > 0)),
            gpu_seconds: f64::from(submitted.gpus) * seconds(run_ms),
            usage,
        })
    }

    fn to_message(&self) -> JobAccount {
        JobAccount {
            id: self.job,
            name: self.name.clone(),
            uid: self.uid,
            user: self.user.clone(),
            kind: JobKind::from_label(&self.kind).into(),
            state: NodeJobState::from_label(&self.state).into(),
            reason: self.reason.clone(),
            exit_code: self.exit_code.map(u32::from),
            gpus: self.gpus,
            workers: self.workers,
            submitted_unix_ms: self.submitted_unix_ms,
            started_unix_ms: self.started_unix_ms,
            ended_unix_ms: self.ended_unix_ms,
            gpu_seconds: self.gpu_seconds,
            run_seconds: self.run_seconds,
            starts: self.starts,
            cpu_seconds: self.usage.map(|usage| seconds(usage.cpu_ms)),
            peak_memory_bytes: self.usage.and_then(|usage| usage.peak_memory_bytes),
        }
    }
}

/// Converts a time on the node's clock to milliseconds since 1970 on the system clock, which is ahead by `skew`. 0
/// stays 0.
pub(crate) fn shown(at: u64, skew: i64) -> u64 {
    if at == 0 { 0 } else { at.saturating_add_signed(skew) }
}

#[expect(clippy::cast_precision_loss, reason = "a job runs for less than 2^52 milliseconds")]
pub(crate) fn seconds(milliseconds: u64) -> f64 {
    milliseconds as f64 / 1000.0
}

/// A query for accounts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Query {
    /// Only jobs with this user id and, if the name is known, this user name.
    pub(crate) owner: Option<(u32, String)>,
    /// Only jobs of the user with this name or number.
    pub(crate) user: Option<String>,
    /// Only jobs that ended at this time, in milliseconds since 1970 (UTC), or later.
    pub(crate) since: u64,
    /// Maximum number of accounts, of which the newest are returned; 0 for the largest page.
    pub(crate) limit: usize,
    /// Only accounts before this position in the files, which is where the previous page began.
    pub(crate) before: Option<u64>,
}

/// A page of accounts, oldest first.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Page {
    pub(crate) accounts: Vec<JobAccount>,
    /// Position in the files before which older accounts may match; `None` on the last page.
    pub(crate) older: Option<u64>,
}

impl Query {
    fn matches(&self, account: &Account) -> bool {
        let is_named = |name: &String| *name == account.user || *name == account.uid.to_string();
        let is_owned = |(uid, name): &(u32, String)| {
            *uid == account.uid && (account.user.is_empty() || account.user == *name)
        };
        account.ended_unix_ms >= self.since
            && self.owner.as_ref().is_none_or(is_owned)
            && self.user.as_ref().is_none_or(is_named)
    }
}

/// The accounting file of a state directory.
#[derive(Clone, Debug)]
pub struct Accounting {
    path: PathBuf,
    /// Start position of each file, by inode. Positions count the bytes of all files in order. The map keeps them
    /// stable, so that paging continues at the right place after a file was renamed or removed.
    begins: Arc<Mutex<HashMap<u64, u64>>>,
}

impl Accounting {
    /// Creates a handle of the file in this directory, which need not exist.
    pub fn new(state_dir: &Path) -> Self {
        Self { path: state_dir.join(FILE), begins: Arc::default() }
    }

    /// Returns whether the file exists.
    pub(crate) fn exists(&self) -> bool {
        self.path.exists()
    }

    /// Appends a line for each account. They are on disk when this returns.
    pub(crate) fn append(&self, accounts: &[Account]) -> io::Result<()> {
        let mut options = std::fs::OpenOptions::new();
        let mut file = options.read(true).append(true).create(true).mode(0o600).open(&self.path)?;
        let mut lines = Vec::new();
        let len = file.metadata()?.len();
        if ends_torn(&mut file, len)? {
            lines.push(b'\n');
        }
        for account in accounts {
            serde_json::to_writer(&mut lines, account)?;
            lines.push(b'\n');
        }
        file.write_all(&lines)?;
        file.sync_data()?;
        if len == 0 {
            // The file may have just been created, so sync its directory too.
            sync_dir(self.path.parent().unwrap_or(&self.path))?;
        }
        Ok(())
    }

    /// Returns the ids of the jobs in the files.
    pub(crate) fn ids(&self) -> io::Result<BTreeSet<u64>> {
        let mut ids = BTreeSet::new();
        for part in self.parts()? {
            let end = part.end();
            let (_, accounts) = part.read(end.saturating_sub(MAX_READ_BYTES), end)?;
            ids.extend(accounts.map(|(_, account)| account.job));
        }
        Ok(ids)
    }

    /// Opens the files in order, with their positions.
    fn parts(&self) -> io::Result<Vec<Part>> {
        let mut known = self.begins.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut parts, mut begins, mut end) = (Vec::new(), HashMap::new(), 0);
        for path in self.files()? {
            let file = match File::open(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                file => file?,
            };
            let metadata = file.metadata()?;
            // A smaller position was that of a removed file with the same inode, or the file before it has grown since.
            let begin = known.get(&metadata.ino()).copied().unwrap_or(0).max(end);
            begins.insert(metadata.ino(), begin);
            let part = Part { file, begin, len: metadata.len() };
            end = part.end();
            parts.push(part);
        }
        *known = begins;
        Ok(parts)
    }

    /// Returns the paths of the rotated files and of the file itself, in the order in which they were written.
    fn files(&self) -> io::Result<Vec<PathBuf>> {
        let mut rotated = Vec::new();
        for entry in std::fs::read_dir(self.path.parent().unwrap_or(&self.path))? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let is_compressed = name.rsplit_once('.').is_some_and(|(_, end)| COMPRESSED.contains(&end));
            if name.starts_with(FILE) && name != FILE && !is_compressed {
                rotated.push((entry.metadata()?.modified()?, entry.path()));
            }
        }
        rotated.sort_unstable();
        let first = rotated.len().saturating_sub(MAX_ROTATED_FILES);
        let rotated = rotated.into_iter().skip(first).map(|(_, path)| path);
        Ok(rotated.chain([self.path.clone()]).collect())
    }

    /// Returns the newest accounts that match. Blocks on the disk.
    pub(crate) fn query(&self, query: &Query) -> io::Result<Page> {
        self.page(query, MAX_READ_BYTES)
    }

    /// Returns a page, reading at most `bytes` bytes of the files.
    fn page(&self, query: &Query, bytes: u64) -> io::Result<Page> {
        let limit = if query.limit == 0 { MAX_ACCOUNTS } else { query.limit.min(MAX_ACCOUNTS) };
        let parts = self.parts()?;
        let first = parts.first().map_or(0, |part| part.begin);
        let last = parts.last().map_or(0, Part::end);
        let end = query.before.map_or(last, |before| before.min(last));
        let begin = end.saturating_sub(bytes);
        let (mut newest, mut is_cut, mut first_line) = (VecDeque::new(), false, None);
        for part in parts.into_iter().filter(|part| part.begin < end && part.end() > begin) {
            let (line, accounts) = part.read(begin, end)?;
            first_line.get_or_insert(line);
            for (position, account) in accounts.filter(|(_, account)| query.matches(account)) {
                if newest.len() == limit {
                    newest.pop_front();
                    is_cut = true;
                }
                newest.push_back((position, account.to_message()));
            }
        }
        let older = match newest.front() {
            Some((position, _)) if is_cut => Some(*position),
            _ => first_line.filter(|line| *line > first),
        };
        Ok(Page { accounts: newest.into_iter().map(|(_, account)| account).collect(), older })
    }
}

/// One of the files.
struct Part {
    file: File,
    /// Position of the file's first byte.
    begin: u64,
    len: u64,
}

impl Part {
    fn end(&self) -> u64 {
        self.begin + self.len
    }

    /// Returns the position of the first complete line between these positions, and the valid lines there, each with
    /// its position.
    fn read(mut self, begin: u64, end: u64) -> io::Result<(u64, impl Iterator<Item = (u64, Account)>)> {
        let begin = begin.clamp(self.begin, self.end());
        let end = end.clamp(begin, self.end());
        self.file.seek(SeekFrom::Start(begin - self.begin))?;
        let mut lines = BufReader::new(self.file.take(end - begin));
        let mut first_line = begin;
        if begin > self.begin {
            // The line that begins before this position belongs to the next, older page.
            first_line += lines.read_until(b'\n', &mut Vec::new())? as u64;
        }
        let mut next = first_line;
        let accounts = lines.split(b'\n').map_while(Result::ok).filter_map(move |line| {
            let position = next;
            next += line.len() as u64 + 1;
            Some((position, serde_json::from_slice(&line).ok()?))
        });
        Ok((first_line, accounts))
    }
}

/// Returns whether a file of this length ends in the middle of a line.
fn ends_torn(file: &mut File, len: u64) -> io::Result<bool> {
    if len == 0 {
        return Ok(false);
    }
    let mut last = [0];
    file.seek(SeekFrom::End(-1))?;
    file.read_exact(&mut last)?;
    Ok(last != *b"\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::{End, Jobs, Record, Submitted};

    fn account(order: u64, uid: u32) -> Account {
        let usage = order.is_multiple_of(2).then_some(Usage { cpu_ms: 5000, peak_memory_bytes: None });
        let (user, state) = (format!("u{uid}"), "done".into());
        Account {
            order,
            job: order,
            uid,
            user,
            state,
            ended_unix_ms: order * 1000,
            usage,
            ..Account::default()
        }
    }

    #[test]
    fn account_of_a_requeued_job_adds_up_its_starts() {
        let mut jobs = Jobs::default();
        let submitted = Submitted { job: 1, gpus: 2, ..Submitted::default() };
        jobs.apply(Record::Submitted(Box::new(submitted)));
        let start = |start, at| Record::Starting {
            job: 1,
            start,
            gpus: vec!["a".into(); 2],
            boot: String::new(),
            at,
        };
        let usage = |cpu_ms, peak| Some(Usage { cpu_ms, peak_memory_bytes: Some(peak) });
        jobs.apply(start(1, 1000));
        let (reason, report) = (String::new(), String::new());
        jobs.apply(Record::Requeued {
            job: 1,
            reason: reason.clone(),
            lost: true,
            at: 10_000,
            usage: usage(5000, 9),
        });
        jobs.apply(start(2, 20_000));
        let (end, exit, usage) = (End::Done, Some(0), usage(2000, 6));
        jobs.apply(Record::Ended { job: 1, end, exit, reason, report, at: 21_000, order: 0, usage });
        let account = Account::of(&jobs.jobs[&1], 0).unwrap().to_message();
        assert_eq!((account.starts, account.run_seconds, account.gpu_seconds), (2, 10.0, 20.0));
        assert_eq!((account.cpu_seconds, account.peak_memory_bytes), (Some(7.0), Some(9)));
        assert_eq!((account.started_unix_ms, account.ended_unix_ms), (20_000, 21_000));
    }

    fn jobs(accounting: &Accounting, query: &Query) -> Vec<u64> {
        accounting.query(query).unwrap().accounts.iter().map(|account| account.id).collect()
    }

    #[test]
    fn accounts_are_found_by_user_and_time_and_torn_lines_are_skipped() {
        let dir = tempfile::tempdir().unwrap();
        let accounting = Accounting::new(dir.path());
        assert_eq!(jobs(&accounting, &Query::default()), [0; 0]);
        accounting.append(&[account(1, 7), account(2, 8)]).unwrap();
        let file = dir.path().join(FILE);
        let whole = fs_err::read_to_string(&file).unwrap();
        fs_err::write(&file, format!("{whole}{}", "{\"order\":3,\"jo")).unwrap();
        assert_eq!(accounting.ids().unwrap(), [1, 2].into());
        accounting.append(&[account(3, 7)]).unwrap();
        assert_eq!(accounting.ids().unwrap(), [1, 2, 3].into());
        let all = accounting.query(&Query::default()).unwrap().accounts;
        assert_eq!(all.iter().map(|it| it.cpu_seconds).collect::<Vec<_>>(), [None, Some(5.0), None]);
        assert_eq!(all[1].peak_memory_bytes, None, "without a memory controller");
        assert_eq!(all[0].state(), NodeJobState::Done);
        let of = |uid, name: &str| Query { owner: Some((uid, name.into())), ..Query::default() };
        assert_eq!(jobs(&accounting, &of(7, "u7")), [1, 3]);
        assert_eq!(jobs(&accounting, &of(7, "new")), [0; 0], "the user id was given to another user");
        for user in ["u7", "7"] {
            assert_eq!(jobs(&accounting, &Query { user: Some(user.into()), ..Query::default() }), [1, 3]);
        }
        assert_eq!(jobs(&accounting, &Query { since: 2000, ..Query::default() }), [2, 3]);
        assert_eq!(jobs(&accounting, &Query { limit: 1, ..Query::default() }), [3]);
    }

    /// The ids on all pages, starting with the one before `before`, newest first.
    fn all_pages(accounting: &Accounting, query: &Query, bytes: u64) -> Vec<u64> {
        let (mut found, mut before) = (Vec::new(), query.before);
        loop {
            let page = accounting.page(&Query { before, ..query.clone() }, bytes).unwrap();
            found.extend(page.accounts.iter().rev().map(|account| account.id));
            assert!(page.older.is_none_or(|older| before.is_none_or(|before| older < before)));
            before = page.older;
            if before.is_none() {
                return found;
            }
        }
    }

    #[test]
    fn pages_follow_each_other_to_the_oldest_account() {
        let dir = tempfile::tempdir().unwrap();
        let accounting = Accounting::new(dir.path());
        let path = |name: &str| dir.path().join(name);
        for order in 1..=25 {
            accounting.append(&[account(order, order as u32 % 2)]).unwrap();
            if order == 8 || order == 9 {
                fs_err::rename(path(FILE), path(&format!("{FILE}.{}", 10 - order))).unwrap();
            }
        }
        for owner in [None, Some((0, "u0".to_owned()))] {
            let is_wanted = |order: &u64| owner.is_none() || order.is_multiple_of(2);
            let expected: Vec<u64> = (1..=25).rev().filter(is_wanted).collect();
            // The second limit makes the files larger than a single read.
            for bytes in [MAX_READ_BYTES, 1000] {
                let query = Query { limit: 4, owner: owner.clone(), ..Query::default() };
                assert_eq!(all_pages(&accounting, &query, bytes), expected);
            }
        }
    }

    #[test]
    fn paging_continues_across_rotation() {
        let dir = tempfile::tempdir().unwrap();
        let accounting = Accounting::new(dir.path());
        let rename =
            |from: &str, to: &str| fs_err::rename(dir.path().join(from), dir.path().join(to)).unwrap();
        let append = |order| accounting.append(&[account(order, 7)]).unwrap();
        (1..=3).for_each(append);
        rename(FILE, "accounting.jsonl.1");
        (4..=9).for_each(append);
        let query = Query { limit: 2, ..Query::default() };
        let page = accounting.query(&query).unwrap();
        assert_eq!(page.accounts.iter().map(|account| account.id).collect::<Vec<_>>(), [8, 9]);
        rename("accounting.jsonl.1", "accounting.jsonl.2.gz");
        rename(FILE, "accounting.jsonl.1");
        append(10);
        let query = Query { before: page.older, ..query };
        assert_eq!(all_pages(&accounting, &query, MAX_READ_BYTES), [7, 6, 5, 4]);
    }

    #[test]
    fn rotated_files_are_read_and_their_jobs_are_known() {
        let dir = tempfile::tempdir().unwrap();
        let accounting = Accounting::new(dir.path());
        for (job, name) in [(1, "accounting.jsonl.2.gz"), (2, "accounting.jsonl.1"), (3, FILE)] {
            accounting.append(&[account(job, 7)]).unwrap();
            fs_err::rename(dir.path().join(FILE), dir.path().join(name)).unwrap();
        }
        fs_err::write(dir.path().join("accounting.json"), "{\"job\":9}\n").unwrap();
        assert_eq!(accounting.ids().unwrap(), [2, 3].into());
        assert_eq!(jobs(&accounting, &Query::default()), [2, 3]);
    }
}
