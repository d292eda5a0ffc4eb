//! The clocks of the GPUs during the measured steps. They show whether a GPU was throttled, which would make its
//! figures meaningless.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::time::Instant;

use serde::Serialize;
use xlaunch_host::gpu_clocks::ClockSample;

use super::quantile;

/// Clocks as NVML reports them. Field names are those of the JSON form.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Clocks {
    /// Median over GPUs and time.
    pub(crate) sm_mhz: f64,
    /// Median over GPUs and time.
    pub(crate) power_watts: f64,
    /// Throttle reasons of any GPU at any time, as nvidia-smi names them.
    pub(crate) throttle_reasons: BTreeSet<&'static str>,
}

impl Clocks {
    /// Summarises the samples of a period; `None` if there are none.
    pub(crate) fn during(period: &RangeInclusive<Instant>, samples: &[ClockSample]) -> Option<Self> {
        let samples: Vec<_> = samples.iter().filter(|sample| period.contains(&sample.at)).collect();
        let median = |value: fn(&ClockSample) -> f64| {
            let mut values: Vec<f64> = samples.iter().map(|sample| value(sample)).collect();
            values.sort_by(f64::total_cmp);
            quantile(&values, 0.5)
        };
        (!samples.is_empty()).then(|| Self {
            sm_mhz: median(|sample| sample.sm_mhz.into()),
            power_watts: median(|sample| sample.power_watts),
            throttle_reasons: samples.iter().flat_map(|sample| &sample.throttle_reasons).copied().collect(),
        })
    }

    /// Formats the clocks as a line of the table.
    pub(crate) fn line(&self) -> String {
        let reasons: Vec<&str> = self.throttle_reasons.iter().copied().collect();
        let reasons = if reasons.is_empty() { "none".into() } else { reasons.join(", ") };
        format!("SM {:.0} MHz, {:.0} W; throttle reasons: {reasons}", self.sm_mhz, self.power_watts)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn clocks_are_medians_of_the_measured_steps_and_reasons_their_union() {
        let start = Instant::now();
        let sample = |second, sm_mhz, power_watts, throttle_reasons: &[&'static str]| ClockSample {
            at: start + Duration::from_secs(second),
            sm_mhz,
            power_watts,
            throttle_reasons: throttle_reasons.to_vec(),
        };
        let samples = [
            sample(0, 345, 70.0, &["gpu_idle"]),
            sample(1, 1980, 500.0, &[]),
            sample(2, 1700, 690.0, &["sw_power_cap"]),
            sample(3, 1500, 700.0, &["sw_power_cap", "sw_thermal_slowdown"]),
            sample(4, 210, 60.0, &["gpu_idle"]),
        ];
        let seconds = |from, to| start + Duration::from_secs(from)..=start + Duration::from_secs(to);
        let found = Clocks::during(&seconds(1, 3), &samples).unwrap();
        assert_eq!((found.sm_mhz, found.power_watts), (1700.0, 690.0));
        assert_eq!(found.line(), "SM 1700 MHz, 690 W; throttle reasons: sw_power_cap, sw_thermal_slowdown");
        assert!(Clocks::during(&seconds(1, 1), &samples).unwrap().line().ends_with("throttle reasons: none"));
        assert_eq!(Clocks::during(&seconds(5, 6), &samples), None);
    }
}
