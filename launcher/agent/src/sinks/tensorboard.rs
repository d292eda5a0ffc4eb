//! Writes losses and speed in TensorBoard's format if `observe.tensorboard` is set.
//!
//! The file is `tensorboard/events.out.tfevents.<seconds>.<host>.<process>` in the run's directory, with one TFRecord
//! per event: length (u64, little-endian), checksum of the length, a protobuf message `Event`, checksum of the message.
//! The messages below declare only those fields of TensorFlow's messages that scalars and histograms need.
//!
//! A run leaves a single curve. A run that continues another one starts with the events of that run up to the step at
//! which it resumes. An attempt that resumes at an earlier step begins with a session log, which makes TensorBoard drop
//! the events after that step.

use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

use fs_err::File;
use prost::Message;
use xlaunch_proto::metrics::{EXPERT_LOADS, Point};
use xlaunch_proto::v1::ExpertLoads;
use xlaunch_proto::v1::worker_report::Report;

use super::appender::Appender;
use super::{RankReport, ReportSink};
use xlaunch_host::clock;
use xlaunch_host::devices;
use xlaunch_host::naming::file_name;

/// Contents of the first event of every file, which identifies the format.
const FILE_VERSION: &str = "brain.Event:2";
/// `SessionStatus.START`.
const SESSION_START: i32 = 1;
/// Name of the directory of event files in a run's directory.
const DIR: &str = "tensorboard";
/// Size limit of an event to copy. Events with scalars are much smaller.
const MAX_EVENT_BYTES: u64 = 1 << 20;

#[derive(Debug)]
pub(crate) struct TensorBoard {
    file: Appender,
    /// Event files of the run that this one continues; empty after they have been copied.
    parent: Vec<PathBuf>,
    /// The last step written.
    last_step: u64,
}

#[derive(Clone, PartialEq, Message)]
struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(oneof = "What", tags = "3, 5, 7")]
    what: Option<What>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum What {
    #[prost(string, tag = "3")]
    FileVersion(String),
    #[prost(message, tag = "5")]
    Summary(Summary),
    #[prost(message, tag = "7")]
    SessionLog(SessionLog),
}

#[derive(Clone, Copy, PartialEq, Message)]
struct SessionLog {
    #[prost(int32, tag = "1")]
    status: i32,
}

#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    value: Vec<Value>,
}

#[derive(Clone, PartialEq, Message)]
struct Value {
    #[prost(string, tag = "1")]
    tag: String,
    /// Part of a oneof in TensorFlow's message, so it must be written even if it is 0.
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
    #[prost(message, optional, tag = "5")]
    histogram: Option<Histogram>,
}

#[derive(Clone, PartialEq, Message)]
struct Histogram {
    #[prost(double, tag = "1")]
    min: f64,
    #[prost(double, tag = "2")]
    max: f64,
    /// Number of values.
    #[prost(double, tag = "3")]
    num: f64,
    #[prost(double, tag = "4")]
    sum: f64,
    #[prost(double, tag = "5")]
    sum_squares: f64,
    /// Upper ends of the buckets, and the number of values in each.
    #[prost(double, repeated, tag = "6")]
    bucket_limit: Vec<f64>,
    #[prost(double, repeated, tag = "7")]
    bucket: Vec<f64>,
}

impl ReportSink for TensorBoard {
    fn report(&mut self, report: &RankReport) -> io::Result<()> {
        if let Report::TrainStarted(started) = &report.report {
            return self.begin(started.first_step);
        }
        let Some(Point { step, values }) = Point::of(&report.report) else { return self.file.flush() };
        self.last_step = step;
        let mut scalars = Vec::new();
        for (metric, value) in values.iter().filter(|(metric, _)| metric.in_tensorboard) {
            let tags = std::iter::once(metric.key).chain(metric.deprecated_tag);
            scalars.extend(tags.map(|tag| Value {
                tag: tag.into(),
                simple_value: Some(value.f32()),
                histogram: None,
            }));
        }
        if let Report::Experts(experts) = &report.report {
            scalars.extend(experts.loads.iter().map(expert_loads));
        }
        self.write(step, What::Summary(Summary { value: scalars }))
    }

    fn finish(&mut self) -> io::Result<()> {
        self.file.flush()
    }

    fn missing(&self) -> u64 {
        self.file.missing()
    }
}

impl TensorBoard {
    /// Creates the file in the run's directory. `parent` is the directory of the run that this one continues.
    pub(crate) fn create(run_dir: &Path, parent: Option<&Path>) -> Self {
        let dir = run_dir.join(DIR);
        // If this fails, writing the first event reports the reason.
        let _ = fs_err::create_dir_all(&dir);
        let now = now();
        let (host, process) = (file_name(&devices::host_name()), std::process::id());
        // Files of another node that had rank 0. They may go beyond the step at which the new attempt begins.
        let earlier = event_files(run_dir);
        let mut parent = parent.map(event_files).unwrap_or_default();
        parent.retain(|path| !earlier.contains(path));
        let file = Appender::new(dir.join(format!("events.out.tfevents.{now:.0}.{host}.{process}")));
        let last_step = if earlier.is_empty() { 0 } else { u64::MAX };
        let mut board = Self { file, parent, last_step };
        // The event is queued if it cannot be written yet.
        let _ = board.write(0, What::FileVersion(FILE_VERSION.into()));
        board
    }

