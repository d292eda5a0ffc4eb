//! Commands of any kind under torchrun's contract: arguments, environment, output, exit codes, failures and restarts.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixDatagram;

use rustix::process::Signal;
use serde_json::Value;
use xlaunch_tests::{Launch, Process, is_alive, requirements, sorted_lines, wait_for, xlaunch_path};

xlaunch_harness::tests! {
    help_is_a_subcommand_too,
    output_of_every_rank_is_passed_through,
    every_line_is_written_at_once_as_other_programs_may_write_between_two_writes,
    worker_failure_stops_group_and_reports_stderr_tail,
    propagate_exit_code_exits_with_code_of_root_cause,
    all_exit_codes_are_reported_and_propagated,
    fatal_signals_are_reported_by_name,
    stdin_is_passed_to_rank_0_only,
    stall_timeout_reports_idle_rank_but_not_computing_rank,
    local_rank_placeholder_in_arguments_is_substituted,
    worker_that_ignores_sigterm_is_killed_after_shutdown_timeout,
    virtual_local_rank_sees_only_its_gpu,
    restart_increments_count_and_changes_port,
    final_exit_code_stops_restarts,
    log_dir_has_layout_of_torchrun,
    redirected_output_is_kept_without_a_log_dir,
    flags_that_only_several_nodes_use_are_named_on_one_node,
    unsupported_variables_of_torchrun_are_named,
    launches_at_the_same_time_have_different_run_ids,
    launchers_own_error_file_has_the_first_failure_or_the_signal,
    unsupported_options_are_refused_by_name,
    fifty_concurrent_launches_have_distinct_ports,
    worker_that_closes_its_output_or_calls_exec_is_waited_for,
    status_and_stop_work_for_commands;
    needs requirements::python3:
    script_arguments_are_passed_unchanged,
    invoked_as_torchrun_behaves_as_torchrun,
    program_that_cannot_start_is_named;
}

fn output_of_every_rank_is_passed_through() {
    let run = Launch::new().run_shell(&[], 4, "echo rank $RANK of $WORLD_SIZE; echo oops $LOCAL_RANK >&2");
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert_eq!(sorted_lines(&run.stdout), ["rank 0 of 4", "rank 1 of 4", "rank 2 of 4", "rank 3 of 4"]);
    assert!((0..4).all(|rank| run.stderr.contains(&format!("oops {rank}\n"))), "{}", run.stderr);
}

fn every_line_is_written_at_once_as_other_programs_may_write_between_two_writes() {
    let launch = Launch::new();
    // A datagram socket keeps the boundaries of writes.
    let (ours, theirs) = UnixDatagram::pair().unwrap();
    let end = || OwnedFd::from(theirs.try_clone().unwrap());
    let script = "echo from $RANK; exit $((1 - TORCHELASTIC_RESTART_COUNT))";
    let refused = launch.command(&["--nproc=2"]).stdout(end()).stderr(end()).status().unwrap();
    assert_eq!(refused.code(), Some(2));
    let mut command = launch.command(&["--max-restarts=1", "--", "sh", "-c", script]);
    let launched = command.stdout(end()).stderr(end()).status().unwrap();
    assert_eq!(launched.code(), Some(0));
    drop((command, theirs));
    ours.set_nonblocking(true).unwrap();
    let mut buffer = [0; 65536];
    let mut text = String::new();
    while let Ok(count @ 1..) = ours.recv(&mut buffer) {
        let written = String::from_utf8_lossy(&buffer[..count]);
        assert!(written.ends_with('\n'), "{written:?} after {text}");
        text.push_str(&written);
    }
    assert_eq!(text.matches("from 0\n").count(), 2, "{text}");
    assert!(text.contains("error: ") && text.contains("restarting (1 of 1)"), "{text}");
}

fn script_arguments_are_passed_unchanged() {
    let launch = Launch::new();
    launch.write("args.py", "import sys\nprint(sys.argv[1:])\n");
    let run = launch.run(&["--nproc", "1", "args.py", "--nproc", "7", "--d", "-m", "--", "x y"]);
    assert_eq!(run.stdout.trim(), "['--nproc', '7', '--d', '-m', '--', 'x y']", "{}", run.stderr);
}

