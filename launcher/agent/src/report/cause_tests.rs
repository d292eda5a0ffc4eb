use super::*;

fn evidence(exit: Exit, stderr: &str) -> Evidence {
    Evidence {
        exit: Some(exit),
        stderr: stderr.lines().map(Into::into).collect(),
        program: "/opt/py/bin/python".into(),
        ..Evidence::default()
    }
}

/// What is said, and what is advised.
fn of(evidence: &Evidence) -> (String, String) {
    let cause = cause(evidence).unwrap();
    (cause.what, cause.advice.unwrap_or_default())
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
fn an_exception_is_named_with_the_users_line() {
    assert_eq!(
        failed(&traceback("ValueError: bad")),
        ("ValueError: bad (/w/t.py, line 7)".into(), String::new())
    );
    let odd = of(&evidence(Exit::Code(3), &traceback("ValueError: bad")));
    assert_eq!(odd.0, "perhaps ValueError: bad (/w/t.py, line 7)");
}

#[test]
fn the_error_file_goes_before_stderr() {
    let file = r#"{"message": {"message": "KeyError: 'loss'", "extraInfo": {"timestamp": "1"}}}"#.to_string();
    let evidence = Evidence {
        error_file: Some(file),
        ..evidence(Exit::Signal(11), &traceback("ValueError: got over this"))
    };
    assert_eq!(of(&evidence).0, "KeyError: 'loss'");
}

#[test]
fn memory_of_gpu_and_host() {
    for line in [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "torch.AcceleratorError: CUDA error: out of memory",
    ] {
        let (what, advice) = failed(&traceback(line));
        assert_eq!(what, format!("the GPU's memory ran out: {line} (/w/t.py, line 7)"));
        assert_eq!(advice, "use less of it (smaller batches), or see who else does: nvidia-smi");
    }
    assert_eq!(
        failed(&traceback("MemoryError")).0,
        "the host's memory ran out: MemoryError (/w/t.py, line 7)"
    );
}

#[test]
fn the_kernels_kills() {
    let killed = evidence(Exit::Signal(9), &traceback("ValueError: got over this"));
    assert_eq!(of(&killed).0, "it was killed, not by xlaunch: perhaps by the kernel for lack of memory");
    let told = |oom_kills| of(&Evidence { oom_kills, ..killed.clone() }).0;
    let (rank, launch) =
        (OomKills { rank: 1, ..OomKills::default() }, OomKills { launch: 1, ..OomKills::default() });
    assert_eq!(told(rank), "the kernel killed it for lack of memory");
    assert_eq!(told(launch), "the kernel killed it for lack of memory");
    let host = told(OomKills { host: Some(3), ..OomKills::default() });
    assert_eq!(host, "it was killed, as 3 processes of this host were by the kernel for lack of memory");
    let nobody = told(OomKills { host: Some(0), ..OomKills::default() });
    assert_eq!(nobody, "it was killed, neither by xlaunch nor by the kernel for lack of memory");
    assert_eq!(cause(&Evidence { signalled: true, ..killed }), None);
    let child = evidence(
        Exit::Code(1),
        &traceback("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed."),
    );
    let told = |oom_kills| of(&Evidence { oom_kills, ..child.clone() });
    let two = told(OomKills { rank: 2, launch: 2, host: Some(2) });
    assert_eq!(two.0, "the kernel killed 2 of its processes for lack of memory");
    let one = told(OomKills { rank: 0, launch: 1, host: Some(1) });
    assert!(
        one.0.starts_with("the kernel killed a process for lack of memory: RuntimeError: DataLoader"),
        "{one:?}"
    );
    assert!(one.1.contains("fewer data loader workers") && of(&child).1.contains("dmesg"), "{one:?}");
    // Others of the host, or of a session, say nothing of a rank that ended by itself.
    let other = evidence(Exit::Code(1), &traceback("ValueError: bad"));
    let others = OomKills { rank: 0, launch: 1, host: Some(1) };
    assert_eq!(of(&Evidence { oom_kills: others, ..other }).0, "ValueError: bad (/w/t.py, line 7)");
    let shell = of(&evidence(Exit::Code(137), ""));
    assert_eq!(
        shell.0,
        "perhaps a process that it started: it was killed, not by xlaunch: perhaps by the kernel for lack of memory"
    );
}

#[test]
fn addresses_in_use_with_their_port() {
    let torch = "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network \
                 address. port: 29777, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use";
    let (what, advice) = failed(&traceback(torch));
    assert_eq!(what, format!("port 29777 is in use: {torch} (/w/t.py, line 7)"));
    assert!(advice.contains("--master-port"));
    let server =
        "OSError: [Errno 98] error while attempting to bind on address ('::', 8000): address already in use";
    assert!(failed(&traceback(server)).0.starts_with("port 8000 is in use: "));
    let bare = failed(&traceback("OSError: [Errno 98] Address already in use"));
    assert!(bare.0.starts_with("an address is in use: "));
}

#[test]
fn collectives_that_fail_or_wait_in_vain() {
    let timeout = "[rank0]:[E1121 ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation timeout: \
                   WorkNCCL(SeqNum=5, OpType=ALLREDUCE)";
    let aborted = format!(
        "{timeout}\nterminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG ID 0] \
         Process group watchdog thread terminated with exception: [Rank 0] Watchdog caught collective operation \
         timeout: WorkNCCL(SeqNum=5)\nException raised from checkTimeout at x.cpp:615\nframe #0: c10::Error\n"
    );
    let (what, advice) = of(&evidence(Exit::Signal(6), &aborted));
    assert!(
        what.starts_with("ranks waited for each other in vain: [PG ID 0] Process group watchdog"),
        "{what}"
    );
    assert!(advice.starts_with("perhaps one of them hangs"));
    let (what, advice) = failed(&traceback(
        "torch.distributed.DistBackendError: NCCL error in: x.cpp:3, unhandled system error",
    ));
    assert!(
        what.starts_with("torch.distributed.DistBackendError: NCCL error")
            && advice.starts_with("NCCL_DEBUG")
    );
    let gloo = "RuntimeError: [/p/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:1";
    assert_eq!(failed(&traceback(gloo)).1, "perhaps another rank ended first: see what its last lines say");
}

#[test]
fn modules_and_scripts_that_are_not_there() {
    let (what, advice) = failed(&traceback("ModuleNotFoundError: No module named 'flash_attn'"));
    assert_eq!(what, "ModuleNotFoundError: No module named 'flash_attn' (/w/t.py, line 7)");
    assert_eq!(advice, "install it for /opt/py/bin/python, or start the workers with the Python that has it");
    let script = "/opt/py/bin/python: can't open file '/w/x.py': [Errno 2] No such file or directory";
    assert_eq!(of(&evidence(Exit::Code(2), script)).0, script);
    assert!(failed("/opt/py/bin/python: No module named tran").1.starts_with("install it"));
}

#[test]
fn programs_that_cannot_be_started() {
    let failed = |errno: Errno, program: &str| {
        of(&Evidence {
            spawn_error: Some(errno.raw_os_error()),
            program: program.into(),
            search_path: "/bin:/usr/bin".into(),
            ..Evidence::default()
        })
    };
    let missing = failed(Errno::NOENT, "pyhton");
    assert_eq!(missing.0, "there is no program pyhton");
    assert_eq!(missing.1, "install it, or give its path; directories searched (PATH): /bin:/usr/bin");
    let file = failed(Errno::NOENT, "./run.sh").0;
    assert_eq!(file, "there is no file ./run.sh, or its first line names an interpreter that is not there");
    assert!(failed(Errno::ACCESS, "./run.sh").1.starts_with("chmod +x ./run.sh"));
    assert_eq!(failed(Errno::NOEXEC, "./a").0, "./a is no program that this machine can execute");
}

#[test]
fn signals_that_programs_end_by() {
    let signal = |signal| of(&evidence(Exit::Signal(signal), ""));
    assert_eq!(signal(4).0, "it came to an illegal instruction");
    assert!(signal(7).1.contains("/dev/shm"));
    assert_eq!(signal(2).0, "it was interrupted (SIGINT, Ctrl-C)");
    assert_eq!(failed(&traceback("KeyboardInterrupt")).0, "it was interrupted (SIGINT, Ctrl-C)");
    assert!(signal(11).1.contains("PYTHONFAULTHANDLER"));
    let fault = "Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f01 (most recent call first):\n  File \
                 \"/v/site-packages/x.py\", line 3 in f\n  File \"/w/t.py\", line 12 in main\n";
    assert_eq!(
        of(&evidence(Exit::Signal(11), fault)).0,
        "Fatal Python error: Segmentation fault (/w/t.py, line 12)"
    );
}

#[test]
fn what_shells_say() {
    let (what, _) = of(&evidence(Exit::Code(127), "run.sh: 3: nvcc: not found"));
    assert_eq!(what, "a shell did not find a command: run.sh: 3: nvcc: not found");
    let library = "python: error while loading shared libraries: libx.so.1: cannot open shared object file";
    assert_eq!(of(&evidence(Exit::Code(127), library)).0, library);
    let (what, _) = of(&evidence(Exit::Code(126), "bash: line 1: ./x: Permission denied"));
    assert_eq!(
        what,
        "a shell found a command that it could not execute: bash: line 1: ./x: Permission denied"
    );
}

#[test]
fn without_evidence_there_is_no_cause() {
    assert_eq!(cause(&evidence(Exit::Code(3), "epoch 1\nepoch 2")), None);
    assert_eq!(cause(&Evidence::default()), None);
    let ours = Evidence { signalled: true, ..evidence(Exit::Signal(15), "") };
    assert_eq!(cause(&ours), None);
}
