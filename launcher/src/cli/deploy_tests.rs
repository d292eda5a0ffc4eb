//! Tests that the files in `deploy/kubernetes` and `deploy/slurm` agree with this program: command lines, exit codes
//! and timeouts. `tests/tests/external` checks the manifests against the schemas of Kubernetes. Also tests that the
//! removal of the Debian package keeps the directories of running jobs.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use xlaunch_agent::config;
use xlaunch_spec::command::{Backend, GroupSpec, Security};
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::job::JobSpec;
use yaml_rust2::{Yaml, YamlLoader};

use super::engine::{self, Host};
use super::torchrun::{self, Group, Name, Request, Scope};

const MANIFESTS: [&str; 3] = ["indexed-job.yaml", "jobset.yaml", "kubeflow.yaml"];

fn text(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../deploy").join(name);
    fs_err::read_to_string(path).unwrap()
}

fn documents(manifest: &str) -> Vec<Yaml> {
    YamlLoader::load_from_str(&text(&format!("kubernetes/{manifest}"))).unwrap()
}

/// The template of the Job in a manifest.
fn job(manifest: &str) -> Yaml {
    let replicated = |set: &Yaml| set["replicatedJobs"][0]["template"]["spec"].clone();
    let found = documents(manifest).iter().find_map(|document| match document["kind"].as_str() {
        Some("Job") => Some(document["spec"].clone()),
        Some("JobSet") => Some(replicated(&document["spec"])),
        Some("ClusterTrainingRuntime") => Some(replicated(&document["spec"]["template"]["spec"])),
        _ => None,
    });
    found.expect(manifest)
}

fn container(job: &Yaml) -> &Yaml {
    &job["template"]["spec"]["containers"][0]
}

fn strings(list: &Yaml) -> Vec<String> {
    list.as_vec().unwrap().iter().map(|item| item.as_str().unwrap().to_owned()).collect()
}

/// Variables of a container: those with values, and the token of the Secret.
fn variables(container: &Yaml) -> Vec<(String, String)> {
    let variable = |it: &Yaml| {
        let secret = &it["valueFrom"]["secretKeyRef"];
        let value = it["value"].as_str().or(secret["name"].as_str()).unwrap();
        (it["name"].as_str().unwrap().to_owned(), value.to_owned())
    };
    container["env"].as_vec().unwrap().iter().map(variable).collect()
}

