//! Tests that, whatever fails, acknowledged records are read back in order, and besides them at most a prefix of the
//! records that were being written.

use std::path::Path;

use proptest::prelude::*;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::faults::{Fault, FaultKind, FaultyDisk, Loss};
use super::*;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    job: u64,
    text: String,
}

type Records = Vec<Record>;

fn record(job: u64) -> Record {
    Record { job, text: format!("line\nand \"ü\" {job}") }
}

fn records(jobs: std::ops::Range<u64>) -> Records {
    jobs.map(record).collect()
}

/// Creates a temporary directory, in memory if possible: the tests create thousands, and syncs of other programs would
/// slow them down.
fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// Opens a journal without faults.
fn open(dir: &Path) -> Result<(Journal<Record>, Replay<Record>), JournalError> {
    Journal::open_on(dir, FaultyDisk::new(dir, None).disk())
}

/// Opens a journal with these contents.
fn open_bytes(dir: &Path, bytes: &[u8]) -> Result<Replay<Record>, JournalError> {
    fs_err::write(dir.join("journal"), bytes).unwrap();
    open(dir).map(|(_, replay)| replay)
}

fn journal_of(records: &[Record]) -> Vec<u8> {
    lines::with_header(&lines::encode(records).unwrap()).unwrap()
}

fn is_subsequence(part: &[Record], whole: &[Record]) -> bool {
    let mut rest = whole.iter();
    part.iter().all(|record| rest.any(|other| other == record))
}

fn copies(dir: &Path) -> Vec<Vec<u8>> {
    let entries = fs_err::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let copies = entries.filter(|path| path.to_string_lossy().contains("journal.damaged-"));
    copies.map(|path| fs_err::read(path).unwrap()).collect()
}

/// The contents that the next open may find.
struct Model {
    /// All acknowledged records.
    now: Records,
    /// The acknowledged records, and every possible result of a failed call.
    possible: Vec<Records>,
}

impl Model {
    fn at(now: Records) -> Self {
        Self { possible: vec![now.clone()], now }
    }

    /// Appends, and updates what the next open may find.
    fn append(&mut self, journal: &mut Journal<Record>, added: &[Record]) -> bool {
        let broken = journal.broken.is_some();
        match journal.append(added) {
            Ok(()) => {
                assert!(!broken, "appended to a file in which something had failed");
                *self = Self::at([&self.now, added].concat());
                true
            }
            Err(_) => {
                if !broken {
                    self.possible = (0..=added.len()).map(|n| [&self.now, &added[..n]].concat()).collect();
                }
                false
            }
        }
    }

    fn rewrite(&mut self, journal: &mut Journal<Record>, to: &[Record]) -> bool {
        let written = journal.rewrite(to).is_ok();
        if written {
            *self = Self::at(to.to_vec())
        } else {
            self.possible.push(to.to_vec())
        }
        written
    }

    fn check(&self, found: &[Record], context: &dyn std::fmt::Debug) {
        assert!(self.possible.iter().any(|possible| possible == found), "{context:?}: {found:?}");
    }
}

/// Opens, appends and rewrites, twice, until a call fails.
fn run_script(dir: &Path, disk: &FaultyDisk, model: &mut Model) -> Option<Journal<Record>> {
    for round in 0..2 {
        let (mut journal, replay) = Journal::open_on(dir, disk.disk()).ok()?;
        model.check(&replay.records, &"restart");
        let first = round * 10;
        let ok = model.append(&mut journal, &[record(first)])
            && model.append(&mut journal, &records(first + 1..first + 4))
            && model.append(&mut journal, &[record(first + 4)])
            && {
                let kept = model.now[2..].to_vec();
                model.rewrite(&mut journal, &kept)
            }
            && model.append(&mut journal, &[record(first + 5)])
            && {
                let kept = model.now[1..].to_vec();
                model.rewrite(&mut journal, &kept)
            }
            && model.append(&mut journal, &[record(first + 6)]);
        if !ok {
            return Some(journal);
        }
    }
    None
}

const TORN: [usize; 7] = [0, 1, 8, 9, 30, 70, usize::MAX];

