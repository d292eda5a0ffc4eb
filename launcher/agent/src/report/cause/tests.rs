use super::*;

fn evidence(exit: Exit, stderr: &str) -> Evidence {
    Evidence {
        exit: Some(exit),
        stderr: stderr.lines().map(Into::into).collect(),
        program: "/opt/py/bin/python".into(),
        ..Evidence::default()
    }
}

/// Cause and help.
fn of(evidence: &Evidence) -> (String, String) {
    let cause = cause(evidence).unwrap();
    (cause.what, cause.help.unwrap_or_default())
}

fn failed(stderr: &str) -> (String, String) {
    of(&evidence(Exit::Code(1), stderr))
}

/// A traceback that ends with `line`, from line 7 of `/w/t.py` through a package.
fn traceback(line: &str) -> String {
    format!(
        "Traceback (most recent call last):\n  File \"/w/t.py\", line 7, in main\n    f()\n  \
         File \"/v/site-packages/torch/x.py\", line 99, in f\n    g()\n{line}\n"
    )
}

#[test]
fn exception_is_the_cause_with_the_users_line() {
    assert_eq!(
        failed(&traceback("ValueError: bad")),
        ("ValueError: bad (/w/t.py, line 7)".into(), String::new())
    );
    let odd = of(&evidence(Exit::Code(3), &traceback("ValueError: bad")));
    assert_eq!(odd.0, "perhaps ValueError: bad (/w/t.py, line 7)");
}

#[test]
fn error_file_takes_precedence_over_stderr() {
    let file = r#"{"message": {"message": "KeyError: 'loss'", "extraInfo": {"timestamp": "1"}}}"#.to_string();
    let evidence = Evidence {
        error_file: Some(file),
        ..evidence(Exit::Signal(11), &traceback("ValueError: got over this"))
    };
    assert_eq!(of(&evidence).0, "KeyError: 'loss'");
}

#[test]
fn gpu_and_host_out_of_memory() {
    for line in [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "torch.AcceleratorError: CUDA error: out of memory",
    ] {
        let (what, help) = failed(&traceback(line));
        assert_eq!(what, format!("GPU out of memory: {line} (/w/t.py, line 7)"));
        assert_eq!(help, "use smaller batches, or check for other processes on the GPU: nvidia-smi");
    }
    assert_eq!(failed(&traceback("MemoryError")).0, "host out of memory: MemoryError (/w/t.py, line 7)");
}

#[test]
fn gpu_fault_is_the_cause_whichever_torch_thread_reports_it() {
    let help = "an earlier operation on the GPU may have failed: set CUDA_LAUNCH_BLOCKING=1 to find the one that did";
    let assertion = "/pytorch/aten/src/ATen/native/cuda/IndexKernel.cu:111: operator(): block: [0,0,0], thread: \
                     [0,0,0] Assertion `-sizes[i] <= index && index < sizes[i] && \"index out of bounds\"` failed.\n";
    let more = "Search for `cudaErrorAssert' in the documentation for more information.\nCUDA kernel errors might be \
                asynchronously reported at some other API call.\n";
    let line = "torch.AcceleratorError: CUDA error: device-side assert triggered";
    let raised = format!("{assertion}{}{more}", traceback(line));
    assert_eq!(failed(&raised), (format!("{line} (/w/t.py, line 7)"), help.into()));
    let thread = "[PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with exception: CUDA \
                  error: device-side assert triggered";
    let aborted = format!(
        "{assertion}[rank1]:[E1123 ProcessGroupNCCL.cpp:2057] {thread}\n{more}terminate called after throwing an \
         instance of 'c10::DistBackendError'\n  what():  {thread}\n{more}frame #0: c10::Error::Error\n"
    );
    assert_eq!(of(&evidence(Exit::Signal(6), &aborted)), (thread.into(), help.into()));
    let stderr: Vec<_> = aborted.lines().map(|line| (line.to_owned(), Some(Instant::now()))).collect();
    let symptom = symptom(&stderr, Exit::Signal(6), Instant::now()).unwrap();
    assert!(!symptom.lost_peer && symptom.error == thread, "{symptom:?}");
}

