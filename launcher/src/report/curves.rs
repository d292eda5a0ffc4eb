//! The curves and figures of a run, from its `metrics.jsonl` and those of the runs that it continues.
//!
//! The files are read twice, oldest run first: the first pass finds where steps repeat and how long the curves are, the
//! second reduces the curves. So memory does not depend on the number of steps.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use xlaunch_proto::metrics::METRICS;

use super::downsampled::Downsampled;
use super::lines::{self, Lines, Point};
use super::reduce::{self, Reducer};

/// Maximum number of values from which a median is taken. In longer runs they are evenly spaced.
const MEDIAN_VALUES: usize = 1 << 16;

/// The contents of the files.
#[derive(Debug, Default)]
pub(crate) struct Curves {
    /// The reduced curve of each key.
    pub(crate) points: [Vec<reduce::Point>; METRICS.len()],
    pub(crate) figures: Figures,
    /// The last loads of experts, by block, and their step.
    pub(crate) expert_loads: Option<(u64, BTreeMap<u32, Vec<f64>>)>,
    /// Notes for the reader about data that could not be used.
    pub(crate) notes: Vec<String>,
}

/// Figures over all steps, not only the points of the reduced curves.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Figures {
    /// The last step.
    pub(crate) steps: u64,
    pub(crate) tokens: f64,
    /// Total duration of the steps of the curve, without the time between them.
    pub(crate) step_seconds: f64,
    pub(crate) loss: Extremes,
    pub(crate) val_loss: Extremes,
    pub(crate) bits_per_byte: Extremes,
    pub(crate) tokens_per_second: Option<f64>,
    pub(crate) mfu: Option<f64>,
    pub(crate) skipped_steps: f64,
    /// Number of times that the run went back to an earlier step.
    pub(crate) restarts: u64,
}

/// The last and the lowest value of a curve.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Extremes {
    pub(crate) last: Option<f64>,
    /// The lowest value and its step.
    pub(crate) best: Option<(f64, u64)>,
}

impl Extremes {
    fn add(&mut self, step: u64, value: f64) {
        self.last = Some(value);
        if value.is_finite() && self.best.is_none_or(|(best, _)| value < best) {
            self.best = Some((value, step));
        }
    }

    /// Returns the values as JSON; null if there is no finite value.
    pub(crate) fn json(&self) -> Value {
        json!({ "last": self.last, "best": self.best.map(|(best, _)| best), "best_step": self.best.map(|(_, at)| at) })
    }
}

/// A file to read, with the last step that belongs to the curve.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Source {
    pub(crate) path: PathBuf,
    pub(crate) until: u64,
}

/// The results of the first pass.
#[derive(Debug, Default)]
struct Survey {
    /// Bytes read of each source.
    bytes: Vec<u64>,
    steps: Rewinds,
    evaluations: Rewinds,
    /// Number of points of each key, including those that are not part of the final curve.
    counts: [u64; METRICS.len()],
    first: Option<u64>,
    last: u64,
    notes: Vec<String>,
}

/// Repeated steps: after a restart, a run writes the steps since its checkpoint again, and a run that continues another
/// one may begin before the end of that run. The last value of a step counts.
///
/// Holds the lines at which a sequence goes back to an earlier step. Lines and steps both increase: an earlier entry
/// whose step is not below that of a later entry is dropped, because the later entry decides about all lines before
/// both.
#[derive(Debug, Default)]
struct Rewinds {
    /// Line number of each first line after going back, and its step.
    at: Vec<(u64, u64)>,
    last_step: Option<u64>,
    /// Number of times that the sequence went back.
    count: u64,
}

impl Rewinds {
    /// Adds the next step of the sequence and its line.
    fn add(&mut self, line: u64, step: u64) {
        if self.last_step.replace(step).is_some_and(|last| step <= last) {
            self.count += 1;
            while self.at.pop_if(|(_, other)| *other >= step).is_some() {}
            self.at.push((line, step));
        }
    }

