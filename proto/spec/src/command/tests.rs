use std::os::unix::ffi::{OsStrExt, OsStringExt};

use super::check::{MAX_ARGUMENT_BYTES, MAX_ARGUMENTS, MAX_ENTRIES, MAX_FIELD_BYTES};
use super::*;

fn spec(words: &[&str]) -> CommandSpec {
    CommandSpec::new(Program::Script(words[0].into()), words[1..].iter().map(OsString::from).collect())
}

/// A spec in which every field differs from its default, with text that is not UTF-8.
fn full() -> CommandSpec {
    let raw = |bytes: &[u8]| OsString::from_vec(bytes.to_vec());
    let both = Streams { stdout: true, stderr: true };
    let per_rank =
        PerRank { all: Streams { stdout: true, stderr: false }, ranks: [(3, both), (12, both)].into() };
    CommandSpec {
        nproc: Nproc::Gpu,
        program: Program::Script(raw(b"./\xff")),
        interpreter: Some(raw(b"/venv/\xff").into()),
        arguments: vec!["--lr".into(), raw(b"\xfe=1"), "".into()],
        preload: vec!["torch".into(), "torch.distributed".into()],
        role: "trainer".into(),
        run_id: Some("id".into()),
        master_addr: "::1".into(),
        master_port: Some(29_500),
        virtual_local_rank: true,
        binding: Some(Binding::CoreComplex),
        max_restarts: 3,
        no_restart_codes: [2, 78].into(),
        requeue_codes: [85, 99].into(),
        shutdown_timeout: Duration::from_millis(2500),
        signals: vec![Signal::Usr1, Signal::Xcpu],
        propagate_exit_code: true,
        stall_timeout: Duration::from_secs(60),
        hang_timeout: Some(Duration::from_secs(90)),
        flight_recorder: true,
        logs: LogOptions {
            dir: Some(raw(b"/logs/\xff").into()),
            redirects: per_rank.clone(),
            tee: per_rank,
            shown: Some([0, 2].into()),
            stdout_filters: vec!["a,b".into()],
            stderr_filters: vec!["é".into()],
            prefix: Some("${rank}:".into()),
            rotate_bytes: Some(64 << 20),
        },
    }
}

#[test]
fn every_field_round_trips_through_json_including_invalid_utf8() {
    for spec in [spec(&["train.py", "--lr", "3"]), full()] {
        assert_eq!(CommandSpec::from_json(&spec.to_json()).unwrap(), spec);
    }
    for program in [Program::Module("m".into()), Program::RunPath("r".into()), Program::Script("s".into())] {
        let spec = CommandSpec::new(program, Vec::new());
        assert_eq!(CommandSpec::from_json(&spec.to_json()).unwrap(), spec);
    }
}

#[test]
fn version_1_is_still_read() {
    let json = br#"{"version":1,"spec":{"nproc":{"count":2},"program":{"script":"train.py"},
        "arguments":["--lr",[255]],"role":"default","run_id":null,"master_addr":"127.0.0.1","master_port":null,
        "virtual_local_rank":false,"binding":null,"max_restarts":0,"no_restart_codes":[],
        "shutdown_timeout":{"secs":30,"nanos":0},"signals":["SIGTERM"],"propagate_exit_code":false,
        "stall_timeout":{"secs":300,"nanos":0},"logs":{"dir":null,
        "redirects":{"all":{"stdout":false,"stderr":false},"ranks":{"1":{"stdout":true,"stderr":false}}},
        "tee":{"all":{"stdout":false,"stderr":false},"ranks":{}},"shown":null,"stdout_filters":[],
        "stderr_filters":[],"prefix":null,"rotate_bytes":null},"a_later_field":1}}"#;
    let spec = CommandSpec::from_json(json).unwrap();
    assert_eq!((spec.nproc, spec.signals), (Nproc::Count(2), vec![Signal::Term]));
    assert_eq!(spec.arguments[1].as_bytes(), b"\xff");
    assert!(spec.requeue_codes.is_empty() && spec.hang_timeout.is_none() && !spec.flight_recorder);
    assert!(spec.logs.redirects.of(1).stdout && !spec.logs.redirects.of(0).stdout);
}

