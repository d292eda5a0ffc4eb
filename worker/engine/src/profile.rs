//! Times of kernels, as reported by [`Backend::end_profile`](crate::Backend::end_profile).

use std::collections::HashMap;

/// One launch of a kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelSpan {
    /// The kernel's name, or `gemm` with its sizes.
    pub name: String,
    /// Seconds since [`Backend::begin_profile`](crate::Backend::begin_profile).
    pub start: f64,
    /// Duration on the device, in seconds.
    pub seconds: f64,
}

/// Total of one kernel over all its launches.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelTime {
    /// The kernel's name, as in [`KernelSpan`].
    pub name: String,
    /// Number of launches.
    pub launches: u64,
    /// Total duration on the device, in seconds.
    pub seconds: f64,
}

impl KernelTime {
    /// Returns the totals by kernel, the longest first.
    pub fn by_name(spans: &[KernelSpan]) -> Vec<Self> {
        let mut times: HashMap<&str, (u64, f64)> = HashMap::new();
        for span in spans {
            let (launches, seconds) = times.entry(&span.name).or_default();
            *launches += 1;
            *seconds += span.seconds;
        }
        let time = |(name, (launches, seconds)): (&str, _)| Self { name: name.into(), launches, seconds };
        let mut times: Vec<Self> = times.into_iter().map(time).collect();
        times.sort_by(|a, b| b.seconds.total_cmp(&a.seconds).then_with(|| a.name.cmp(&b.name)));
        times
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_times_are_totals_by_name_longest_first() {
        let span = |name: &str, seconds| KernelSpan { name: name.into(), start: 0.0, seconds };
        let times = KernelTime::by_name(&[span("a", 1.0), span("b", 1.5), span("a", 2.0)]);
        let expected = [("a", 2, 3.0), ("b", 1, 1.5)];
        let found: Vec<_> = times.iter().map(|time| (&*time.name, time.launches, time.seconds)).collect();
        assert_eq!(found, expected);
    }
}
