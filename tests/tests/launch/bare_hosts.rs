//! Hosts that lack something: processes, descriptors, temporary directories, system calls, or an activated environment.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use rustix::process::Signal;
use xlaunch_tests::{
    Launch, LimitedCgroup, Output, Process, requirements, send_signal, wait_for, xlaunch_path,
};

xlaunch_harness::tests! {
    launch_with_another_temporary_directory_is_named_with_its_path,
    open_file_limit_is_named_without_a_panic,
    address_space_limit_is_named_without_a_panic,
    launch_runs_with_an_empty_or_missing_temporary_directory,
    deleted_run_directory_is_created_again_and_the_job_restarts,
    python_beside_xlaunch_in_a_virtual_environment_runs_scripts;
    needs requirements::python3:
    refused_system_call_is_named_with_the_kernel_that_has_it,
    directories_archives_and_scripts_without_extension_are_launched,
    script_from_a_pipe_runs_on_every_rank_and_after_a_restart;
    needs requirements::task_cgroup:
    task_limit_of_the_cgroup_is_named_without_a_panic;
    needs requirements::root:
    process_limit_is_named_without_a_panic,
    worker_of_another_user_that_cannot_be_killed_is_named_and_left,
    missing_proc_or_null_device_is_named;
}

/// User ids that no account of a test machine has, so that limits count no other processes.
const UNUSED_UIDS: u32 = 61_000;

/// Installs a seccomp filter that makes a system call fail with an error number, and runs a program. Arguments: NUMBER
/// ERRNO PROGRAM.
const REFUSE_CALL: &str = "\
import ctypes, os, struct, sys
number, error = int(sys.argv[1]), int(sys.argv[2])
libc = ctypes.CDLL(None, use_errno=True)
code = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (6, 0, 0, 0x50000 | error), (6, 0, 0, 0x7fff0000)]
code = ctypes.create_string_buffer(b''.join(struct.pack('HBBI', *instruction) for instruction in code))
class Program(ctypes.Structure):
    _fields_ = [('length', ctypes.c_ushort), ('code', ctypes.c_void_p)]
program = Program(4, ctypes.addressof(code))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0
os.execvp(sys.argv[3], sys.argv[3:])
";

/// Checks that a launch was refused for lack of something, with these words and in a single line.
fn assert_refused(run: &Output, words: &str) {
    let Output { code, stderr, .. } = run;
    assert!(*code != 0 && stderr.contains(words), "exit {code}: {stderr}");
    assert!(!stderr.contains("panicked") && !stderr.contains("internal error in thread"), "{stderr}");
}