    /// Returns whether a line with this step is part of the final curve.
    fn keeps(&self, line: u64, step: u64) -> bool {
        let after = self.at.partition_point(|(other, _)| *other <= line);
        self.at.get(after).is_none_or(|(_, first)| step < *first)
    }
}

/// Reads a run: the files of the runs that it continues, and its own.
pub(crate) fn read(sources: &[Source]) -> io::Result<Curves> {
    let survey = survey(sources)?;
    let first = survey.first.unwrap_or(0);
    let mut reducers = survey.counts.map(|count| Reducer::new(count, first, survey.last));
    let mut totals = Totals::default();
    let limits = survey.bytes.iter().copied();
    let (mut line, mut expert_loads) = (0, None);
    for (source, limit) in sources.iter().zip(limits) {
        each_point(source, limit, &mut line, |line, point, text| {
            let kept = survey.steps.keeps(line, point.step)
                && (point.value("val/loss").is_none() || survey.evaluations.keeps(line, point.step));
            if kept {
                let values = reducers.iter_mut().zip(point.values);
                values.for_each(|(reducer, value)| {
                    value.into_iter().for_each(|value| reducer.add(point.step, value))
                });
                totals.add(point);
                // They are in lines of their own.
                let has_values = point.values.iter().any(Option::is_some);
                if !has_values && let Some(loads) = lines::expert_loads(text) {
                    expert_loads = Some((point.step, loads));
                }
            }
        })?;
    }
    let figures = Figures { restarts: survey.steps.count, ..totals.finish() };
    Ok(Curves { points: reducers.map(Reducer::finish), figures, expert_loads, notes: survey.notes })
}

fn survey(sources: &[Source]) -> io::Result<Survey> {
    let mut survey = Survey::default();
    let mut line = 0;
    for source in sources {
        let found = each_point(source, u64::MAX, &mut line, |line, point, _| survey.add(line, point))?;
        survey.bytes.push(found.bytes);
        if found.broken > 0 {
            survey.notes.push(super::broken_lines(&source.path, found.broken));
        }
    }
    Ok(survey)
}

impl Survey {
    fn add(&mut self, line: u64, point: &Point) {
        if point.is_step() {
            self.steps.add(line, point.step);
        } else if point.value("val/loss").is_some() {
            self.evaluations.add(line, point.step);
        }
        let counts = self.counts.iter_mut().zip(point.values);
        counts.for_each(|(count, value)| *count += u64::from(value.is_some()));
        self.first = Some(self.first.map_or(point.step, |first| first.min(point.step)));
        self.last = self.last.max(point.step);
    }
}

/// The result of a pass over a file.
struct Found {
    bytes: u64,
    broken: u64,
}

/// Calls `take` with the line number of each point of a file, counted over all files, the point and the line.
fn each_point(
    source: &Source,
    limit: u64,
    line: &mut u64,
    mut take: impl FnMut(u64, &Point, &[u8]),
) -> io::Result<Found> {
    let mut lines = Lines::open(&source.path, limit)?;
    let mut broken = 0;
    while let Some((text, cut)) = lines.next()? {
        *line += 1;
        match lines::parse(text) {
            Some(point) if point.step <= source.until => take(*line, &point, text),
            Some(_) => {}
            // The run is still writing this line.
            None if cut => {}
            None => broken += 1,
        }
    }
    Ok(Found { bytes: lines.read, broken: broken + lines.too_long })
}

/// Sums up the points of the curve.
#[derive(Debug)]
struct Totals {
    figures: Figures,
    speeds: Downsampled<f64>,
    utilisations: Downsampled<f64>,
}

impl Default for Totals {
    fn default() -> Self {
        let (speeds, utilisations) = (Downsampled::new(MEDIAN_VALUES), Downsampled::new(MEDIAN_VALUES));
        Self { figures: Figures::default(), speeds, utilisations }
    }
}

