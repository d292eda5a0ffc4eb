//! Tests of command lines and their meaning.

use std::time::Duration;

use xlaunch_agent::resolved_command::{ResolvedCommand, resolve};
use xlaunch_host::devices::Node;
use xlaunch_spec::command::{Binding, Program, Signal, Streams};

use super::*;

/// Variables of every test: a Python, so that none has to be installed.
const PYTHON: (&str, &str) = ("PYTHON_EXEC", "py");

fn environment(variables: &[(&str, &str)]) -> impl Fn(&str) -> Option<OsString> {
    let known: Vec<_> =
        [&[PYTHON], variables].concat().iter().map(|(n, v)| (n.to_string(), v.into())).collect();
    move |wanted| {
        known.iter().find(|(name, _)| name == wanted).map(|(_, value): &(String, OsString)| value.clone())
    }
}

fn ask(name: Name, line: &[&str], variables: &[(&str, &str)]) -> Result<Request, String> {
    let arguments: Vec<OsString> = line.iter().map(OsString::from).collect();
    parse(name, &arguments, &environment(variables), Scope::Nodes(&|| Ok(None)))
        .map_err(|refusal| refusal.message)
}

/// Resolves a command line on a node with 4 GPUs and 12 cores.
fn resolved(name: Name, line: &str, variables: &[(&str, &str)]) -> Result<ResolvedCommand, String> {
    let node = || Node { gpus: Ok(4), cores: 12 };
    match ask(name, &line.split_whitespace().collect::<Vec<_>>(), variables)? {
        Request::Command(spec, None) => {
            resolve(*spec, &environment(variables), &node).map_err(|refusal| refusal.message)
        }
        other => panic!("{line}: {other:?}"),
    }
}

fn command(line: &str, variables: &[(&str, &str)]) -> ResolvedCommand {
    resolved(Name::Xlaunch, line, variables).unwrap_or_else(|refusal| panic!("{line}: {refusal}"))
}

fn refused(name: Name, line: &str, variables: &[(&str, &str)]) -> String {
    resolved(name, line, variables).expect_err(line)
}

#[test]
fn defaults_match_torchrun() {
    let ResolvedCommand { spec, name, argv, nproc } = command("dir/train.py --lr 3", &[]);
    assert_eq!((name.as_str(), spec.role.as_str(), nproc), ("train", "default", 1));
    assert_eq!(argv, ["py", "-u", "dir/train.py", "--lr", "3"]);
    assert_eq!((spec.run_id, spec.master_addr.as_str(), spec.master_port), (None, "127.0.0.1", None));
    assert!(spec.max_restarts == 0 && spec.no_restart_codes.is_empty());
    assert_eq!(spec.signals, [Signal::Term, Signal::Int, Signal::Hup, Signal::Quit]);
    assert_eq!(
        (spec.shutdown_timeout, spec.stall_timeout),
        (Duration::from_secs(30), Duration::from_secs(300))
    );
    assert!(spec.hang_timeout.is_none() && spec.requeue_codes.is_empty() && !spec.flight_recorder);
    assert!(!spec.virtual_local_rank && !spec.propagate_exit_code && spec.binding.is_none());
    assert_eq!((spec.logs.redirects.of(0), spec.logs.tee.of(0)), Default::default());
    assert!(spec.logs.dir.is_none() && spec.logs.shown.is_none() && spec.logs.prefix.is_none());
}

#[test]
fn target_is_a_script_a_module_or_a_program() {
    let run_path =
        "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')";
    for (line, name, argv) in [
        ("a.py --nproc 2 -m", "a", vec!["py", "-u", "a.py", "--nproc", "2", "-m"]),
        ("-m pkg.a --d", "pkg.a", vec!["py", "-u", "-m", "pkg.a", "--d"]),
        ("-m -- pkg.a", "pkg.a", vec!["py", "-u", "-m", "pkg.a"]),
        ("--run-path --no-python -m /x/a.py b", "a", vec!["py", "-u", "-c", run_path, "/x/a.py", "b"]),
        ("--no-python ./a.sh -- b", "a", vec!["./a.sh", "b"]),
        ("-- ./a.out x", "a", vec!["./a.out", "x"]),
        ("-- cat train.toml", "cat", vec!["cat", "train.toml"]),
    ] {
        let command = command(line, &[]);
        assert_eq!(
            (command.name.as_str(), command.argv),
            (name, argv.iter().map(OsString::from).collect()),
            "{line}"
        );
    }
    for line in [["-", "b"], ["/dev/stdin", "b"], ["/dev/fd/0", "b"]] {
        let request = ask(Name::Xlaunch, &line, &[]);
        assert!(
            matches!(&request, Ok(Request::Command(spec, None)) if matches!(spec.program, Program::Script(_))),
            "{request:?}"
        );
    }
    // torchrun passes every target to Python.
    for line in [["a.toml", "b"], ["status", "b"], ["--", "a"]] {
        let request = ask(Name::Torchrun, &line, &[]);
        assert!(
            matches!(&request, Ok(Request::Command(spec, None)) if matches!(spec.program, Program::Script(_))),
            "{request:?}"
        );
    }
}

