//! Command lines, `PET_*` variables and allocations, and the groups that follow from them.

use std::ffi::OsString;

use super::super::{Request, parse};
use super::*;

const TOKEN: (&str, &str) = ("XLAUNCH_TOKEN", "0123456789abcdef");

/// The second of four nodes of a Slurm step.
fn step(munge: bool) -> Allocation {
    let from = |value, source: &str| Some(Sourced { value, source: source.to_owned() });
    Allocation {
        engine: "Slurm",
        variables: vec![],
        nodes: from(4, "SLURM_STEP_NUM_NODES=4"),
        node_rank: from(1, "SLURM_NODEID=1"),
        endpoint: Some(Sourced {
            value: ("h0".into(), vec![20_001, 20_002]),
            source: "SLURM_STEP_NODELIST".into(),
        }),
        run_id: Some(Sourced { value: "slurm-7.0".into(), source: "SLURM_JOB_ID".into() }),
        munge,
    }
}

fn mpi() -> Allocation {
    Allocation { engine: "mpirun", endpoint: None, run_id: None, ..step(false) }
}

fn pod() -> Allocation {
    Allocation { nodes: None, ..mpi() }
}

fn asked(
    name: Name,
    flags: &str,
    variables: &[(&str, &str)],
    found: Result<Option<Allocation>, String>,
) -> Result<Option<Group>, String> {
    let arguments: Vec<OsString> = flags.split_whitespace().chain(["a.py"]).map(OsString::from).collect();
    let environment =
        |wanted: &str| variables.iter().find(|(name, _)| *name == wanted).map(|(_, value)| value.into());
    let detect = || found.clone();
    match parse(name, &arguments, &environment, Scope::Nodes(&detect)) {
        Ok(Request::Command(_, group)) => Ok(group.map(|group| *group)),
        Ok(other) => panic!("{flags}: {other:?}"),
        Err(refusal) => Err(refusal.message),
    }
}

/// Resolves the group of a launch that has a token.
fn group(
    flags: &str,
    variables: &[(&str, &str)],
    found: Option<Allocation>,
) -> Result<Option<Group>, String> {
    asked(Name::Xlaunch, flags, &[variables, &[TOKEN]].concat(), Ok(found))
}

fn spec(flags: &str, variables: &[(&str, &str)], found: Option<Allocation>) -> GroupSpec {
    group(flags, variables, found).unwrap_or_else(|refusal| panic!("{flags}: {refusal}")).expect(flags).spec
}

/// Nodes, rank, backend, endpoint and run id.
fn summary(spec: &GroupSpec) -> String {
    let rank = spec.node_rank.map_or("-".into(), |rank| rank.to_string());
    let id = spec.run_id.as_deref().unwrap_or("-");
    format!("{} {rank} {} {} {id}", spec.nodes, spec.backend, spec.endpoint)
}

#[test]
fn flags_have_the_meaning_and_defaults_of_torchrun() {
    for (flags, expected) in [
        ("--nnodes 2 --master-addr h0", "2 0 static h0:29500 -"),
        ("--nnodes 2 --node-rank 1 --master-addr h0 --master-port 5", "2 1 static h0:5 -"),
        ("--nnodes 2:2 --node-rank 1 --rdzv-endpoint h0 --rdzv-id x", "2 1 static h0:29500 x"),
        ("--nnodes 2 --rdzv-endpoint h1:7 --master-addr h0 --rdzv-id none", "2 0 static h1:7 -"),
        ("--nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint [fd77::10]", "1:2 - c10d [fd77::10]:29400 -"),
        ("--nnodes 3 --node-rank 2 --rdzv-backend c10d --rdzv-endpoint h0:9", "3 2 c10d h0:9 -"),
    ] {
        assert_eq!(summary(&spec(flags, &[], None)), expected, "{flags}");
    }
    let flags = "--nnodes 2 --master-addr h0 --local-addr 10.0.0.2 --interface eth0";
    let spec = spec(flags, &[], None);
    assert_eq!((spec.local_addr.as_deref(), spec.interface.as_deref()), (Some("10.0.0.2"), Some("eth0")));
    assert_eq!((spec.join_timeout.as_secs(), spec.last_call_timeout.as_secs()), (600, 30));
    assert_eq!((spec.loss_timeout().as_secs(), spec.hosts_coordinator), (12, None));
}