#[test]
fn sigkill_of_unknown_origin_names_the_limit_of_cpu_time() {
    let killed = Evidence { cpu_limit: Some(60), ..evidence(Exit::Signal(9), "") };
    let sent = OomKills { host: Some(0), ..OomKills::default() };
    for evidence in [killed.clone(), Evidence { oom_kills: sent, ..killed.clone() }] {
        let help = of(&evidence).1;
        let limit = "; or its CPU time limit was used up (RLIMIT_CPU is 60 s, `ulimit -t`)";
        assert!(help.ends_with(limit), "{help}");
    }
    assert!(!of(&Evidence { cpu_limit: None, ..killed }).1.contains("CPU time"));
}

#[test]
fn oom_kills_by_counter() {
    let killed = evidence(Exit::Signal(9), &traceback("ValueError: got over this"));
    assert_eq!(of(&killed).0, "killed by SIGKILL, not sent by xlaunch: perhaps by the OOM killer");
    let help =
        of(&Evidence { oom_kills: OomKills { host: Some(0), ..OomKills::default() }, ..killed.clone() }).1;
    assert_eq!(help, "the program itself, another program or a user sent it");
    let with = |oom_kills| of(&Evidence { oom_kills, ..killed.clone() }).0;
    let (rank, launch) =
        (OomKills { rank: 1, ..OomKills::default() }, OomKills { launch: 1, ..OomKills::default() });
    assert_eq!(with(rank), "killed by the kernel's OOM killer");
    assert_eq!(with(launch), "killed by the kernel's OOM killer");
    let host = with(OomKills { host: Some(3), ..OomKills::default() });
    assert_eq!(host, "killed by SIGKILL while the OOM killer killed 3 processes on this host");
    let foreign = with(OomKills { host: Some(0), ..OomKills::default() });
    assert_eq!(foreign, "killed by SIGKILL, sent neither by xlaunch nor by the OOM killer");
    assert_eq!(cause(&Evidence { signalled: true, ..killed }), None);
    let child = evidence(
        Exit::Code(1),
        &traceback("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed."),
    );
    let with = |oom_kills| of(&Evidence { oom_kills, ..child.clone() });
    let two = with(OomKills { rank: 2, launch: 2, host: Some(2) });
    assert_eq!(two.0, "the OOM killer killed 2 of its processes");
    let one = with(OomKills { rank: 0, launch: 1, host: Some(1) });
    assert!(one.0.starts_with("the OOM killer killed a process: RuntimeError: DataLoader"), "{one:?}");
    assert!(one.1.contains("fewer data loader workers") && of(&child).1.contains("dmesg"), "{one:?}");
    // OOM kills on the host or in the session do not concern a rank that exited by itself.
    let other = evidence(Exit::Code(1), &traceback("ValueError: bad"));
    let others = OomKills { rank: 0, launch: 1, host: Some(1) };
    assert_eq!(of(&Evidence { oom_kills: others, ..other }).0, "ValueError: bad (/w/t.py, line 7)");
    let shell = of(&evidence(Exit::Code(137), ""));
    assert_eq!(
        shell.0,
        "perhaps one of its child processes: killed by SIGKILL, not sent by xlaunch: perhaps by the OOM killer"
    );
}

#[test]
fn address_in_use_with_its_port() {
    let torch = "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network \
                 address. port: 29777, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use";
    let (what, help) = failed(&traceback(torch));
    assert_eq!(what, format!("port 29777 is in use: {torch} (/w/t.py, line 7)"));
    assert!(help.contains("--master-port"));
    let server =
        "OSError: [Errno 98] error while attempting to bind on address ('::', 8000): address already in use";
    assert!(failed(&traceback(server)).0.starts_with("port 8000 is in use: "));
    let bare = failed(&traceback("OSError: [Errno 98] Address already in use"));
    assert!(bare.0.starts_with("an address is in use: "));
}