fn invoked_as_torchrun_behaves_as_torchrun() {
    let launch = Launch::new();
    let link = launch.path().join("torchrun");
    symlink(xlaunch_path(), &link).unwrap();
    // As an argument of xlaunch, this name would be its subcommand.
    let script = launch.write("status", "print('a script with the name of a subcommand')\n");
    let run = Launch::with_program(&link).run(&["--standalone", script.to_str().unwrap()]);
    assert_eq!(run.stdout.trim(), "a script with the name of a subcommand", "{}", run.stderr);
}

fn worker_failure_stops_group_and_reports_stderr_tail() {
    let script = "[ $RANK = 1 ] || exec sleep 1000; echo the disk is on fire >&2; exit 7";
    let run = Launch::new().run_shell(&[], 3, script);
    assert_eq!(run.code, 1, "{}", run.stderr);
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    for words in ["rank 1", host.as_str(), "exit code 7", "on fire"] {
        assert!(run.root_cause().contains(words), "{words} in {}", run.stderr);
    }
    for words in ["rank 0", "rank 2", "SIGTERM"] {
        assert!(run.consequences().contains(words), "{words} in {}", run.stderr);
    }
}

fn propagate_exit_code_exits_with_code_of_root_cause() {
    for (script, code) in [("exit 85", 85), ("exit 255", 255), ("kill -SEGV $$", 139), ("kill -KILL $$", 137)]
    {
        let run = Launch::new().run_shell(&["--propagate-exit-code"], 2, script);
        assert_eq!(run.code, code, "{script}: {}", run.stderr);
        assert_eq!(Launch::new().run_shell(&[], 1, script).code, 1, "{script}");
    }
}

fn all_exit_codes_are_reported_and_propagated() {
    let launch = Launch::new();
    for code in 0..=255 {
        let run = launch.run_shell(&["--propagate-exit-code"], 1, &format!("exit {code}"));
        assert_eq!(run.code, code, "{}", run.stderr);
        assert_eq!(run.reports_exit_code(code), code != 0, "{code}: {}", run.stderr);
    }
}

fn fatal_signals_are_reported_by_name() {
    const NAMES: [&str; 24] = [
        "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE",
        "ALRM", "TERM", "STKFLT", "XCPU", "XFSZ", "VTALRM", "PROF", "IO", "PWR", "SYS", "RTMIN+3",
    ];
    const NUMBERS: [i32; 24] =
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 24, 25, 26, 27, 29, 30, 31, 37];
    let launch = Launch::new();
    for (name, number) in NAMES.iter().zip(NUMBERS) {
        let run = launch.run_shell(&["--propagate-exit-code"], 1, &format!("ulimit -c 0; kill -{number} $$"));
        assert_eq!(run.code, 128 + number, "{}", run.stderr);
        assert!(run.stderr.contains(&format!("signal {number} (SIG{name}")), "{name}: {}", run.stderr);
    }
}

fn stdin_is_passed_to_rank_0_only() {
    let launch = Launch::new();
    let input = launch.write("input", "from a file\n");
    for nproc in ["1", "2"] {
        let script = "read line; echo $RANK read $line";
        let mut command = launch.command(&["--nproc", nproc, "--", "sh", "-c", script]);
        let output = command.stdin(std::fs::File::open(&input).unwrap()).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(0));
        assert_eq!(text.matches("from a file").count(), 1, "{text}");
        assert!(text.contains("0 read from a file"), "{text}");
    }
}

fn stall_timeout_reports_idle_rank_but_not_computing_rank() {
    let launch = Launch::new();
    let script = "[ $RANK = 0 ] && exec sleep 1000; while [ ! -e go ]; do :; done; exit 3";
    let run = launch.spawn_shell(&["--stall-timeout", "1"], 2, script);
    run.wait_for_stderr("rank 0");
    assert!(!run.stderr().contains("rank 1"), "{}", run.stderr());
    launch.write("go", "");
    assert_eq!(run.wait().code, 1);
}

fn local_rank_placeholder_in_arguments_is_substituted() {
    let arguments = ["data-${local_rank}-$local_rank.bin", "$X", "$$"];
    let launch = Launch::new();
    let run = launch.run(&[&["--nproc", "2", "--", "echo"], &arguments[..]].concat());
    assert_eq!(sorted_lines(&run.stdout), ["data-0-0.bin $X $$", "data-1-1.bin $X $$"], "{}", run.stderr);
    // As under torchrun. This program only stands for Python.
    launch.write("script.py", "");
    let mut command = launch.command(&[&["--nproc", "2", "script.py"], &arguments[..]].concat());
    let run = command.env("PYTHON_EXEC", "echo").output().unwrap();
    let printed = ["-u script.py data-0-0.bin $X $", "-u script.py data-1-1.bin $X $"];
    assert_eq!(sorted_lines(&String::from_utf8_lossy(&run.stdout)), printed, "{run:?}");
}

