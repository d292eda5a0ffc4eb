//! The devices of this node, and how workers are placed on them.

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::job::{Device, JobSpec, Precision, WireDtype};

use xlaunch_spec::refusal::Refusal;

/// The devices of a job's workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Number of workers on this node.
    pub workers: u32,
    /// True if each worker has a GPU of its own; otherwise all workers use the CPU.
    pub cuda: bool,
    /// `CUDA_VISIBLE_DEVICES` for the workers, if the configuration chooses devices.
    pub visible: Option<String>,
    /// CPU threads per worker.
    pub threads: usize,
}

/// The resources of this node.
#[derive(Clone, Debug)]
pub struct Node {
    /// Number of GPUs that this process may use, or the reason why they cannot be counted.
    pub gpus: Result<u32, String>,
    /// Number of cores that this process may use.
    pub cores: usize,
}

pub fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

impl Node {
    /// Inspects this node. NVML counts the GPUs; `CUDA_VISIBLE_DEVICES` limits them.
    pub fn inspect() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
        Self { gpus: count_gpus().map(|present| visible_gpus(present, visible.as_deref())), cores }
    }
}

fn count_gpus() -> Result<u32, String> {
    let nvml = Nvml::init().map_err(|error| nvml_problem(&error))?;
    nvml.device_count().map_err(|error| nvml_problem(&error))
}

/// Describes why NVML failed. If its library cannot be loaded, this is the message of the dynamic linker, which names
/// the file.
pub fn nvml_problem(error: &NvmlError) -> String {
    match error {
        NvmlError::LibloadingError(reason) => format!("NVML: {reason}"),
        other => format!("NVML: {other}"),
    }
}

/// Memory of the GPU that has the least, in bytes; `None` without NVML.
pub fn gpu_memory() -> Option<u64> {
    let nvml = Nvml::init().ok()?;
    let totals = (0..nvml.device_count().ok()?).map(|index| nvml.device_by_index(index)?.memory_info());
    let totals: Vec<_> = totals.collect::<Result<_, NvmlError>>().ok()?;
    totals.into_iter().map(|memory| memory.total).min()
}

/// PCI addresses of the visible GPUs; empty without NVML. The order is CUDA's if all GPUs are of the same model.
pub fn gpu_addresses() -> Vec<String> {
    addresses_among(std::env::var("CUDA_VISIBLE_DEVICES").ok().as_deref())
}

/// PCI addresses of the workers' GPUs, indexed by local rank; empty without GPUs or NVML.
pub fn worker_gpu_addresses(placement: &Placement) -> Vec<String> {
    if !placement.cuda {
        return Vec::new();
    }
    let mut addresses = match &placement.visible {
        Some(visible) => addresses_among(Some(visible)),
        None => gpu_addresses(),
    };
    addresses.truncate(placement.workers as usize);
    addresses
}

fn addresses_among(visible: Option<&str>) -> Vec<String> {
    let Ok(nvml) = Nvml::init() else { return Vec::new() };
    let gpus = (0..nvml.device_count().unwrap_or(0)).map(|index| {
        let device = nvml.device_by_index(index)?;
        Ok((device.uuid()?, device.pci_info()?.bus_id))
    });
    let gpus: Vec<_> = gpus.collect::<Result<_, NvmlError>>().unwrap_or_default();
    visible_addresses(&gpus, visible)
}

/// Selects the addresses of visible GPUs from pairs of UUID and address. `visible` is `CUDA_VISIBLE_DEVICES`, which
/// names GPUs by index or by a prefix of the UUID.
pub fn visible_addresses(gpus: &[(String, String)], visible: Option<&str>) -> Vec<String> {
    let Some(visible) = visible else { return gpus.iter().map(|(_, address)| address.clone()).collect() };
    let named = |entry: &str| match entry.parse::<usize>() {
        Ok(index) => gpus.get(index),
        Err(_) => gpus.iter().find(|(uuid, _)| !entry.is_empty() && uuid.starts_with(entry)),
    };
    visible.split(',').map_while(|entry| named(entry.trim()).map(|(_, address)| address.clone())).collect()
}