impl Totals {
    fn add(&mut self, point: &Point) {
        let figures = &mut self.figures;
        let finite = |key: &str| point.value(key).filter(|value| value.is_finite());
        figures.steps = figures.steps.max(point.step);
        let curves = [
            (&mut figures.loss, "train/loss"),
            (&mut figures.val_loss, "val/loss"),
            (&mut figures.bits_per_byte, "val/bits_per_byte"),
        ];
        for (extremes, key) in curves {
            point.value(key).into_iter().for_each(|value| extremes.add(point.step, value));
        }
        if let (Some(speed), Some(seconds)) = (finite("perf/tokens_per_second"), finite("perf/step_seconds"))
        {
            figures.tokens += speed * seconds;
            figures.step_seconds += seconds;
        }
        figures.skipped_steps = finite("train/skipped_steps").unwrap_or(figures.skipped_steps);
        finite("perf/tokens_per_second").into_iter().for_each(|speed| self.speeds.add(speed));
        finite("perf/mfu").into_iter().for_each(|mfu| self.utilisations.add(mfu));
    }

    fn finish(self) -> Figures {
        let (tokens_per_second, mfu) = (median(self.speeds), median(self.utilisations));
        // The number of tokens follows from rounded speeds, so round it to a whole number.
        Figures { tokens: self.figures.tokens.round(), tokens_per_second, mfu, ..self.figures }
    }
}

