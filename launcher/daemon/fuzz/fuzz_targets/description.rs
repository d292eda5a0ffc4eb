//! Fuzzes descriptions of jobs as an agent reads them from standard input, including the descriptions of commands and
//! training jobs in them. A description that is accepted must be valid, be written as it was read, and be resolvable on
//! a node.
#![no_main]

mod patch;

use std::ffi::OsString;
use std::sync::LazyLock;

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use patch::Document;
use serde_json::Value;
use xlaunch_agent::resolved_command;
use xlaunch_host::devices::{self, Node};
use xlaunch_daemon::files::{Description, PROTOCOL};
use xlaunch_spec::command::{CommandSpec, Program};
use xlaunch_proto::convert::node::Work;
use xlaunch_spec::job::JobSpec;

#[derive(Arbitrary, Debug)]
enum Input<'a> {
    Command(Document<'a>, u8),
    Trainer(Document<'a>),
    Start(Document<'a>, bool),
}

fn command() -> CommandSpec {
    CommandSpec::new(Program::Binary("/bin/true".into()), vec!["--lr".into(), "${local_rank}".into()])
}

static TRAINER: LazyLock<Value> =
    LazyLock::new(|| serde_json::from_slice(&JobSpec::default().to_json()).expect("JSON"));
static COMMAND: LazyLock<Value> =
    LazyLock::new(|| serde_json::from_slice(&command().to_json()).expect("JSON"));
static TRAINER_START: LazyLock<Value> = LazyLock::new(|| start(Work::Trainer(Box::default())));
static COMMAND_START: LazyLock<Value> = LazyLock::new(|| start(Work::Command(Box::new(command()))));

fn start(work: Work) -> Value {
    let description = Description {
        protocol: PROTOCOL,
        job: 7,
        name: "n".into(),
        work_dir: "/".into(),
        environment: vec![b"A=\xff".to_vec()],
        work,
        workers: 1,
        start: 1,
        gpus: vec!["GPU-a".into()],
        requeued: false,
        umask: None,
        max_output: Some(1 << 20),
    };
    serde_json::to_value(&description).expect("plain data")
}

fuzz_target!(|input: Input<'_>| match input {
    Input::Command(document, gpus) => {
        let Ok(spec) = CommandSpec::from_json(&document.text(&COMMAND)) else { return };
        assert_eq!(CommandSpec::from_json(&spec.to_json()).expect("as written"), spec);
        resolve(spec, gpus);
    }
    Input::Trainer(document) => {
        let Ok(spec) = JobSpec::from_json(&document.text(&TRAINER)) else { return };
        let again = JobSpec::from_json(&spec.to_json()).expect("as written");
        assert_eq!(again, spec);
        assert_eq!(again.digest(), spec.digest());
        place(&spec);
    }
    Input::Start(document, trainer) => {
        let start = document.text(if trainer { &TRAINER_START } else { &COMMAND_START });
        let Ok(read) = serde_json::from_slice::<Description>(&start) else { return };
        let written = serde_json::to_vec(&read).expect("plain data");
        assert_eq!(serde_json::from_slice::<Description>(&written).expect("as written"), read);
        match read.work {
            Work::Trainer(spec) => place(&spec),
            Work::Command(spec) => resolve(*spec, 1),
        }
    }
});

fn resolve(spec: CommandSpec, gpus: u8) {
    // The daemon has checked the descriptions that it wrote.
    if spec.check().is_err() {
        return;
    }
    assert!(!spec.name().contains('/'));
    let _ = spec.to_string();
    // Resolving looks for scripts on the disk, so use a binary, which is not looked up.
    let spec = match spec.program {
        Program::Binary(_) => spec,
        _ => CommandSpec { program: Program::Binary("true".into()), ..spec },
    };
    let variable = |name: &str| (name == "CUDA_VISIBLE_DEVICES").then(|| OsString::from("0,1"));
    let node = || Node { gpus: Ok(gpus.into()), cores: 2 };
    if let Ok(resolved) = resolved_command::resolve(spec, &variable, &node) {
        assert!(resolved.nproc > 0 && !resolved.argv.is_empty());
    }
}

fn place(spec: &JobSpec) {
    if spec.check().is_err() {
        return;
    }
    for gpus in [Ok(0), Ok(2), Err("no driver".to_owned())] {
        if let Ok(placement) = devices::place(spec, &Node { gpus, cores: 2 }) {
            assert!(placement.workers > 0);
        }
    }
}
