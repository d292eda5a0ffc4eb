"""Sends the metrics of a training run to Weights & Biases or MLflow, during the run or after it.

    pip install wandb
    python3 examples/track.py wandb runs/train --follow
    pip install mlflow
    python3 examples/track.py mlflow runs/train --project experiments

RUN is a run's directory, or the directory of a job's runs, whose latest one is taken. The job's keys become the
configuration, and the lines of metrics.jsonl the history. Where the service is, and with which key, is the library's
business: WANDB_MODE=offline (later `wandb sync`), WANDB_API_KEY, MLFLOW_TRACKING_URI.

A step is sent once, also if a failure repeats it. With --follow, the end of the run ends this program. A run that has
failed, was stopped or was killed is marked as such.
"""

import argparse
import fcntl
import json
import pathlib
import sys
import time

# Seconds without a writer after which a run counts as killed. Until then, another node may take over rank 0.
WRITER_TIMEOUT = 60
KILLED = 137


def flat(value, prefix=""):
    """Returns the leaves of nested tables, such as `train.lr`."""
    if not isinstance(value, dict):
        return {prefix: value}
    return {key: leaf for name in value for key, leaf in flat(value[name], f"{prefix}.{name}".lstrip(".")).items()}


def lines(run, follow):
    """Yields (step, time, metrics) of each complete line, in order of steps."""
    path, sent, written = run / "metrics.jsonl", {}, time.monotonic()
    while True:
        ended = (run / "summary.json").exists()
        if is_written(run):
            written = time.monotonic()
        for text in path.read_text().splitlines(keepends=True) if path.exists() else []:
            if not text.endswith("\n"):
                break
            line = json.loads(text)
            step, seconds = line.pop("_step"), line.pop("_timestamp")
            # Losses and validation losses of a step are lines of their own. What is not finite is null.
            new = {key: value for key, value in line.items()
                   if isinstance(value, (int, float)) and step > sent.get(key, 0)}
            sent.update(dict.fromkeys(new, step))
            if new:
                yield step, seconds, new
        if ended or not follow or time.monotonic() - written > WRITER_TIMEOUT:
            return
        time.sleep(2)


def is_written(run):
    """Returns whether a launch writes to metrics.jsonl, which it locks, or whether that is unknown."""
    try:
        # On NFS, only files that are open for writing can be locked.
        with open(run / "metrics.jsonl", "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def exit_code(run):
    """Returns the exit code of a run, or None before its end."""
    summary = run / "summary.json"
    if summary.exists():
        return json.loads(summary.read_text())["exit_code"]
    return None if is_written(run) else KILLED


def to_wandb(path, project, config, history):
    import wandb

    run = wandb.init(project=project, name=path.name, id=path.name, resume="allow", config=config)
    # Steps of the trainer, instead of a count of calls.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    for step, seconds, metrics in history:
        run.log({**metrics, "step": step, "timestamp": seconds})
    run.finish(exit_code(path))


def to_mlflow(path, project, config, history):
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    client = MlflowClient()
    experiment = client.get_experiment_by_name(project)
    experiment = experiment.experiment_id if experiment else client.create_experiment(project)
    run = client.create_run(experiment, run_name=path.name).info.run_id
    # MLflow refuses longer values.
    client.log_batch(run, params=[Param(key, str(value)[:500]) for key, value in config.items()])
    for step, seconds, metrics in history:
        client.log_batch(run, [Metric(key, value, round(1000 * seconds), step) for key, value in metrics.items()])
    code = exit_code(path)
    if code is not None:
        status = "FINISHED" if code == 0 else "KILLED" if code in (130, KILLED, 143) else "FAILED"
        client.set_terminated(run, status)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("service", choices=["wandb", "mlflow"])
    parser.add_argument("run", type=pathlib.Path)
    parser.add_argument("--follow", action="store_true", help="wait for new lines until the run has ended")
    parser.add_argument("--project", default="xlaunch", help="project or experiment")
    options = parser.parse_args()
    run = options.run if (options.run / "job.json").exists() else options.run / "latest"
    if not (run / "job.json").exists():
        sys.exit(f"{options.run} is neither a run of a training job nor a directory of runs")
    run = run.resolve()
    config = flat(json.loads((run / "job.json").read_text()))
    config = {key: value for key, value in config.items() if value is not None}
    send = {"wandb": to_wandb, "mlflow": to_mlflow}[options.service]
    send(run, options.project, config, lines(run, options.follow))


if __name__ == "__main__":
    main()
