//! `xlaunch bench allreduce`: all-reduce by message size, with the columns of nccl-tests.
//!
//! For n ranks that reduce S bytes in t seconds, algbw is S / t and busbw is algbw times 2 (n - 1) / n: the load of
//! each link in a ring, which is comparable between numbers of ranks (nccl-tests, doc/PERFORMANCE.md). Times are means
//! over ranks, the default of nccl-tests. #wrong counts elements, over all ranks, that differ from the exact sum.

use std::fmt::Write;

use serde::Serialize;
use xlaunch_proto::v1::bench::Kind;
use xlaunch_proto::v1::worker_report::Report;
use xlaunch_proto::v1::{AllReduceBench, AllReduceReport};
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::job::JobSpec;

use super::{Mode, RankReport, missing_report, run_workers};
use xlaunch_host::devices::Placement;
use xlaunch_spec::refusal::Refusal;

/// Each size is this multiple of the previous one.
const SIZE_FACTOR: u64 = 4;

/// Element type on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Dtype {
    /// 2 bytes; GPUs only
    Bf16,
    /// 4 bytes
    Fp32,
}

impl Dtype {
    fn size(self) -> u64 {
        if self == Self::Bf16 { 2 } else { 4 }
    }

    /// Returns the name in nccl-tests.
    fn name(self) -> &'static str {
        if self == Self::Bf16 { "bfloat16" } else { "float" }
    }
}

/// One message size. Units: bytes, microseconds, GB/s (1e9 bytes per second).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Row {
    pub(crate) size: u64,
    pub(crate) count: u64,
    #[serde(rename = "type")]
    pub(crate) dtype: &'static str,
    pub(crate) time: f64,
    pub(crate) algbw: f64,
    pub(crate) busbw: f64,
    pub(crate) wrong: u64,
}

/// Measures all-reduces of `min` to `max` bytes between the workers of the placement.
///
/// # Errors
/// bf16 was requested on the CPU; those of [`run_workers`].
pub(crate) async fn run(
    spec: &JobSpec,
    placement: &Placement,
    min: u64,
    max: u64,
    dtype: Dtype,
) -> Result<Vec<Row>, Refusal> {
    if dtype == Dtype::Bf16 && !placement.cuda {
        let message = "--dtype bf16: only fp32 is supported without a GPU";
        return Err(Refusal::new(ExitCode::Usage, message));
    }
    let counts = counts(min, max, dtype);
    let request = AllReduceBench { counts: counts.clone(), bf16: dtype == Dtype::Bf16 };
    let reports = run_workers(spec, placement, Mode::Processes, Kind::AllReduce(request)).await?;
    let rows: Option<Vec<Row>> =
        counts.iter().map(|count| row(*count, dtype, placement.workers, &reports)).collect();
    rows.ok_or_else(|| missing_report("every size"))
}

/// Returns the numbers of elements to measure, from `min` to `max` bytes.
fn counts(min: u64, max: u64, dtype: Dtype) -> Vec<u64> {
    let elements = |bytes: u64| (bytes / dtype.size()).max(1);
    let sizes = std::iter::successors(Some(min.max(1)), |size| size.checked_mul(SIZE_FACTOR));
    let mut counts: Vec<u64> = sizes.take_while(|size| *size < max).map(elements).collect();
    counts.push(elements(max));
    counts.dedup();
    counts
}

/// Returns the row of one size, over all ranks; `None` if a rank has not reported it.
#[expect(clippy::cast_precision_loss, reason = "sizes and rates")]
fn row(count: u64, dtype: Dtype, world: u32, reports: &[RankReport]) -> Option<Row> {
    let reports: Vec<&AllReduceReport> = reports
        .iter()
        .filter_map(|received| match &received.report {
            Report::AllReduce(report) if report.count == count => Some(report),
            _ => None,
        })
        .collect();
    if reports.len() != world as usize {
        return None;
    }
    let (size, ranks) = (count * dtype.size(), f64::from(world));
    let seconds = reports.iter().map(|report| report.seconds).sum::<f64>() / ranks;
    let algbw = size as f64 / seconds / 1e9;
    Some(Row {
        size,
        count,
        dtype: dtype.name(),
        time: seconds * 1e6,
        algbw,
        busbw: algbw * 2.0 * (ranks - 1.0) / ranks,
        wrong: reports.iter().map(|report| report.wrong).sum(),
    })
}

pub(crate) fn table(rows: &[Row], world: u32, platform: &str) -> String {
    let mut out = format!("# all-reduce of {world} ranks, in place; {platform}\n");
    out += "#       size         count      type   redop    root     time   algbw   busbw  #wrong\n";
    out += "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)\n";
    for Row { size, count, dtype, time, algbw, busbw, wrong } in rows {
        // Writing to a String cannot fail.
        let _ = writeln!(
            out,
            "{size:>12}{count:>14}{dtype:>10}{:>8}{:>8}{time:>9.2}{algbw:>8.2}{busbw:>8.2}{wrong:>8}",
            "sum", -1
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn sizes_grow_by_factor_4_and_end_with_the_largest() {
        assert_eq!(counts(8, 1024, Dtype::Fp32), [2, 8, 32, 128, 256]);
        assert_eq!(counts(8, 128, Dtype::Bf16), [4, 16, 64]);
        assert_eq!(counts(1, 2, Dtype::Fp32), [1]);
    }

    #[test]
    fn row_has_mean_time_and_total_of_wrong_elements() {
        let report = |rank, seconds, wrong| RankReport {
            rank,
            at: Instant::now(),
            report: Report::AllReduce(AllReduceReport { count: 250, seconds, wrong }),
        };
        let reports = [report(0, 1e-6, 0), report(1, 3e-6, 2), report(2, 2e-6, 1), report(3, 2e-6, 0)];
        let found = row(250, Dtype::Fp32, 4, &reports).unwrap();
        assert_eq!((found.size, found.wrong), (1000, 3));
        assert!((found.time - 2.0).abs() < 1e-9 && (found.algbw - 0.5).abs() < 1e-9, "{found:?}");
        assert!((found.busbw - 0.75).abs() < 1e-9, "{found:?}");
        assert_eq!(row(250, Dtype::Fp32, 3, &reports[..2]), None);
    }
}
