//! The accounting file: one line of JSON for each job that has ended, including those that are forgotten since.
//!
//! ```text
//! <state>/accounting.jsonl      readable by the daemon only; appended to, never rewritten
//! ```
//! It is opened anew for each line, so an operator may rename it at any time, as logrotate does. The journal decides
//! what has happened: a line that was lost in a crash is written again from there at the next start, and a torn line is
//! skipped by readers.

use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use xlaunch_proto::labels::{kind as kind_label, node_job_state};
use xlaunch_proto::v1::{JobAccount, JobKind, NodeJobState};

use super::measured::Usage;
use super::state::{Entry, Phase};

const FILE: &str = "accounting.jsonl";
/// Only so much of the file is read for a page.
const MAX_READ_BYTES: u64 = 64 << 20;
/// The last line is within so many bytes of the end.
const MAX_LINE_BYTES: u64 = 32 << 10;
/// Jobs of a page.
const MAX_ACCOUNTS: usize = 1000;

/// A line of the file. Fields are only ever added. Times are in milliseconds since 1970 (UTC), 0 if there is none.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Account {
    /// Which end this was on the node, from 1.
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
    /// Number of GPUs times seconds from start to end.
    pub(crate) gpu_seconds: f64,
    /// Unknown if the daemon was not running when the job ended.
    #[serde(flatten)]
    pub(crate) usage: Option<Usage>,
}

impl Account {
    /// The account of a job that has ended.
    pub(crate) fn of(entry: &Entry) -> Option<Self> {
        let Phase::Ended { end, exit, reason, gpus, started, at, order, usage, .. } = &entry.phase else {
            return None;
        };
        let submitted = &entry.submitted;
        let kind = if submitted.trainer { JobKind::Trainer } else { JobKind::Command };
        let gpus = u32::try_from(gpus.len()).unwrap_or(u32::MAX);
        let milliseconds = if *started > 0 { at.saturating_sub(*started) } else { 0 };
        Some(Self {
            order: *order,
            job: submitted.job,
            name: submitted.name.clone(),
            uid: submitted.uid,
            user: submitted.user.clone(),
            kind: kind_label(kind).into(),
            state: node_job_state((*end).into()).into(),
            reason: reason.clone(),
            exit_code: *exit,
            gpus,
            workers: submitted.workers,
            submitted_unix_ms: submitted.at,
            started_unix_ms: *started,
            ended_unix_ms: *at,
            gpu_seconds: f64::from(gpus) * seconds(milliseconds),
            usage: *usage,
        })
    }

    fn to_message(&self) -> JobAccount {
        use NodeJobState::{Cancelled, Done, Failed, Lost, Unspecified};
        let state = [Done, Failed, Cancelled, Lost].into_iter().find(|it| node_job_state(*it) == self.state);
        let kind =
            [JobKind::Trainer, JobKind::Command].into_iter().find(|kind| kind_label(*kind) == self.kind);
        JobAccount {
            id: self.job,
            name: self.name.clone(),
            uid: self.uid,
            user: self.user.clone(),
            kind: kind.unwrap_or(JobKind::Unspecified).into(),
            state: state.unwrap_or(Unspecified).into(),
            reason: self.reason.clone(),
            exit_code: self.exit_code.map(u32::from),
            gpus: self.gpus,
            workers: self.workers,
            submitted_unix_ms: self.submitted_unix_ms,
            started_unix_ms: self.started_unix_ms,
            ended_unix_ms: self.ended_unix_ms,
            gpu_seconds: self.gpu_seconds,
            cpu_seconds: self.usage.map(|usage| seconds(usage.cpu_ms)),
            peak_memory_bytes: self.usage.map(|usage| usage.peak_memory_bytes),
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "a job runs for less than 2^52 milliseconds")]
pub(crate) fn seconds(milliseconds: u64) -> f64 {
    milliseconds as f64 / 1000.0
}

/// Which accounts are asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Query {
    /// Only jobs of this user.
    pub(crate) uid: Option<u32>,
    /// Only jobs of the user with this name or number.
    pub(crate) user: Option<String>,
    /// Only jobs that ended at this time, in milliseconds since 1970 (UTC), or later.
    pub(crate) since: u64,
    /// Maximum number, the newest; 0 for the largest page.
    pub(crate) limit: usize,
    /// Only accounts before this offset in the file, where the page before began.
    pub(crate) before: Option<u64>,
}

/// Accounts, oldest first.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Page {
    pub(crate) accounts: Vec<JobAccount>,
    /// Offset in the file before which older accounts may match.
    pub(crate) older: Option<u64>,
}

impl Query {
    fn matches(&self, account: &Account) -> bool {
        let is_named = |name: &String| *name == account.user || *name == account.uid.to_string();
        account.ended_unix_ms >= self.since
            && self.uid.is_none_or(|uid| uid == account.uid)
            && self.user.as_ref().is_none_or(is_named)
    }
}

/// The accounting file of a state directory.
#[derive(Clone, Debug)]
pub struct Accounting {
    path: PathBuf,
}

impl Accounting {
    /// The file in this directory, which need not exist.
    pub fn new(state_dir: &Path) -> Self {
        Self { path: state_dir.join(FILE) }
    }

    /// Appends a line.
    pub(crate) fn append(&self, account: &Account) -> io::Result<()> {
        let mut options = std::fs::OpenOptions::new();
        let mut file = options.read(true).append(true).create(true).mode(0o600).open(&self.path)?;
        let mut line = Vec::new();
        if ends_torn(&mut file)? {
            line.push(b'\n');
        }
        serde_json::to_writer(&mut line, account)?;
        line.push(b'\n');
        file.write_all(&line)
    }