#[test]
fn acknowledged_records_survive_crash_at_any_call() {
    let losses = [(false, false), (true, false), (false, true), (true, true)];
    let losses = losses.map(|(contents, names)| Loss { contents, names });
    for at in 0.. {
        let mut injected = false;
        for (torn, loss) in TORN.into_iter().flat_map(|torn| losses.map(|loss| (torn, loss))) {
            let dir = scratch();
            let fault = Fault { at, torn, kind: FaultKind::Crash };
            let disk = FaultyDisk::new(dir.path(), Some(fault));
            let mut model = Model::at(Vec::new());
            drop(run_script(dir.path(), &disk, &mut model));
            injected = disk.is_injected();
            disk.lose(loss);

            let (mut journal, replay) = open(dir.path()).unwrap();
            model.check(&replay.records, &(fault, loss));
            journal.append(&[record(99)]).unwrap();
            drop(journal);
            let (_, again) = open(dir.path()).unwrap();
            assert_eq!(again.records, [replay.records, vec![record(99)]].concat(), "{fault:?}");
            assert_eq!(again.notes, [""; 0], "{fault:?}");
            assert!(copies(dir.path()).is_empty(), "{fault:?} {loss:?}: a crash is not damage");
        }
        if !injected {
            assert!(at > 40, "the script has only {at} calls");
            return;
        }
    }
}

#[test]
fn records_read_by_restart_survive_a_later_crash() {
    for at in 0.. {
        let mut injected = false;
        for torn in TORN {
            let dir = scratch();
            let fault = Fault { at, torn, kind: FaultKind::Crash };
            let disk = FaultyDisk::new(dir.path(), Some(fault));
            drop(run_script(dir.path(), &disk, &mut Model::at(Vec::new())));
            injected = disk.is_injected();
            disk.restart();
            let (_, replay) = Journal::<Record>::open_on(dir.path(), disk.disk()).unwrap();
            disk.lose(Loss { contents: true, names: true });
            assert_eq!(open(dir.path()).unwrap().1.records, replay.records, "{fault:?}");
        }
        if !injected {
            return;
        }
    }
}

#[test]
fn failed_append_blocks_appends_until_rewrite() {
    for at in 0.. {
        let mut injected = false;
        for (torn, errno) in TORN.into_iter().flat_map(|torn| [(torn, Errno::IO), (torn, Errno::NOSPC)]) {
            let dir = scratch();
            let fault = Fault { at, torn, kind: FaultKind::Error(errno) };
            let disk = FaultyDisk::new(dir.path(), Some(fault));
            let mut model = Model::at(Vec::new());
            let journal = run_script(dir.path(), &disk, &mut model);
            injected = disk.is_injected();
            if let Some(mut journal) = journal {
                if journal.broken.is_some() {
                    let error = journal.append(&[record(50)]).unwrap_err().to_string();
                    assert!(error.contains("must be rewritten"), "{error}");
                    if torn == 30 {
                        let now = model.now.clone();
                        assert!(model.rewrite(&mut journal, &now), "{fault:?}");
                    }
                }
                if journal.broken.is_none() {
                    assert!(model.append(&mut journal, &[record(51)]), "{fault:?}");
                }
            }
            // All acknowledged records were synced, so they survive a power failure as well.
            disk.lose(Loss { contents: errno == Errno::IO, names: errno == Errno::IO });
            let (_, replay) = open(dir.path()).unwrap();
            model.check(&replay.records, &fault);
        }
        if !injected {
            return;
        }
    }
}