#[test]
fn unknown_version_and_unreadable_json_are_refused() {
    let error = |json: &[u8]| CommandSpec::from_json(json).unwrap_err().to_string();
    assert_eq!(
        error(br#"{"version":2,"spec":{"words":["a"]}}"#),
        "command description has version 2, but this build reads version 1"
    );
    for json in [b"{}".as_slice(), b"", br#"{"version":1}"#, br#"{"version":1,"spec":{"nproc":"many"}}"#] {
        assert!(error(json).starts_with("invalid command description: "), "{}", error(json));
    }
}

#[test]
fn a_spec_at_the_limits_is_accepted_and_beyond_is_refused_with_the_field_name() {
    let field = |change: &dyn Fn(&mut CommandSpec)| {
        let mut spec = full();
        change(&mut spec);
        match spec.check() {
            Err(CommandSpecError::Invalid { field, .. }) => field,
            other => panic!("{other:?}"),
        }
    };
    let text = |len: usize| "x".repeat(len);
    full().check().unwrap();
    let mut limits = full();
    limits.arguments = vec!["".into(); MAX_ARGUMENTS];
    limits.role = text(MAX_FIELD_BYTES);
    (limits.shutdown_timeout, limits.stall_timeout) = (MAX_TIMEOUT, MAX_TIMEOUT);
    limits.check().unwrap();
    limits.arguments = vec![text(MAX_ARGUMENT_BYTES - 1 - limits.program.target().len() - 1).into()];
    limits.check().unwrap();
    limits.arguments.push("".into());
    assert!(limits.check().is_err());

    assert_eq!(field(&|spec| spec.nproc = Nproc::Count(0)), "nproc");
    assert_eq!(field(&|spec| spec.program = Program::Script("".into())), "program");
    assert_eq!(field(&|spec| spec.program = Program::Script("a\0".into())), "arguments");
    assert_eq!(field(&|spec| spec.arguments.push("a\0b".into())), "arguments");
    assert_eq!(field(&|spec| spec.arguments = vec!["".into(); MAX_ARGUMENTS + 1]), "arguments");
    assert_eq!(field(&|spec| spec.arguments = vec![text(MAX_ARGUMENT_BYTES).into()]), "arguments");
    assert_eq!(field(&|spec| spec.program = Program::Binary("a".into())), "preload");
    assert_eq!(field(&|spec| spec.preload = vec!["a\0".into()]), "preload");
    assert_eq!(field(&|spec| spec.role = text(MAX_FIELD_BYTES + 1)), "role");
    assert_eq!(field(&|spec| spec.role = "\0".into()), "role");
    assert_eq!(field(&|spec| spec.run_id = Some("\0".into())), "run_id");
    assert_eq!(field(&|spec| spec.master_addr = "\0".into()), "master_addr");
    assert_eq!(field(&|spec| spec.logs.prefix = Some("\0".into())), "logs.prefix");
    assert_eq!(field(&|spec| spec.logs.dir = Some("/a\0".into())), "logs.dir");
    assert_eq!(field(&|spec| spec.logs.stdout_filters = vec!["\0".into()]), "logs.stdout_filters");
    assert_eq!(
        field(&|spec| spec.logs.stderr_filters = vec![String::new(); MAX_ENTRIES + 1]),
        "logs.stderr_filters"
    );
    assert_eq!(field(&|spec| spec.signals = vec![Signal::Int; MAX_ENTRIES + 1]), "signals");
    assert_eq!(field(&|spec| spec.logs.shown = Some((0..=4096).collect())), "logs.shown");
    let beyond = MAX_TIMEOUT + Duration::from_nanos(1);
    assert_eq!(field(&|spec| spec.shutdown_timeout = beyond), "shutdown_timeout");
    assert_eq!(field(&|spec| spec.stall_timeout = beyond), "stall_timeout");
    assert_eq!(field(&|spec| spec.hang_timeout = Some(beyond)), "hang_timeout");
    assert_eq!(field(&|spec| spec.requeue_codes = (0..=4096).collect()), "requeue_codes");
}

#[test]
fn check_applies_to_json() {
    let mut spec = spec(&["a.py"]);
    spec.nproc = Nproc::Count(0);
    assert!(CommandSpec::from_json(&spec.to_json()).is_err());
}

#[test]
fn runs_are_named_after_the_program() {
    let name = |program| CommandSpec::new(program, Vec::new()).name();
    assert_eq!(name(Program::Script("dir/train.py".into())), "train");
    assert_eq!(name(Program::Module("pkg.train".into())), "pkg.train");
    assert_eq!(name(Program::RunPath("/x/a.py".into())), "a");
    assert_eq!(name(Program::Binary("..".into())), "command");
}

#[test]
fn display_is_a_shell_command_line() {
    let line = |program| CommandSpec::new(program, vec!["--name".into(), "two words".into()]).to_string();
    assert_eq!(line(Program::Script("train.py".into())), "python train.py --name 'two words'");
    assert_eq!(line(Program::RunPath("train.py".into())), "python train.py --name 'two words'");
    assert_eq!(line(Program::Module("pkg".into())), "python -m pkg --name 'two words'");
    assert_eq!(line(Program::Binary("./a.out".into())), "./a.out --name 'two words'");
}

#[test]
fn workers_are_counted_by_gpus_or_cores() {
    let unknown = Err("no NVML".to_owned());
    for (nproc, gpus, workers) in [
        (Nproc::Auto, Ok(4), Ok(4)),
        (Nproc::Auto, Ok(0), Ok(12)),
        (Nproc::Auto, unknown.clone(), Ok(12)),
        (Nproc::Cpu, Ok(4), Ok(12)),
        (Nproc::Gpu, Ok(4), Ok(4)),
        (Nproc::Gpu, Ok(0), Err("--nproc-per-node gpu: no GPU is visible")),
        (Nproc::Gpu, unknown.clone(), Err("--nproc-per-node gpu: no GPU was found: no NVML")),
        (Nproc::Count(7), unknown, Ok(7)),
    ] {
        assert_eq!(nproc.resolve(&gpus, 12), workers.map_err(String::from), "{nproc:?} {gpus:?}");
    }
}

#[test]
fn signals_are_parsed_by_name_and_number() {
    for signal in Signal::ALL {
        assert_eq!(Signal::parse(signal.name()), Some(signal));
        assert_eq!(Signal::parse(&(signal as i32).to_string()), Some(signal));
        assert_eq!(rustix::process::Signal::from(signal).as_raw(), signal as i32);
        assert_eq!(serde_json::to_value(signal).unwrap(), signal.name());
    }
    for text in ["SIGKILL", "9", "TERM", ""] {
        assert_eq!(Signal::parse(text), None, "{text}");
    }
}
