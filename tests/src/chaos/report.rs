//! The table of a chaos run: number of faults of each kind, and the time that jobs took to recover. Pure.

use std::collections::BTreeMap;
use std::fmt::{self, Display};
use std::time::Duration;

use super::kind::Kind;
use super::run::JobResult;

/// Results of a chaos run.
#[derive(Clone, Debug)]
pub struct Report {
    seed: u64,
    jobs: Vec<JobResult>,
}

impl Report {
    /// Creates the report of these jobs.
    pub fn new(seed: u64, jobs: Vec<JobResult>) -> Self {
        Self { seed, jobs }
    }

    /// Returns the number of injected faults.
    pub fn faults(&self) -> usize {
        self.jobs.iter().flat_map(|job| &job.faults).filter(|fault| fault.injected).count()
    }

    /// Returns the number of jobs with a wrong result.
    pub fn problems(&self) -> usize {
        self.jobs.iter().filter(|job| job.problem.is_some()).count()
    }
}

impl Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let jobs = self.jobs.len();
        let restarts: usize = self.jobs.iter().map(|job| job.restarts).sum();
        let bad = self.problems();
        writeln!(
            f,
            "seed {}: {} faults in {jobs} jobs, {restarts} restarts, {bad} jobs failed",
            self.seed,
            self.faults()
        )?;
        let wall: Duration = self.jobs.iter().map(|job| job.wall).sum();
        let undisturbed: Duration = self.jobs.iter().map(|job| job.undisturbed).sum();
        let useful = 100.0 * undisturbed.as_secs_f64() / wall.as_secs_f64().max(1e-9);
        writeln!(
            f,
            "time of the jobs {:.0} s, undisturbed {:.0} s: useful time {useful:.0} %\n",
            wall.as_secs_f64(),
            undisturbed.as_secs_f64()
        )?;
        writeln!(f, "| fault | number | recovery: median | 95th percentile | maximum |")?;
        writeln!(f, "|---|---|---|---|---|")?;
        let mut all = Vec::new();
        for (kind, (number, recoveries)) in self.by_kind() {
            row(f, kind.name(), number, &recoveries)?;
            all.extend(recoveries);
        }
        row(f, "all", self.faults(), &all)
    }
}

impl Report {
    /// Returns the number of faults of each kind, and the recovery times.
    fn by_kind(&self) -> BTreeMap<Kind, (usize, Vec<f64>)> {
        let mut kinds: BTreeMap<Kind, (usize, Vec<f64>)> = BTreeMap::new();
        for fault in self.jobs.iter().flat_map(|job| &job.faults).filter(|fault| fault.injected) {
            let (number, recoveries) = kinds.entry(fault.kind).or_default();
            *number += 1;
            recoveries.extend(fault.recovery);
        }
        kinds
    }
}

fn row(f: &mut fmt::Formatter<'_>, name: &str, number: usize, recoveries: &[f64]) -> fmt::Result {
    let mut sorted = recoveries.to_vec();
    sorted.sort_by(f64::total_cmp);
    let seconds =
        |fraction| percentile(&sorted, fraction).map_or(String::new(), |time| format!("{time:.2} s"));
    writeln!(f, "| {name} | {number} | {} | {} | {} |", seconds(0.5), seconds(0.95), seconds(1.0))
}

/// Returns the smallest value that at least this fraction of the sorted values does not exceed.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "an index"
)]
fn percentile(sorted: &[f64], fraction: f64) -> Option<f64> {
    let rank = (fraction * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied()
}

#[cfg(test)]
mod tests {
    use super::super::run::FaultResult;
    use super::*;

    #[test]
    fn percentiles_are_values_that_occurred() {
        let values: Vec<f64> = (1..=20).map(f64::from).collect();
        assert_eq!(percentile(&values, 0.5), Some(10.0));
        assert_eq!(percentile(&values, 0.95), Some(19.0));
        assert_eq!(percentile(&values, 1.0), Some(20.0));
        assert_eq!((percentile(&[3.0], 0.5), percentile(&[], 0.5)), (Some(3.0), None));
    }

    #[test]
    fn report_counts_injected_faults_and_wrong_results() {
        let fault = |kind, injected, recovery| FaultResult { kind, injected, recovery };
        let job = |faults: &[FaultResult], problem: Option<&str>| JobResult {
            faults: faults.to_vec(),
            wall: Duration::from_secs(4),
            undisturbed: Duration::from_secs(1),
            restarts: 1,
            problem: problem.map(Into::into),
        };
        let jobs = vec![
            job(&[fault(Kind::KillRank, true, Some(0.5)), fault(Kind::SlowRank, true, None)], None),
            job(
                &[fault(Kind::KillRank, true, Some(1.5)), fault(Kind::SlowDisk, false, None)],
                Some("differs"),
            ),
        ];
        let report = Report::new(3, jobs);
        assert_eq!(report.faults(), 3);
        assert_eq!(report.problems(), 1);
        let text = report.to_string();
        for line in [
            "seed 3: 3 faults in 2 jobs, 2 restarts, 1 jobs failed",
            "useful time 25 %",
            "| SIGKILL of a rank | 2 | 0.50 s | 1.50 s | 1.50 s |",
            "| all | 3 | 0.50 s | 1.50 s | 1.50 s |",
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
        assert!(!text.contains(Kind::SlowDisk.name()));
    }
}