#[test]
fn failed_and_timed_out_collectives() {
    let timeout = "[rank0]:[E1121 ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation timeout: \
                   WorkNCCL(SeqNum=5, OpType=ALLREDUCE)";
    let aborted = format!(
        "{timeout}\nterminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG ID 0] \
         Process group watchdog thread terminated with exception: [Rank 0] Watchdog caught collective operation \
         timeout: WorkNCCL(SeqNum=5)\nException raised from checkTimeout at x.cpp:615\nframe #0: c10::Error\n"
    );
    let (what, help) = of(&evidence(Exit::Signal(6), &aborted));
    assert!(what.starts_with("a collective timed out: [PG ID 0] Process group watchdog"), "{what}");
    assert!(help.starts_with("a rank may hang"));
    let (what, help) = failed(&traceback(
        "torch.distributed.DistBackendError: NCCL error in: x.cpp:3, unhandled system error",
    ));
    assert!(
        what.starts_with("torch.distributed.DistBackendError: NCCL error")
            && help.starts_with("set NCCL_DEBUG=INFO")
    );
    let gloo = "RuntimeError: [/p/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:1";
    assert_eq!(failed(&traceback(gloo)).1, "perhaps another rank exited first: check its last lines");
}

#[test]
fn missing_modules_and_scripts() {
    let (what, help) = failed(&traceback("ModuleNotFoundError: No module named 'flash_attn'"));
    assert_eq!(what, "ModuleNotFoundError: No module named 'flash_attn' (/w/t.py, line 7)");
    let expected = "install it for /opt/py/bin/python, activate its virtual environment, or set \
                    PYTHON_EXEC=/PATH/TO/python";
    assert_eq!(help, expected);
    let home = "Fatal Python error: init_fs_encoding: failed to get the Python codec of the filesystem encoding\n\
                Python runtime state: core initialized\nModuleNotFoundError: No module named 'encodings'";
    assert!(of(&evidence(Exit::Code(1), home)).1.starts_with("Python does not find its own library: unset"));
    let script = "/opt/py/bin/python: can't open file '/w/x.py': [Errno 2] No such file or directory";
    assert_eq!(of(&evidence(Exit::Code(2), script)).0, script);
    assert!(failed("/opt/py/bin/python: No module named tran").1.starts_with("install it"));
}

#[test]
fn reading_the_end_of_the_input_is_explained() {
    for line in ["bdb.BdbQuit", "EOFError: EOF when reading a line"] {
        let (what, help) = failed(&traceback(line));
        assert_eq!(what, format!("{line} (/w/t.py, line 7)"));
        assert!(help.contains("standard input has ended") && help.contains("--local-ranks-filter"), "{help}");
    }
    assert_eq!(failed(&traceback("EOFError: Ran out of input")).1, "", "of a pickled file");
}