#[test]
fn empty_value_of_an_address_or_id_counts_as_not_given() {
    for (flags, expected) in [
        ("--nnodes 2 --rdzv-endpoint= --master-addr h0 --master-port 5", "2 0 static h0:5 -"),
        ("--nnodes 2 --rdzv-endpoint h0 --master-addr= --local-addr= --rdzv-id=", "2 0 static h0:29500 -"),
    ] {
        let spec = spec(flags, &[], None);
        assert_eq!((summary(&spec).as_str(), spec.local_addr), (expected, None), "{flags}");
    }
    let of_engine = spec("--master-addr= --rdzv-id=", &[], Some(step(true)));
    assert_eq!(summary(&of_engine), "4 1 static h0:20001 slurm-7.0");
    for flags in ["--nnodes 2 --master-addr=", "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint="] {
        let refused = group(flags, &[], None).unwrap_err();
        assert!(refused.contains("use --rdzv-endpoint HOST:PORT"), "{refused}");
    }
    // Without the host, every node would look for the coordinator on itself.
    let refused = group("--nnodes 2 --rdzv-endpoint :29500", &[], None).unwrap_err();
    assert_eq!(refused, "--rdzv-endpoint :29500: expected HOST:PORT; the host is missing");
}

#[test]
fn one_node_needs_no_group_and_looks_for_no_engine() {
    let unusable = || Err("an engine was detected".into());
    for flags in [
        "--nnodes 1",
        "--nnodes 1:1 --node-rank 0 --rdzv-endpoint h:5",
        "--standalone",
        "--standalone --nnodes 1:4",
    ] {
        assert_eq!(asked(Name::Xlaunch, flags, &[], unusable()), Ok(None), "{flags}");
    }
    assert_eq!(
        asked(Name::Xlaunch, "", &[("PET_NNODES", "1"), ("PET_NODE_RANK", "0")], unusable()),
        Ok(None)
    );
    assert_eq!(asked(Name::Xlaunch, "--standalone", &[("PET_NNODES", "2")], unusable()), Ok(None));
    for flags in ["", "--rdzv-backend c10d --rdzv-endpoint localhost:0", "--node-rank 0"] {
        assert_eq!(group(flags, &[], None), Ok(None), "{flags}");
    }
    // An allocation of one node, or a pod that may be one of many independent ones.
    let one = |mut found: Allocation| {
        found.nodes = Some(Sourced { value: 1, source: "SLURM_STEP_NUM_NODES=1".into() });
        found
    };
    assert_eq!(group("", &[], Some(one(step(true)))), Ok(None));
    assert_eq!(group("", &[], Some(pod())), Ok(None));
    let by_hand = spec("--nnodes 2 --node-rank 1 --master-addr h5", &[], Some(one(step(true))));
    assert_eq!(summary(&by_hand), "2 1 static h5:29500 -");
}

#[test]
fn rank_that_torchrun_ignores_may_be_outside_the_range() {
    for flags in ["--node-rank 3", "--nnodes 1 --node-rank 1", "--rdzv-backend c10d --node-rank 1"] {
        assert_eq!(group(flags, &[], None), Ok(None), "{flags}");
    }
    assert_eq!(group("--node-rank 1", &[], Some(pod())), Ok(None));
    assert_eq!(group("--nnodes 1", &[("PET_NODE_RANK", "3")], None), Ok(None));
    let flags = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint h0 --node-rank 2";
    let found = group(flags, &[], None).unwrap().unwrap();
    assert_eq!(summary(&found.spec), "2 - c10d h0:29400 -");
    assert_eq!(found.warnings, ["--node-rank 2 has no effect: it is outside the range of --nnodes 2"]);
}