    /// Prepares the file for an attempt that starts after `first_step` completed steps.
    fn begin(&mut self, first_step: u64) -> io::Result<()> {
        for path in std::mem::take(&mut self.parent) {
            self.copy(&path, first_step)?;
        }
        if self.last_step > first_step {
            let log = SessionLog { status: SESSION_START };
            self.write(first_step + 1, What::SessionLog(log))?;
        }
        self.last_step = first_step;
        Ok(())
    }

    /// Copies the events up to `last_step`. A damaged file is read up to the damage, as TensorBoard does.
    fn copy(&mut self, path: &Path, last_step: u64) -> io::Result<()> {
        let mut events = BufReader::new(File::open(path)?);
        let mut result = Ok(());
        while let Some(data) = next_event(&mut events) {
            let Ok(event) = Event::decode(&*data) else { break };
            let is_earlier = u64::try_from(event.step).is_ok_and(|step| step <= last_step);
            if is_earlier && !matches!(event.what, Some(What::FileVersion(_))) {
                result = self.file.append(record(&data));
            }
        }
        result
    }

    fn write(&mut self, step: u64, what: What) -> io::Result<()> {
        let step = i64::try_from(step).unwrap_or(i64::MAX);
        let event = Event { wall_time: now(), step, what: Some(what) };
        self.file.append(record(&event.encode_to_vec()))
    }
}

/// Returns the histogram of the experts that a block has chosen, as shares of all choices, by the number of the expert.
fn expert_loads(loads: &ExpertLoads) -> Value {
    let experts = (0_u32..).map(f64::from).zip(loads.shares.iter().map(|share| f64::from(*share)));
    let sum = |power: i32| experts.clone().map(|(expert, share)| expert.powi(power) * share).sum();
    let histogram = Histogram {
        min: 0.0,
        max: experts.clone().last().map_or(0.0, |(last, _)| last),
        num: sum(0),
        sum: sum(1),
        sum_squares: sum(2),
        bucket_limit: experts.clone().map(|(expert, _)| expert + 0.5).collect(),
        bucket: experts.clone().map(|(_, share)| share).collect(),
    };
    let tag = format!("{EXPERT_LOADS}/{}", loads.block);
    Value { tag, simple_value: None, histogram: Some(histogram) }
}

/// Returns the event files of a run, in the order of their creation.
fn event_files(run_dir: &Path) -> Vec<PathBuf> {
    let entries = fs_err::read_dir(run_dir.join(DIR)).into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(|path| path.is_file()).collect();
    files.sort();
    files
}

/// Reads the data of the next record; `None` at the end or if the file is damaged.
fn next_event(file: &mut impl Read) -> Option<Vec<u8>> {
    let (mut len, mut crc) = ([0; 8], [0; 4]);
    file.read_exact(&mut len).ok()?;
    file.read_exact(&mut crc).ok()?;
    let bytes = u64::from_le_bytes(len);
    if crc != checksum(&len) || bytes > MAX_EVENT_BYTES {
        return None;
    }
    let mut data = vec![0; usize::try_from(bytes).ok()?];
    file.read_exact(&mut data).ok()?;
    file.read_exact(&mut crc).ok()?;
    (crc == checksum(&data)).then_some(data)
}

fn record(data: &[u8]) -> Vec<u8> {
    let len = (data.len() as u64).to_le_bytes();
    [&len[..], &checksum(&len), data, &checksum(data)].concat()
}