/// Identifies the platform for performance comparisons, in addition to the device's name: the GPU driver version, or
/// the CPU model.
pub fn platform(cuda: bool) -> String {
    let driver = || Nvml::init().and_then(|nvml| nvml.sys_driver_version());
    if cuda {
        return driver().map_or_else(|_| "unknown driver".into(), |version| format!("driver {version}"));
    }
    let cpus = fs_err::read_to_string("/proc/cpuinfo").unwrap_or_default();
    cpu_model(&cpus).unwrap_or_else(|| "unknown CPU".into())
}

/// Returns the model of the first CPU in `/proc/cpuinfo`. Arm processors have numbers in place of a name.
fn cpu_model(cpus: &str) -> Option<String> {
    let value = |key: &str| {
        let mut fields = cpus.lines().filter_map(|line| line.split_once(':'));
        fields.find(|(name, _)| name.trim() == key).map(|(_, value)| value.trim())
    };
    if let Some(name) = value("model name") {
        return Some(name.to_owned());
    }
    Some(format!("Arm CPU, implementer {}, part {}", value("CPU implementer")?, value("CPU part")?))
}

/// Number of GPUs that `CUDA_VISIBLE_DEVICES` leaves visible. CUDA ignores everything from the first invalid entry on,
/// so -1 and an empty list mean no GPU.
fn visible_gpus(present: u32, visible: Option<&str>) -> u32 {
    let Some(visible) = visible else { return present };
    let known = visible.split(',').map(str::trim).take_while(|entry| match entry.parse::<i64>() {
        Ok(index) => (0..i64::from(present)).contains(&index),
        Err(_) => !entry.is_empty(),
    });
    u32::try_from(known.count()).unwrap_or(present).min(present)
}

/// Chooses the devices and the number of workers of a job on a node.
///
/// # Errors
/// The node lacks the devices that the job asks for.
pub fn place(spec: &JobSpec, node: &Node) -> Result<Placement, Refusal> {
    let refuse = |message: String| Err(Refusal::new(ExitCode::Usage, message));
    let chosen = u32::try_from(spec.launch.devices.len()).unwrap_or(u32::MAX);
    let gpus = match &node.gpus {
        Ok(0) | Err(_) => 0,
        Ok(present) if chosen == 0 => *present,
        Ok(_) => chosen,
    };
    if spec.engine.device == Device::Cuda && gpus == 0 {
        let reason = node.gpus.as_ref().err().map_or("no GPU is visible", String::as_str);
        return refuse(format!(
            "engine.device is \"cuda\", but no GPU was found: {reason}; \"auto\" and \"cpu\" train without a GPU"
        ));
    }
    let cuda = spec.engine.device != Device::Cpu && gpus > 0;
    let workers = spec.launch.nproc.unwrap_or(if cuda { gpus } else { 1 });
    if cuda && workers > gpus {
        return refuse(format!(
            "{workers} workers requested, but only {gpus} GPU{} present: each worker needs its own",
            if gpus == 1 { " is" } else { "s are" }
        ));
    }
    check_device(spec, cuda)?;
    let visible = (cuda && chosen > 0).then(|| spec.launch.devices.join(","));
    let threads = (node.cores / workers.max(1) as usize).max(1);
    Ok(Placement { workers, cuda, visible, threads })
}

