use std::ops::Range;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};

use xlaunch_proto::v1::{Heartbeat, StepReport};

use super::*;

/// Longer than any operation takes unless it hangs.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Records lines and the number of reports. With a `gate`, it blocks before each item until the gate lets it through.
struct TestSink {
    seen: Arc<Mutex<Vec<String>>>,
    gate: Option<Receiver<()>>,
    /// Steps whose reports cannot be written.
    fails: Range<u64>,
    /// The end cannot be written, either.
    fails_at_end: bool,
    missing: u64,
}

impl TestSink {
    fn new() -> (Self, Arc<Mutex<Vec<String>>>) {
        let seen = Arc::<Mutex<Vec<String>>>::default();
        (Self { seen: seen.clone(), gate: None, fails: 0..0, fails_at_end: false, missing: 0 }, seen)
    }

    fn gated() -> (Self, Arc<Mutex<Vec<String>>>, Sender<()>) {
        let (open, gate) = channel();
        let (sink, seen) = Self::new();
        (Self { gate: Some(gate), ..sink }, seen, open)
    }

    fn take(&self, text: String) -> io::Result<()> {
        if let Some(gate) = &self.gate {
            // A dropped gate stays open.
            let _ = gate.recv();
        }
        self.seen.lock().unwrap().push(text);
        Ok(())
    }
}

impl ReportSink for TestSink {
    fn report(&mut self, report: &RankReport) -> io::Result<()> {
        let Report::Step(step) = &report.report else { return Ok(()) };
        if self.fails.contains(&step.step) {
            self.missing += 1;
            return Err(io::Error::other("disk full"));
        }
        self.take(format!("step {}", step.step))
    }

    fn line(&mut self, line: &str) -> io::Result<()> {
        self.take(line.into())
    }

    fn finish(&mut self) -> io::Result<()> {
        if self.fails_at_end {
            return Err(io::Error::other("disk full"));
        }
        self.take("finish".into())
    }

    fn missing(&self) -> u64 {
        self.missing
    }
}

fn step(rank: u32, step: u64) -> RankReport {
    let report = Report::Step(StepReport { step, ..StepReport::default() });
    RankReport { rank, at: Instant::now(), report }
}

fn contents(seen: &Mutex<Vec<String>>) -> Vec<String> {
    seen.lock().unwrap().clone()
}

#[tokio::test]
async fn sinks_receive_the_reports_of_rank_0_and_the_console_lines_in_order() {
    let ((console, shown), (file, written)) = (TestSink::new(), TestSink::new());
    let mut sinks = Sinks::new(console).unwrap();
    sinks.add_file("metrics", move || file).unwrap();
    sinks.report(step(0, 1));
    sinks.report(step(1, 7));
    sinks.report(RankReport { report: Report::Heartbeat(Heartbeat::default()), ..step(0, 1) });
    sinks.printer().print("a line");
    sinks.report(step(0, 2));
    assert_eq!(sinks.finish(TIMEOUT).await, ["metrics"].into());
    assert_eq!(contents(&shown), ["step 1", "a line", "step 2", "finish"]);
    assert_eq!(contents(&written), ["step 1", "step 2", "finish"]);
}

#[tokio::test]
async fn blocked_sink_does_not_delay_others_and_its_losses_are_reported() {
    let (console, shown) = TestSink::new();
    let (slow, written, gate) = TestSink::gated();
    let (other, other_written) = TestSink::new();
    let mut sinks = Sinks::new(console).unwrap();
    sinks.add_file("metrics", move || slow).unwrap();
    let reports = QUEUE_LENGTH as u64 + 100;
    // `report` returns although the sink takes nothing from its queue.
    for number in 0..reports {
        sinks.report(step(0, number));
        // The console is an ordinary sink with a queue of its own. Wait for it, so that it drops nothing.
        while shown.lock().unwrap().len() as u64 <= number {
            std::thread::sleep(Duration::from_micros(10));
        }
    }
    sinks.add_file("tensorboard", move || other).unwrap();
    sinks.report(step(0, reports));
    assert!(contents(&written).is_empty());
    drop(gate);
    assert_eq!(sinks.finish(TIMEOUT).await, ["tensorboard"].into());
    assert_eq!(contents(&other_written), [format!("step {reports}"), "finish".into()]);
    let written = contents(&written).len() as u64 - 1;
    let lines: Vec<String> =
        contents(&shown).into_iter().filter(|line| line.starts_with("xlaunch:")).collect();
    let dropped = reports + 1 - written;
    assert!((90..=101).contains(&dropped), "{dropped}");
    let expected = [
        "xlaunch: metrics is written too slowly: reports are dropped".to_owned(),
        format!("xlaunch: metrics is incomplete: {dropped} reports were dropped"),
    ];
    assert_eq!(lines, expected);
}

