"""Sends a run to Weights & Biases and MLflow, both offline, and compares what they store with metrics.jsonl.

    python3 tests/peers/trackers.py RUN     # needs wandb, mlflow

Also sends copies of the run that have failed and that were killed. Prints a line for each service; exit code 1 if one
differs.
"""

import collections
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

TRACK = pathlib.Path(__file__).parents[2] / "examples/track.py"
BLOCK, HEADER, FILE_HEADER = 32768, 7, 7


def track(service, run, folder, **variables):
    environment = {**os.environ, **variables}
    # A killed run is noticed at once.
    main = "import track; track.WRITER_TIMEOUT = 0; track.main()"
    environment["PYTHONPATH"] = str(TRACK.parent)
    command = [sys.executable, "-c", main, service, run, "--follow", "--project", "test"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def records(path):
    """Yields the records of a log in LevelDB's format, with wandb's header."""
    data, at, record = path.read_bytes(), FILE_HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(data[at + 4:at + 6], "little"), data[at + 6]
        record += data[at + HEADER:at + HEADER + length]
        at += HEADER + length
        # Whole, first, middle, last.
        if kind in (1, 4):
            yield record
            record = b""


def of_wandb(run, folder, code):
    from wandb.proto import wandb_internal_pb2

    track("wandb", run, folder, WANDB_MODE="offline", WANDB_SILENT="true")
    [path] = folder.glob("wandb/offline-run-*/run-*.wandb")
    found, ends = collections.defaultdict(dict), []
    for record in records(path):
        message = wandb_internal_pb2.Record.FromString(record)
        if message.HasField("exit"):
            ends.append(message.exit.exit_code)
        if message.HasField("history"):
            line = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in message.history.item}
            for key, value in line.items():
                if "/" in key:
                    found[key][line["step"]] = value
    assert ends == [code], ends
    return found


def of_mlflow(run, folder, code):
    uri = f"file://{folder}/mlruns"
    track("mlflow", run, folder, MLFLOW_TRACKING_URI=uri, MLFLOW_ALLOW_FILE_STORE="true")
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    [stored] = client.search_runs([client.get_experiment_by_name("test").experiment_id])
    status = {0: "FINISHED", 1: "FAILED", 137: "KILLED"}[code]
    assert stored.info.status == status and stored.data.params["train.batch"], stored
    history = {key: client.get_metric_history(stored.info.run_id, key) for key in stored.data.metrics}
    return {key: {metric.step: metric.value for metric in metrics} for key, metrics in history.items()}


def main():
    run = pathlib.Path(sys.argv[1])
    expected = collections.defaultdict(dict)
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        for key, value in line.items():
            if "/" in key and value is not None:
                expected[key][line["_step"]] = value
    assert "train/loss" in expected and "val/loss" in expected, expected.keys()
    same = True
    for name, read in [("wandb", of_wandb), ("mlflow", of_mlflow)]:
        equal = True
        for code in (0, 1, 137):
            with tempfile.TemporaryDirectory() as folder:
                copy = pathlib.Path(folder) / "run"
                shutil.copytree(run, copy, symlinks=True)
                summary = json.loads((copy / "summary.json").read_text())
                if code == 137:
                    (copy / "summary.json").unlink()
                else:
                    (copy / "summary.json").write_text(json.dumps({**summary, "exit_code": code}))
                found = read(copy, pathlib.Path(folder), code)
            equal &= {key: dict(values) for key, values in found.items()} == expected
        print(f"{name}: {'equal' if equal else f'DIFFERENT: {found}, {expected}'}", flush=True)
        same &= equal
    sys.exit(not same)


if __name__ == "__main__":
    main()
