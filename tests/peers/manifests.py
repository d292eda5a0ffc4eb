"""Validates the manifests in deploy/kubernetes with the schemas of Kubernetes and Kubeflow Trainer, and what the
kustomizations in deploy/kustomize make of them.

    python3 tests/peers/manifests.py     # needs kubernetes-validate and kubeflow-trainer-api

Prints `FILE KIND NAME  valid` for each object, or its problems. Exit code 1 if there are any.
"""

import pathlib
import sys

import kubernetes_validate
import yaml
from kubeflow_trainer_api import models

DEPLOY = pathlib.Path(__file__).parents[2] / "deploy"
MANIFESTS = DEPLOY / "kubernetes"
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


def replace(document, path, value):
    """Replaces the value at a JSON pointer (RFC 6901), which must exist."""
    *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")[1:]]
    for part in parents:
        document = document[int(part) if isinstance(document, list) else part]
    last = int(last) if isinstance(document, list) else last
    document[last]  # An index or key that is missing is an error.
    document[last] = value


def containers(value):
    if isinstance(value, dict):
        yield from value.get("containers", [])
        value = list(value.values())
    for item in value if isinstance(value, list) else []:
        yield from containers(item)


def rendered(directory):
    """Renders a kustomization. Anything but the features used in this repository is an error."""
    kustomization = yaml.safe_load((directory / "kustomization.yaml").read_text())
    known = {"apiVersion", "kind", "namespace", "resources", "images", "patches"}
    if kustomization["kind"] != "Kustomization" or kustomization.keys() - known:
        raise ValueError(f"unknown keys: {kustomization.keys() - known}")
    documents = []
    for resource in kustomization["resources"]:
        path = directory / resource
        documents += rendered(path) if path.is_dir() else list(yaml.safe_load_all(path.read_text()))
    for patch in kustomization.get("patches", []):
        target = patch["target"]
        found = [it for it in documents if (it["kind"], it["metadata"]["name"]) == (target["kind"], target["name"])]
        if not found:
            raise ValueError(f"a patch for {target}, which does not exist")
        for document in found:
            for operation in yaml.safe_load(patch["patch"]):
                if operation.pop("op") != "replace":
                    raise ValueError("a patch other than replace")
                replace(document, **operation)
    for image in kustomization.get("images", []):
        found = [it for it in containers(documents) if it["image"].rpartition(":")[0] == image["name"]]
        if not found:
            raise ValueError(f"no container has the image {image['name']}")
        for container in found:
            container["image"] = f"{image['newName']}:{image['newTag']}"
    for document in documents:
        if "namespace" in kustomization and document["kind"] not in ("Namespace", "ClusterTrainingRuntime"):
            document["metadata"]["namespace"] = kustomization["namespace"]
    return documents


def pod_monitor(document):
    """Returns problems of a PodMonitor, whose schema no package has: its selector and port must be those of pods."""
    spec = document["spec"]
    yield from (f".spec.{key}" for key in spec.keys() - {"selector", "podMetricsEndpoints", "namespaceSelector"})
    known = {"port", "path", "interval", "honorLabels", "relabelings"}
    for endpoint in spec["podMetricsEndpoints"]:
        yield from (f".spec.podMetricsEndpoints[].{key}" for key in endpoint.keys() - known)


def check(document):
    kind, spec = document["kind"], document["spec"] if "spec" in document else {}
    if kind == "PodMonitor":
        yield from pod_monitor(document)
        return
    if kind not in MODELS:
        kubernetes_validate.validate(document, VERSION, strict=True)
        return
    yield from lost(document, MODELS[kind].from_dict(document).to_dict())
    jobset = {"JobSet": spec, "ClusterTrainingRuntime": spec.get("template", {}).get("spec")}.get(kind)
    for job in jobs(jobset) if jobset else []:
        kubernetes_validate.validate(job, VERSION, strict=True)


def report(source, documents):
    """Prints whether documents are valid. Returns whether they are."""
    valid = True
    for document in documents:
        name = f"{source} {document['kind']} {document['metadata']['name']}"
        try:
            problems = [f"unknown or changed: {key}" for key in check(document)]
        except kubernetes_validate.ValidationError as error:
            problems = [f"{error.json_path}: {error.message}"]
        except ValueError as error:
            problems = [str(error)]
        valid = valid and not problems
        print(f"{name}  {'; '.join(problems) or 'valid'}")
    return valid


def main():
    valid = True
    for path in sorted(MANIFESTS.glob("*.yaml")):
        if path.name != "kustomization.yaml":
            valid &= report(path.name, yaml.safe_load_all(path.read_text()))
    for path in sorted(DEPLOY.glob("*/**/kustomization.yaml")):
        valid &= report(path.parent.relative_to(DEPLOY), rendered(path.parent))
    return 0 if valid else 1


if __name__ == "__main__":
    sys.exit(main())