#[tokio::test]
async fn file_recovers_from_errors_and_missing_reports_are_counted() {
    let failing = "cannot be written: disk full; trying again with every report";
    // For a while, and to the end.
    for (fails, fails_at_end, expected) in
        [(1..3, false, &[failing, "is written again"][..]), (1..9, true, &[failing])]
    {
        let ((console, shown), (failing, written), (other, other_written)) =
            (TestSink::new(), TestSink::new(), TestSink::new());
        let mut sinks = Sinks::new(console).unwrap();
        let missing = fails.end.min(5) - fails.start;
        let failing = TestSink { fails, fails_at_end, ..failing };
        sinks.add_file("metrics", move || failing).unwrap();
        sinks.add_file("tensorboard", move || other).unwrap();
        (0..5).for_each(|number| sinks.report(step(0, number)));
        assert_eq!(sinks.finish(TIMEOUT).await, ["tensorboard"].into());
        assert_eq!(contents(&written).len() as u64, 5 - missing + u64::from(!fails_at_end));
        assert_eq!(contents(&other_written).len(), 6);
        let lines: Vec<String> = contents(&shown)
            .iter()
            .filter_map(|line| Some(line.strip_prefix("xlaunch: metrics ")?.into()))
            .collect();
        let incomplete = format!("is incomplete: {missing} reports are missing");
        assert_eq!(lines, [expected, &[&*incomplete]].concat());
    }
}

#[tokio::test]
async fn finish_reports_a_blocked_file_at_the_deadline() {
    let (console, shown) = TestSink::new();
    let (blocked, written, gate) = TestSink::gated();
    let mut sinks = Sinks::new(console).unwrap();
    sinks.add_file("metrics", move || blocked).unwrap();
    sinks.report(step(0, 0));
    assert!(sinks.finish(Duration::from_millis(50)).await.is_empty());
    assert!(contents(&written).is_empty());
    let message = "xlaunch: metrics is incomplete: the last reports could not be written in time";
    assert!(contents(&shown).contains(&message.to_owned()), "{:?}", contents(&shown));
    drop(gate);
}

#[tokio::test]
async fn lines_that_a_slow_console_drops_are_counted() {
    let (console, shown, gate) = TestSink::gated();
    let sinks = Sinks::new(console).unwrap();
    let lines = QUEUE_LENGTH + 50;
    (0..lines).for_each(|number| sinks.printer().print(format!("{number}")));
    drop(gate);
    sinks.finish(TIMEOUT).await;
    let shown = contents(&shown);
    let counts = shown.iter().filter_map(|line| {
        line.strip_prefix("xlaunch: ")?.strip_suffix(" lines were dropped: the console was too slow")
    });
    let dropped: usize = counts.map(|count| count.parse::<usize>().unwrap()).sum();
    assert_eq!(shown.iter().filter(|line| line.parse::<usize>().is_ok()).count() + dropped, lines);
    assert!((49..=50).contains(&dropped), "{dropped}");
}

#[tokio::test]
async fn blocked_open_delays_nothing_and_its_losses_are_counted() {
    let dir = tempfile::tempdir().unwrap();
    let path = metrics::Metrics::path(dir.path());
    // Opening a FIFO for writing blocks without a reader, like a file on a stalled disk.
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let (console, shown) = TestSink::new();
    let mut sinks = Sinks::new(console).unwrap();
    let run_dir = dir.path().to_path_buf();
    sinks.add_file("metrics", move || metrics::Metrics::create(&run_dir, None)).unwrap();
    let reports = QUEUE_LENGTH as u64 + 7;
    for number in 0..reports {
        sinks.report(step(0, number));
        while shown.lock().unwrap().len() as u64 <= number {
            std::thread::sleep(Duration::from_micros(10));
        }
    }
    assert!(sinks.finish(Duration::from_millis(50)).await.is_empty());
    let lines: Vec<String> =
        contents(&shown).into_iter().filter(|line| line.starts_with("xlaunch:")).collect();
    let expected = [
        "xlaunch: metrics is written too slowly: reports are dropped",
        "xlaunch: metrics is incomplete: 7 reports were dropped, and the last reports could not be written in time",
    ];
    assert_eq!(lines, expected);
    // Unblocks the thread, and waits for its end: it would create a deleted file again, and so the directory.
    assert_eq!(fs_err::read_to_string(path).unwrap().lines().count(), QUEUE_LENGTH);
}