#[test]
fn step_of_an_engine_needs_no_flags() {
    let spec = spec("", &[], Some(step(true)));
    assert_eq!(summary(&spec), "4 1 static h0:20001 slurm-7.0");
    assert_eq!(spec.endpoint.ports, [20_001, 20_002]);
    // The first host has the coordinator, whatever the names and addresses of the hosts are.
    let first =
        Allocation { node_rank: Some(Sourced { value: 0, source: "SLURM_NODEID=0".into() }), ..step(true) };
    let hosts = |found| self::spec("--nnodes 1:4 --rdzv-backend c10d", &[], Some(found)).hosts_coordinator;
    assert_eq!((hosts(step(true)), hosts(first)), (Some(false), Some(true)));
}

#[test]
fn torchrun_by_name_looks_for_no_engine() {
    let asked = |flags| asked(Name::Torchrun, flags, &[], Ok(Some(step(true))));
    assert_eq!(asked(""), Ok(None));
    let group = asked("--nnodes 2 --node-rank 0 --master-addr h").unwrap().unwrap();
    assert_eq!(
        (summary(&group.spec).as_str(), group.spec.security),
        ("2 0 static h:29500 -", Security::Insecure)
    );
}

#[test]
fn flags_override_variables_and_variables_override_the_engine() {
    let variables = [("PET_NNODES", "4"), ("PET_RDZV_ENDPOINT", "pet:1"), ("PET_RDZV_ID", "pet")];
    assert_eq!(summary(&spec("", &variables, Some(step(true)))), "4 1 static pet:1 pet");
    let flags = "--rdzv-endpoint flag:2 --rdzv-id flag";
    assert_eq!(summary(&spec(flags, &variables, Some(step(true)))), "4 1 static flag:2 flag");
    // Nodes beyond the maximum are spares.
    let elastic = spec("--nnodes 1:1 --nnodes 2:3 --rdzv-backend c10d", &[], Some(step(true)));
    assert_eq!(summary(&elastic), "2:3 1 c10d h0:20001 slurm-7.0");
    let fourth =
        Allocation { node_rank: Some(Sourced { value: 3, source: "SLURM_NODEID=3".into() }), ..step(true) };
    assert_eq!(spec("--nnodes 2:3 --rdzv-backend c10d", &[], Some(fourth)).node_rank, None);
}

#[test]
fn pod_of_kubernetes_gets_its_rank_from_the_index() {
    let variables = [("PET_NNODES", "4"), ("PET_RDZV_ENDPOINT", "train-0.train")];
    assert_eq!(summary(&spec("", &variables, Some(pod()))), "4 1 static train-0.train:29500 -");
    // Kubeflow Trainer; the index is that of one of several Indexed Jobs.
    let kubeflow = [
        ("PET_NNODES", "4"),
        ("PET_NODE_RANK", "3"),
        ("PET_MASTER_ADDR", "job-node-0-0.job"),
        ("PET_MASTER_PORT", "29500"),
    ];
    assert_eq!(summary(&spec("", &kubeflow, Some(pod()))), "4 3 static job-node-0-0.job:29500 -");
    let beyond = [("PET_NNODES", "1:2"), ("PET_RDZV_BACKEND", "c10d"), ("PET_RDZV_ENDPOINT", "h")];
    assert_eq!(summary(&spec("", &beyond, Some(pod()))), "1:2 1 c10d h:29400 -");
}

