//! Tests of console and files with several workers.

use std::io::{PipeReader, PipeWriter, Read, Write, pipe};
use std::path::PathBuf;
use std::thread::JoinHandle;

use tempfile::TempDir;

use super::*;
use crate::resolved_command::{PerRank, Streams};

/// Longer than any operation takes unless it hangs.
const TIMEOUT: Duration = Duration::from_secs(60);

/// An output whose console is two pipes that the test reads.
struct Set {
    output: Output,
    dir: TempDir,
    screens: [Option<PipeReader>; 2],
}

/// The worker's ends of its pipes.
struct Fake {
    output: RankOutput,
    stdout: PipeWriter,
    stderr: PipeWriter,
}

impl Set {
    fn new(options: &LogOptions, world: u32) -> Self {
        let [(out, stdout), (err, stderr)] = [pipe().unwrap(), pipe().unwrap()];
        let consoles = [Console::new(stdout.into()), Console::new(stderr.into())];
        let output = Output::on(consoles, options, "default", world).unwrap();
        Self { output, dir: tempfile::tempdir().unwrap(), screens: [Some(out), Some(err)] }
    }

    fn start(&self, rank: u32) -> Fake {
        let dir = self.dir.path().join("attempt_0").join(rank.to_string());
        fs_err::create_dir_all(&dir).unwrap();
        let [(out, stdout), (err, stderr)] = [pipe().unwrap(), pipe().unwrap()];
        Fake { output: self.output.start(rank, &dir, out, err).unwrap(), stdout, stderr }
    }

    fn file(&self, path: &str) -> Vec<u8> {
        fs_err::read(self.path(path)).unwrap()
    }

    fn path(&self, path: &str) -> PathBuf {
        self.dir.path().join("attempt_0").join(path)
    }

    /// Reads all of stdout (0) or stderr (1) on a thread, until all writers have closed it.
    fn read(&mut self, stream: usize) -> JoinHandle<Vec<u8>> {
        let mut screen = self.screens[stream].take().unwrap();
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            screen.read_to_end(&mut bytes).unwrap();
            bytes
        })
    }
}

/// Closes a worker's streams and waits until they are moved.
fn end(fake: Fake) -> RankOutput {
    let Fake { mut output, stdout, stderr } = fake;
    drop((stdout, stderr));
    wait(async { output.end(TIMEOUT).await });
    output
}

fn wait(future: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(future);
}

fn streams(stdout: bool, stderr: bool) -> PerRank {
    PerRank { all: Streams { stdout, stderr }, ..Default::default() }
}

#[test]
fn single_rank_passes_through_byte_by_byte() {
    let mut set = Set::new(&LogOptions::default(), 1);
    let screens = [set.read(0), set.read(1)];
    let mut fake = set.start(0);
    let bytes: Vec<u8> = (0..=255).cycle().take(100_000).collect();
    fake.stdout.write_all(&bytes).unwrap();
    fake.stderr.write_all(b"\xff no newline").unwrap();
    let output = end(fake);
    assert_eq!(output.timed_tail()[0].0, "\u{fffd} no newline");
    assert_eq!(
        (set.file("0/stdout.log"), set.file("0/stderr.log")),
        (bytes.clone(), b"\xff no newline".to_vec())
    );
    drop((set, output));
    let [stdout, stderr] = screens.map(|screen| screen.join().unwrap());
    assert!(stdout == bytes && stderr == b"\xff no newline");
}

#[test]
fn lines_of_ranks_are_whole_and_tee_adds_torchruns_prefix() {
    for (tee, prefix) in
        [(streams(false, false), ["", ""]), (streams(true, false), ["[default0]:", "[default1]:"])]
    {
        let mut set = Set::new(&LogOptions { tee, ..Default::default() }, 2);
        let screen = set.read(0);
        let mut fakes = [set.start(0), set.start(1)];
        for line in 0..1000 {
            for (rank, fake) in fakes.iter_mut().enumerate() {
                let text = format!("rank {rank} line {line} \u{fc}\n");
                let (a, b) = text.as_bytes().split_at(line % text.len());
                fake.stdout.write_all(a).unwrap();
                fake.stdout.write_all(b).unwrap();
            }
        }
        fakes.into_iter().for_each(|fake| drop(end(fake)));
        drop(set);
        let text = String::from_utf8(screen.join().unwrap()).unwrap();
        for (rank, prefix) in prefix.iter().enumerate() {
            let own = format!("{prefix}rank {rank} ");
            let seen: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix(&own)).collect();
            let expected: Vec<String> = (0..1000).map(|line| format!("line {line} \u{fc}")).collect();
            assert_eq!(seen, expected);
        }
        assert_eq!(text.lines().count(), 2000);
    }
}