fn worker_that_ignores_sigterm_is_killed_after_shutdown_timeout() {
    let script = "[ $RANK = 0 ] && { trap '' TERM; while :; do sleep 0.1; done; }; sleep 0.3; exit 3";
    let run = Launch::new().run_shell(&["--shutdown-timeout", "0.5"], 2, script);
    assert_eq!(run.code, 1, "{}", run.stderr);
    let after = run.consequences();
    assert!(after.contains("rank 0") && after.contains("SIGKILL"), "{}", run.stderr);
}

fn virtual_local_rank_sees_only_its_gpu() {
    let script = "echo $RANK $LOCAL_RANK $CUDA_VISIBLE_DEVICES";
    let launch = Launch::new();
    let mut command = launch.command(&["--nproc", "2", "--virtual-local-rank", "--", "sh", "-c", script]);
    let run = Process::spawn(command.env("CUDA_VISIBLE_DEVICES", "GPU-b, 5")).wait();
    assert_eq!(sorted_lines(&run.stdout), ["0 0 GPU-b", "1 0 5"], "{}", run.stderr);
}

fn restart_increments_count_and_changes_port() {
    let launch = Launch::new();
    let script = "echo $TORCHELASTIC_RESTART_COUNT $TORCHELASTIC_MAX_RESTARTS $MASTER_PORT; \
                  [ $TORCHELASTIC_RESTART_COUNT = 2 ] || exit 1";
    let run = launch.run_shell(&["--max-restarts", "5"], 1, script);
    assert_eq!(run.code, 0, "{}", run.stderr);
    let lines: Vec<Vec<&str>> = run.stdout.lines().map(|line| line.split(' ').collect()).collect();
    let counts: Vec<&str> = lines.iter().map(|line| line[0]).collect();
    assert_eq!(counts, ["0", "1", "2"]);
    assert!(lines.iter().all(|line| line[1] == "5" && line[2].parse::<u16>().is_ok()), "{lines:?}");
    assert!(lines.windows(2).all(|pair| pair[0][2] != pair[1][2]), "{lines:?}");
}

fn final_exit_code_stops_restarts() {
    let launch = Launch::new();
    let options = ["--max-restarts", "9", "--no-restart-codes", "78"];
    let run = launch.run_shell(&options, 1, "echo x; exit 78");
    assert_eq!((run.code, run.stdout.as_str()), (1, "x\n"), "{}", run.stderr);
    assert!(run.reports_exit_code(78), "{}", run.stderr);
}

fn log_dir_has_layout_of_torchrun() {
    let launch = Launch::new();
    let script = "echo out $RANK; echo err $RANK >&2; echo $TORCHELASTIC_ERROR_FILE > file.$RANK";
    let run = launch.run_shell(&["--log-dir", "logs", "--rdzv-id", "night", "--redirects", "1:3"], 2, script);
    assert_eq!((run.code, run.stdout.as_str()), (0, "out 0\n"), "{}", run.stderr);
    for rank in 0..2 {
        let dir = format!("logs/night/attempt_0/{rank}");
        assert_eq!(launch.read(&format!("{dir}/stdout.log")), format!("out {rank}\n"));
        assert_eq!(launch.read(&format!("{dir}/stderr.log")), format!("err {rank}\n"));
        assert!(launch.read(&format!("file.{rank}")).trim().ends_with(&format!("{dir}/error.json")));
    }
    assert!(!run.stderr.contains("err 1"), "{}", run.stderr);
}

