//! `xlaunch bench allreduce`: sums between ranks by size, in the columns of nccl-tests.
//!
//! With n ranks and S bytes in t seconds, algbw is S / t and busbw is algbw times 2 (n - 1) / n: what each link would
//! carry in a ring, comparable between numbers of ranks (nccl-tests, doc/PERFORMANCE.md). Times are means over ranks, as
//! nccl-tests' are by default; #wrong counts, over all ranks, elements that are not the exact sum.

use std::fmt::Write;

use serde::Serialize;
use xlaunch_proto::exit::ExitCode;
use xlaunch_proto::spec::JobSpec;
use xlaunch_proto::v1::bench::Kind;
use xlaunch_proto::v1::worker_report::Report;
use xlaunch_proto::v1::{AllReduceBench, AllReduceReport};

use super::{launch, silent};
use xlaunch_agent::Refusal;
use xlaunch_agent::devices::Placement;
use xlaunch_agent::sinks::RankReport;

/// Ratio of a size to the one before.
const FACTOR: u64 = 4;

/// Element type on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Dtype {
    /// 2 bytes; on GPUs.
    Bf16,
    /// 4 bytes.
    Fp32,
}

impl Dtype {
    fn size(self) -> u64 {
        if self == Self::Bf16 { 2 } else { 4 }
    }

    /// As nccl-tests calls it.
    fn name(self) -> &'static str {
        if self == Self::Bf16 { "bfloat16" } else { "float" }
    }
}

/// One size: the columns of the table. Units: bytes, microseconds, GB/s (1e9 bytes per second).
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

/// Measures sums of `min` to `max` bytes between the workers of the placement.
///
/// # Errors
/// bf16 on the CPU; those of [`launch`].
pub(crate) async fn run(
    spec: &JobSpec,
    placement: &Placement,
    min: u64,
    max: u64,
    dtype: Dtype,
) -> Result<Vec<Row>, Refusal> {
    if dtype == Dtype::Bf16 && !placement.cuda {
        let message = "--dtype bf16: without a GPU only fp32 is summed";
        return Err(Refusal::new(ExitCode::Usage, message));
    }
    let counts = counts(min, max, dtype);
    let question = AllReduceBench { counts: counts.clone(), bf16: dtype == Dtype::Bf16 };
    let heard = launch(spec, placement, Kind::AllReduce(question)).await?;
    let rows: Option<Vec<Row>> =
        counts.iter().map(|count| row(*count, dtype, placement.workers, &heard)).collect();
    rows.ok_or_else(|| silent("every size"))
}

/// Elements by size: fourfold from `min`, and `max` at last.
fn counts(min: u64, max: u64, dtype: Dtype) -> Vec<u64> {
    let elements = |bytes: u64| (bytes / dtype.size()).max(1);
    let sizes = std::iter::successors(Some(min.max(1)), |size| size.checked_mul(FACTOR));
    let mut counts: Vec<u64> = sizes.take_while(|size| *size < max).map(elements).collect();
    counts.push(elements(max));
    counts.dedup();
    counts
}

/// One size as all ranks found it; `None` where one said nothing.
#[expect(clippy::cast_precision_loss, reason = "sizes and rates")]
fn row(count: u64, dtype: Dtype, world: u32, heard: &[RankReport]) -> Option<Row> {
    let reports: Vec<&AllReduceReport> = heard
        .iter()
        .filter_map(|heard| match &heard.report {
            Report::AllReduce(sum) if sum.count == count => Some(sum),
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

/// The table.
pub(crate) fn table(rows: &[Row], world: u32, platform: &str) -> String {
    let mut out = format!("# sums over {world} ranks, in place; {platform}\n");
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
    fn sizes_grow_fourfold_and_end_with_the_largest() {
        assert_eq!(counts(8, 1024, Dtype::Fp32), [2, 8, 32, 128, 256]);
        assert_eq!(counts(8, 128, Dtype::Bf16), [4, 16, 64]);
        assert_eq!(counts(1, 2, Dtype::Fp32), [1]);
    }

    #[test]
    fn a_row_is_the_mean_of_times_and_the_sum_of_wrong_elements() {
        let report = |rank, seconds, wrong| RankReport {
            rank,
            at: Instant::now(),
            report: Report::AllReduce(AllReduceReport { count: 250, seconds, wrong }),
        };
        let heard = [report(0, 1e-6, 0), report(1, 3e-6, 2), report(2, 2e-6, 1), report(3, 2e-6, 0)];
        let found = row(250, Dtype::Fp32, 4, &heard).unwrap();
        assert_eq!((found.size, found.wrong), (1000, 3));
        assert!((found.time - 2.0).abs() < 1e-9 && (found.algbw - 0.5).abs() < 1e-9, "{found:?}");
        assert!((found.busbw - 0.75).abs() < 1e-9, "{found:?}");
        assert_eq!(row(250, Dtype::Fp32, 3, &heard[..2]), None);
    }
}
