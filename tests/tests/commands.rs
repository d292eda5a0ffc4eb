//! Any command under torchrun's contract: environment, exit codes, failures, restarts, signals, and nothing left behind.

use std::collections::BTreeSet;

use rustix::process::Signal;
use xlaunch_tests::{Launch, alive, children, name, wait_for};

/// Lines of a text, sorted: ranks print in any order.
fn sorted(text: &str) -> Vec<&str> {
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    lines
}

#[test]
fn every_rank_runs_the_command_and_its_output_is_the_launchers() {
    let run = Launch::new().shell(&[], 4, "echo rank $RANK of $WORLD_SIZE; echo oops $LOCAL_RANK >&2");
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert_eq!(sorted(&run.stdout), ["rank 0 of 4", "rank 1 of 4", "rank 2 of 4", "rank 3 of 4"]);
    assert!((0..4).all(|rank| run.stderr.contains(&format!("oops {rank}\n"))), "{}", run.stderr);
}

#[test]
fn a_script_gets_its_own_arguments_untouched() {
    let launch = Launch::new();
    launch.write("args.py", "import sys\nprint(sys.argv[1:])\n");
    let run = launch.run(&["--nproc", "1", "args.py", "--nproc", "7", "--d", "-m", "--", "x y"]);
    assert_eq!(run.stdout.trim(), "['--nproc', '7', '--d', '-m', '--', 'x y']", "{}", run.stderr);
}

#[test]
fn the_name_torchrun_is_torchrun() {
    let launch = Launch::new();
    let link = launch.path().join("torchrun");
    std::os::unix::fs::symlink(xlaunch_tests::xlaunch(), &link).unwrap();
    launch.write("status", "print('a script named as a subcommand')\n");
    let run =
        Launch::of(&link).start(&["--standalone", launch.path().join("status").to_str().unwrap()]).finish();
    assert_eq!(run.stdout.trim(), "a script named as a subcommand", "{}", run.stderr);
}

#[test]
fn a_failure_ends_the_others_and_is_reported_with_its_last_words() {
    let script = "[ $RANK = 1 ] || exec sleep 1000; echo the disk is on fire >&2; exit 7";
    let run = Launch::new().shell(&[], 3, script);
    assert_eq!(run.code, 1, "{}", run.stderr);
    let report = run.stderr.split("the job failed").nth(1).unwrap_or_default();
    let (root, others) = report.split_once("then:").unwrap_or_default();
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    assert!(
        root.contains("rank 1")
            && root.contains(&format!(" on {host}: exit code 7"))
            && root.contains("on fire"),
        "{}",
        run.stderr
    );
    assert!(others.contains("rank 0") && others.contains("rank 2") && others.contains("SIGTERM"), "{report}");
}

#[test]
fn the_root_causes_exit_code_can_be_passed_on() {
    for (script, code) in [("exit 85", 85), ("exit 255", 255), ("kill -SEGV $$", 139), ("kill -KILL $$", 137)]
    {
        let run = Launch::new().shell(&["--propagate-exit-code"], 2, script);
        assert_eq!(run.code, code, "{script}: {}", run.stderr);
        assert_eq!(Launch::new().shell(&[], 1, script).code, 1, "{script}");
    }
}

#[test]
fn every_exit_code_is_told_and_can_be_passed_on() {
    let launch = Launch::new();
    for code in 0..=255 {
        let run = launch.shell(&["--propagate-exit-code"], 1, &format!("exit {code}"));
        assert_eq!(run.code, code, "{}", run.stderr);
        assert_eq!(run.stderr.contains(&format!("exit code {code},")), code != 0, "{}", run.stderr);
    }
}

#[test]
fn every_fatal_signal_has_its_name() {
    const NAMES: [&str; 24] = [
        "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE",
        "ALRM", "TERM", "STKFLT", "XCPU", "XFSZ", "VTALRM", "PROF", "IO", "PWR", "SYS", "RTMIN+3",
    ];
    const NUMBERS: [i32; 24] =
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 24, 25, 26, 27, 29, 30, 31, 37];
    let launch = Launch::new();
    for (name, number) in NAMES.iter().zip(NUMBERS) {
        let run = launch.shell(&["--propagate-exit-code"], 1, &format!("ulimit -c 0; kill -{number} $$"));
        assert_eq!(run.code, 128 + number, "{}", run.stderr);
        assert!(run.stderr.contains(&format!("signal {number} (SIG{name}")), "{name}: {}", run.stderr);
    }
}

