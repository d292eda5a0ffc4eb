//! Detection of engines from their environments, which were recorded under the real engines.

use super::*;

const STEP: [(&str, &str); 8] = [
    ("SLURM_JOB_ID", "7"),
    ("SLURM_STEP_ID", "0"),
    ("SLURM_STEP_NUM_NODES", "2"),
    ("SLURM_STEP_NUM_TASKS", "2"),
    ("SLURM_STEP_NODELIST", "h[2-3]"),
    ("SLURM_NODEID", "1"),
    ("SLURM_NNODES", "4"),
    ("SLURM_LAUNCH_NODE_IPADDR", "10.77.0.10"),
];
const MPI: [(&str, &str); 4] = [
    ("OMPI_COMM_WORLD_SIZE", "3"),
    ("OMPI_COMM_WORLD_RANK", "2"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "1"),
    ("PMIX_RANK", "2"),
];
const HYDRA: [(&str, &str); 3] = [("PMI_SIZE", "3"), ("PMI_RANK", "2"), ("MPI_LOCALNRANKS", "1")];
const LSF: [(&str, &str); 2] = [("LSB_JOBID", "5"), ("LSB_DJOB_HOSTFILE", "/hosts")];
const PBS: [(&str, &str); 3] = [("PBS_JOBID", "9.server"), ("PBS_NODEFILE", "/hosts"), ("PBS_NODENUM", "2")];

fn detected(variables: &[(&str, &str)]) -> Result<Option<Allocation>, String> {
    detected_in(None, variables)
}

/// Detects the engine on host h1, where the host file lists h0, h1 and h2 with two slots each.
fn detected_in(step: Option<&str>, variables: &[(&str, &str)]) -> Result<Option<Allocation>, String> {
    detect(&Host {
        environment: &|wanted| {
            // Later ones replace earlier ones.
            variables.iter().rfind(|(name, _)| *name == wanted).map(|(_, value)| value.into())
        },
        read: &|path| {
            if path == Path::new("/hosts") {
                Ok("h0.site\nh0.site\nh1.site\nh2.site\nh2.site\nh1.site\n".into())
            } else {
                Err("no such file".into())
            }
        },
        name: "h1",
        munge: true,
        slurm_step: step,
    })
}

fn found(variables: &[&[(&str, &str)]]) -> Allocation {
    detected(&variables.concat()).unwrap().unwrap()
}

/// Engine, nodes, rank, first host and run id.
fn summary(found: &Allocation) -> String {
    let number =
        |number: &Option<Sourced<u32>>| number.as_ref().map_or("-".into(), |it| it.value.to_string());
    let host = found.endpoint.as_ref().map_or("-", |endpoint| &endpoint.value.0);
    let id = found.run_id.as_ref().map_or("-", |id| &id.value);
    format!("{} {} {} {host} {id}", found.engine, number(&found.nodes), number(&found.node_rank))
}

#[test]
fn slurm_step_gives_the_place_of_its_task() {
    let step = found(&[&STEP]);
    assert_eq!(summary(&step), "Slurm 2 1 h2 slurm-7.0");
    assert!(step.munge && step.variables.contains(&("SLURM_NODEID", "1".into())));
    assert_eq!(step.nodes.unwrap().source, "SLURM_STEP_NUM_NODES=2");
    let requeued = found(&[&STEP, &[("SLURM_RESTART_COUNT", "2"), ("SLURM_STEP_ID", "3")]]);
    assert_eq!(summary(&requeued), "Slurm 2 1 h2 slurm-7.3-r2");
}

#[test]
fn variables_of_a_step_that_has_submitted_the_slurm_job_are_ignored() {
    for own in ["7.0", "7.0+1", "7+1.0", "unknown"] {
        assert!(detected_in(Some(own), &STEP).unwrap().is_some(), "{own}");
    }
    // The second component of a heterogeneous job.
    let component = [&STEP[..], &[("SLURM_HET_SIZE", "2")]].concat();
    assert!(detected_in(Some("8.0"), &component).unwrap().is_some());
    assert!(detected_in(Some("9.0"), &component).is_err());
    for other in ["7.batch", "7.interactive", "7.extern", "6.0", "7.1"] {
        let refusal = detected_in(Some(other), &STEP).unwrap_err();
        assert!(refusal.starts_with("this process is not a task of a Slurm step"), "{other}: {refusal}");
        let one_node = [&STEP[..], &[("SLURM_NNODES", "1")]].concat();
        assert_eq!(detected_in(Some(other), &one_node), Ok(None), "{other}");
    }
}

