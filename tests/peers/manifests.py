"""Validates the manifests in deploy/kubernetes with the schemas of Kubernetes and Kubeflow Trainer.

    python3 tests/peers/manifests.py     # needs kubernetes-validate and kubeflow-trainer-api

Prints `FILE KIND NAME  valid` for each object, or its problems. Exit code 1 if there are any.
"""

import pathlib
import sys

import kubernetes_validate
import yaml
from kubeflow_trainer_api import models

MANIFESTS = pathlib.Path(__file__).parents[2] / "deploy" / "kubernetes"
VERSION = kubernetes_validate.latest_version()
MODELS = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "ClusterTrainingRuntime": models.TrainerV1alpha1ClusterTrainingRuntime,
}


def lost(given, kept, path=""):
    """Returns paths of keys that a model did not accept: unknown keys, which a server would reject or drop."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for key, value in given.items():
            if key not in kept:
                yield f"{path}.{key}"
            else:
                yield from lost(value, kept[key], f"{path}.{key}")
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for index, (value, other) in enumerate(zip(given, kept)):
            yield from lost(value, other, f"{path}[{index}]")
    elif given != kept:
        yield path


def jobs(jobset):
    """Returns the Jobs that a JobSet creates, with all checks of Kubernetes' own schema."""
    for job in jobset["replicatedJobs"]:
        yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]}


def check(document):
    kind, spec = document["kind"], document["spec"] if "spec" in document else {}
    if kind not in MODELS:
        kubernetes_validate.validate(document, VERSION, strict=True)
        return
    yield from lost(document, MODELS[kind].from_dict(document).to_dict())
    jobset = {"JobSet": spec, "ClusterTrainingRuntime": spec.get("template", {}).get("spec")}.get(kind)
    for job in jobs(jobset) if jobset else []:
        kubernetes_validate.validate(job, VERSION, strict=True)


def main():
    failed = False
    for path in sorted(MANIFESTS.glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            name = f"{path.name} {document['kind']} {document['metadata']['name']}"
            try:
                problems = [f"unknown or changed: {key}" for key in check(document)]
            except kubernetes_validate.ValidationError as error:
                problems = [f"{error.json_path}: {error.message}"]
            except ValueError as error:
                problems = [str(error)]
            failed = failed or bool(problems)
            print(f"{name}  {'; '.join(problems) or 'valid'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