/// Checks that the device kind supports the job's precision and gradient type.
///
/// # Errors
/// The configured type is not supported on this kind of device.
pub fn check_device(spec: &JobSpec, cuda: bool) -> Result<(), Refusal> {
    let refuse = |message: String| Err(Refusal::new(ExitCode::Usage, message));
    if !cuda && spec.engine.precision.is_some_and(|precision| precision != Precision::Fp32) {
        return refuse("engine.precision: only \"fp32\" is supported without a GPU".into());
    }
    if !cuda && spec.comm.dtype == WireDtype::Bf16 {
        let why = "bf16 gradients need bf16 activations, and the CPU back end supports fp32 only";
        return refuse(format!("comm.dtype: {why}; use \"auto\" or \"fp32\" without a GPU"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(gpus: Result<u32, String>) -> Node {
        Node { gpus, cores: 8 }
    }

    fn spec(device: Device, nproc: Option<u32>) -> JobSpec {
        let mut spec = JobSpec::default();
        spec.engine.device = device;
        spec.launch.nproc = nproc;
        spec
    }

    #[test]
    fn auto_uses_all_gpus_or_one_cpu_worker() {
        let placed = place(&spec(Device::Auto, None), &node(Ok(4))).unwrap();
        assert_eq!((placed.workers, placed.cuda), (4, true));
        let placed = place(&spec(Device::Auto, None), &node(Err("no NVML".into()))).unwrap();
        assert_eq!((placed.workers, placed.cuda, placed.threads), (1, false, 8));
        let placed = place(&spec(Device::Cpu, Some(3)), &node(Ok(2))).unwrap();
        assert_eq!((placed.workers, placed.cuda, placed.threads), (3, false, 2));
    }

    #[test]
    fn cpu_is_identified_by_name_or_numbers() {
        let intel =
            "processor\t: 0\nmodel\t\t: 143\nmodel name\t: Intel(R) Xeon(R) 8480C\nmodel name\t: other\n";
        assert_eq!(cpu_model(intel).as_deref(), Some("Intel(R) Xeon(R) 8480C"));
        let grace = "processor\t: 0\nBogoMIPS\t: 2000.00\nCPU implementer\t: 0x41\nCPU architecture: 8\n\
            CPU variant\t: 0x0\nCPU part\t: 0xd4f\nCPU revision\t: 0\n";
        assert_eq!(cpu_model(grace).as_deref(), Some("Arm CPU, implementer 0x41, part 0xd4f"));
        assert_eq!(cpu_model(""), None);
    }

    #[test]
    fn too_many_workers_and_missing_gpus_are_refused() {
        let refusal = place(&spec(Device::Auto, Some(3)), &node(Ok(2))).unwrap_err();
        assert!(refusal.exit == ExitCode::Usage && refusal.message.contains("3 workers"), "{refusal:?}");
        let refusal = place(&spec(Device::Cuda, None), &node(Err("NVML missing".into()))).unwrap_err();
        assert!(refusal.message.contains("NVML missing"), "{refusal:?}");
    }

    #[test]
    fn bf16_gradients_are_refused_without_a_gpu() {
        let mut spec = spec(Device::Auto, None);
        spec.comm.dtype = WireDtype::Bf16;
        let refusal = place(&spec, &node(Ok(0))).unwrap_err();
        assert!(refusal.exit == ExitCode::Usage && refusal.message.contains("comm.dtype"), "{refusal:?}");
        assert!(place(&spec, &node(Ok(1))).is_ok());
    }

    #[test]
    fn missing_nvml_is_reported_with_the_dynamic_linkers_message() {
        let path = "/nowhere/libnvidia-ml.so.1";
        let error = Nvml::builder().lib_path(path.as_ref()).init().map(drop).unwrap_err();
        let problem = nvml_problem(&error);
        assert!(problem.starts_with(&format!("NVML: {path}: ")), "{problem}");
    }

    #[test]
    fn visible_devices_are_counted_like_cuda_does() {
        for (visible, count) in [("0,2", 2), ("", 0), ("-1", 0), ("1,9,0", 1), ("GPU-a,GPU-b", 2)] {
            assert_eq!(visible_gpus(4, Some(visible)), count, "{visible:?}");
        }
        assert_eq!(visible_gpus(4, None), 4);
    }
    #[test]
    fn addresses_follow_the_order_of_visible_devices() {
        let gpus: Vec<_> = ["a", "b", "c"].map(|gpu| (format!("GPU-{gpu}"), format!("pci-{gpu}"))).into();
        for (visible, addresses) in [
            (None, "pci-a pci-b pci-c"),
            (Some("2, 0"), "pci-c pci-a"),
            (Some("GPU-b,7,0"), "pci-b"),
            (Some(""), ""),
            (Some("-1"), ""),
        ] {
            assert_eq!(visible_addresses(&gpus, visible).join(" "), addresses, "{visible:?}");
        }
    }
}