#[test]
fn steps_of_slurm_that_cannot_work_are_told_what_to_do() {
    let batch = [("SLURM_JOB_ID", "7"), ("SLURM_NNODES", "4"), ("SLURM_NODEID", "0"), ("SLURM_PROCID", "0")];
    let refusal = detected(&batch).unwrap_err();
    assert!(
        refusal.contains("(SLURM_NNODES=4)") && refusal.contains("`srun -N 4 -n 4 xlaunch ...`"),
        "{refusal}"
    );
    // The first component of a heterogeneous job, and a job that was submitted there.
    let component = [("SLURM_JOB_ID", "7"), ("SLURM_JOB_NUM_NODES", "1"), ("SLURM_HET_SIZE", "3")];
    let refusal = detected(&[&component[..], &[("SLURM_JOB_ID_HET_GROUP_0", "7")]].concat()).unwrap_err();
    for words in
        ["several components (SLURM_HET_SIZE=3)", "`srun --het-group=0-2 --ntasks-per-node=1 xlaunch ...`"]
    {
        assert!(refusal.contains(words), "{refusal}");
    }
    assert_eq!(detected(&[&component[..], &[("SLURM_JOB_ID_HET_GROUP_0", "5")]].concat()), Ok(None));
    let interactive = [&batch[..], &[("SLURM_STEP_ID", "4294967290")]].concat();
    assert!(detected(&interactive).unwrap_err().contains("not a task of a Slurm step"));
    assert_eq!(detected(&[("SLURM_JOB_ID", "7"), ("SLURM_NNODES", "1")]), Ok(None));
    for (changed, words) in [
        (
            ("SLURM_STEP_NUM_TASKS", "8"),
            "several tasks per node (SLURM_STEP_NUM_TASKS=8, SLURM_STEP_NUM_NODES=2)",
        ),
        (("SLURM_STEP_NUM_TASKS", "8"), "use `srun -N 2 -n 2 xlaunch ...`"),
        (("SLURM_NODEID", ""), "SLURM_NODEID is not set"),
        (("SLURM_NODEID", "2"), "SLURM_NODEID=2 is outside the range"),
        (("SLURM_STEP_NODELIST", "h[2-4]"), "SLURM_STEP_NODELIST has 3 hosts, but SLURM_STEP_NUM_NODES=2"),
        (("SLURM_STEP_NODELIST", "h[2-"), "SLURM_STEP_NODELIST: brackets do not match"),
        (("SLURM_STEP_NUM_NODES", "70000"), "expected 1 to 65536 nodes"),
        (("SLURM_STEP_NUM_NODES", "x"), "SLURM_STEP_NUM_NODES=x: expected a whole number"),
    ] {
        let refusal = detected(&[&STEP[..], &[changed]].concat()).unwrap_err();
        assert!(refusal.contains(words), "{refusal}");
    }
}

#[test]
fn coordinator_ports_differ_between_steps_and_are_the_same_on_all_nodes() {
    let of = |step: &str, node: &str| {
        found(&[&STEP, &[("SLURM_STEP_ID", step), ("SLURM_NODEID", node)]]).endpoint.unwrap().value.1
    };
    assert_eq!(of("0", "0"), of("0", "1"));
    assert!(of("0", "0").iter().filter(|port| of("1", "0").contains(port)).count() < 4);
    let ports = of("0", "0");
    let distinct: std::collections::BTreeSet<_> = ports.iter().collect();
    assert_eq!((ports.len(), distinct.len()), (16, 16));
    assert!(ports.iter().all(|port| (20_000..30_000).contains(port)), "{ports:?}");
}

#[test]
fn mpirun_of_mpich_is_one_unless_another_engine_names_the_hosts() {
    assert_eq!(summary(&found(&[&HYDRA])), "mpirun 3 2 - -");
    let refusal = detected(&[&HYDRA[..], &[("MPI_LOCALNRANKS", "3")]].concat()).unwrap_err();
    assert!(refusal.contains("mpirun -ppn 1"), "{refusal}");
    assert_eq!(summary(&found(&[&HYDRA, &STEP])), "Slurm 2 1 h2 slurm-7.0");
    assert_eq!(summary(&found(&[&HYDRA, &PBS])), "PBS 3 1 h0.site pbs-9.server");
    // Slurm's own PMI.
    assert_eq!(detected(&HYDRA[..2]), Ok(None));
}