/// Returns a launch as another user, whose id is among the first arguments.
fn launch_of_any_user() -> Launch {
    let launch = Launch::with_program("setpriv");
    std::fs::set_permissions(launch.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::set_permissions(launch.runtime_dir(), std::fs::Permissions::from_mode(0o777)).unwrap();
    launch
}

fn process_limit_is_named_without_a_panic() {
    let launch = launch_of_any_user();
    let uid = (UNUSED_UIDS + std::process::id() % 4000).to_string();
    let run = |limit: u32, words: &[&str]| {
        let limit = format!("--nproc={limit}");
        let user = ["--reuid", &uid, "--regid", &uid, "--clear-groups", "prlimit", &limit];
        launch.run(&[&user[..], &[xlaunch_path().to_str().unwrap()], words].concat())
    };
    for limit in [1, 2, 3, 4, 5, 6, 8] {
        assert_refused(&run(limit, &["--", "true"]), "ulimit -u");
    }
    // Subcommands that only query start no thread.
    let status = run(1, &["status"]);
    assert_refused(&status, "no launch of yours is running");
    assert_eq!(run(1, &["env"]).code, 0);
}

fn worker_of_another_user_that_cannot_be_killed_is_named_and_left() {
    let launch = launch_of_any_user();
    let become_root = launch.path().join("become_root");
    let path = std::env::var_os("PATH").unwrap();
    let programs = std::env::split_paths(&path).map(|dir| dir.join("setpriv"));
    let setpriv = programs.into_iter().find(|file| file.exists()).unwrap();
    std::fs::copy(setpriv, &become_root).unwrap();
    std::fs::set_permissions(&become_root, std::fs::Permissions::from_mode(0o4755)).unwrap();
    let (uid, xlaunch) = (UNUSED_UIDS.to_string(), xlaunch_path().to_str().unwrap());
    let user = ["--reuid", &uid, "--regid", &uid, "--clear-groups", xlaunch, "--shutdown-timeout", "1", "--"];
    let worker = ["./become_root", "--reuid", "0", "--regid", "0", "--clear-groups", "sh", "-c"];
    let run = launch.spawn(&[&user[..], &worker, &["echo worker $$; exec sleep 1000"]].concat());
    let pid = wait_for("the worker", || run.stdout().strip_prefix("worker ")?.trim().parse::<u32>().ok());
    run.signal(Signal::TERM);
    let run = run.wait();
    send_signal(pid, Signal::KILL);
    let left = format!("process {pid} (sleep) runs as another user and cannot be killed: it is left running");
    assert!(run.code == 143 && run.stderr.contains(&left), "{}: {}", run.code, run.stderr);
}

fn task_limit_of_the_cgroup_is_named_without_a_panic() {
    let launch = Launch::with_program("sh");
    let run = |limit: u64, words: &[&str]| {
        let cgroup = LimitedCgroup::with_tasks("xlaunch-test-tasks", limit).unwrap();
        let enter = format!("echo $$ > {} && exec \"$@\"", cgroup.procs_file().display());
        launch.run(&[&["-c", &enter, "sh", xlaunch_path().to_str().unwrap()], words].concat())
    };
    for limit in [1, 2, 3, 4, 5, 6, 8, 10] {
        let refused = run(limit, &["--nproc", "2", "--", "true"]);
        assert_refused(&refused, "pids.max in /sys/fs/cgroup/");
        assert!(refused.stderr.contains(&format!(" is {limit}, ")), "{limit}: {}", refused.stderr);
    }
    // Subcommands that only query start no thread.
    assert_refused(&run(1, &["status"]), "no launch of yours is running");
    assert_eq!(run(1, &["env"]).code, 0);
}

fn address_space_limit_is_named_without_a_panic() {
    let launch = Launch::with_program("sh");
    let mut named = 0;
    // In KiB: from a limit below the size of the program to the first one that suffices.
    for limit in (24 << 10..1 << 20).step_by(2 << 10) {
        let enter = format!("ulimit -v {limit} && exec \"$@\"");
        let run = launch.run(&["-c", &enter, "sh", xlaunch_path().to_str().unwrap(), "--", "true"]);
        // Libraries may also run out of memory in ways of their own.
        if run.stderr.contains("Resource temporarily unavailable") {
            assert_refused(&run, "RLIMIT_AS is ");
            assert!(run.stderr.contains("ulimit -v"), "{}", run.stderr);
            named += 1;
        }
        if run.code == 0 {
            break;
        }
    }
    assert!(named > 0, "no limit has stopped a thread");
}

fn open_file_limit_is_named_without_a_panic() {
    let launch = Launch::with_program("prlimit");
    for limit in [4, 6, 8, 10, 11, 12, 13, 14, 16, 18, 20] {
        let limit = format!("--nofile={limit}");
        let run = launch.run(&[&limit, xlaunch_path().to_str().unwrap(), "--", "true"]);
        assert_refused(&run, "ulimit -Hn");
    }
}

fn launch_runs_with_an_empty_or_missing_temporary_directory() {
    let launch = Launch::new();
    for temporary in ["", "/nosuch"] {
        let mut command = launch.command(&["--", "true"]);
        command.env("TMPDIR", temporary).env_remove("XDG_RUNTIME_DIR").env_remove("HOME");
        let run = Process::spawn(&mut command).wait();
        assert_eq!(run.code, 0, "TMPDIR={temporary}: {}", run.stderr);
    }
}

fn deleted_run_directory_is_created_again_and_the_job_restarts() {
    let launch = Launch::new();
    // A rank of the first attempt needs the directories for its heartbeat and error file; the second attempt succeeds.
    let script = "n=$TORCHELASTIC_RESTART_COUNT; echo up $n
        until [ -e go$n ]; do sleep 0.02; done
        until echo 7 2>/dev/null >$XLAUNCH_HEARTBEAT; do sleep 0.02; done
        until echo '{}' 2>/dev/null >$TORCHELASTIC_ERROR_FILE; do sleep 0.02; done
        [ $n = 1 ]";
    let logs = launch.runtime_dir().join("logs");
    let options = ["--max-restarts", "1", "--log-dir", logs.to_str().unwrap(), "-t", "1"];
    let run = launch.spawn_shell(&options, 1, script);
    for attempt in 0..2 {
        wait_for("the attempt", || run.stdout().contains(&format!("up {attempt}")).then_some(()));
        for entry in std::fs::read_dir(launch.runtime_dir()).unwrap() {
            // Moved away first, because the launch may create it again at any time.
            let deleted = launch.path().join("deleted");
            std::fs::rename(entry.unwrap().path(), &deleted).unwrap();
            std::fs::remove_dir_all(deleted).unwrap();
        }
        // The socket exists again once a query is answered.
        wait_for("an answer", || (launch.run(&["status"]).code == 0).then_some(()));
        launch.write(&format!("go{attempt}"), "");
    }
    let run = run.wait();
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert!(run.stderr.contains("restarting (1 of 1)"), "{}", run.stderr);
}

fn python_beside_xlaunch_in_a_virtual_environment_runs_scripts() {
    let launch = Launch::new();
    let bin = launch.path().join("venv/bin");
    std::fs::create_dir_all(&bin).unwrap();
    launch.write("venv/pyvenv.cfg", "");
    let python = launch.write("venv/bin/python3", "#!/bin/sh\necho \"python of the environment: $*\"\n");
    std::fs::set_permissions(python, std::fs::Permissions::from_mode(0o755)).unwrap();
    let xlaunch = bin.join("xlaunch");
    std::os::unix::fs::symlink(xlaunch_path(), &xlaunch).unwrap();
    launch.write("train.py", "");
    let run = |program: &Path, path: &str| {
        let mut command = Command::new(program);
        let environment = launch.command(&["train.py"]);
        command.args(environment.get_args()).current_dir(launch.path()).env_clear().env("PATH", path);
        command.env("XDG_RUNTIME_DIR", launch.runtime_dir());
        Process::spawn(&mut command).wait()
    };
    let expected = "python of the environment: -u train.py\n";
    // cron and systemd start it like this.
    assert_eq!(run(&xlaunch, "/usr/bin:/bin").stdout, expected);
    let in_path = format!("/usr/bin:/bin:{}", bin.display());
    assert_eq!(run(Path::new("xlaunch"), &in_path).stdout, expected);
}

fn refused_system_call_is_named_with_the_kernel_that_has_it() {
    let launch = Launch::with_program("python3");
    // pidfd_open has this number on every architecture. Old kernels lack it, and some seccomp profiles refuse it.
    for errno in ["1", "38"] {
        let program = xlaunch_path().to_str().unwrap();
        let run = launch.run(&["-c", REFUSE_CALL, "434", errno, program, "--", "true"]);
        assert_refused(&run, "pidfd_open: ");
        assert!(run.stderr.contains("Linux 5.4 or later"), "{}", run.stderr);
    }
}

fn missing_proc_or_null_device_is_named() {
    let launch = Launch::with_program("unshare");
    let program = xlaunch_path().to_str().unwrap();
    for (script, named) in [
        ("umount -l /proc && exec \"$@\"", "mount /proc"),
        ("mount -t tmpfs none /dev && exec \"$@\"", "create /dev/null"),
    ] {
        let run = launch.run(&["--mount", "sh", "-c", script, "sh", program, "--", "true"]);
        assert_refused(&run, named);
    }
}

fn directories_archives_and_scripts_without_extension_are_launched() {
    let launch = Launch::new();
    std::fs::create_dir(launch.path().join("package")).unwrap();
    launch.write("package/__main__.py", "import sys\nprint('package', sys.argv[1])\n");
    launch.write("train", "import sys\nprint('script', sys.argv[1])\n");
    let mut zip = Command::new("python3");
    zip.args(["-m", "zipapp", "package", "-o", "app.pyz"]).current_dir(launch.path());
    assert!(zip.status().unwrap().success());
    for (target, expected) in
        [("package", "package 5\n"), ("app.pyz", "package 5\n"), ("./train", "script 5\n")]
    {
        let run = launch.run(&[target, "5"]);
        assert_eq!((run.code, run.stdout.as_str()), (0, expected), "{target}: {}", run.stderr);
    }
}

fn script_from_a_pipe_runs_on_every_rank_and_after_a_restart() {
    // Imports a module of the working directory. The first attempt fails when both ranks have printed.
    const SCRIPT: &str = "\
import os, sys, time, helper
attempt, rank = os.environ['TORCHELASTIC_RESTART_COUNT'], int(os.environ['RANK'])
print(helper.WORD, attempt, rank)
file = lambda rank: sys.argv[1] + attempt + str(rank)
open(file(rank), 'w')
while not os.path.exists(file(1 - rank)):
    time.sleep(0.01)
sys.exit(attempt == '0')
";
    let launch = Launch::with_program("bash");
    launch.write("helper.py", "WORD = 'imported'\n");
    launch.write("script", SCRIPT);
    let xlaunch = xlaunch_path().display();
    for target in ["- a < script", "/dev/stdin b < script", "- c < <(cat script)", "<(cat script) d"] {
        let run = launch.run(&["-c", &format!("{xlaunch} --nproc 2 --max-restarts 1 {target}")]);
        assert_eq!(run.code, 0, "{target}: {}", run.stderr);
        for line in ["imported 0 0\n", "imported 0 1\n", "imported 1 0\n", "imported 1 1\n"] {
            assert_eq!(run.stdout.matches(line).count(), 1, "{target}: {}", run.stdout);
        }
    }
    let run = launch.run(&["-c", &format!("{xlaunch} - < /dev/null")]);
    assert_eq!((run.code, run.stderr.as_str()), (2, "error: -: the script is empty\n"));
}

fn launch_with_another_temporary_directory_is_named_with_its_path() {
    let launch = Launch::new();
    let running = launch.spawn(&["--", "sh", "-c", "echo ready; exec sleep 1000"]);
    wait_for("the worker", || running.stdout().contains("ready").then_some(()));
    let query = |args: &[&str]| {
        let (mut command, other) = (launch.command(args), launch.path());
        Process::spawn(command.env("XDG_RUNTIME_DIR", other).env("TMPDIR", other)).wait()
    };
    // Other tests run launches as well, some of them in `/tmp`, where every query looks.
    let path = launch.runtime_dir().display().to_string();
    let entry = wait_for("the path of the launch", || {
        let refused = query(&["status"]).stderr;
        let mut named = refused.split('`').filter_map(|quoted| quoted.strip_prefix("xlaunch status "));
        named.find(|entry| entry.starts_with(&path)).map(str::to_owned)
    });
    let stopped = query(&["stop", "--wait", &entry]);
    assert_eq!(stopped.code, 0, "{}", stopped.stderr);
}