#[test]
fn one_worker_reads_what_the_launcher_would_and_several_read_nothing() {
    let launch = Launch::new();
    let input = launch.write("input", "from a file\n");
    for (nproc, expected) in [(1, "from a file\n"), (2, "")] {
        let mut command = launch.command(&["--nproc", &nproc.to_string(), "--", "cat"]);
        let output = command.stdin(std::fs::File::open(&input).unwrap()).output().unwrap();
        assert_eq!((output.status.code(), &*String::from_utf8_lossy(&output.stdout)), (Some(0), expected));
    }
}

#[test]
fn ctrl_z_stops_the_workers_and_fg_continues_them() {
    let launch = Launch::new();
    let script = "echo ready >&2; while [ ! -e go ]; do sleep 0.05; done; echo went on";
    let run = launch.start_shell(&[], 1, script);
    run.wait_for_stderr("ready");
    let worker = wait_for("a worker", || children(run.pid()).first().copied());
    run.signal(Signal::TSTP);
    let stopped =
        |pid| std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat.contains(") T "));
    wait_for("both to be stopped", || (stopped(worker) && stopped(run.pid())).then_some(()));
    launch.write("go", "");
    run.signal(Signal::CONT);
    let run = run.finish();
    assert_eq!((run.code, run.stdout.trim()), (0, "went on"), "{}", run.stderr);
}

#[test]
fn a_rank_that_does_nothing_is_pointed_out_and_one_that_computes_is_not() {
    let launch = Launch::new();
    let script = "[ $RANK = 0 ] && exec sleep 1000; while [ ! -e go ]; do :; done; exit 3";
    let run = launch.start_shell(&["--stall-timeout", "1"], 2, script);
    run.wait_for_stderr("rank 0: no output for");
    assert!(!run.stderr().contains("rank 1 silent"), "{}", run.stderr());
    launch.write("go", "");
    assert_eq!(run.finish().code, 1);
}

#[test]
fn a_local_rank_among_the_arguments_is_filled_in() {
    let run =
        Launch::new().run(&["--nproc", "2", "--", "echo", "data-${local_rank}-${local_rank}.bin", "$X"]);
    assert_eq!(sorted(&run.stdout), ["data-0-0.bin $X", "data-1-1.bin $X"], "{}", run.stderr);
}

#[test]
fn whoever_ignores_sigterm_is_killed_when_its_time_is_over() {
    let script = "[ $RANK = 0 ] && { trap '' TERM; while :; do sleep 0.1; done; }; sleep 0.3; exit 3";
    let run = Launch::new().shell(&["--shutdown-timeout", "0.5"], 2, script);
    assert_eq!(run.code, 1, "{}", run.stderr);
    assert!(run.stderr.contains("did not exit in time") && run.stderr.contains("SIGKILL"), "{}", run.stderr);
}

/// Leaves a process that nobody waits for, in a session of its own, deaf to SIGTERM; its id goes to a file.
const HIDE: &str =
    "setsid sh -c 'trap \"\" TERM; (echo $$ > hidden.$RANK; exec sleep 1000) & wait' >/dev/null 2>&1 & ";

fn hidden(launch: &Launch, ranks: u32) -> Vec<u32> {
    wait_for("hidden processes", || {
        let pids = (0..ranks).map(|rank| launch.read(&format!("hidden.{rank}")).trim().parse().ok());
        pids.collect::<Option<Vec<u32>>>()
    })
}

#[test]
fn what_a_worker_has_hidden_ends_with_the_job() {
    for end in ["sleep 0.5; exit 0", "sleep 0.5; exit 9"] {
        let launch = Launch::new();
        let run = launch.shell(&[], 2, &format!("{HIDE} {end}"));
        let pids = hidden(&launch, 2);
        assert!(!pids.iter().any(|pid| alive(*pid)), "{end}: {}", run.stderr);
    }
}