#[test]
fn mpirun_gives_rank_and_size_but_no_host() {
    assert_eq!(summary(&found(&[&MPI])), "mpirun 3 2 - -");
    assert_eq!(summary(&found(&[&MPI, &[("OMPI_COMM_WORLD_RANK", "")]])), "mpirun 3 2 - -");
    let refusal = detected(&[&MPI[..], &[("OMPI_COMM_WORLD_LOCAL_SIZE", "3")]].concat()).unwrap_err();
    assert!(refusal.contains("mpirun -npernode 1"), "{refusal}");
    // mpirun in a Slurm batch script: the script's variables are inherited.
    let inherited = [("SLURM_JOB_ID", "7"), ("SLURM_NNODES", "3")];
    assert_eq!(summary(&found(&[&MPI, &inherited])), "mpirun 3 2 - -");
    // mpirun in a job of PBS: the job's host file has the hosts.
    assert_eq!(summary(&found(&[&MPI, &PBS])), "PBS 3 1 h0.site pbs-9.server");
}

#[test]
fn host_files_list_a_host_per_slot() {
    assert_eq!(summary(&found(&[&LSF])), "LSF 3 1 h0.site lsf-5");
    assert_eq!(summary(&found(&[&PBS])), "PBS 3 1 h0.site pbs-9.server");
    let in_turn = [("LSB_JOBID", "5"), ("LSB_MCPU_HOSTS", "h3 4 h1 4")];
    assert_eq!(summary(&found(&[&in_turn])), "LSF 2 1 h3 lsf-5");
    let elsewhere = [("LSB_JOBID", "5"), ("LSB_MCPU_HOSTS", "h3 4 h4 4")];
    assert_eq!(summary(&found(&[&elsewhere])), "LSF 2 - h3 lsf-5");
    let unreadable = [("LSB_JOBID", "5"), ("LSB_DJOB_HOSTFILE", "/nosuch")];
    assert!(detected(&unreadable).unwrap_err().contains("no such file; --standalone uses this node alone"));
    assert_eq!(summary(&found(&[&unreadable, &in_turn])), "LSF 2 1 h3 lsf-5");
    // A single host may have another name here.
    assert_eq!(
        summary(&found(&[&[("LSB_JOBID", "5"), ("LSB_MCPU_HOSTS", "alias 4")]])),
        "LSF 1 0 alias lsf-5"
    );
    assert_eq!(detected(&[("LSB_JOBID", "5")]), Ok(None));
}

#[test]
fn host_is_found_by_number_where_the_list_has_other_names() {
    let host = |number: &'static str| Host {
        environment: &|_| None,
        read: &|_| Ok("10.0.0.1\n10.0.0.2\n".into()),
        name: number,
        munge: false,
        slurm_step: None,
    };
    let pbs = |number: &str| {
        let variables = [("PBS_JOBID", "9"), ("PBS_NODEFILE", "/f"), ("PBS_NODENUM", number)];
        let environment =
            |wanted: &str| variables.iter().find(|(name, _)| *name == wanted).map(|(_, value)| value.into());
        detect(&Host { environment: &environment, ..host("h1") })
    };
    assert_eq!(summary(&pbs("1").unwrap().unwrap()), "PBS 2 1 10.0.0.1 pbs-9");
    assert_eq!(summary(&pbs("2").unwrap().unwrap()), "PBS 2 - 10.0.0.1 pbs-9");
}

#[test]
fn pod_of_an_indexed_job_knows_its_rank_only() {
    let pod = found(&[&[("KUBERNETES_SERVICE_HOST", "10.0.0.1"), ("JOB_COMPLETION_INDEX", "3")]]);
    assert_eq!(summary(&pod), "Kubernetes - 3 - -");
    assert_eq!(detected(&[("KUBERNETES_SERVICE_HOST", "10.0.0.1")]), Ok(None));
}

#[test]
fn launch_in_a_worker_of_a_launch_is_on_its_own() {
    let in_worker_of = |scope| detected(&[&STEP[..], &[("XLAUNCH_SCOPE", scope)]].concat());
    assert_eq!(in_worker_of("run:1:1:7,0,,"), Ok(None));
    // `sbatch` or `srun` in a worker.
    for other in ["run:1:1:6,0,,", "run:1:1:7,1,,", "run:1:1:,,,"] {
        assert_eq!(summary(&in_worker_of(other).unwrap().unwrap()), "Slurm 2 1 h2 slurm-7.0", "{other}");
    }
    assert_eq!(detected(&[]), Ok(None));
}

#[test]
fn host_file_is_read_up_to_a_limit() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("hosts");
    fs_err::write(&path, "h0\n").unwrap();
    assert_eq!(read_hosts(&path), Ok("h0\n".into()));
    fs_err::write(&path, "h\n".repeat(MAX_HOSTS_BYTES)).unwrap();
    assert!(read_hosts(&path).unwrap_err().contains("is longer than 1048576 bytes"));
    assert!(read_hosts(Path::new("/nosuch")).is_err());
}
