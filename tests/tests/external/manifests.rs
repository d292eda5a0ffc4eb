//! Checks the manifests in `deploy/kubernetes`, and the kustomizations in `deploy/kustomize`, against the schemas of
//! Kubernetes, JobSet and Kubeflow Trainer.

use xlaunch_tests::{peer, requirements, run_ok};

xlaunch_harness::tests! {
    needs requirements::kubernetes_schemas:
    manifests_are_valid_without_unknown_keys;
}

/// The check itself is `python3 tests/peers/manifests.py`.
fn manifests_are_valid_without_unknown_keys() {
    let output = run_ok(&mut peer("manifests.py"));
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
        assert!(output.lines().any(|line| valid(&line)), "{kind}: {}", output);
    }
    for kustomization in ["kubernetes Job", "kustomize/example Job", "kustomize/node-metrics NetworkPolicy"] {
        assert!(output.contains(&format!("\n{kustomization} ")), "{kustomization}: {}", output);
    }
}