#[test]
fn append_returns_disk_error() {
    // Creating a journal takes seven calls. The next two calls are the write and the sync of the append.
    for at in [7, 8] {
        let dir = scratch();
        let fault = Fault { at, torn: 0, kind: FaultKind::Error(Errno::NOSPC) };
        let disk = FaultyDisk::new(dir.path(), Some(fault));
        let (mut journal, _) = Journal::open_on(dir.path(), disk.disk()).unwrap();
        let error = journal.append(&[record(1)]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    }
}

#[test]
fn repair_interrupted_at_any_call_is_repeated() {
    let whole = journal_of(&records(0..5));
    let torn = whole[..whole.len() - 7].to_vec();
    let mut middle = whole.clone();
    middle[whole.len() / 2] ^= 4;
    let headless = lines::valid_records(&whole);
    for (bytes, records, damaged) in [(torn, 4, false), (middle, 4, true), (headless, 5, true)] {
        for at in 0.. {
            let mut injected = false;
            for (torn, lost) in TORN.into_iter().flat_map(|torn| [(torn, false), (torn, true)]) {
                let dir = scratch();
                fs_err::write(dir.path().join("journal"), &bytes).unwrap();
                let fault = Fault { at, torn, kind: FaultKind::Crash };
                let disk = FaultyDisk::new(dir.path(), Some(fault));
                let repaired = Journal::<Record>::open_on(dir.path(), disk.disk()).is_ok();
                injected = disk.is_injected();
                disk.lose(Loss { contents: lost, names: lost });
                let (_, replay) = open(dir.path()).unwrap();
                assert_eq!(replay.records.len(), records, "{fault:?}");
                assert!(!repaired || replay.notes.is_empty(), "{fault:?}");
                assert_eq!(copies(dir.path()).contains(&bytes), damaged, "{fault:?}");
            }
            if !injected {
                break;
            }
        }
    }
}

#[test]
fn journal_truncated_at_any_byte_keeps_complete_records() {
    let whole = journal_of(&records(0..5));
    for len in 0..=whole.len() {
        let dir = scratch();
        let replay = open_bytes(dir.path(), &whole[..len]).unwrap();
        let lines = whole[..len].iter().filter(|byte| **byte == b'\n').count();
        assert_eq!(replay.records, records(0..lines.saturating_sub(1) as u64), "{len} bytes");
        let is_whole = len == 0 || whole[len - 1] == b'\n';
        assert_eq!(replay.notes.is_empty(), is_whole, "{len} bytes: {:?}", replay.notes);
        if lines > 0 && !is_whole {
            let start = whole[..len].iter().rposition(|byte| *byte == b'\n').unwrap() + 1;
            assert!(replay.notes[0].contains(&format!("last {} bytes", len - start)), "{:?}", replay.notes);
            assert_eq!(fs_err::read(dir.path().join("journal")).unwrap(), whole[..start]);
        }
    }
}

#[test]
fn bit_flip_loses_only_the_lines_it_touches() {
    let whole = journal_of(&records(0..5));
    let dir = scratch();
    for (at, bit) in (0..whole.len()).flat_map(|at| (0..8).map(move |bit| (at, bit))) {
        let mut bytes = whole.clone();
        bytes[at] ^= 1 << bit;
        let replay = open_bytes(dir.path(), &bytes).unwrap();
        // If the newline between two lines is damaged, both lines are.
        let left = if whole[at] == b'\n' { 3 } else { 4 };
        assert!(replay.records.len() >= left, "byte {at}, bit {bit}: {:?}", replay.records);
        assert!(is_subsequence(&replay.records, &records(0..5)), "byte {at}, bit {bit}");
        assert_eq!(replay.notes.len(), 1, "byte {at}, bit {bit}: {:?}", replay.notes);
        // Without its newline, the last line cannot be distinguished from a torn write.
        let is_torn = at == whole.len() - 1;
        assert_eq!(copies(dir.path()).contains(&bytes), !is_torn, "byte {at}, bit {bit}");
        let integrity = if is_torn { Integrity::Torn } else { Integrity::Damaged };
        assert_eq!(replay.integrity, integrity, "byte {at}, bit {bit}");
        let again = open(dir.path()).unwrap().1;
        assert_eq!((again.records, again.notes.len()), (replay.records, 0), "byte {at}, bit {bit}");
        for entry in fs_err::read_dir(dir.path()).unwrap() {
            fs_err::remove_file(entry.unwrap().path()).unwrap();
        }
    }
}

#[test]
fn damage_is_reported_and_damaged_file_kept() {
    let dir = scratch();
    let mut lines: Vec<_> =
        journal_of(&records(0..20)).split_inclusive(|b| *b == b'\n').map(Vec::from).collect();
    for number in [3, 7] {
        lines[number - 1][12] ^= 1;
    }
    let bytes = lines.concat();
    let replay = open_bytes(dir.path(), &bytes).unwrap();
    let note = &replay.notes[0];
    assert!(note.contains("removed damaged lines 3, 7;"), "{note}");
    let copy = note.rsplit("kept as ").next().unwrap();
    assert_eq!(fs_err::read(copy).unwrap(), bytes);

    lines[2][12] ^= 1;
    let replay = open_bytes(dir.path(), &lines.concat()).unwrap();
    assert!(replay.notes[0].contains("removed damaged line 7;"), "{replay:?}");

    let replay = open_bytes(dir.path(), &lines[1..2].concat()).unwrap();
    assert!(replay.notes[0].contains("the header is missing"), "{replay:?}");
    assert_eq!(replay.records, [record(0)]);
    let replay = open_bytes(dir.path(), &[b"no journal\n".repeat(13), lines[1].clone()].concat()).unwrap();
    assert!(replay.notes[0].contains("9, 10 and 3 more"), "{replay:?}");
    assert_eq!(copies(dir.path()).len(), 4, "each copy has its own name");
    let replay = open_bytes(dir.path(), &[b"bad\n".repeat(10), lines[1].clone()].concat()).unwrap();
    assert!(replay.notes[0].contains("lines 1, 2, 3, 4, 5, 6, 7, 8, 9, 10; the damaged"), "{replay:?}");
}

#[test]
fn newer_journal_is_refused_unmodified() {
    let dir = scratch();
    let header = |version: u64| {
        let header =
            serde_json::json!({"format": "xlaunch-journal", "version": version, "writer": "9.8.7", "new": 1});
        lines::encode(&[header]).unwrap()
    };
    // Not even the torn end is repaired.
    let newer = [header(2), lines::encode(&records(0..2)).unwrap(), b"12".to_vec()].concat();
    let error = open_bytes(dir.path(), &newer).unwrap_err().to_string();
    let expected = "it was written by xlaunch 9.8.7 in format 2, and this xlaunch reads formats up to 1; \
                    start that version or a newer one";
    assert!(error.ends_with(expected), "{error}");
    assert_eq!(fs_err::read(dir.path().join("journal")).unwrap(), newer);

    let unknown = lines::encode(&[serde_json::json!({"job": 1, "text": "", "gang": true})]).unwrap();
    let newer = [header(1), lines::encode(&[record(0)]).unwrap(), unknown, b"12".to_vec()].concat();
    let error = open_bytes(dir.path(), &newer).unwrap_err().to_string();
    assert!(error.contains("line 3") && error.contains("gang") && error.contains("9.8.7"), "{error}");
    assert_eq!(fs_err::read(dir.path().join("journal")).unwrap(), newer);
    assert!(copies(dir.path()).is_empty());
}

#[test]
fn second_daemon_is_refused() {
    let dir = scratch();
    let (journal, _) = open(dir.path()).unwrap();
    let error = open(dir.path()).unwrap_err();
    let process = std::process::id();
    assert!(matches!(error, JournalError::InUse { pid: Some(pid), .. } if pid == process), "{error}");
    assert!(error.to_string().contains(&format!("another daemon (process {process}) uses it")), "{error}");
    drop(journal);
    open(dir.path()).unwrap();
}

#[test]
fn state_directory_of_another_host_is_refused() {
    let dir = scratch();
    let file = dir.path().join("host");
    drop(open(dir.path()).unwrap());
    let own: Host = serde_json::from_slice(&fs_err::read(&file).unwrap()).unwrap();
    assert_eq!(own, Host::own(), "a directory without a record is adopted");
    let host = |name: &str, boot: &str| {
        fs_err::write(&file, format!(r#"{{"name":"{name}","boot":"{boot}"}}"#)).unwrap();
    };
    host("node-1", "earlier");
    let error = open(dir.path()).unwrap_err().to_string();
    let advice = format!("such as {}-{}, or", dir.path().display(), own.name);
    assert!(error.contains("it belongs to host `node-1`") && error.contains(&advice), "{error}");
    assert!(error.contains(&format!("or remove {} if host", file.display())), "{error}");
    // After a reboot, and after a change of the host's name.
    for (name, boot) in [(own.name.as_str(), "earlier"), ("node-1", own.boot.as_str())] {
        host(name, boot);
        drop(open(dir.path()).unwrap());
        assert_eq!(fs_err::read(&file).unwrap(), serde_json::to_vec(&own).unwrap());
    }
    let (_journal, _) = open(dir.path()).unwrap();
    host("node-1", "earlier");
    assert!(
        matches!(open(dir.path()), Err(JournalError::OtherHost { .. })),
        "not only a process id is shown"
    );
}

#[test]
fn state_directory_writable_by_others_is_refused() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("a/state");
    drop(Journal::<Record>::open(&state).unwrap());
    let mode = |path: &Path| fs_err::metadata(path).unwrap().mode() & 0o777;
    assert_eq!(
        (mode(&state), mode(&state.join("journal")), mode(&state.join("lock"))),
        (0o700, 0o600, 0o600)
    );

    fs_err::set_permissions(&state, std::fs::Permissions::from_mode(0o777)).unwrap();
    let error = open(&state).unwrap_err().to_string();
    assert!(error.contains("can be changed by other users") && error.contains("chmod go-w"), "{error}");
    // Only root can give the directory to another user.
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(&state, Some(12_345), None).unwrap();
        let error = open(&state).unwrap_err().to_string();
        assert!(error.contains(" belongs to user"), "{error}");
    }
}

#[test]
fn planted_files_are_refused_and_left_as_they_are() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state");
    fs_err::create_dir(&state).unwrap();
    let planted = journal_of(&records(0..1));
    fs_err::write(state.join("journal"), &planted).unwrap();
    // Simulates a directory that was open to all users, even if its mode has been corrected since.
    let mode =
        |path: &Path, mode| fs_err::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    mode(&state, 0o1777);
    assert!(matches!(Journal::<Record>::open(&state), Err(JournalError::Unsafe { .. })));
    assert_eq!(fs_err::metadata(&state).unwrap().mode() & 0o7777, 0o1777, "it is not repaired");
    mode(&state, 0o755);
    mode(dir.path(), 0o777);
    assert!(
        matches!(Journal::<Record>::open(&state), Err(JournalError::Unsafe { .. })),
        "others could replace it"
    );
    mode(dir.path(), 0o755);
    mode(&state.join("journal"), 0o666);
    assert!(matches!(Journal::<Record>::open(&state), Err(JournalError::Unsafe { .. })));
    mode(&state.join("journal"), 0o600);
    if rustix::process::geteuid().is_root() {
        for entry in ["journal", "jobs/7"] {
            let entry = state.join(entry);
            fs_err::create_dir_all(state.join("jobs/7")).unwrap();
            std::os::unix::fs::chown(&entry, Some(12_345), None).unwrap();
            let error = Journal::<Record>::open(&state).unwrap_err().to_string();
            assert!(error.contains(&format!("{} belongs to user 12345", entry.display())), "{error}");
            std::os::unix::fs::chown(&entry, Some(0), None).unwrap();
        }
    }
    assert_eq!(fs_err::read(state.join("journal")).unwrap(), planted);
    assert!(!state.join("lock").exists());
    assert_eq!(Journal::<Record>::open(&state).unwrap().1.records, records(0..1));
}