#[test]
fn redirected_streams_and_hidden_ranks_go_to_files_only() {
    let options = LogOptions {
        redirects: streams(true, false),
        shown: Some([1].into()),
        stdout_filters: vec!["x".into()],
        stderr_filters: vec!["x".into()],
        ..Default::default()
    };
    let mut set = Set::new(&options, 2);
    let screens = [set.read(0), set.read(1)];
    for rank in 0..2 {
        let mut fake = set.start(rank);
        writeln!(fake.stdout, "out {rank} x").unwrap();
        writeln!(fake.stderr, "err {rank} x\nno").unwrap();
        end(fake);
    }
    assert_eq!(set.file("0/stdout.log"), b"out 0 x\n");
    assert_eq!(set.file("1/stderr.log"), b"err 1 x\nno\n");
    assert_eq!(set.file("filtered_stderr.log"), b"[default1]:err 1 x\n");
    drop(set);
    assert_eq!(screens.map(|screen| screen.join().unwrap()), [b"".to_vec(), b"err 1 x\nno\n".to_vec()]);
}

#[test]
fn prompt_appears_before_its_line_ends() {
    let set = Set::new(&LogOptions { tee: streams(true, true), ..Default::default() }, 2);
    let mut screen = set.screens[0].as_ref().unwrap();
    let mut fake = set.start(1);
    let mut expect = |text: &str| {
        let mut bytes = vec![0; text.len()];
        screen.read_exact(&mut bytes).unwrap();
        assert_eq!(String::from_utf8(bytes).unwrap(), text);
    };
    fake.stdout.write_all(b"name? ").unwrap();
    expect("[default1]:name? ");
    fake.stdout.write_all(b"me\nage?").unwrap();
    expect("me\n");
    expect("[default1]:age?");
    end(fake);
}

#[test]
fn closed_console_stops_neither_the_worker_nor_its_files() {
    let mut set = Set::new(&LogOptions::default(), 2);
    drop(set.screens[0].take());
    let mut fake = set.start(0);
    let bytes = b"a line\n".repeat(1 << 18);
    fake.stdout.write_all(&bytes).unwrap();
    end(fake);
    assert!(set.file("0/stdout.log") == bytes);
}

#[test]
fn blocked_console_delays_neither_the_end_of_a_worker_nor_messages() {
    let set = Set::new(&LogOptions::default(), 2);
    let Fake { mut output, mut stdout, .. } = set.start(0);
    let flood = std::thread::spawn(move || stdout.write_all(&vec![b'\n'; 1 << 20]));
    // The console is not read.
    wait(async {
        output.end(Duration::from_millis(50)).await;
        (0..10_000).for_each(|_| set.output.print("xlaunch: stopping"));
        set.output.flush(Duration::from_millis(50)).await;
    });
    assert!(!flood.is_finished());
}

#[test]
fn orphan_holding_the_pipe_neither_delays_nor_loses_output() {
    let mut set = Set::new(&LogOptions::default(), 1);
    let screen = set.read(0);
    let Fake { mut output, mut stdout, stderr } = set.start(0);
    stdout.write_all(b"last words").unwrap();
    wait(async { output.end(Duration::from_millis(50)).await });
    assert_eq!(set.file("0/stdout.log"), b"last words");
    drop((stdout, stderr, set, output));
    assert_eq!(screen.join().unwrap(), b"last words");
}

#[test]
fn slow_console_receives_all_lines() {
    let mut set = Set::new(&LogOptions::default(), 2);
    let mut screen = set.screens[0].take().unwrap();
    let fake = set.start(0);
    let Fake { mut output, mut stdout, stderr } = fake;
    let lines: String = (0..20_000).map(|i| format!("line {i}\n")).collect();
    let text = lines.clone();
    let write = std::thread::spawn(move || stdout.write_all(text.as_bytes()).unwrap());
    let size = lines.len();
    let read = std::thread::spawn(move || {
        let (mut bytes, mut part) = (Vec::new(), [0; 4096]);
        while bytes.len() < size {
            std::thread::sleep(Duration::from_millis(5));
            let count = screen.read(&mut part).unwrap();
            bytes.extend_from_slice(&part[..count]);
        }
        bytes
    });
    write.join().unwrap();
    drop(stderr);
    // Shorter than the console needs to print everything.
    wait(async { output.end(Duration::from_millis(100)).await });
    assert!(String::from_utf8(read.join().unwrap()).unwrap() == lines);
}