#[test]
fn nothing_outlives_a_launcher_that_is_killed() {
    let (launch, id) = (Launch::new(), id("killed"));
    let run = launch.start_shell(&["--rdzv-id", &id], 2, &format!("{HIDE} exec sleep 1000"));
    let pids = hidden(&launch, 2);
    let workers = wait_for("two workers", || {
        let found: Vec<u32> = children(run.pid()).into_iter().filter(|pid| name(*pid) == "sleep").collect();
        (found.len() == 2).then_some(found)
    });
    run.signal(Signal::KILL);
    wait_for("the end of all", || (!pids.iter().chain(&workers).any(|pid| alive(*pid))).then_some(()));
    wait_for("an empty runtime directory", || left(&launch).is_empty().then_some(()));
    wait_for("the end of all cgroups", || cgroups(&id).is_empty().then_some(()));
}

#[test]
fn a_container_whose_session_began_outside_of_it_is_no_obstacle() {
    // A process has no number of its session and its group there, as with `docker exec`.
    let container = ["--user", "--map-root-user", "--pid", "--fork", "--mount-proc"];
    let unshare = Launch::of(std::path::Path::new("unshare"));
    let may = unshare.command(&container).arg("true").output();
    if !may.is_ok_and(|ran| ran.status.success()) {
        eprintln!("skipped: no unshare, or no namespaces for this user here");
        return;
    }
    let worker = "(setsid sleep 1000 &); (env -i setsid sleep 1000 &); echo rank $RANK; exit $RANK";
    let launch = format!("\"$0\" --propagate-exit-code --nproc 2 -- sh -c '{worker}'");
    let left = "echo left $(cat /proc/[0-9]*/comm | grep -c sleep)";
    // The first process of the container, and not the first.
    for script in [format!("exec {launch}"), format!("{launch}; code=$?; {left}; exit $code")] {
        let program = xlaunch_tests::xlaunch().to_str().unwrap();
        let run = unshare.run(&[container.as_slice(), &["sh", "-c", &script, program]].concat());
        assert_eq!(run.code, 1, "{}", run.stderr);
        assert!(run.stderr.contains("rank 1") && run.stderr.contains("exit code 1,"), "{}", run.stderr);
        let told = sorted(&run.stdout);
        assert!(told.iter().all(|line| ["left 0", "rank 0", "rank 1"].contains(line)), "{told:?}");
        assert!(
            told.contains(&"rank 1") && (script.starts_with("exec") || told.contains(&"left 0")),
            "{told:?}"
        );
    }
}

/// Files that launches have left.
fn left(launch: &Launch) -> Vec<String> {
    let mut found = Vec::new();
    let mut dirs = vec![launch.runtime()];
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            match entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                true => dirs.push(entry.path()),
                false => found.push(entry.path().display().to_string()),
            }
        }
    }
    found
}

/// Cgroups of launches with this id.
fn cgroups(id: &str) -> Vec<String> {
    let roots = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
    let names = roots.iter().flat_map(|root| std::fs::read_dir(root).into_iter().flatten().flatten());
    let names = names.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.starts_with(&format!("xlaunch-{id}."))).collect()
}

/// An id that no other test's launches have.
fn id(test: &str) -> String {
    format!("{test}_{}", std::process::id())
}

#[test]
fn signals_reach_the_workers_and_are_the_exit_code() {
    for (signal, number) in [(Signal::INT, 2), (Signal::TERM, 15), (Signal::HUP, 1), (Signal::QUIT, 3)] {
        let launch = Launch::new();
        let script =
            format!("trap 'echo got $RANK; exit 0' {number}; echo ready >&2; while :; do sleep 0.1; done");
        let run = launch.start_shell(&[], 2, &script);
        wait_for("both", || (run.stderr().matches("ready").count() == 2).then_some(()));
        run.signal(signal);
        let run = run.finish();
        assert_eq!((run.code, sorted(&run.stdout)), (128 + number, vec!["got 0", "got 1"]), "{}", run.stderr);
    }
}

#[test]
fn nohup_means_what_it_says() {
    let launch = Launch::of("sh".as_ref());
    let xlaunch = xlaunch_tests::xlaunch().display();
    let worker = "echo ready >&2; while [ ! -e go ]; do sleep 0.05; done; echo done";
    let run = launch.start(&["-c", &format!("trap '' HUP; exec {xlaunch} -- sh -c '{worker}'")]);
    run.wait_for_stderr("ready");
    run.signal(Signal::HUP);
    launch.write("go", "");
    let run = run.finish();
    assert_eq!((run.code, run.stdout.trim()), (0, "done"), "{}", run.stderr);
}

