//! `--preload`: forked workers behave like spawned ones, and if anything goes wrong, workers start without it.

use std::collections::BTreeSet;

use rustix::process::Signal;
use serde_json::Value;
use xlaunch_tests::{Launch, Output, Process, children, is_alive, requirements, wait_for, xlaunch_path};

xlaunch_harness::tests! {
    needs requirements::python3:
    forked_worker_finds_what_a_spawned_one_does,
    forked_worker_ends_like_a_spawned_one,
    forked_worker_reads_standard_input_of_the_launcher,
    ranks_have_different_random_numbers,
    restarts_fork_from_the_same_process,
    late_import_of_torch_is_preloaded_if_it_can_be,
    workers_start_without_it_if_an_import_fails,
    workers_start_without_it_if_an_import_initialises_cuda,
    workers_start_without_it_if_the_process_is_killed,
    threads_of_modules_are_listed_once,
    stop_during_imports_ends_the_launch,
    killed_launcher_leaves_no_process_of_modules_or_workers;
    needs requirements::python3_without_cgroups:
    restarts_without_cgroups_fork_from_the_same_process;
}

/// A module that records its imports and the importing process.
const MODULE: &str = "
import os
PROCESS = os.getpid()
with open('imports', 'a') as file:
    file.write(f'{PROCESS}\\n')
";

fn launch_with_module(more: &str) -> Launch {
    let launch = Launch::new();
    launch.write("recorded.py", &format!("{MODULE}\n{more}"));
    launch
}

/// Returns the processes in which the module was imported.
fn imports(launch: &Launch) -> Vec<u32> {
    launch.read("imports").lines().map(|line| line.parse().unwrap()).collect()
}

/// Returns the findings of `preload.py` in rank 1 of a launch.
fn dump(launch: &Launch, name: &str, args: &[&str]) -> Value {
    let mut command =
        launch.command(&["--nproc-per-node", "2", "--rdzv-id", "one", "--master-port", "29517"]);
    command.args(args).env("DUMP", launch.path().join(name)).env("BYTES", "\u{e9}");
    let run = Process::spawn(&mut command).wait();
    assert_eq!(run.code, 0, "{}", run.stderr);
    let mut dump: Value = serde_json::from_str(&launch.read(&format!("{name}1"))).unwrap();
    // These differ between any two launches: the mark contains the process id of xlaunch, and DUMP belongs to the test.
    let of_launch = |name: &str| ["XLAUNCH_SCOPE", "DUMP"].contains(&name);
    dump["environment"].as_object_mut().unwrap().retain(|name, _| !of_launch(name));
    let lines = dump["c_environment"].as_array_mut().unwrap();
    lines.retain(|line| !of_launch(line.as_str().unwrap().split('=').next().unwrap()));
    dump
}

fn assert_same_dump(args: &[&str]) {
    let launch = Launch::new();
    std::fs::create_dir(launch.path().join("dir")).unwrap();
    launch.write("dir/preload.py", include_str!("preload.py"));
    launch.write("dir/__init__.py", "");
    let plain = dump(&launch, "plain", args);
    let modules = ["--preload", "json,decimal,random,subprocess,multiprocessing.pool"];
    let forked = dump(&launch, "forked", &[&modules, args].concat());
    assert_eq!(forked["parent_death_signal"], 9);
    assert_eq!(forked["environment"]["RANK"], "1");
    for (name, value) in plain.as_object().unwrap() {
        assert_eq!(&forked[name], value, "{name}, {args:?}");
    }
}

fn forked_worker_finds_what_a_spawned_one_does() {
    assert_same_dump(&["--numa-binding", "node", "dir/preload.py", "--lr", "3", "${local_rank}"]);
    assert_same_dump(&["-m", "dir.preload", "x"]);
    assert_same_dump(&["--run-path", "dir/preload.py", "x"]);
}

/// Returns the end of a launch of a script, without parts that differ between any two launches.
fn end(launch: &Launch, args: &[&str]) -> (i32, String, String) {
    let run = launch.run(&[&["--propagate-exit-code"], args].concat());
    let own = run.stderr.split("xlaunch: the job failed").next().unwrap_or_default().to_owned();
    (run.code, run.stdout, own)
}

fn forked_worker_ends_like_a_spawned_one() {
    let launch = Launch::new();
    for (script, code) in [
        ("print('done')", 0),
        ("import sys; print('half', end=''); sys.exit(3)", 3),
        ("import sys; sys.exit('a message')", 1),
        ("def f():\n    raise ValueError('é')\n\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    f()", 1),
        ("raise KeyboardInterrupt", 130),
        ("x = 1\nx ==== 2", 1),
        ("import atexit; atexit.register(print, 'at exit'); 1 / 0", 1),
        ("import sys; sys.excepthook = lambda *args: print('hook', args[0], args[1]); 1 / 0", 1),
        ("import faulthandler, os; faulthandler.disable(); os.abort()", 134),
        ("import os; os._exit(7)", 7),
        (
            "import threading, time\nthreading.Thread(target=lambda: [time.sleep(0.2), print('last')]).start()",
            0,
        ),
        ("import signal, os\nsignal.signal(2, lambda *_: print('caught'))\nos.kill(os.getpid(), 2)", 0),
    ] {
        launch.write("script.py", script);
        for target in [&["script.py"] as &[&str], &["-m", "script"]] {
            let plain = end(&launch, target);
            assert_eq!(plain.0, code, "{script}: {}", plain.2);
            assert_eq!(end(&launch, &[&["--preload", "json,ctypes"], target].concat()), plain, "{script}");
        }
    }
    assert_eq!(
        end(&launch, &["--preload", "json", "-m", "no_such_module"]),
        end(&launch, &["-m", "no_such_module"])
    );
}