#[test]
fn contradictions_and_impossible_groups_are_refused_with_their_sources() {
    let step = || Some(step(true));
    for (flags, found, words) in [
        ("--nnodes 2", step(), "--nnodes 2 contradicts SLURM_STEP_NUM_NODES=4"),
        ("--nnodes 5:8 --rdzv-backend c10d", step(), "--nnodes 5:8 contradicts SLURM_STEP_NUM_NODES=4"),
        ("--node-rank 2", step(), "--node-rank 2 contradicts SLURM_NODEID=1"),
        (
            "--nnodes 2 --master-addr h --node-rank 2",
            None,
            "--node-rank 2 is outside the range: --nnodes 2 means",
        ),
        (
            "--nnodes 1:2 --master-addr h",
            None,
            "--nnodes 1:2: the static rendezvous has a fixed number of nodes",
        ),
        ("--nnodes 2 --rdzv-backend etcd", None, "--rdzv-backend etcd: etcd is not supported"),
        (
            "--nnodes 2",
            None,
            "--nnodes 2: several nodes need the address of their coordinator; use --rdzv-endpoint",
        ),
        ("--nnodes 2 --rdzv-backend c10d --master-addr h", None, "need the address of their coordinator"),
        (
            "",
            Some(mpi()),
            "the address of their coordinator, which mpirun does not give; use --rdzv-endpoint",
        ),
        ("--nnodes 2 --rdzv-endpoint h:0", None, "--rdzv-endpoint h:0: expected a port from 1 to 65535"),
        ("--nnodes 2 --rdzv-endpoint fd77::1:6000", None, "with an IPv6 address in brackets"),
        (
            "",
            Some(Allocation { node_rank: None, ..mpi() }),
            "mpirun does not say which node this is; use --node-rank",
        ),
        ("--nnodes 2 --standalone", None, "--standalone is for one node, but --nnodes 2 is given"),
    ] {
        let refusal = group(flags, &[], found).expect_err(flags);
        assert!(refusal.contains(words), "{flags}: {refusal}");
    }
    let refusal = group("", &[("PET_NNODES", "2")], step()).unwrap_err();
    assert!(refusal.contains("PET_NNODES=2 contradicts SLURM_STEP_NUM_NODES=4"), "{refusal}");
}

#[test]
fn unusable_engine_matters_unless_flags_say_everything() {
    let batch = || Err("a batch script".to_owned());
    let complete = "--nnodes 2 --node-rank 1 --rdzv-endpoint h --rdzv-insecure";
    assert!(asked(Name::Xlaunch, complete, &[], batch()).unwrap().is_some());
    for flags in
        ["", "--nnodes 2 --rdzv-endpoint h --rdzv-insecure", "--nnodes 2 --node-rank 1 --rdzv-insecure"]
    {
        assert_eq!(asked(Name::Xlaunch, flags, &[], batch()), Err("a batch script".into()), "{flags}");
    }
}

#[test]
fn several_nodes_need_a_token_or_an_explicit_choice() {
    let flags = "--nnodes 2 --rdzv-endpoint h:7";
    let security = |name, more: &str, variables: &[(&str, &str)], found| {
        let group = asked(name, &format!("{flags} {more}"), variables, Ok(found))?.unwrap();
        let file = group.token_file.map(|file| file.display().to_string()).unwrap_or_default();
        Ok::<_, String>((group.spec.security, file, group.warnings))
    };
    let quiet = |security, file: &str| Ok((security, file.to_owned(), vec![]));
    let xlaunch = |more, variables: &[(&str, &str)]| security(Name::Xlaunch, more, variables, None);
    assert_eq!(xlaunch("--token-file /t", &[TOKEN]), quiet(Security::Token, "/t"));
    assert_eq!(xlaunch("", &[TOKEN]), quiet(Security::Token, ""));
    assert_eq!(security(Name::Torchrun, "", &[TOKEN], None), quiet(Security::Token, ""));
    for (name, more, why) in [
        (Name::Xlaunch, "--rdzv-insecure", "(--rdzv-insecure)"),
        (Name::Torchrun, "", "(called as torchrun)"),
    ] {
        let (security, _, warnings) = security(name, more, &[], None).unwrap();
        assert_eq!((security, warnings.len()), (Security::Insecure, 1));
        assert!(warnings[0].contains(why) && warnings[0].contains("h:7"), "{warnings:?}");
    }
    let refusal = xlaunch("", &[("XLAUNCH_TOKEN", "")]).unwrap_err();
    for words in ["--nnodes 2", "--token-file", "XLAUNCH_TOKEN", "--rdzv-insecure"] {
        assert!(refusal.contains(words), "{refusal}");
    }
    assert!(xlaunch("--token-file /t --rdzv-insecure", &[]).unwrap_err().contains("cannot be combined"));
    let under_slurm = |munge, variables: &[(&str, &str)]| {
        let group = asked(Name::Xlaunch, "", variables, Ok(Some(step(munge))))?;
        Ok::<_, String>(group.unwrap().spec.security)
    };
    assert_eq!(under_slurm(true, &[]), Ok(Security::Munge));
    assert_eq!(under_slurm(true, &[TOKEN]), Ok(Security::Token));
    let refusal = under_slurm(false, &[]).unwrap_err();
    for words in ["munged does not run on this node (no `/run/munge/munge.socket.2`)", "--token-file"] {
        assert!(refusal.contains(words), "{refusal}");
    }
}

