//! Checks the manifests in `deploy/kubernetes`, and the kustomizations in `deploy/kustomize`, against the schemas of
//! Kubernetes, JobSet and Kubeflow Trainer.

use std::path::Path;
use std::process::Command;

use xlaunch_tests::{Process, requirements};

xlaunch_harness::tests! {
    needs requirements::kubernetes_schemas:
    manifests_are_valid_without_unknown_keys;
}

/// The check itself is `python3 tests/peers/manifests.py`.
fn manifests_are_valid_without_unknown_keys() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/manifests.py");
    let output = Process::spawn(Command::new(requirements::python_path()).arg(script)).wait();
    assert_eq!(output.code, 0, "{}\n{}", output.stdout, output.stderr);
    for kind in [
        " Job ",
        " Service ",
        " JobSet ",
        " ClusterTrainingRuntime ",
        " TrainJob ",
        " DaemonSet ",
        " PodMonitor ",
    ] {
        let valid = |line: &&str| line.contains(kind) && line.ends_with("  valid");
        assert!(output.stdout.lines().any(|line| valid(&line)), "{kind}: {}", output.stdout);
    }
    for kustomization in ["kubernetes Job", "kustomize/example Job", "kustomize/node-metrics NetworkPolicy"] {
        assert!(output.stdout.contains(&format!("\n{kustomization} ")), "{kustomization}: {}", output.stdout);
    }
}