/// Resident memory of this process in kB.
fn resident() -> usize {
    let status = fs_err::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn flooding_rank_uses_bounded_memory_and_leaves_turns_to_others() {
    const FLOOD: usize = 200 << 20;
    let options = LogOptions { rotate_bytes: Some(1 << 20), tee: streams(true, true), ..Default::default() };
    let mut set = Set::new(&options, 2);
    let mut screen = set.screens[0].take().unwrap();
    let before = resident();
    let mut quiet = set.start(1);
    let mut loud = set.start(0);
    let read = std::thread::spawn(move || {
        let (mut part, mut late, mut line, mut flooded) = (vec![0; 1 << 16], Vec::new(), Vec::new(), 0);
        loop {
            let count = screen.read(&mut part).unwrap();
            if count == 0 {
                return (late, flooded);
            }
            for byte in &part[..count] {
                flooded += usize::from(*byte == b'z');
                line.push(*byte);
                if *byte == b'\n' {
                    if let Some(sent) = line.strip_prefix(b"[default1]:sent at ") {
                        let at: usize = std::str::from_utf8(sent).unwrap().trim().parse().unwrap();
                        late.push(flooded - at.min(flooded));
                    }
                    line.clear();
                }
                // The flood contains an endless line.
                line.truncate(64);
            }
        }
    });
    let sent = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let progress = sent.clone();
    let flood = std::thread::spawn(move || {
        // Half of the bytes are in short lines, half in a single line.
        let (lines, endless) = ([&[b'z'; 1023][..], b"\n"].concat().repeat(64), vec![b'z'; 1 << 16]);
        let order = std::sync::atomic::Ordering::Relaxed;
        while progress.load(order) < FLOOD {
            let part = if progress.load(order) < FLOOD / 2 { &lines } else { &endless };
            loud.stdout.write_all(part).unwrap();
            progress.fetch_add(part.len(), order);
        }
        end(loud);
    });
    let (mut lines, mut most) = (0, before);
    while !flood.is_finished() {
        let at = sent.load(std::sync::atomic::Ordering::Relaxed);
        writeln!(quiet.stdout, "sent at {at}").unwrap();
        lines += 1;
        most = most.max(resident());
        std::thread::sleep(Duration::from_millis(10));
    }
    flood.join().unwrap();
    end(quiet);
    let files =
        ["0/stdout.log", "0/stdout.log.1"].map(|name| fs_err::metadata(set.path(name)).unwrap().len());
    assert!(files.iter().all(|size| *size <= 1 << 20), "{files:?}");
    drop(set);
    let (late, flooded) = read.join().unwrap();
    assert_eq!(late.len(), lines);
    assert!(flooded > FLOOD - FLOOD / 500, "{flooded} of {FLOOD}");
    // A line of the quiet rank waits for a single turn of the flooding rank, not for all of its output.
    let worst = late.iter().max().unwrap();
    assert!(*worst < 4 << 20, "{worst} bytes of the flood came first");
    assert!(most - before < 50 << 10, "{} kB more", most - before);
}

#[test]
fn trainer_stderr_is_printed_line_by_line_with_its_rank() {
    let dir = tempfile::tempdir().unwrap();
    let (lines, shown) = std::sync::mpsc::sync_channel(3);
    let output = Output::for_trainer(move |line| drop(lines.try_send(line)));
    let [(out, mut stdout), (err, mut stderr)] = [pipe().unwrap(), pipe().unwrap()];
    output.begin_attempt(4);
    let started = output.start(1, dir.path(), out, err).unwrap();
    stdout.write_all(b"stdout\n").unwrap();
    let text = format!("one\r\n{}\nthree\nleft to the file\n", "y".repeat(5000));
    stderr.write_all(text.as_bytes()).unwrap();
    let ended = end(Fake { output: started, stdout, stderr });
    assert_eq!(ended.timed_tail().last().unwrap().0, "left to the file");
    let cut = format!("[rank 5] {} [...]", "y".repeat(4096));
    let seen: Vec<String> = std::iter::from_fn(|| shown.try_recv().ok()).collect();
    assert_eq!(seen, ["[rank 5] one".to_string(), cut, "[rank 5] three".to_string()]);
    assert_eq!(fs_err::read_to_string(dir.path().join("stderr.log")).unwrap(), text);
    assert_eq!(fs_err::read_to_string(dir.path().join("stdout.log")).unwrap(), "stdout\n");
}
