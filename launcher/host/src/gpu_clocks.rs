//! Samples GPU clocks, power and throttle reasons through NVML during benchmarks. A step time means little without
//! them.
//!
//! A separate thread takes the samples. Nothing ever waits for it, because a driver call can hang.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use nvml_wrapper::Nvml;
use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::Clock;
use nvml_wrapper::error::NvmlError;

/// Interval between samples: short enough to get several within a second of steps. The calls take less than a
/// millisecond per GPU.
const CLOCK_SAMPLE_INTERVAL: Duration = Duration::from_millis(50);
/// Throttle reasons, named as in `nvidia-smi --query-gpu=clocks_event_reasons.NAME`.
const REASONS: [(ThrottleReasons, &str); 9] = [
    (ThrottleReasons::GPU_IDLE, "gpu_idle"),
    (ThrottleReasons::APPLICATIONS_CLOCKS_SETTING, "applications_clocks_setting"),
    (ThrottleReasons::SW_POWER_CAP, "sw_power_cap"),
    (ThrottleReasons::HW_SLOWDOWN, "hw_slowdown"),
    (ThrottleReasons::SYNC_BOOST, "sync_boost"),
    (ThrottleReasons::SW_THERMAL_SLOWDOWN, "sw_thermal_slowdown"),
    (ThrottleReasons::HW_THERMAL_SLOWDOWN, "hw_thermal_slowdown"),
    (ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN, "hw_power_brake_slowdown"),
    (ThrottleReasons::DISPLAY_CLOCK_SETTING, "display_clock_setting"),
];

/// A sample of one GPU.
#[derive(Clone, Debug)]
pub struct ClockSample {
    pub at: Instant,
    pub sm_mhz: u32,
    pub power_watts: f64,
    /// The reasons why the clock is not higher, under nvidia-smi's names.
    pub throttle_reasons: Vec<&'static str>,
}

/// Samples a set of GPUs until it is dropped.
#[derive(Debug)]
pub struct ClockSampler {
    samples: Receiver<ClockSample>,
    /// The sampling thread ends when this is dropped.
    _running: Sender<()>,
}

impl ClockSampler {
    /// Starts to sample the GPUs with these PCI addresses. Returns `None` if there are no addresses, or if no thread
    /// can be started.
    pub fn start(addresses: Vec<String>) -> Option<Self> {
        if addresses.is_empty() {
            return None;
        }
        let (sender, samples) = channel();
        let (running, ended) = channel();
        let run = move || run(&addresses, &sender, &ended);
        std::thread::Builder::new().name("gpu clocks".into()).spawn(run).ok()?;
        Some(Self { samples, _running: running })
    }

    /// Stops sampling and returns the samples.
    pub fn finish(self) -> Vec<ClockSample> {
        self.samples.try_iter().collect()
    }
}

fn run(addresses: &[String], samples: &Sender<ClockSample>, ended: &Receiver<()>) {
    let Ok(nvml) = Nvml::init() else { return };
    while ended.recv_timeout(CLOCK_SAMPLE_INTERVAL) == Err(RecvTimeoutError::Timeout) {
        // A GPU that cannot be read is left out.
        for sample in addresses.iter().filter_map(|address| sample(&nvml, address).ok()) {
            // If the receiver is gone, the sampler was dropped, which also ends the loop.
            let _ = samples.send(sample);
        }
    }
}

fn sample(nvml: &Nvml, address: &str) -> Result<ClockSample, NvmlError> {
    let device = nvml.device_by_pci_bus_id(address)?;
    Ok(ClockSample {
        at: Instant::now(),
        sm_mhz: device.clock_info(Clock::SM)?,
        power_watts: f64::from(device.power_usage()?) / 1e3,
        throttle_reasons: names(device.current_throttle_reasons()?),
    })
}

fn names(reasons: ThrottleReasons) -> Vec<&'static str> {
    REASONS.iter().filter(|(reason, _)| reasons.contains(*reason)).map(|(_, name)| *name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_throttle_reason_has_its_name() {
        assert_eq!(
            names(ThrottleReasons::SW_POWER_CAP | ThrottleReasons::GPU_IDLE),
            ["gpu_idle", "sw_power_cap"]
        );
        assert_eq!(names(ThrottleReasons::all()).len(), ThrottleReasons::all().iter().count());
    }

    #[test]
    fn without_gpus_there_are_no_samples() {
        assert!(ClockSampler::start(Vec::new()).is_none());
        let sampler = ClockSampler::start(vec!["00000000:FF:1F.0".into()]).unwrap();
        assert!(sampler.finish().is_empty());
    }
}