fn median(values: Downsampled<f64>) -> Option<f64> {
    let mut values = values.into_items();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

impl Source {
    /// Returns the source with all steps of a file.
    pub(crate) fn all(path: &Path) -> Self {
        Self { path: path.to_owned(), until: u64::MAX }
    }

    /// Returns the first step of the file; `None` if it has no steps.
    pub(crate) fn first_step(&self) -> Option<u64> {
        let mut lines = Lines::open(&self.path, u64::MAX).ok()?;
        while let Ok(Some((text, _))) = lines.next() {
            if let Some(point) = lines::parse(text) {
                return Some(point.step);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn file(dir: &Path, name: &str, lines: &[Value], rest: &str) -> Source {
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        let path = dir.join(name);
        fs_err::write(&path, text + rest).unwrap();
        Source::all(&path)
    }

    fn step(step: u64, loss: f64) -> Value {
        json!({
            "_step": step, "train/loss": loss, "perf/tokens_per_second": 200.0 + loss, "perf/step_seconds": 0.5,
            "perf/mfu": loss / 10.0,
        })
    }

    fn losses(curves: &Curves, key: &str) -> Vec<(u64, f64)> {
        let points = &curves.points[lines::index(key).unwrap()];
        points.iter().map(|(step, value)| (*step, value.unwrap_or(f64::INFINITY))).collect()
    }

    #[test]
    fn continued_and_restarted_run_is_one_curve_of_the_last_values() {
        let dir = tempfile::tempdir().unwrap();
        let eval = |step: u64, loss: f64| json!({ "_step": step, "val/loss": loss });
        let parent = [step(1, 9.0), step(2, 8.0), eval(2, 8.5), step(3, 7.0), step(4, 6.0), eval(4, 6.5)];
        let parent = Source { until: 3, ..file(dir.path(), "parent", &parent, "") };
        // Steps 5 and 6 are repeated after a restart, which ends before the second evaluation of step 6.
        let own = [step(4, 5.0), eval(4, 5.5), step(5, 4.0), step(6, 3.0), eval(6, 3.5), step(5, 2.0)];
        let own = file(dir.path(), "own", &own, "");
        let curves = read(&[parent, own]).unwrap();
        assert_eq!(losses(&curves, "train/loss"), [(1, 9.0), (2, 8.0), (3, 7.0), (4, 5.0), (5, 2.0)]);
        assert_eq!(losses(&curves, "val/loss"), [(2, 8.5), (4, 5.5)]);
        let figures = &curves.figures;
        assert_eq!((figures.steps, figures.restarts, figures.step_seconds), (5, 1, 2.5));
        assert_eq!(figures.loss, Extremes { last: Some(2.0), best: Some((2.0, 5)) });
        assert_eq!((figures.tokens_per_second, figures.mfu), (Some(207.0), Some(0.7)));
        // (209 + 208 + 207 + 205 + 202) / 2, rounded.
        assert_eq!(figures.tokens, 516.0);
        assert!(curves.notes.is_empty());
    }

    #[test]
    fn last_loads_of_experts_are_those_of_the_curve() {
        let dir = tempfile::tempdir().unwrap();
        let loads =
            |step: u64, share: f64| json!({ "_step": step, "experts/load": { "1": [share, 1.0 - share] } });
        let eval = |step: u64| json!({ "_step": step, "val/loss": 1.0 });
        // Step 4 was not repeated after a restart.
        let before =
            [step(2, 1.0), loads(2, 0.5), eval(2), step(3, 1.0), step(4, 1.0), loads(4, 0.25), eval(4)];
        let after = [step(2, 1.0), loads(2, 0.75), eval(2), step(3, 1.0)];
        let curves = read(&[file(dir.path(), "a", &[&before[..], &after].concat(), "")]).unwrap();
        assert_eq!(curves.expert_loads, Some((2, [(1, vec![0.75, 0.25])].into())));
    }

    #[test]
    fn values_that_are_not_finite_are_gaps_and_never_the_best() {
        let dir = tempfile::tempdir().unwrap();
        let mut nan = step(2, 1.0);
        nan["train/loss"] = Value::Null;
        let source = file(dir.path(), "a", &[step(1, 3.0), nan], "");
        let curves = read(&[source]).unwrap();
        assert_eq!(curves.points[lines::index("train/loss").unwrap()], [(1, Some(3.0)), (2, None)]);
        assert_eq!(curves.figures.loss.json(), json!({ "last": null, "best": 3.0, "best_step": 1 }));
    }

    #[test]
    fn broken_lines_are_counted_but_not_the_one_that_is_being_written() {
        let dir = tempfile::tempdir().unwrap();
        let rest = "not JSON\n{\"_step\": \"x\"}\n{\"_step\": 2, \"train/lo";
        let source = file(dir.path(), "a", &[step(1, 3.0)], rest);
        let curves = read(std::slice::from_ref(&source)).unwrap();
        assert_eq!(losses(&curves, "train/loss"), [(1, 3.0)]);
        assert_eq!(curves.notes, [format!("{}: 2 lines are broken, and left out", source.path.display())]);
        let empty = file(dir.path(), "b", &[], "");
        let curves = read(&[empty]).unwrap();
        assert!(curves.points.iter().all(Vec::is_empty) && curves.figures == Figures::default());
    }

    fn kept(steps: &[u64]) -> Vec<usize> {
        let mut rewinds = Rewinds::default();
        (0..).zip(steps).for_each(|(line, step)| rewinds.add(line, *step));
        let lines = 0..steps.len();
        lines.filter(|line| rewinds.keeps(*line as u64, steps[*line])).collect()
    }

    #[test]
    fn last_value_of_a_repeated_step_counts() {
        assert_eq!(kept(&[1, 2, 3, 4, 3, 4, 5]), [0, 1, 4, 5, 6]);
        // The second restart goes back further than the first.
        assert_eq!(kept(&[1, 2, 3, 4, 4, 5, 2, 3]), [0, 6, 7]);
        // The second restart goes back less far than the first.
        assert_eq!(kept(&[1, 2, 3, 2, 3, 4, 4, 5]), [0, 3, 4, 6, 7]);
        // The run ends before it reaches the old steps again.
        assert_eq!(kept(&[10, 20, 30, 40, 20]), [0, 4]);
    }

    proptest! {
        #[test]
        fn curve_rises_and_equals_that_of_replaying_the_lines(steps in prop::collection::vec(0_u64..20, 0..60)) {
            let mut curve: Vec<usize> = Vec::new();
            for (line, step) in steps.iter().enumerate() {
                curve.retain(|other| steps[*other] < *step);
                curve.push(line);
            }
            prop_assert_eq!(kept(&steps), curve);
        }
    }
}