#[test]
fn flags_mean_the_same_as_in_torchrun() {
    let ResolvedCommand { spec, nproc, .. } = command(
        "--nproc-per-node=2 --role trainer --max_restarts 3 --no-restart-codes 2,78 --shutdown-timeout 5 \
         --signals-to-handle SIGTERM,SIGUSR1 --propagate-exit-code --stall-timeout 60 --numa-binding core-complex \
         --hang-timeout 90 --requeue-codes 85,99 --flight-recorder \
         --virtual-local-rank --log-dir /logs -r 0:1 -t 2 --log-line-prefix-template ${rank}: \
         --local-ranks-filter 0,2 --duplicate-stdout-filters a,,b,c --log-rotate 64M --rdzv-conf a=1,'b=2 \
         --rdzv-backend c10d --monitor-interval 5 --start-method fork --event-log-handler console --nnodes 1:1 \
         --node-rank 0 --logs-specs default a.py",
        &[("CUDA_VISIBLE_DEVICES", "3,1")],
    );
    assert_eq!((nproc, spec.role.as_str(), spec.max_restarts), (2, "trainer", 3));
    assert_eq!(spec.no_restart_codes, [2, 78].into());
    assert_eq!(
        (spec.shutdown_timeout, spec.stall_timeout),
        (Duration::from_secs(5), Duration::from_secs(60))
    );
    assert_eq!((spec.hang_timeout, spec.requeue_codes), (Some(Duration::from_secs(90)), [85, 99].into()));
    assert!(spec.flight_recorder);
    assert_eq!(spec.signals, [Signal::Term, Signal::Usr1]);
    assert!(spec.propagate_exit_code && spec.virtual_local_rank);
    assert_eq!(spec.binding, Some(Binding::CoreComplex));
    let logs = spec.logs;
    assert_eq!(logs.dir.as_deref(), Some("/logs".as_ref()));
    assert_eq!(logs.redirects.of(0), Streams { stdout: true, stderr: false });
    assert_eq!(
        (logs.redirects.of(1), logs.tee.of(9)),
        (Streams::default(), Streams { stdout: false, stderr: true })
    );
    assert_eq!((logs.prefix.as_deref(), logs.shown), (Some("${rank}:"), Some([0, 2].into())));
    assert_eq!((logs.stdout_filters, logs.rotate_bytes), (vec!["a,b".into(), "c".into()], Some(64 << 20)));
}

#[test]
fn log_dir_that_names_no_directory_counts_as_not_given() {
    for flags in ["--log-dir=", "--log-dir /dev/null"] {
        assert_eq!(command(&format!("{flags} a.py"), &[]).spec.logs.kept_in(), None, "{flags}");
    }
    assert_eq!(command("a.py", &[("PET_LOG_DIR", "/dev/null")]).spec.logs.kept_in(), None);
}

#[test]
fn empty_filter_of_local_ranks_shows_all() {
    assert_eq!(command("--local-ranks-filter= a.py", &[]).spec.logs.shown, None);
}

#[test]
fn nproc_is_a_number_or_a_kind_of_device() {
    for (nproc, workers) in [("7", 7), ("auto", 4), ("gpu", 4), ("cpu", 12)] {
        assert_eq!(command(&format!("--nproc {nproc} a.py"), &[]).nproc, workers, "{nproc}");
    }
}

#[test]
fn rendezvous_flags_set_the_master_address_and_run_id() {
    for (flags, id, address, port) in [
        ("--master-addr h --master-port 5 --rdzv-id x", Some("x"), "h", Some(5)),
        ("--master-port 0 --rdzv-id none", None, "127.0.0.1", None),
        ("--rdzv-backend c10d --rdzv-endpoint [::1]:29400", None, "::1", Some(29400)),
        ("--rdzv-backend=c10d --rdzv-endpoint=localhost:0 --master-port 5", None, "localhost", None),
        ("--standalone --rdzv-id x --rdzv-endpoint h:5 --master-port 6", None, "127.0.0.1", None),
        ("--local-addr 10.0.0.1", None, "10.0.0.1", None),
        ("--rdzv-endpoint= --master-addr h --master-port 5 --local-addr=", None, "h", Some(5)),
        ("--master-addr= --local-addr= --rdzv-id=", None, "127.0.0.1", None),
    ] {
        let spec = command(&format!("{flags} a.py"), &[]).spec;
        let found = (spec.run_id.as_deref(), spec.master_addr.as_str(), spec.master_port);
        assert_eq!(found, (id, address, port), "{flags}");
    }
}