#[test]
fn the_gpu_of_a_virtual_local_rank_is_its_only_one() {
    let script = "echo $RANK $LOCAL_RANK $CUDA_VISIBLE_DEVICES";
    let launch = Launch::new();
    let mut command = launch.command(&["--nproc", "2", "--virtual-local-rank", "--", "sh", "-c", script]);
    let run = xlaunch_tests::Running::start(command.env("CUDA_VISIBLE_DEVICES", "GPU-b, 5")).finish();
    assert_eq!(sorted(&run.stdout), ["0 0 GPU-b", "1 0 5"], "{}", run.stderr);
}

#[test]
fn user_signals_are_passed_on_and_end_nothing() {
    let launch = Launch::new();
    let script = "trap 'echo saved; exit 0' USR1; echo ready >&2; while :; do sleep 0.1; done";
    let run = launch.start_shell(&[], 1, script);
    run.wait_for_stderr("ready");
    run.signal(Signal::USR1);
    let run = run.finish();
    assert_eq!((run.code, run.stdout.trim()), (0, "saved"), "{}", run.stderr);
}

#[test]
fn a_failed_group_starts_again_with_its_count_and_another_port() {
    let launch = Launch::new();
    let script = "echo $TORCHELASTIC_RESTART_COUNT $TORCHELASTIC_MAX_RESTARTS $MASTER_PORT; \
                  [ $TORCHELASTIC_RESTART_COUNT = 2 ] || exit 1";
    let run = launch.shell(&["--max-restarts", "5"], 1, script);
    assert_eq!(run.code, 0, "{}", run.stderr);
    let lines: Vec<Vec<&str>> = run.stdout.lines().map(|line| line.split(' ').collect()).collect();
    let counts: Vec<&str> = lines.iter().map(|line| line[0]).collect();
    assert_eq!(counts, ["0", "1", "2"]);
    assert!(lines.iter().all(|line| line[1] == "5" && line[2].parse::<u16>().is_ok()), "{lines:?}");
    assert!(lines.windows(2).all(|pair| pair[0][2] != pair[1][2]), "{lines:?}");
}

#[test]
fn final_codes_and_loops_end_restarts_early() {
    let run = Launch::new().shell(&["--max-restarts", "9", "--no-restart-codes", "78"], 1, "echo x; exit 78");
    assert_eq!((run.code, run.stdout.as_str()), (1, "x\n"), "{}", run.stderr);
    assert!(run.stderr.contains("exit code 78 is final"), "{}", run.stderr);
    let run = Launch::new().shell(&["--max-restarts", "9"], 1, "echo x; exit 1");
    assert_eq!(run.stdout, "x\nx\nx\n", "{}", run.stderr);
    assert!(run.stderr.contains("3 attempts in a row failed in the same way"), "{}", run.stderr);
}

#[test]
fn logs_are_where_torchrun_has_them() {
    let launch = Launch::new();
    let script = "echo out $RANK; echo err $RANK >&2; echo $TORCHELASTIC_ERROR_FILE > file.$RANK";
    let run = launch.shell(&["--log-dir", "logs", "--rdzv-id", "night", "--redirects", "1:3"], 2, script);
    assert_eq!((run.code, run.stdout.as_str()), (0, "out 0\n"), "{}", run.stderr);
    for rank in 0..2 {
        let dir = format!("logs/night/attempt_0/{rank}");
        assert_eq!(launch.read(&format!("{dir}/stdout.log")), format!("out {rank}\n"));
        assert_eq!(launch.read(&format!("{dir}/stderr.log")), format!("err {rank}\n"));
        assert!(launch.read(&format!("file.{rank}")).trim().ends_with(&format!("{dir}/error.json")));
    }
    assert!(!run.stderr.contains("err 1"), "{}", run.stderr);
}

#[test]
fn a_program_that_cannot_start_is_named() {
    let launch = Launch::new();
    let run = launch.run(&["--nproc", "2", "--", "no-such-program"]);
    assert!(run.code == 1 && run.stderr.contains("no-such-program"), "{}: {}", run.code, run.stderr);
    let run = launch.run(&["--nproc", "1", "missing.py"]);
    assert!(run.code != 0 && run.stderr.contains("missing.py"), "{}: {}", run.code, run.stderr);
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    let launch = Launch::new();
    for (args, word) in [
        (&["--nnodes", "2", "x.py"][..], "several nodes"),
        (&["--rdzv-backend", "etcd", "x.py"], "etcd"),
        (&["--nproc-per-nod", "x", "x.py"], "nproc"),
        (&["--no-such-flag", "x.py"], "no-such-flag"),
    ] {
        let run = launch.run(args);
        assert!(run.code == 2 && run.stderr.contains(word), "{args:?}: {} {}", run.code, run.stderr);
    }
}