/// The group that the second pod of a manifest joins.
fn group(manifest: &str, set_by_engine: &[(&str, &str)]) -> Group {
    let job = job(manifest);
    let container = container(&job);
    let mut known = variables(container);
    known.extend(set_by_engine.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
    let environment =
        |wanted: &str| known.iter().find(|(name, _)| name == wanted).map(|(_, value)| OsString::from(value));
    let detect = || {
        let read = |_: &std::path::Path| Err("no host file".into());
        let name = "pod";
        engine::detect(&Host { environment: &environment, read: &read, name, munge: false, slurm_step: None })
    };
    let arguments: Vec<OsString> = strings(&container["args"]).into_iter().map(OsString::from).collect();
    match torchrun::parse(Name::Xlaunch, &arguments, &environment, Scope::Nodes(&detect)) {
        Ok(Request::Trainer(_, Some(group))) => *group,
        other => panic!("{manifest}: {other:?}"),
    }
}

#[test]
fn pods_join_the_group_that_their_manifest_describes() {
    let index = [("JOB_COMPLETION_INDEX", "1")];
    // Variables that Kubeflow Trainer adds for two nodes.
    let kubeflow = [
        ("JOB_COMPLETION_INDEX", "1"),
        ("PET_NNODES", "2"),
        ("PET_NPROC_PER_NODE", "8"),
        ("PET_NODE_RANK", "1"),
        ("PET_MASTER_ADDR", "train-node-0-0.train"),
        ("PET_MASTER_PORT", "29500"),
    ];
    for (manifest, set_by_engine, endpoint) in [
        ("indexed-job.yaml", &index[..], "train-0.train:29500"),
        ("jobset.yaml", &index, "train-node-0-0.train:29500"),
        ("kubeflow.yaml", &kubeflow, "train-node-0-0.train:29500"),
    ] {
        let Group { spec, warnings, .. } = group(manifest, set_by_engine);
        let GroupSpec { nodes, node_rank, backend, security, .. } = &spec;
        assert!(spec.sigterm_is_preemption, "{manifest}");
        // Nodes may have to be added to the cluster first, and must pull the image.
        assert!(spec.join_timeout >= Duration::from_secs(1800), "{manifest}: {:?}", spec.join_timeout);
        assert_eq!((nodes.to_string().as_str(), *node_rank), ("2", Some(1)), "{manifest}");
        assert_eq!((*backend, *security), (Backend::Static, Security::Token), "{manifest}");
        assert_eq!((spec.endpoint.to_string().as_str(), warnings.len()), (endpoint, 0), "{manifest}");
        let job = job(manifest);
        if manifest != "kubeflow.yaml" {
            assert_eq!((job["completions"].as_i64(), job["parallelism"].as_i64()), (Some(2), Some(2)));
        }
        assert_eq!(variables(container(&job))[0], ("XLAUNCH_TOKEN".into(), "xlaunch-token".into()));
    }
    // The names in the endpoints are those of pods and Services.
    let service = documents("indexed-job.yaml").into_iter().find(|it| it["kind"].as_str() == Some("Service"));
    let service = service.unwrap();
    assert_eq!(service["metadata"]["name"], job("indexed-job.yaml")["template"]["spec"]["subdomain"]);
    assert_eq!(service["spec"]["publishNotReadyAddresses"].as_bool(), Some(true));
}

#[test]
fn failure_policy_has_the_exit_codes_of_the_table() {
    let codes = |exits: &[ExitCode]| exits.iter().map(|exit| i64::from(exit.code())).collect::<BTreeSet<_>>();
    for manifest in MANIFESTS {
        let job = job(manifest);
        let rules = job["podFailurePolicy"]["rules"].as_vec().unwrap();
        let of = |action: &str| {
            let rules = rules.iter().filter(|rule| rule["action"].as_str() == Some(action));
            let values = rules.filter_map(|rule| rule["onExitCodes"]["values"].as_vec()).flatten();
            values.map(|value| value.as_i64().unwrap()).collect::<BTreeSet<_>>()
        };
        // A job that a user has stopped stays stopped, so a preempted one must not exit with the same code.
        assert_eq!(of("FailJob"), codes(&[ExitCode::Usage, ExitCode::Data, ExitCode::Stopped]), "{manifest}");
        assert_eq!(of("Ignore"), codes(&[ExitCode::Retryable]), "{manifest}");
        // The first matching rule applies.
        assert_eq!(rules[0]["action"].as_str(), Some("Ignore"), "{manifest}");
        assert_eq!(rules[0]["onPodConditions"][0]["type"].as_str(), Some("DisruptionTarget"), "{manifest}");
        for rule in rules.iter().filter(|rule| !rule["onExitCodes"].is_badvalue()) {
            assert_eq!(rule["onExitCodes"]["containerName"], container(&job)["name"], "{manifest}");
        }
    }
}

#[test]
fn pods_ask_for_what_they_need_and_get_no_more() {
    for manifest in MANIFESTS {
        let job = job(manifest);
        let pod = &job["template"]["spec"];
        assert_eq!(pod["automountServiceAccountToken"].as_bool(), Some(false), "{manifest}");
        assert_eq!(pod["enableServiceLinks"].as_bool(), Some(false), "{manifest}");
        let volumes = pod["volumes"].as_vec().unwrap();
        let shm = volumes.iter().find(|volume| volume["name"].as_str() == Some("shm")).unwrap();
        assert!(shm["emptyDir"]["sizeLimit"].as_str().is_some(), "{manifest}");
        let documents = documents(manifest);
        let of_train_job = documents.iter().map(|it| it["spec"]["trainer"]["resourcesPerNode"].clone());
        let all = of_train_job.filter(|resources| !resources.is_badvalue());
        for resources in all.chain([container(&job)["resources"].clone()]) {
            for wanted in ["cpu", "memory"] {
                assert!(!resources["requests"][wanted].is_badvalue(), "{manifest}: {wanted}");
            }
            assert_eq!(resources["limits"]["memory"], resources["requests"]["memory"], "{manifest}");
        }
        let policy = documents.iter().find(|it| it["kind"].as_str() == Some("NetworkPolicy")).unwrap();
        let (pods, from) = (&policy["spec"]["podSelector"], &policy["spec"]["ingress"][0]["from"]);
        assert_eq!((from.as_vec().map(Vec::len), &from[0]["podSelector"]), (Some(1), pods), "{manifest}");
        // Labels of the pods: the manifest's own, or the one that JobSet adds, with the name of the job.
        let (label, value) = pods["matchLabels"].as_hash().unwrap().front().unwrap();
        let own = &job["template"]["metadata"]["labels"][label.as_str().unwrap()];
        assert!(own == value || label.as_str() == Some("jobset.sigs.k8s.io/jobset-name"), "{manifest}");
        assert!(documents.iter().any(|document| document["metadata"]["name"] == *value), "{manifest}");
        assert!(text(&format!("kubernetes/{manifest}")).contains("# - {name: NCCL_SOCKET_IFNAME"));
    }
}

#[test]
fn schedulers_wait_longer_than_a_training_job_takes_to_stop() {
    let limit = JobSpec::default().launch.shutdown_timeout_max;
    for manifest in MANIFESTS {
        let grace = job(manifest)["template"]["spec"]["terminationGracePeriodSeconds"].as_i64().unwrap();
        assert!(grace as f64 > limit, "{manifest}: {grace} s");
    }
    let script = text("slurm/train.sbatch");
    let signal = script.lines().find_map(|line| line.strip_prefix("#SBATCH --signal=B:TERM@")).unwrap();
    assert!(signal.parse::<f64>().unwrap() > limit, "{signal}");
}

#[test]
fn images_and_configurations_of_manifests_are_current() {
    let image = format!("registry.example.com/xlaunch:{}", env!("CARGO_PKG_VERSION"));
    assert!(text("kubernetes/Containerfile").contains(&image));
    let version = env!("CARGO_PKG_VERSION");
    let overlay = text("kustomize/example/kustomization.yaml");
    assert!(
        overlay.contains(&format!("newTag: {version}\n")) && overlay.contains(&format!("ref=v{version}\n"))
    );
    assert!(text("ansible/xlaunch.yml").contains(&format!("src: xlaunch_{version}_amd64.deb")));
    let dir = tempfile::tempdir().unwrap();
    for manifest in MANIFESTS {
        assert_eq!(container(&job(manifest))["image"].as_str(), Some(image.as_str()), "{manifest}");
        let config =
            documents(manifest).into_iter().find(|it| it["kind"].as_str() == Some("ConfigMap")).unwrap();
        let path = dir.path().join("train.toml");
        fs_err::write(&path, config["data"]["train.toml"].as_str().unwrap()).unwrap();
        let loaded = config::load(&path, &[]).unwrap_or_else(|error| panic!("{manifest}: {error:?}"));
        assert!(loaded.warnings.is_empty(), "{manifest}: {:?}", loaded.warnings);
    }
}

#[test]
fn purge_of_the_package_keeps_the_directories_of_a_running_daemon_and_of_running_jobs() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("xlaunch");
    let state_dir = state.display().to_string();
    let script = text("debian/postrm").replace("/var/lib/xlaunch", &state_dir);
    let script = script.replace("/run/xlaunch", &format!("{state_dir}/run")).replace("/run/systemd", "/none");
    let purge = || {
        let done = Command::new("sh").args(["-c", &script, "postrm", "purge"]).output().unwrap();
        assert!(done.status.success(), "{done:?}");
        String::from_utf8(done.stderr).unwrap()
    };
    fs_err::create_dir_all(state.join("jobs/7/agent")).unwrap();
    let lock = fs_err::File::create(state.join("lock")).unwrap();
    lock.file().lock().unwrap();
    assert!(purge().contains("the daemon still runs") && state.exists());
    drop(lock);
    // An agent's command line ends with the directory of its job. This process ends with its input.
    let agent = format!("{state_dir}/jobs/7/agent");
    let mut agent =
        Command::new("sh").args(["-c", "read line", &agent]).stdin(Stdio::piped()).spawn().unwrap();
    let message = purge();
    drop(agent.stdin.take());
    agent.wait().unwrap();
    assert!(message.contains("jobs still run") && state.exists(), "{message}");
    assert_eq!(purge(), "");
    assert!(!state.exists());
}