/// Masked CRC-32C, as the TFRecord format requires. The mask avoids computing the CRC of data that contains CRCs.
fn checksum(bytes: &[u8]) -> [u8; 4] {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

fn now() -> f64 {
    clock::unix().as_secs_f64()
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use xlaunch_proto::v1::{EvalReport, ExpertReport, StepReport};

    use super::*;

    fn write(board: &mut TensorBoard, report: Report) {
        board.report(&RankReport { rank: 0, at: Instant::now(), report }).unwrap();
    }

    /// The events of the one file in a run's directory.
    fn events(run_dir: &Path) -> Vec<Event> {
        let mut files = fs_err::read_dir(run_dir.join("tensorboard")).unwrap().map(Result::unwrap);
        let file = files.next().unwrap();
        assert!(files.next().is_none());
        let name = file.file_name().into_string().unwrap();
        let parts: Vec<_> = name.splitn(5, '.').collect();
        assert_eq!(parts[..3], ["events", "out", "tfevents"], "{name}");
        assert!(parts[3].parse::<u64>().is_ok(), "{name}");
        assert!(name.ends_with(&format!(".{}", std::process::id())), "{name}");

        let bytes = fs_err::read(file.path()).unwrap();
        let (mut rest, mut events) = (&bytes[..], Vec::new());
        while !rest.is_empty() {
            let (len, after) = rest.split_at(8);
            let (crc, after) = after.split_at(4);
            assert_eq!(crc, checksum(len));
            let len = u64::from_le_bytes(len.try_into().unwrap());
            let (data, after) = after.split_at(usize::try_from(len).unwrap());
            let (crc, after) = after.split_at(4);
            assert_eq!(crc, checksum(data));
            events.push(Event::decode(data).unwrap());
            rest = after;
        }
        events
    }

    fn scalars(event: &Event) -> Vec<(&str, f32)> {
        let Some(What::Summary(summary)) = &event.what else { return Vec::new() };
        summary.value.iter().map(|value| (value.tag.as_str(), value.simple_value.unwrap())).collect()
    }

    #[test]
    fn written_events_can_be_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let mut board = TensorBoard::create(dir.path(), None);
        let step = StepReport {
            step: 3,
            loss: 0.1,
            grad_norm: 0.0,
            skipped_steps: 2,
            learning_rate: 1e-4,
            step_seconds: 0.5,
            tokens: 100,
            mfu: Some(0.25),
            ..Default::default()
        };
        write(&mut board, Report::Step(step));
        write(
            &mut board,
            Report::Eval(EvalReport {
                step: 4,
                loss: f32::NAN,
                bits_per_byte: Some(1.5),
                ..Default::default()
            }),
        );
        let events = events(dir.path());
        assert_eq!(events[0].what, Some(What::FileVersion("brain.Event:2".into())));
        assert_eq!(events.iter().map(|event| event.step).collect::<Vec<_>>(), [0, 3, 4]);
        let expected = [
            ("train/loss", 0.1),
            ("train/lr", 1e-4),
            ("lr", 1e-4),
            ("train/grad_norm", 0.0),
            ("train/skipped_steps", 2.0),
            ("perf/tokens_per_second", 200.0),
            ("perf/tokens_per_s", 200.0),
            ("perf/step_seconds", 0.5),
            ("perf/mfu", 0.25),
        ];
        assert_eq!(scalars(&events[1]), expected);
        let eval = scalars(&events[2]);
        assert!(matches!(eval[..], [("val/loss", loss), ("val/bits_per_byte", 1.5)] if loss.is_nan()));
        assert!(events.iter().all(|event| event.wall_time > 1.7e9));
    }

    #[test]
    fn loads_of_experts_are_a_histogram_by_the_number_of_the_expert() {
        let dir = tempfile::tempdir().unwrap();
        let loads = vec![ExpertLoads { block: 1, shares: vec![0.25, 0.0, 0.75] }];
        let mut board = TensorBoard::create(dir.path(), None);
        write(&mut board, Report::Experts(ExpertReport { step: 3, loads }));
        let events = events(dir.path());
        let Some(What::Summary(summary)) = &events[1].what else { panic!("{events:?}") };
        let loads = summary.value.iter().find(|value| value.tag == "experts/load/1").unwrap();
        let histogram = loads.histogram.as_ref().unwrap();
        assert_eq!((histogram.min, histogram.max, histogram.num), (0.0, 2.0, 1.0));
        assert_eq!((histogram.sum, histogram.sum_squares), (1.5, 3.0));
        assert_eq!(histogram.bucket_limit, [0.5, 1.5, 2.5]);
        assert_eq!(histogram.bucket, [0.25, 0.0, 0.75]);
    }

    #[test]
    fn continued_and_restarted_runs_are_one_curve() {
        let (parent, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let train = |board: &mut TensorBoard, steps: std::ops::RangeInclusive<u64>| {
            board.begin(steps.start() - 1).unwrap();
            for step in steps {
                write(board, Report::Step(StepReport { step, ..Default::default() }));
            }
        };
        train(&mut TensorBoard::create(parent.path(), None), 1..=4);
        let mut board = TensorBoard::create(dir.path(), Some(parent.path()));
        train(&mut board, 3..=5);
        train(&mut board, 4..=5);
        let steps: Vec<_> = events(dir.path()).iter().map(|event| event.step).collect();
        // The file version, the parent's steps, this run's steps, the restart, and the repeated steps.
        assert_eq!(steps, [0, 1, 2, 3, 4, 5, 4, 4, 5]);
        let restart = &events(dir.path())[6];
        assert_eq!(restart.what, Some(What::SessionLog(SessionLog { status: SESSION_START })));
    }

    #[test]
    fn record_matches_tensorboards_own_writer() {
        // Written by TensorBoard's Python writer.
        let written = b"\x09\0\0\0\0\0\0\0\x37\xf9\x71\x39123456789\xe5\xb0\x8a\xc7";
        assert_eq!(record(b"123456789"), written);
    }
}
