//! Restricts the environment of training jobs on a node that accepts no commands (`jobs.allow_commands = false`). Pure.
//!
//! Environment variables can make a process run the user's code: the loader, NCCL, CUDA, cuDNN, libibverbs, glibc and
//! Python have dozens of variables that do so, directly or through a file that they name, and each release adds some.
//! So only variables that are known to be harmless reach the job. None of these names a file that is executed or
//! loaded, or a file that names such files.
//!
//! NCCL also reads `~/.nccl.conf`, which the user can write, unless `NCCL_CONF_FILE` names another file. Therefore that
//! variable is set to the operator's file.

/// Variables that reach training jobs, in groups of names separated by spaces. A `*` at the end matches any text.
const ALLOWED: [&str; 5] = [
    // The user and the session. HOME and the cache directories are the user's own in any case; the caches hold code for
    // the GPUs of the job.
    "HOME USER LOGNAME SHELL LANG LANGUAGE LC_* TZ TERM COLORTERM NO_COLOR TMPDIR XDG_CACHE_HOME",
    // xlaunch.
    "XLAUNCH_CACHE XLAUNCH_LOG_FALLBACK XLAUNCH_POOL_DEBUG XLAUNCH_POOL_TRACE XLAUNCH_PROFILE XLAUNCH_ARRAY_JOB \
     XLAUNCH_ARRAY_INDEX RUST_BACKTRACE",
    // Threads and memory of the process, but not OMP_TOOL_LIBRARIES and similar variables.
    "OMP_NUM_THREADS MALLOC_ARENA_MAX",
    // CUDA and its libraries: numbers and switches, but not CUDA_INJECTION64_PATH, CUDA_CACHE_PATH and
    // CUBLAS_LOGDEST_DBG.
    "CUDA_DEVICE_MAX_CONNECTIONS CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING CUDA_CACHE_DISABLE CUDA_CACHE_MAXSIZE \
     CUDA_FORCE_PTX_JIT CUBLAS_WORKSPACE_CONFIG CUBLASLT_WORKSPACE_SIZE NVIDIA_TF32_OVERRIDE CUDNN_LOGERR_DBG \
     CUDNN_LOGINFO_DBG CUDNN_LOGLEVEL_DBG CUDNN_LOGWARN_DBG",
    // NCCL: numbers, switches and names of interfaces and devices, but not NCCL_CONF_FILE, NCCL_*_PLUGIN, and the files
    // of topologies and graphs.
    "NCCL_ALGO NCCL_BUFFSIZE NCCL_CHECK_POINTERS NCCL_COLLNET_ENABLE NCCL_COMM_BLOCKING NCCL_CROSS_NIC \
     NCCL_CTA_POLICY NCCL_CUMEM_ENABLE NCCL_CUMEM_HOST_ENABLE NCCL_DEBUG NCCL_DEBUG_SUBSYS NCCL_DMABUF_ENABLE \
     NCCL_GRAPH_MIXING_SUPPORT NCCL_GRAPH_REGISTER NCCL_IB_ADAPTIVE_ROUTING NCCL_IB_DISABLE NCCL_IB_GID_INDEX \
     NCCL_IB_HCA NCCL_IB_MERGE_NICS NCCL_IB_QPS_PER_CONNECTION NCCL_IB_RETRY_CNT NCCL_IB_SL NCCL_IB_TC \
     NCCL_IB_TIMEOUT NCCL_LAUNCH_MODE NCCL_LOCAL_REGISTER NCCL_MAX_CTAS NCCL_MAX_NCHANNELS NCCL_MIN_CTAS \
     NCCL_MIN_NCHANNELS NCCL_NET_GDR_LEVEL NCCL_NET_GDR_READ NCCL_NSOCKS_PERTHREAD NCCL_NTHREADS NCCL_NVLS_ENABLE \
     NCCL_P2P_DISABLE NCCL_P2P_LEVEL NCCL_PROTO NCCL_PXN_DISABLE NCCL_SHM_DISABLE NCCL_SOCKET_FAMILY \
     NCCL_SOCKET_IFNAME NCCL_SOCKET_NTHREADS",
];

/// Prefixes of variables that configure a job. The user is told if such a variable does not reach the job.
const CONFIGURING: [&str; 11] =
    ["LD_", "NCCL_", "CUDA_", "CUDNN_", "CUBLAS", "NVTX_", "NVIDIA_", "OMP_", "UCX_", "FI_", "XLAUNCH_"];

/// Variable that is set for every training job.
const OPERATORS_NCCL_CONFIGURATION: &[u8] = b"NCCL_CONF_FILE=/etc/nccl.conf";

/// Removes all variables that are not known to be harmless.
pub(crate) fn restrict(environment: &mut Vec<Vec<u8>>) {
    environment.retain(|variable| is_allowed(name(variable)));
    environment.push(OPERATORS_NCCL_CONFIGURATION.to_vec());
}