#[test]
fn programs_that_cannot_be_started() {
    let with_first_line = |errno: Errno, program: &str, first_line: Option<&str>| {
        let first_line = first_line.map(str::to_owned);
        of(&Evidence {
            spawn_failure: Some(SpawnFailure { errno: errno.raw_os_error(), limit: None, first_line }),
            program: program.into(),
            search_path: "/bin:/usr/bin".into(),
            ..Evidence::default()
        })
    };
    let failed = |errno, program| with_first_line(errno, program, None);
    let missing = failed(Errno::NOENT, "pyhton");
    assert_eq!(missing.0, "program `pyhton` not found");
    assert_eq!(missing.1, "install it, or give its path; directories searched (PATH): /bin:/usr/bin");
    let script = failed(Errno::NOENT, "train.py");
    assert_eq!(script.1, "to run it with Python, leave out `--` and `--no-python`");
    assert_eq!(failed(Errno::NOENT, "./run.sh").0, "file `./run.sh` not found");
    let script = |first_line| with_first_line(Errno::NOENT, "./run.sh", Some(first_line));
    let expected = "the interpreter in the first line of `./run.sh` is not found: `/opt/bin/python3 -u`";
    assert_eq!(script("#! /opt/bin/python3 -u").0, expected);
    assert!(script("#!/bin/sh\r").0.contains("Windows") && script("#!/bin/sh\r").1.ends_with("run.sh"));
    assert!(failed(Errno::ACCESS, "./run.sh").1.starts_with("chmod +x ./run.sh"));
    assert_eq!(failed(Errno::NOEXEC, "./a").0, "`./a` is not an executable for this machine");
    let limit = Reached { what: "pids.max is 4".into(), help: "raise it".into() };
    let errno = Errno::AGAIN.raw_os_error();
    let failure = SpawnFailure { errno, limit: Some(limit), first_line: None };
    let refused = Evidence { spawn_failure: Some(failure), ..Evidence::default() };
    assert_eq!(of(&refused), ("pids.max is 4".into(), "raise it".into()));
}

#[test]
fn fatal_signals() {
    let signal = |signal| of(&evidence(Exit::Signal(signal), ""));
    assert_eq!(signal(4).0, "illegal instruction (SIGILL)");
    assert!(signal(7).1.contains("/dev/shm"));
    assert_eq!(signal(2).0, "interrupted (SIGINT, Ctrl-C)");
    assert_eq!(failed(&traceback("KeyboardInterrupt")).0, "interrupted (SIGINT, Ctrl-C)");
    assert!(signal(11).1.contains("PYTHONFAULTHANDLER"));
    let fault = "Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f01 (most recent call first):\n  File \
                 \"/v/site-packages/x.py\", line 3 in f\n  File \"/w/t.py\", line 12 in main\n";
    assert_eq!(
        of(&evidence(Exit::Signal(11), fault)).0,
        "Fatal Python error: Segmentation fault (/w/t.py, line 12)"
    );
}

#[test]
fn shell_exit_codes() {
    let (what, _) = of(&evidence(Exit::Code(127), "run.sh: 3: nvcc: not found"));
    assert_eq!(what, "shell: command not found: run.sh: 3: nvcc: not found");
    let library = "python: error while loading shared libraries: libx.so.1: cannot open shared object file";
    assert_eq!(of(&evidence(Exit::Code(127), library)).0, library);
    let (what, _) = of(&evidence(Exit::Code(126), "bash: line 1: ./x: Permission denied"));
    assert_eq!(what, "shell: command not executable: bash: line 1: ./x: Permission denied");
}

#[test]
fn no_evidence_no_cause() {
    assert_eq!(cause(&evidence(Exit::Code(3), "epoch 1\nepoch 2")), None);
    assert_eq!(cause(&Evidence::default()), None);
    let ours = Evidence { signalled: true, ..evidence(Exit::Signal(15), "") };
    assert_eq!(cause(&ours), None);
}