#[test]
fn environment_variables_replace_missing_flags() {
    let variables = [
        ("PET_NPROC_PER_NODE", "gpu"),
        ("PET_MAX_RESTARTS", "2"),
        ("PET_RDZV_ENDPOINT", ""),
        ("PET_MODULE", "1"),
        ("PET_VIRTUAL_LOCAL_RANK", "0"),
        ("PET_ROLE", "worker"),
        ("PET_PRELOAD", "torch, torch.nn"),
        ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7"),
        ("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "${local_rank} "),
        // torchrun does not read this variable.
        ("PET_NUMA_BINDING", "node"),
    ];
    let ResolvedCommand { spec: found, argv, nproc, .. } = command("--role mine pkg", &variables);
    assert_eq!((nproc, found.max_restarts, found.role.as_str()), (4, 2, "mine"));
    assert_eq!(argv, ["py", "-u", "-m", "pkg"]);
    assert_eq!(found.preload, ["torch", "torch.nn"]);
    assert_eq!((found.shutdown_timeout.as_secs(), found.logs.prefix.as_deref()), (7, Some("${local_rank} ")));
    assert!(!found.virtual_local_rank && found.binding.is_none());
    let given = command("--shutdown-timeout 9 --log-line-prefix-template x pkg", &variables).spec;
    assert_eq!((given.shutdown_timeout.as_secs(), given.logs.prefix.as_deref()), (9, Some("x")));
}

#[test]
fn invalid_values_are_refused_with_what_was_expected() {
    for (line, words) in [
        ("--nproc many a.py", "--nproc many: expected a number from 1 to 65536, auto, gpu or cpu"),
        ("--nproc_per_node=many a.py", "--nproc_per_node many: expected a number from 1"),
        ("-t 5 a.py", "-t 5: expected 0 (none), 1 (stdout)"),
        ("--nproc 0 a.py", "expected a number from 1"),
        ("--nproc 4294967295 a.py", "expected a number from 1 to 65536"),
        ("--max-restarts -1 a.py", "--max-restarts -1: expected a whole number"),
        ("--nnodes 0 a.py", "--nnodes 0: expected a number of nodes, N or MIN:MAX, from 1 to 65536"),
        (
            "--rdzv-backend etcd-v2 a.py",
            "--rdzv-backend etcd-v2: etcd is not supported; expected static or c10d",
        ),
        ("--nproc many t.toml", "--nproc many: expected a whole number, auto, gpu or cpu"),
        ("--rdzv-backend mine a.py", "--rdzv-backend mine: plug-ins in Python are not supported"),
        ("--logs-specs mine a.py", "--logs-specs mine: plug-ins in Python are not supported"),
        (
            "--signals-to-handle SIGKILL a.py",
            "--signals-to-handle SIGKILL: expected a comma-separated list of SIGHUP",
        ),
        ("--tee 5 a.py", "--tee 5: expected 0 (none), 1 (stdout)"),
        ("--numa-binding core a.py", "expected node, socket, exclusive or core-complex"),
        ("--monitor-interval abc a.py", "--monitor-interval abc: expected a number of seconds"),
        ("--start-method thread a.py", "--start-method thread: expected spawn, fork or forkserver"),
        ("--rdzv-conf abc a.py", "--rdzv-conf abc: expected KEY=VALUE"),
        ("--rdzv-conf join_timeout=abc a.py", "join_timeout=abc: expected a number of seconds"),
        ("--nproc xpu a.py", "--nproc xpu: XPUs are not counted; give their number"),
        ("--log-rotate 64X a.py", "--log-rotate 64X: expected a number of bytes such as"),
        ("--preload a/b a.py", "--preload a/b: expected a comma-separated list of Python modules"),
        ("--preload torch --no-python a", "--preload imports Python modules: it needs a script or -m MODULE"),
        ("--preload torch -- a", "--preload imports Python modules: it needs a script or -m MODULE"),
        ("--preload torch t.toml", "--preload does not apply to training configurations"),
        ("--no-python -m a", "--no-python and --module cannot be combined"),
        ("t.toml --resume --overwrite", "--resume and --overwrite cannot be combined"),
        ("--overwrite t.toml --resume=a", "--resume and --overwrite cannot be combined"),
        (
            "--nproc 3 --virtual-local-rank a.py",
            "3 workers need a GPU each, but CUDA_VISIBLE_DEVICES=1,0 has 2",
        ),
        ("--set train.lr=1 a.py", "--set is for training configurations"),
        (
            "./a.out",
            "./a.out is neither a Python script nor a .toml file: `xlaunch -- ./a.out` runs a program",
        ),
        ("a.ipynb", "make it a script with `jupyter nbconvert --to script a.ipynb`, and launch that"),
        (
            "a.yaml b.py",
            "a.yaml: configurations of training jobs are TOML files; `xlaunch [OPTIONS] SCRIPT.py`",
        ),
        ("build.rs", "`xlaunch -- python3 build.rs` runs it as one, `xlaunch -- ./build.rs` as a program"),
        (
            "statsu",
            "unknown subcommand `statsu`; did you mean `xlaunch status`? `xlaunch -- statsu` runs a program",
        ),
        ("--nproc 2 stauts 7", "did you mean `xlaunch status`?"),
        ("train t.toml", "training needs no subcommand: `xlaunch t.toml`; `xlaunch -- train` runs a program"),
        ("train --resume", "training needs no subcommand: `xlaunch CONFIG.toml`"),
        ("--hosts a,b - x", "-: other hosts cannot read a script from standard input or a pipe"),
        (
            "--resume src t.toml",
            "a directory without __main__.py, which Python cannot run; to resume from it, write",
        ),
        ("sleep 5", "sleep is neither a Python script nor a .toml file"),
        ("", "nothing to launch"),
        ("--standalone", "nothing to launch"),
    ] {
        let refusal = refused(Name::Xlaunch, line, &[("CUDA_VISIBLE_DEVICES", "1,0")]);
        assert!(refusal.contains(words), "{line}: {refusal}");
    }
    for line in [&["--nproc", "2", ""][..], &["-m", "", "x"], &["--", ""]] {
        let refusal = ask(Name::Xlaunch, line, &[]).unwrap_err();
        assert_eq!(refusal, "nothing to launch: the name of the script, module or program is empty");
    }
    let refusal = refused(Name::Torchrun, "a.py", &[("PET_MAX_RESTARTS", "few")]);
    assert_eq!(refusal, "PET_MAX_RESTARTS=few: expected a whole number");
    let refusal = refused(Name::Torchrun, "a.py", &[("PET_STANDALONE", "yes")]);
    assert_eq!(refusal, "PET_STANDALONE=yes: expected 0 or 1");
}

#[test]
fn training_configurations_take_flags_before_and_after() {
    let line = "--nproc 2 a.toml --set b.c=d --set=e.f=g --resume --max-restarts 1 --shutdown-timeout 2.5";
    // A variable of torchrun's means nothing to the trainer.
    match ask(Name::Xlaunch, &line.split(' ').collect::<Vec<_>>(), &[("PET_MAX_RESTARTS", "few")]) {
        Ok(Request::Trainer(launch, None)) => {
            assert_eq!((launch.config, launch.nproc), ("a.toml".into(), Some(2)));
            let keys = ["b.c=d", "e.f=g", "launch.max_restarts=1", "launch.shutdown_timeout=2.5"];
            assert_eq!(launch.set, keys);
            assert_eq!(launch.resume.as_deref(), Some("auto"));
        }
        other => panic!("{other:?}"),
    }
    // `cpu`, which Kubeflow sets on nodes without GPUs, and `auto` leave the device to the configuration.
    for (nproc, set) in [("gpu", &["engine.device=\"cuda\""][..]), ("auto", &[]), ("cpu", &[])] {
        let request = ask(Name::Xlaunch, &["--nproc", nproc, "a.toml"], &[]);
        assert!(
            matches!(&request, Ok(Request::Trainer(launch, None)) if launch.nproc.is_none() && launch.set == set),
            "{nproc}: {request:?}"
        );
    }
    let refusal = refused(Name::Xlaunch, "--tee 3 a.toml", &[]);
    assert!(
        refusal.starts_with("--tee does not apply to training configurations such as a.toml"),
        "{refusal}"
    );
}

#[test]
fn help_lists_subcommands_and_exit_codes() {
    for (name, line) in [(Name::Xlaunch, "--help"), (Name::Torchrun, "-h")] {
        let Ok(Request::Text(help)) = ask(name, &[line], &[]) else { panic!("no help") };
        for (exit, meaning) in ExitCode::TABLE {
            assert!(help.contains(&exit.code().to_string()) && help.contains(meaning), "{help}");
        }
        assert_eq!(help.contains("Show running launches"), name == Name::Xlaunch);
    }
}