#[test]
fn rdzv_conf_is_that_of_torchrun_within_bounds() {
    let with = |backend: &str, conf: &str| {
        group(&format!("--nnodes 2 --rdzv-endpoint h --rdzv-backend {backend} --rdzv-conf {conf}"), &[], None)
    };
    let found = with("c10d", "join_timeout=5,last_call_timeout=2.5,keep_alive_interval=2,is_host=1")
        .unwrap()
        .unwrap();
    let spec = &found.spec;
    assert_eq!((spec.join_timeout.as_secs(), spec.last_call_timeout.as_millis()), (5, 2500));
    assert_eq!((spec.loss_timeout().as_secs(), spec.hosts_coordinator), (24, Some(true)));
    assert!(found.warnings.is_empty());
    assert_eq!(with("static", "timeout=7").unwrap().unwrap().spec.join_timeout.as_secs(), 7);
    let found = with("c10d", "timeout=7,store_type=file,is_host=false").unwrap().unwrap();
    assert_eq!((found.spec.join_timeout.as_secs(), found.spec.hosts_coordinator), (600, Some(false)));
    assert_eq!(found.warnings, ["--rdzv-conf: timeout, store_type has no effect here"]);
    for (conf, words) in [
        ("join_timeout=soon", "join_timeout=soon: expected a number of seconds"),
        ("is_host=maybe", "is_host=maybe: expected true or false"),
        ("keep_alive_interval=30", "keep_alive_max_attempt is 360 s, expected 3 to 60 s"),
        ("keep_alive_max_attempt=-1", "expected a whole number"),
        ("join_timeout", "expected KEY=VALUE"),
    ] {
        assert!(with("c10d", conf).unwrap_err().contains(words), "{conf}");
    }
}

#[test]
fn training_configurations_take_the_same_flags() {
    let line = ["--nnodes", "2", "a.toml", "--node-rank", "1", "--rdzv-endpoint", "h", "--token-file", "/t"];
    let detect = || Ok(None);
    // Kubeflow sets `cpu` on nodes without GPUs.
    for nproc in ["auto", "gpu", "cpu"] {
        let variables = |name: &str| (name == "PET_NPROC_PER_NODE").then(|| nproc.into());
        match parse(Name::Xlaunch, &line.map(OsString::from), &variables, Scope::Nodes(&detect)) {
            Ok(Request::Trainer(launch, Some(group))) => {
                assert_eq!(summary(&group.spec), "2 1 static h:29500 -");
                assert_eq!(launch.nproc, None, "{nproc}");
            }
            other => panic!("{nproc}: {other:?}"),
        }
    }
}

#[test]
fn settings_name_their_sources_even_if_one_is_missing() {
    let environment = |name: &str| (name == "PET_RDZV_ID").then(|| "night".into());
    let detect = || Ok(Some(step(false)));
    let mut settings = Settings::new();
    let refusal = super::super::placement(&environment, Scope::Nodes(&detect), &mut settings).unwrap_err();
    assert!(refusal.contains("need munge, or a secret token"), "{refusal}");
    let shown: Vec<_> =
        settings.iter().map(|(name, it)| format!("{name}: {} <- {}", it.value, it.source)).collect();
    assert_eq!(
        shown,
        [
            "workers per node: 1; training: one per GPU <- default",
            "nodes: 4 <- SLURM_STEP_NUM_NODES=4",
            "backend: static <- default",
            "node rank: 1 <- SLURM_NODEID=1",
            "run id: night <- PET_RDZV_ID=night",
            "endpoint: h0:20001 (or one of 1 others) <- SLURM_STEP_NODELIST",
        ]
    );
}