/// Returns the names of configuring variables that [`restrict`] removes, sorted.
pub(crate) fn withheld(environment: &[Vec<u8>]) -> Vec<String> {
    let names = environment.iter().map(|variable| name(variable)).filter(|name| !is_allowed(name));
    let configuring = names.filter(|name| CONFIGURING.iter().any(|start| name.starts_with(start.as_bytes())));
    let mut names: Vec<_> = configuring.map(|name| String::from_utf8_lossy(name).into_owned()).collect();
    names.sort_unstable();
    names.dedup();
    names
}

fn name(variable: &[u8]) -> &[u8] {
    variable.split(|byte| *byte == b'=').next().unwrap_or_default()
}

fn is_allowed(name: &[u8]) -> bool {
    ALLOWED.iter().flat_map(|group| group.split(' ')).any(|allowed| match allowed.strip_suffix('*') {
        Some(start) => name.starts_with(start.as_bytes()),
        None => name == allowed.as_bytes(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variables(names: &[&str]) -> Vec<Vec<u8>> {
        names.iter().map(|name| format!("{name}=/x").into_bytes()).collect()
    }

    /// Variables that name code to load or run, or files with such names, for the loader, glibc, NCCL, CUDA, cuDNN,
    /// OpenMP, libibverbs, UCX, libfabric, Python, Rust and shells.
    const CODE: [&str; 51] = [
        "LD_PRELOAD",
        "LD_LIBRARY_PATH",
        "LD_AUDIT",
        "GLIBC_TUNABLES",
        "GCONV_PATH",
        "LOCPATH",
        "NLSPATH",
        "HOSTALIASES",
        "RESOLV_HOST_CONF",
        "RES_OPTIONS",
        "NCCL_CONF_FILE",
        "NCCL_NET_PLUGIN",
        "NCCL_TUNER_PLUGIN",
        "NCCL_PROFILER_PLUGIN",
        "NCCL_ENV_PLUGIN",
        "NCCL_GIN_PLUGIN",
        "NCCL_RAS_PLUGIN",
        "NCCL_NET",
        "NCCL_TOPO_FILE",
        "NCCL_GRAPH_FILE",
        "NCCL_DEBUG_FILE",
        "NCCL_NEW_IN_A_LATER_RELEASE",
        "CUDA_INJECTION64_PATH",
        "CUDA_INJECTION32_PATH",
        "CUDA_CACHE_PATH",
        "CUDA_HOME",
        "CUDA_MPS_PIPE_DIRECTORY",
        "NVTX_INJECTION64_PATH",
        "CUBLAS_LOGDEST_DBG",
        "CUDNN_LOGDEST_DBG",
        "CUDNN_LIB_CONFIG",
        "OMP_TOOL_LIBRARIES",
        "RDMAV_DRIVERS",
        "IBV_DRIVERS",
        "UCX_MODULE_DIR",
        "FI_PROVIDER_PATH",
        "PYTHONPATH",
        "PYTHONHOME",
        "PYTHONSTARTUP",
        "PYTHON_EXEC",
        "VIRTUAL_ENV",
        "PATH",
        "BASH_ENV",
        "ENV",
        "XLAUNCH_WORKER_PROGRAM",
        "XLAUNCH_NCCL",
        "XLAUNCH_CUDNN",
        "XLAUNCH_NVRTC",
        "XLAUNCH_CUBLASLT",
        "XLAUNCH_FAIL",
        "lc_all",
    ];

    #[test]
    fn variables_that_can_run_code_do_not_reach_a_training_job() {
        let mut environment = variables(&CODE);
        // Variables without a value or with an empty name are not harmless either.
        environment.extend([b"LD_PRELOAD".to_vec(), b"=x".to_vec(), Vec::new()]);
        restrict(&mut environment);
        assert_eq!(environment, [OPERATORS_NCCL_CONFIGURATION.to_vec()]);
    }

    #[test]
    fn harmless_variables_reach_a_training_job() {
        let harmless =
            ["HOME", "LC_ALL", "NCCL_DEBUG", "NCCL_IB_HCA", "CUDA_LAUNCH_BLOCKING", "XLAUNCH_CACHE"];
        let mut environment = variables(&harmless);
        restrict(&mut environment);
        assert_eq!(environment[..harmless.len()], variables(&harmless));
    }

    #[test]
    fn variables_that_were_set_to_configure_the_job_are_named() {
        let environment = variables(&["NCCL_TOPO_FILE", "NCCL_DEBUG", "EDITOR", "LD_PRELOAD", "LD_PRELOAD"]);
        assert_eq!(withheld(&environment), ["LD_PRELOAD", "NCCL_TOPO_FILE"]);
    }
}