fn forked_worker_reads_standard_input_of_the_launcher() {
    let shell = Launch::with_program("sh");
    shell.write("cat.py", "import sys\nprint('read', sys.stdin.read().strip(), sys.stdin.seekable())");
    shell.write("input", "words");
    let launcher = xlaunch_path().display();
    let read = |options: &str| {
        let script =
            format!("'{launcher}' {options} cat.py < input; echo piped | '{launcher}' {options} cat.py");
        let run = shell.run(&["-c", &script]);
        assert_eq!(run.code, 0, "{}", run.stderr);
        run.stdout
    };
    assert_eq!(read("--preload json"), read(""));
    assert_eq!(read("--preload json"), "read words True\nread piped False\n");
}

fn ranks_have_different_random_numbers() {
    let launch = Launch::new();
    let script = "import random, uuid\nprint(random.random())\nprint(uuid.uuid4())";
    let script = launch.write("script.py", script).display().to_string();
    let run = launch.run(&["--nproc-per-node", "4", "--preload", "random,uuid", &script]);
    let numbers: BTreeSet<&str> = run.stdout.lines().collect();
    assert_eq!(numbers.len(), 8, "{}", run.stdout);
}

/// Writes a script whose rank 1 fails in the first attempt as given by `failure`; the second attempt prints the
/// importing process.
fn failing_once(launch: &Launch, failure: &str) {
    let script = format!(
        "import os, recorded, signal, time
if os.environ['TORCHELASTIC_RESTART_COUNT'] == '1':
    print('second attempt', recorded.PROCESS == os.getpid(), os.environ['RANK'])
elif os.environ['RANK'] == '1':
    {failure}
else:
    time.sleep(1000)
"
    );
    launch.write("script.py", &script);
}

const ONE_RESTART: [&str; 7] =
    ["--nproc-per-node", "2", "--max-restarts", "1", "--preload", "recorded", "script.py"];

fn assert_restarted_from_the_same_process(launch: &Launch, run: &Output) {
    assert_eq!(run.code, 0, "{}", run.stderr);
    let lines: BTreeSet<&str> = run.stdout.lines().collect();
    assert_eq!(lines, BTreeSet::from(["second attempt False 0", "second attempt False 1"]), "{}", run.stderr);
    let imports = imports(launch);
    assert_eq!(imports.len(), 1, "{imports:?}");
    assert!(!is_alive(imports[0]));
}

fn restarts_fork_from_the_same_process() {
    let launch = launch_with_module("");
    failing_once(&launch, "os.kill(os.getpid(), signal.SIGKILL)");
    let run = launch.run(&ONE_RESTART);
    assert_restarted_from_the_same_process(&launch, &run);
    assert!(run.stderr.contains("rank 1: signal 9 (SIGKILL: killed); restarting"), "{}", run.stderr);
}

fn restarts_without_cgroups_fork_from_the_same_process() {
    let launch = Launch::with_program("unshare");
    launch.write("recorded.py", MODULE);
    failing_once(&launch, "os.kill(os.getpid(), signal.SIGKILL)");
    let script = format!("umount -R /sys/fs/cgroup && exec '{}' \"$@\"", xlaunch_path().display());
    let run = launch.run(&[&["--mount", "sh", "-c", &script, "sh"], &ONE_RESTART[..]].concat());
    assert_restarted_from_the_same_process(&launch, &run);
}

fn late_import_of_torch_is_preloaded_if_it_can_be() {
    for (late, module, found) in
        [("", "torch", "True"), ("raise OSError", "torch", "False"), ("", "torch.other", "False")]
    {
        let launch = launch_with_module("");
        std::fs::create_dir(launch.path().join("torch")).unwrap();
        launch.write("torch/__init__.py", "");
        launch.write("torch/other.py", "");
        launch.write("torch/_dynamo.py", late);
        launch.write(
            "script.py",
            "import sys; print('recorded' in sys.modules, 'torch._dynamo' in sys.modules)",
        );
        let modules = format!("{module},recorded");
        let run = launch.run(&["--nproc-per-node", "1", "--preload", &modules, "script.py"]);
        assert_eq!(
            (run.code, run.stdout.as_str()),
            (0, format!("True {found}\n").as_str()),
            "{}",
            run.stderr
        );
    }
}