/// Output of gloo's thread and of faulthandler when a rank is aborted.
const ABORTED: &str = "\
terminate called after throwing an instance of 'gloo::IoException'
  what():  [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:1
Fatal Python error: Aborted

Current thread 0x00007f02 (most recent call first):
  File \"/usr/lib/python3.11/threading.py\", line 9 in join
  File \"/w/t.py\", line 30 in <module>
";

#[test]
fn exception_before_an_abort_is_the_cause() {
    let own = traceback("RuntimeError: the disk is on fire");
    let aborted = evidence(Exit::Signal(6), &format!("step 1\n{own}{ABORTED}"));
    assert_eq!(of(&aborted).0, "RuntimeError: the disk is on fire (/w/t.py, line 7)");
    let by_shell = Evidence { exit: Some(Exit::Code(134)), ..aborted.clone() };
    assert_eq!(of(&by_shell).0, "RuntimeError: the disk is on fire (/w/t.py, line 7)");
    // The rank wrote more after the exception, so it may have handled it.
    let went_on = evidence(Exit::Signal(6), &format!("{own}trying again\n{ABORTED}"));
    assert_eq!(of(&went_on).0, "perhaps RuntimeError: the disk is on fire (/w/t.py, line 7)");
    let old = Evidence { old_lines: 7, ..aborted.clone() };
    assert!(!of(&old).0.contains("RuntimeError"), "it was handled long ago");
    // An exception does not explain other signals.
    let killed = Evidence { exit: Some(Exit::Signal(11)), ..aborted };
    assert!(!of(&killed).0.contains("RuntimeError"));
}

#[test]
fn symptom_distinguishes_a_lost_peer_from_an_own_error() {
    let start = Instant::now();
    let at = |milliseconds| start + Duration::from_millis(milliseconds);
    let now = at(5000);
    let timed = |text: &str| -> Vec<(String, Option<Instant>)> {
        (0..).zip(text.lines()).map(|(number, line)| (line.to_owned(), Some(at(number)))).collect()
    };
    let seen = |text: &str, exit| symptom(&timed(text), exit, now).map(|found| (found.lost_peer, found.at));
    let own = traceback("ValueError: bad");
    let lost = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer";
    assert_eq!(seen(&format!("step 1\n{own}"), Exit::Code(1)), Some((false, at(1))));
    assert_eq!(seen(&traceback(lost), Exit::Code(1)), Some((true, at(0))));
    let ranked: String = traceback(lost).lines().map(|line| format!("[rank2]: {line}\n")).collect();
    assert_eq!(seen(&ranked, Exit::Code(1)), Some((true, at(0))));
    // The rank was terminated while it was exiting.
    assert_eq!(seen(&own, Exit::Signal(15)), Some((false, at(0))));
    // The last exception counts; the first one was handled.
    let both = format!("{}{own}", traceback(lost));
    assert_eq!(seen(&both, Exit::Code(1)), Some((false, at(6))));
    let aborted = "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  NCCL error: \
                   remote process exited, ncclRemoteError\n";
    assert_eq!(seen(aborted, Exit::Signal(6)), Some((true, at(1))));
    let both = format!("{}terminate called\n", traceback(lost));
    assert_eq!(
        seen(&both, Exit::Signal(6)),
        Some((true, at(0))),
        "aborted by a thread of gloo while it exited"
    );
    let own_and_aborted = format!("{own}{ABORTED}");
    assert_eq!(
        seen(&own_and_aborted, Exit::Signal(6)),
        Some((false, at(0))),
        "its exception made the peers close their connections"
    );
    let found = symptom(&timed(&own_and_aborted), Exit::Signal(6), now).unwrap();
    assert_eq!(found.error, "ValueError: bad");
    let cpp = symptom(&timed(ABORTED), Exit::Signal(6), now).unwrap();
    assert!(cpp.lost_peer && cpp.error.starts_with("[../third_party/gloo"), "{}", cpp.error);
    let cursor = symptom(&timed(&traceback("ValueError: \x1b[2J")), Exit::Code(1), now).unwrap();
    assert_eq!(cursor.error, "ValueError: \\u{1b}[2J");
    assert_eq!(seen("Killed\n", Exit::Code(137)), None);
    assert_eq!(seen(&own, Exit::Signal(9)), None, "what was written before is unrelated");
    assert_eq!(symptom(&timed(&own), Exit::Code(1), at(60_000)), None, "it was handled long ago");
}

#[test]
fn root_cause_terminated_by_xlaunch_keeps_its_exception() {
    let terminated =
        Evidence { signalled: true, ..evidence(Exit::Signal(15), &traceback("ValueError: bad")) };
    assert_eq!(cause(&terminated), None, "of a rank that failed in consequence");
    assert_eq!(cause_of_root(&terminated).unwrap().what, "perhaps ValueError: bad (/w/t.py, line 7)");
}
