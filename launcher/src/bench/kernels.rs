//! The kernels of a step, grouped by purpose.

use std::fmt::Write;

use serde::Serialize;
use xlaunch_proto::v1::KernelReport;

/// Families by prefixes of kernel names. The first match applies.
const FAMILIES: [(&str, &[&str]); 10] = [
    ("GEMM", &["gemm", "linear_glu", "weight_grads", "transpose"]),
    ("FP8 rounding", &["fp8"]),
    ("attention", &["attention", "rope"]),
    ("norms", &["norm"]),
    ("activations", &["activation", "glu"]),
    ("classifier", &["classifier"]),
    ("embedding", &["embed"]),
    ("optimizer", &["adamw"]),
    ("reductions", &["sum", "squared_norm", "column_sum"]),
    ("copies", &["cast", "copy"]),
];
/// Family of all other kernels.
const OTHER: &str = "other";

/// One kernel over all its launches in the step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Kernel {
    pub(crate) family: &'static str,
    pub(crate) name: String,
    pub(crate) ms: f64,
    /// Fraction of the total time of all kernels.
    pub(crate) share: f64,
    pub(crate) launches: u64,
}

/// Adds families to the kernels of a report. Families and the kernels in each are ordered by time, longest first.
pub(crate) fn grouped(kernels: &[KernelReport]) -> Vec<Kernel> {
    let total: f64 = kernels.iter().map(|kernel| kernel.seconds).sum();
    let mut grouped: Vec<Kernel> = kernels
        .iter()
        .map(|kernel| Kernel {
            family: family(&kernel.name),
            name: kernel.name.clone(),
            ms: kernel.seconds * 1e3,
            share: kernel.seconds / total,
            launches: kernel.launches,
        })
        .collect();
    let family_ms: Vec<f64> = grouped.iter().map(|kernel| family_total(&grouped, kernel.family).0).collect();
    let mut order: Vec<usize> = (0..grouped.len()).collect();
    order.sort_by(|a, b| {
        let (x, y) = (&grouped[*a], &grouped[*b]);
        family_ms[*b].total_cmp(&family_ms[*a]).then(x.family.cmp(y.family)).then(y.ms.total_cmp(&x.ms))
    });
    grouped = order.into_iter().map(|index| grouped[index].clone()).collect();
    grouped
}

fn family(kernel: &str) -> &'static str {
    let matches = |names: &[&str]| names.iter().any(|name| kernel.starts_with(name));
    FAMILIES.iter().find(|(_, names)| matches(names)).map_or(OTHER, |(family, _)| family)
}

/// Returns milliseconds and launches of a family.
fn family_total(kernels: &[Kernel], family: &str) -> (f64, u64) {
    let members = kernels.iter().filter(|kernel| kernel.family == family);
    members.fold((0.0, 0), |(ms, launches), kernel| (ms + kernel.ms, launches + kernel.launches))
}

/// Returns one line per family, followed by its kernels.
pub(crate) fn table(kernels: &[Kernel]) -> String {
    if kernels.is_empty() {
        return "kernels      not timed: the CPU back end has no kernels\n".into();
    }
    let total: f64 = kernels.iter().map(|kernel| kernel.ms).sum();
    let mut out = format!("\n{:<44}{:>10}{:>9}{:>10}\n", "kernels of one step", "ms", "share", "launches");
    let mut line = |name: &str, ms: f64, launches: u64| {
        // Writing to a String cannot fail.
        let _ = writeln!(out, "{name:<44}{ms:>10.3}{:>7.1} %{launches:>10}", 100.0 * ms / total);
    };
    line("all", total, kernels.iter().map(|kernel| kernel.launches).sum());
    for family in kernels.chunk_by(|a, b| a.family == b.family) {
        let (ms, launches) = family_total(family, family[0].family);
        line(family[0].family, ms, launches);
        for kernel in family {
            line(&format!("  {}", kernel.name), kernel.ms, kernel.launches);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_grouped_by_family_longest_first() {
        let names = ["norm_fwd", "gemm 8 x 8 x 8", "squared_norm_partials", "norm_bwd_input", "novel"];
        let kernels = names.iter().zip([2, 4, 1, 3, 2]).map(|(name, ms)| KernelReport {
            name: (*name).into(),
            launches: 2,
            seconds: f64::from(ms) / 1e3,
        });
        let grouped = grouped(&kernels.collect::<Vec<_>>());
        let found: Vec<_> = grouped.iter().map(|kernel| (kernel.family, &*kernel.name)).collect();
        let expected = [
            ("norms", "norm_bwd_input"),
            ("norms", "norm_fwd"),
            ("GEMM", "gemm 8 x 8 x 8"),
            ("other", "novel"),
            ("reductions", "squared_norm_partials"),
        ];
        assert_eq!(found, expected);
        assert!((grouped.iter().map(|kernel| kernel.share).sum::<f64>() - 1.0).abs() < 1e-12);
        let table = table(&grouped);
        let line = table.lines().find(|line| line.starts_with("norms")).unwrap_or_default();
        let words: Vec<_> = line.split_whitespace().collect();
        assert_eq!(words, ["norms", "5.000", "41.7", "%", "4"], "{table}");
    }
}