#[test]
fn second_daemon_is_refused_after_the_lock_file_was_deleted() {
    let dir = scratch();
    let (_journal, _) = open(dir.path()).unwrap();
    fs_err::remove_file(dir.path().join("lock")).unwrap();
    assert!(matches!(open(dir.path()), Err(JournalError::InUse { .. })));
}

#[test]
fn records_round_trip_through_real_disk() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, replay) = Journal::open(dir.path()).unwrap();
    assert_eq!(replay, Replay { records: Vec::new(), notes: Vec::new(), integrity: Integrity::New });
    journal.append(&records(0..3)).unwrap();
    journal.append(&[record(3)]).unwrap();
    journal.rewrite(&records(2..4)).unwrap();
    journal.append(&[record(4)]).unwrap();
    let len = fs_err::metadata(dir.path().join("journal")).unwrap().len();
    assert_eq!(journal.len_bytes(), len);
    drop(journal);
    let (journal, replay) = Journal::<Record>::open(dir.path()).unwrap();
    assert_eq!((replay.records, replay.notes), (records(2..5), Vec::new()));
    assert_eq!(journal.len_bytes(), len);
    let text = fs_err::read_to_string(dir.path().join("journal")).unwrap();
    assert!(text.lines().next().unwrap().contains(r#"{"format":"xlaunch-journal","version":1,"writer":""#));
}

/// Resident memory of this process in bytes.
fn resident() -> u64 {
    let text = fs_err::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

#[test]
fn appended_records_are_not_kept_in_memory() {
    const ALONE: &str = "XLAUNCH_TEST_JOURNAL_MEMORY";
    if std::env::var_os(ALONE).is_none() {
        // The test runs in a process of its own, so that no other test changes the memory use.
        let mut test = std::process::Command::new(std::env::current_exe().unwrap());
        let name = format!("{}::appended_records_are_not_kept_in_memory", module_path!());
        let name = name.split_once("::").unwrap().1;
        let output = test.args([name, "--exact"]).env(ALONE, "1").output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
        return;
    }
    let dir = scratch();
    let (mut journal, _) = Journal::open(dir.path()).unwrap();
    let record = Record { job: 1, text: "x".repeat(2000) };
    journal.append(std::slice::from_ref(&record)).unwrap();
    let before = resident();
    for _ in 0..10_000 {
        journal.append(std::slice::from_ref(&record)).unwrap();
    }
    assert!(journal.len_bytes() > 20_000_000);
    let grown = resident().saturating_sub(before);
    assert!(grown < 8 << 20, "{grown} bytes");
}

fn pieces() -> impl Strategy<Value = Vec<Vec<u8>>> {
    let line = |record: Record| lines::encode(&[record]).unwrap();
    let piece = prop_oneof![
        6 => (0..50_u64).prop_map(move |job| line(record(job))),
        1 => (0..50_u64, 0..60_usize).prop_map(move |(job, len)| line(record(job))[..len.min(20)].to_vec()),
        1 => proptest::collection::vec(any::<u8>(), 0..20),
        1 => Just(b"\n".to_vec()),
        1 => Just(lines::with_header(&[]).unwrap()),
    ];
    proptest::collection::vec(piece, 0..12)
}

proptest! {
    #[test]
    fn arbitrary_bytes_can_be_opened(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let dir = scratch();
        let replay = open_bytes(dir.path(), &bytes).unwrap();
        prop_assert_eq!(replay.records, []);
        prop_assert_eq!(replay.notes.is_empty(), bytes.is_empty());
        prop_assert!(bytes.is_empty() || copies(dir.path()).contains(&bytes));
    }

    #[test]
    fn shuffled_journal_pieces_keep_record_order(pieces in pieces()) {
        let bytes = pieces.concat();
        let dir = scratch();
        match open_bytes(dir.path(), &bytes) {
            Ok(replay) => {
                let written: Vec<_> =
                    pieces.iter().filter_map(|piece| serde_json::from_slice(piece.get(9..)?).ok()).collect();
                prop_assert!(is_subsequence(&replay.records, &written));
                let again = open(dir.path()).unwrap().1;
                let intact =
                    Replay { records: replay.records, notes: Vec::new(), integrity: Integrity::Intact };
                prop_assert_eq!(again, intact);
            }
            // A second header is an unknown record.
            Err(error) => {
                prop_assert!(matches!(error, JournalError::Unknown { .. }), "{}", error);
                prop_assert_eq!(fs_err::read(dir.path().join("journal")).unwrap(), bytes);
            }
        }
    }
}

/// A journal written by the first release. It must never be changed, because later versions must be able to read it.
const JOURNAL_V1: &[u8] = include_bytes!("testdata/journal-v1");

#[test]
fn journal_of_first_release_is_read_completely() {
    use crate::state::{Canceller, Jobs, Phase, Record};
    let parsed = lines::parse::<Record>(JOURNAL_V1).unwrap();
    assert_eq!(parsed.state, State::Intact);
    assert_eq!(
        lines::encode(&parsed.records).unwrap(),
        lines::valid_records(JOURNAL_V1),
        "and written the same"
    );
    let mut jobs = Jobs::default();
    parsed.records.into_iter().for_each(|record| jobs.apply(record));
    assert_eq!(jobs.jobs.keys().copied().collect::<Vec<_>>(), [2, 3, 4, 5, 6]);
    assert_eq!((jobs.submitted, jobs.ended), (6, 4));
    let submitted = &jobs.jobs[&3].submitted;
    assert_eq!((submitted.shutdown_timeout, submitted.priority, submitted.gpus), (30.5, -1, 2));
    assert_eq!(submitted.request_id, "request-3");
    let Phase::Active { start: 2, gpus, cancelled: Some(Canceller { uid: 0, .. }), at: 9, .. } =
        &jobs.jobs[&3].phase
    else {
        panic!("{:?}", jobs.jobs[&3]);
    };
    assert_eq!(gpus, &["GPU-a"]);
    assert!(matches!(jobs.jobs[&2].phase, Phase::Queued { starts: 1, .. }));
    assert_eq!((jobs.drained.as_deref(), jobs.drained_gpus["GPU-c"].as_str()), (None, "fan"));
}