#[test]
fn fifty_launches_at_once_have_fifty_ports() {
    let launch = Launch::new();
    let runs: Vec<_> = (0..50)
        .map(|i| {
            launch.start_shell(
                &[],
                1,
                &format!("echo $MASTER_PORT > port.{i}; while [ ! -e go ]; do sleep 0.05; done"),
            )
        })
        .collect();
    let ports = wait_for("fifty ports", || {
        let ports = (0..50).map(|i| launch.read(&format!("port.{i}")).trim().parse::<u16>().ok());
        ports.collect::<Option<Vec<u16>>>()
    });
    launch.write("go", "");
    assert!(runs.into_iter().all(|run| run.finish().code == 0));
    assert_eq!(ports.iter().collect::<BTreeSet<_>>().len(), 50, "{ports:?}");
}

#[test]
fn a_worker_that_closes_its_output_or_becomes_another_program_is_waited_for() {
    let launch = Launch::new();
    let run = launch.shell(&[], 1, "exec >&- 2>&-; sleep 0.5; echo done > end");
    assert_eq!((run.code, launch.read("end").trim()), (0, "done"), "{}", run.stderr);
    let run = launch.shell(&[], 1, "exec sh -c 'sleep 0.3; exit 4'");
    assert!(run.stderr.contains("exit code 4"), "{}", run.stderr);
}

#[test]
fn status_and_stop_reach_a_command() {
    let launch = Launch::new();
    let run = launch.start_shell(&[], 2, "echo ready >&2; exec sleep 1000");
    wait_for("both", || (run.stderr().matches("ready").count() == 2).then_some(()));
    let status = launch.run(&["status", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&status.stdout).unwrap_or_default();
    let ranks = json["ranks"].as_array().map(Vec::len);
    assert_eq!(
        (status.code, ranks, json["state"].as_str()),
        (0, Some(2), Some("running")),
        "{}",
        status.stderr
    );
    assert!(json["ranks"][1]["pid"].as_u64().is_some_and(|pid| alive(u32::try_from(pid).unwrap())), "{json}");
    assert_eq!(launch.run(&["stop"]).code, 0);
    assert_eq!(run.finish().code, 143);
    assert_ne!(launch.run(&["status"]).code, 0);
}

#[test]
fn a_thousand_launches_leave_nothing() {
    let (launch, id) = (Launch::new(), id("thousand"));
    for _ in 0..1000 {
        let run = launch.run(&["--nproc", "2", "--rdzv-id", &id, "--", "true"]);
        assert_eq!((run.code, run.stderr.as_str()), (0, ""));
    }
    assert_eq!(left(&launch), Vec::<String>::new());
    wait_for("the end of all cgroups", || cgroups(&id).is_empty().then_some(()));
}

#[test]
fn two_hundred_kills_at_any_moment_leave_nothing() {
    let (launch, id) = (Launch::new(), id("kills"));
    for round in 0..200_u64 {
        let run = launch.start_shell(&["--rdzv-id", &id], 2, &format!("{HIDE} exec sleep 1000"));
        // Spread over the time that a launch takes to start, and some more.
        std::thread::sleep(std::time::Duration::from_micros(round * 317 % 40_000));
        run.signal(Signal::KILL);
        run.finish();
    }
    let marked = || {
        let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let ours = all.filter(|entry| {
            let environment = std::fs::read(entry.path().join("environ")).unwrap_or_default();
            let runtime = launch.runtime().display().to_string();
            environment
                .split(|byte| *byte == 0)
                .any(|variable| variable == format!("XDG_RUNTIME_DIR={runtime}").as_bytes())
        });
        ours.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(|pid| alive(*pid)).count()
    };
    wait_for("the end of all processes", || (marked() == 0).then_some(()));
    wait_for("an empty runtime directory", || left(&launch).is_empty().then_some(()));
    wait_for("the end of all cgroups", || cgroups(&id).is_empty().then_some(()));
}