    /// The order of the last end in the file; 0 if there is none.
    pub(crate) fn last_order(&self) -> io::Result<u64> {
        Ok(self.read(None, MAX_LINE_BYTES)?.1.map(|(_, account)| account.order).max().unwrap_or(0))
    }

    /// The newest accounts that match. Blocks on the disk.
    pub(crate) fn query(&self, query: &Query) -> io::Result<Page> {
        let limit = if query.limit == 0 { MAX_ACCOUNTS } else { query.limit.min(MAX_ACCOUNTS) };
        let (begin, accounts) = self.read(query.before, MAX_READ_BYTES)?;
        let (mut newest, mut is_cut) = (VecDeque::new(), false);
        for (offset, account) in accounts.filter(|(_, account)| query.matches(account)) {
            if newest.len() == limit {
                newest.pop_front();
                is_cut = true;
            }
            newest.push_back((offset, account.to_message()));
        }
        let older = match newest.front() {
            Some((first, _)) if is_cut => Some(*first),
            _ => (begin > 0).then_some(begin),
        };
        Ok(Page { accounts: newest.into_iter().map(|(_, account)| account).collect(), older })
    }

    /// The valid lines in the last `bytes` of the file before an offset, each with its own offset; and the offset of
    /// the first complete line there.
    fn read(
        &self,
        before: Option<u64>,
        bytes: u64,
    ) -> io::Result<(u64, impl Iterator<Item = (u64, Account)>)> {
        let file = match std::fs::File::open(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            file => Some(file?),
        };
        let (mut begin, mut reader) = (0, None);
        if let Some(mut file) = file {
            let length = file.metadata()?.len();
            // Beyond the end, the file is a new one since the page before.
            let end = before.map_or(length, |before| before.min(length));
            begin = end.saturating_sub(bytes);
            file.seek(SeekFrom::Start(begin))?;
            let mut lines = BufReader::new(file.take(end - begin));
            if begin > 0 {
                // The page before this one, in time, ends with the line that begins further ahead.
                begin += lines.read_until(b'\n', &mut Vec::new())? as u64;
            }
            reader = Some(lines);
        }
        let mut next = begin;
        let lines = reader.into_iter().flat_map(|reader| reader.split(b'\n')).map_while(Result::ok);
        let accounts = lines.filter_map(move |line| {
            let offset = next;
            next += line.len() as u64 + 1;
            Some((offset, serde_json::from_slice(&line).ok()?))
        });
        Ok((begin, accounts))
    }
}

/// Whether the file ends within a line.
fn ends_torn(file: &mut std::fs::File) -> io::Result<bool> {
    if file.metadata()?.len() == 0 {
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

    fn account(order: u64, uid: u32) -> Account {
        let usage = order.is_multiple_of(2).then_some(Usage { cpu_ms: 5000, peak_memory_bytes: 6 });
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

    fn jobs(accounting: &Accounting, query: &Query) -> Vec<u64> {
        accounting.query(query).unwrap().accounts.iter().map(|account| account.id).collect()
    }

    #[test]
    fn accounts_are_found_by_user_and_time_and_torn_lines_are_skipped() {
        let dir = tempfile::tempdir().unwrap();
        let accounting = Accounting::new(dir.path());
        assert_eq!((accounting.last_order().unwrap(), jobs(&accounting, &Query::default())), (0, vec![]));
        for (order, uid) in [(1, 7), (2, 8)] {
            accounting.append(&account(order, uid)).unwrap();
        }
        let file = dir.path().join(FILE);
        let whole = fs_err::read_to_string(&file).unwrap();
        fs_err::write(&file, format!("{whole}{}", "{\"order\":3,\"jo")).unwrap();
        assert_eq!(accounting.last_order().unwrap(), 2);
        accounting.append(&account(3, 7)).unwrap();
        assert_eq!(accounting.last_order().unwrap(), 3);
        let all = accounting.query(&Query::default()).unwrap().accounts;
        assert_eq!(all.iter().map(|it| it.cpu_seconds).collect::<Vec<_>>(), [None, Some(5.0), None]);
        assert_eq!(all[0].state(), NodeJobState::Done);
        assert_eq!(jobs(&accounting, &Query { uid: Some(7), ..Query::default() }), [1, 3]);
        for user in ["u7", "7"] {
            assert_eq!(jobs(&accounting, &Query { user: Some(user.into()), ..Query::default() }), [1, 3]);
        }
        assert_eq!(jobs(&accounting, &Query { since: 2000, ..Query::default() }), [2, 3]);
        assert_eq!(jobs(&accounting, &Query { limit: 1, ..Query::default() }), [3]);
    }
    #[test]
    fn pages_follow_each_other_to_the_oldest_account() {
        let dir = tempfile::tempdir().unwrap();
        let accounting = Accounting::new(dir.path());
        (1..=25).for_each(|order| accounting.append(&account(order, order as u32 % 2)).unwrap());
        for uid in [None, Some(0)] {
            let (mut found, mut before) = (Vec::new(), None);
            loop {
                let page = accounting.query(&Query { limit: 4, uid, before, ..Query::default() }).unwrap();
                found.extend(page.accounts.iter().rev().map(|account| account.id));
                before = page.older;
                if before.is_none() {
                    break;
                }
            }
            let expected: Vec<u64> = (1..=25).rev().filter(|order| uid.is_none() || order % 2 == 0).collect();
            assert_eq!(found, expected);
        }
        // A file larger than what is read at a time.
        let (begin, accounts) = accounting.read(None, 1000).unwrap();
        let newest: Vec<_> = accounts.map(|(_, account)| account.order).collect();
        let older: Vec<_> = accounting.read(Some(begin), 1 << 20).unwrap().1.map(|it| it.1.order).collect();
        assert_eq!([older, newest].concat(), (1..=25).collect::<Vec<_>>());
    }
}