fn assert_starts_without_it(launch: &Launch, run: &Output, reason: &str) {
    assert_eq!(run.code, 0, "{}", run.stderr);
    let notices = run.stderr.lines().filter(|line| line.starts_with("xlaunch: preloading failed: "));
    let notices: Vec<&str> = notices.collect();
    assert!(matches!(notices[..], [one] if one.contains(reason)), "{}", run.stderr);
    assert!(notices[0].ends_with("; starting workers without it"), "{}", run.stderr);
    assert!(imports(launch).iter().all(|pid| !is_alive(*pid)));
}

fn workers_start_without_it_if_an_import_fails() {
    for (failure, reason) in [
        ("raise OSError('no space')", "`import recorded` failed: OSError: no space"),
        ("print('printed'); raise SystemExit(3)", "`import recorded` failed: SystemExit: 3"),
        ("os.kill(PROCESS, 11)", "the interpreter ended during the imports: signal 11 (SIGSEGV"),
    ] {
        let launch = launch_with_module(failure);
        launch.write("script.py", "print('ran')");
        let run = launch.run(&["--nproc-per-node", "2", "--preload", "json,recorded", "script.py"]);
        assert_starts_without_it(&launch, &run, reason);
        assert_eq!(run.stdout, "ran\nran\n");
        assert_eq!(run.stderr.contains("[preload] printed"), failure.contains("print"), "{}", run.stderr);
    }
}

fn workers_start_without_it_if_an_import_initialises_cuda() {
    let launch = launch_with_module("import torch\ntorch.cuda.init()");
    launch.write(
        "torch.py",
        "class cuda:
    is_initialized = lambda: False
    init = lambda: setattr(cuda, 'is_initialized', lambda: True)
",
    );
    launch.write("script.py", "import recorded; print(recorded.PROCESS == recorded.os.getpid())");
    let run = launch.run(&["--nproc-per-node", "2", "--preload", "torch,recorded", "script.py"]);
    assert_starts_without_it(&launch, &run, "`import recorded` initialised CUDA");
    assert_eq!(run.stdout, "True\nTrue\n");
}

fn workers_start_without_it_if_the_process_is_killed() {
    let launch = launch_with_module("");
    failing_once(&launch, "os.kill(recorded.PROCESS, signal.SIGKILL); os._exit(1)");
    let run = launch.run(&ONE_RESTART);
    assert_starts_without_it(&launch, &run, "the preloading process cannot fork workers");
    assert!(run.stdout.contains("second attempt True 0"), "{}", run.stdout);
    assert_eq!(imports(&launch).len(), 3);
}

fn threads_of_modules_are_listed_once() {
    let threads = "import threading, time
for _ in range(2):
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()";
    let launch = launch_with_module(threads);
    launch.write("script.py", "import threading; print(threading.active_count())");
    let run = launch.run(&["--nproc-per-node", "2", "--preload", "recorded", "script.py"]);
    assert_eq!((run.code, run.stdout.as_str()), (0, "1\n1\n"), "{}", run.stderr);
    assert_eq!(run.stderr.matches("preloading left threads running").count(), 1, "{}", run.stderr);
    assert!(run.stderr.contains(" (2 times)"), "{}", run.stderr);
}

fn stop_during_imports_ends_the_launch() {
    for (signal, code) in [(Signal::TERM, 143), (Signal::INT, 130)] {
        let launch = launch_with_module("import time; time.sleep(1000)");
        launch.write("script.py", "print('ran')");
        let process = launch.spawn(&["--preload", "recorded", "script.py"]);
        let importing = wait_for("the imports", || imports(&launch).first().copied());
        process.signal(signal);
        let run = process.wait();
        assert_eq!((run.code, run.stdout.as_str()), (code, ""), "{}", run.stderr);
        assert!(!is_alive(importing));
    }
}

fn killed_launcher_leaves_no_process_of_modules_or_workers() {
    // A module and the script start processes that hide in sessions of their own.
    let hidden = "
import os, subprocess
subprocess.Popen(['setsid', 'sh', '-c', 'echo $$ > hidden.' + os.environ.get('RANK', 'm') + '; sleep 1000'])
";
    let launch = launch_with_module(hidden);
    let fork = "
if os.fork() == 0:
    os.setsid()
    open('forked.' + os.environ['RANK'], 'w').write(f'{os.getpid()}\\n')";
    launch.write("script.py", &format!("{hidden}{fork}\nimport time\ntime.sleep(1000)"));
    let process = launch.spawn(&["--nproc-per-node", "2", "--preload", "recorded", "script.py"]);
    let names = ["hidden.m", "hidden.0", "hidden.1", "forked.0", "forked.1"];
    let mut started: Vec<u32> =
        names.iter().map(|name| wait_for(name, || launch.read(name).trim().parse().ok())).collect();
    started.extend(children(process.pid()));
    assert!(started.len() >= 8 && started.iter().all(|pid| is_alive(*pid)), "{started:?}");
    process.signal(Signal::KILL);
    process.wait();
    wait_for("the end of all processes", || (!started.iter().any(|pid| is_alive(*pid))).then_some(()));
}