fn redirected_output_is_kept_without_a_log_dir() {
    let launch = Launch::new();
    let run = launch.run(&["-r", "3", "--", "sh", "-c", "echo kept"]);
    assert_eq!((run.code, run.stdout.as_str()), (0, ""), "{}", run.stderr);
    let logs = run.stderr.lines().find_map(|line| line.strip_prefix("xlaunch: logs in ")).unwrap();
    let runs: Vec<_> = std::fs::read_dir(logs).unwrap().flatten().collect();
    let file = runs[0].path().join("attempt_0/0/stdout.log");
    assert_eq!((runs.len(), std::fs::read_to_string(file).unwrap().as_str()), (1, "kept\n"));
    let unwanted = launch.run(&["-r", "3", "--log-dir", "/dev/null", "--", "echo", "gone"]);
    assert!(unwanted.code == 0 && !unwanted.stderr.contains("logs in"), "{}", unwanted.stderr);
}

fn launches_at_the_same_time_have_different_run_ids() {
    let launch = Launch::new();
    let script = "echo $TORCHELASTIC_RUN_ID";
    let command: Vec<_> = (0..4).map(|_| launch.spawn_shell(&[], 2, script)).collect();
    let logged = ["--log-dir", "logs", "--tee", "3"];
    let logged: Vec<_> = (0..4).map(|_| launch.spawn_shell(&logged, 2, script)).collect();
    let ids = command.into_iter().chain(logged).map(|process| {
        let output = process.wait().stdout;
        // The id follows the prefix of the rank.
        let ids: BTreeSet<&str> = output.lines().filter_map(|line| line.rsplit(':').next()).collect();
        assert_eq!(ids.len(), 1, "both ranks have the same: {output}");
        ids.first().unwrap().to_string()
    });
    let ids: BTreeSet<String> = ids.collect();
    assert_eq!(ids.len(), 8, "{ids:?}");
    // A chosen id is kept, however often it is used.
    for _ in 0..2 {
        let options = ["--log-dir", "logs", "--tee", "3", "--rdzv-id", "my run"];
        assert!(launch.run_shell(&options, 1, script).stdout.ends_with("my run\n"));
    }
    assert!(launch.path().join("logs/my_run-2/attempt_0").exists());
}

fn program_that_cannot_start_is_named() {
    let launch = Launch::new();
    let run = launch.run(&["--nproc", "2", "--", "no-such-program"]);
    assert!(run.code == 1 && run.stderr.contains("no-such-program"), "{}: {}", run.code, run.stderr);
    let run = launch.run(&["--nproc", "1", "missing.py"]);
    assert_eq!((run.code, run.stderr.as_str()), (2, "error: missing.py: no such file\n"));
}

fn launchers_own_error_file_has_the_first_failure_or_the_signal() {
    let launch = Launch::new();
    let file = launch.path().join("own.json");
    let start = |script: &str| {
        let mut command = launch.command(&["--nproc-per-node", "2", "--", "sh", "-c", script]);
        Process::spawn(command.env("TORCHELASTIC_ERROR_FILE", &file))
    };
    let written = || -> Value { serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap() };
    assert_eq!(start("true").wait().code, 0);
    assert!(!file.exists());

    let of_rank = r#"{"message":{"message":"E: x","extraInfo":{"py_callstack":"T","timestamp":"7"}}}"#;
    let script = "[ $RANK = 1 ] || exec sleep 1000; echo '".to_owned()
        + of_rank
        + "' > $TORCHELASTIC_ERROR_FILE; exit 7";
    assert_eq!(start(&script).wait().code, 1);
    let mut expected: Value = serde_json::from_str(of_rank).unwrap();
    expected["message"]["errorCode"] = 7.into();
    assert_eq!(written(), expected);

    assert_eq!(start("[ $RANK = 1 ] || exec sleep 1000; kill -9 $$").wait().code, 1);
    let message = written()["message"].clone();
    assert_eq!(message["errorCode"], -9, "{message}");
    assert!(message["message"].as_str().unwrap().starts_with("rank 1 ("), "{message}");
    assert!(message["extraInfo"]["timestamp"].as_str().unwrap().parse::<u64>().is_ok(), "{message}");

    let run = start("echo ready >&2; exec sleep 1000");
    wait_for("both workers", || (run.stderr().matches("ready").count() == 2).then_some(()));
    let expected = format!("SignalException: Process {} got signal: 15", run.pid());
    run.signal(Signal::TERM);
    assert_eq!(run.wait().code, 143);
    assert_eq!(written()["message"]["message"], expected);
}

fn unsupported_options_are_refused_by_name() {
    let launch = Launch::new();
    for (args, word) in [
        (&["--nnodes", "2", "x.py"][..], "nodes"),
        (&["--rdzv-backend", "etcd", "x.py"], "etcd"),
        (&["--nproc-per-nod", "x", "x.py"], "nproc"),
        (&["--no-such-flag", "x.py"], "no-such-flag"),
    ] {
        let run = launch.run(args);
        assert!(run.code == 2 && run.stderr.contains(word), "{args:?}: {} {}", run.code, run.stderr);
    }
}

fn fifty_concurrent_launches_have_distinct_ports() {
    let launch = Launch::new();
    let script = |i| format!("echo $MASTER_PORT > port.{i}; while [ ! -e go ]; do sleep 0.05; done");
    let runs: Vec<Process> = (0..50).map(|i| launch.spawn_shell(&[], 1, &script(i))).collect();
    let ports = wait_for("fifty ports", || {
        let ports = (0..50).map(|i| launch.read(&format!("port.{i}")).trim().parse::<u16>().ok());
        ports.collect::<Option<Vec<u16>>>()
    });
    launch.write("go", "");
    assert!(runs.into_iter().all(|run| run.wait().code == 0));
    assert_eq!(ports.iter().collect::<BTreeSet<_>>().len(), 50, "{ports:?}");
}

fn worker_that_closes_its_output_or_calls_exec_is_waited_for() {
    let launch = Launch::new();
    let run = launch.run_shell(&[], 1, "exec >&- 2>&-; sleep 0.5; echo done > end");
    assert_eq!((run.code, launch.read("end").trim()), (0, "done"), "{}", run.stderr);
    let run = launch.run_shell(&[], 1, "exec sh -c 'sleep 0.3; exit 4'");
    assert!(run.reports_exit_code(4), "{}", run.stderr);
}

fn status_and_stop_work_for_commands() {
    let launch = Launch::new();
    let run = launch.spawn_shell(&[], 2, "echo ready >&2; exec sleep 1000");
    wait_for("both workers", || (run.stderr().matches("ready").count() == 2).then_some(()));
    let status = launch.run(&["status", "--json"]);
    assert_eq!(status.code, 0, "{}", status.stderr);
    let status: serde_json::Value = serde_json::from_str(&status.stdout).unwrap();
    assert_eq!((status["ranks"].as_array().map(Vec::len), &status["state"]), (Some(2), &"running".into()));
    let pid = status["ranks"][1]["pid"].as_u64().unwrap_or_default();
    assert!(is_alive(u32::try_from(pid).unwrap()), "{status}");
    assert_eq!(launch.run(&["stop"]).code, 0);
    assert_eq!(run.wait().code, 143);
    assert_ne!(launch.run(&["status"]).code, 0);
}

fn flags_that_only_several_nodes_use_are_named_on_one_node() {
    let launch = Launch::new();
    let mut command = launch.command(&["--token-file", "/nosuch", "--interface", "nosuch0", "--", "true"]);
    let run = Process::spawn(command.env("PET_NODE_RANK", "3")).wait();
    assert_eq!(run.code, 0, "{}", run.stderr);
    for given in ["--token-file /nosuch", "--interface nosuch0", "PET_NODE_RANK=3"] {
        let warning =
            format!("warning: {given} has no effect: the job has one node; --nnodes sets the number\n");
        assert_eq!(run.stderr.matches(&warning).count(), 1, "{}", run.stderr);
    }
    assert_eq!(launch.run(&["--node-rank", "0", "--", "true"]).stderr, "");
}

fn unsupported_variables_of_torchrun_are_named() {
    let launch = Launch::new();
    let stderr = |name, value| {
        let run = launch.command(&["--", "true"]).env(name, value).output().unwrap();
        String::from_utf8_lossy(&run.stderr).into_owned()
    };
    let name = "TORCHELASTIC_ENABLE_FILE_TIMER";
    let warned = stderr(name, "1");
    assert!(warned.starts_with(&format!("warning: {name} has no effect: ")), "{warned}");
    assert_eq!(stderr(name, "0"), "");
    assert!(stderr("TORCHELASTIC_HEALTH_CHECK_PORT", "8080").contains("`xlaunch status --ready`"));
}

fn help_is_a_subcommand_too() {
    let launch = Launch::new();
    assert_eq!(launch.run(&["help"]).stdout, launch.run(&["--help"]).stdout);
    assert!(launch.run(&["help", "status"]).stdout.contains("Usage: xlaunch status "));
}
