"""Failures of ten kinds: checks that the first cause is named, and measures the time until the job runs again.

    python3 tests/peers/first_cause.py --binary target/release/xlaunch --runs 200 [--kinds killed,exit] [--torchrun 5]

Trainer: 3 CPU ranks. Commands: 3 ranks of `fail.py` with gloo, under the Python that runs this script. Each run makes
one failure and may restart once; the rank and the cause are read from xlaunch's line about the restart, or from the
report if there was none. `--torchrun N` runs N of each kind of command under torchrun, too: without a restart for the
root cause that it prints, with one for the times. Times are those of rank 0: from the failure to the start of its next
process, and to its next step.
"""

import argparse
import collections
import json
import os
import pathlib
import random
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
LIMIT = 240
CONFIG = """
[model]
arch = "llama"
layers = 2
heads = 2
kv_heads = 2
dim = 32
ffn = 48
seq = 32
vocab = 256
[data]
train = ["text.txt"]
[train]
steps = 1000000
batch = 4
eval_every = 0
sample = 0
[engine]
device = "cpu"
[checkpoint]
every = 50
on_error = "stop"
[launch]
max_restarts = 1
"""
RANKS = 3


class Launch:
    """A launch in a scratch directory, with its stderr in a file."""

    def __init__(self, command, scratch):
        self.scratch = scratch
        self.stderr = scratch / "stderr"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("XLAUNCH_")}
        environment |= {"XDG_RUNTIME_DIR": str(scratch), "TMPDIR": str(scratch), "CUDA_VISIBLE_DEVICES": ""}
        environment["PYTHON_EXEC"] = sys.executable
        with open(self.stderr, "w") as stderr:
            self.process = subprocess.Popen(command, cwd=scratch, env=environment, stdout=stderr, stderr=stderr)

    def text(self):
        return self.stderr.read_text(errors="replace")

    def wait_for(self, what, poll, exited_is_fine=False):
        """Returns the result of `poll` once it is true."""
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            running = self.process.poll() is None
            if found := poll():
                return found
            if not running and exited_is_fine:
                return None
            if not running:
                break
            time.sleep(0.002)
        raise RuntimeError(f"no {what}; exit code {self.process.poll()}\n{self.text()[-3000:]}")

    def workers(self):
        """Returns the process ids of all ranks, by rank; None until all are running."""
        children = pathlib.Path(f"/proc/{self.process.pid}/task").glob("*/children")
        pids = [pid for listed in children for pid in listed.read_text().split()]
        ranks = {}
        for pid in pids:
            try:
                variables = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            found = [v for v in variables if v.startswith(b"RANK=")]
            if found:
                ranks[int(found[0][5:])] = int(pid)
        return ranks if len(ranks) == RANKS else None

    def end(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def started(pid):
    """Returns the start time of a process, in seconds since the epoch."""
    ticks = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()[19])
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return boot + ticks / os.sysconf("SC_CLK_TCK")


def steps(scratch):
    """Returns step numbers and times of a training job so far."""
    path = next(scratch.glob("runs/*/latest/metrics.jsonl"), None)
    lines = path.read_text().split("\n")[:-1] if path else []
    return [(line["_step"], line["_timestamp"]) for line in map(json.loads, lines) if "train/loss" in line]


def kill(how, *ranks):
    def inject(launch, workers):
        for rank in ranks:
            os.kill(workers[rank], how)
            if how == signal.SIGSEGV:
                # Rust's handler for stack overflows handles the first signal, and restores the default action.
                time.sleep(0.01)
                os.kill(workers[rank], how)

    return inject


def truncate(launch, workers):
    os.truncate(launch.scratch / "text.txt", 0)


def exhaust_files(rank):
    def inject(launch, workers):
        resource.prlimit(workers[rank], resource.RLIMIT_NOFILE, (3, 3))

    return inject


# For each kind: the ranks that may be named, words of the cause, and a function that causes it. `None` names the group.
def trainer_kind(kind, rank):
    other = (rank + 1) % RANKS
    return {
        "killed": ([rank], "SIGKILL", kill(signal.SIGKILL, rank)),
        "segfault": ([rank], "SIGSEGV", kill(signal.SIGSEGV, rank)),
        "abort": ([rank], "SIGABRT", kill(signal.SIGABRT, rank)),
        "two killed": ([rank, other], "SIGKILL", kill(signal.SIGKILL, rank, other)),
        "killed while joining": ([rank], "SIGKILL", kill(signal.SIGKILL, rank)),
        "data file truncated": (list(range(RANKS)), "text.txt", truncate),
        "save fails": ([rank], "Too many open files", exhaust_files(rank)),
    }[kind]


TRAINER_KINDS = "killed segfault abort two_killed killed_while_joining data_file_truncated save_fails"
TRAINER_KINDS = [kind.replace("_", " ") for kind in TRAINER_KINDS.split()]
COMMAND_KINDS = ["command: exception", "command: exit 0 early", "command: killed"]
Result = collections.namedtuple("Result", "right blamed start step")


def named(text):
    """Returns rank and cause from xlaunch's line about a restart, or from its report."""
    found = re.search(r"xlaunch: (?:rank (\d+)|the group): (.*); restarting", text)
    if not found:
        report = text.split("the job failed\n", 1)[-1]
        found = re.search(r"\s*(?:rank (\d+))?([\s\S]*?)(?:then:|logs:|$)", report)
    return (int(found[1]) if found and found[1] else None), (found[2] if found else "")


def trainer_run(options, kind, rank, scratch):
    (scratch / "train.toml").write_text(CONFIG)
    (scratch / "text.txt").write_text("".join(f"line {i}: {i * i} and {i % 7}\n" for i in range(4000)))
    launch = Launch([options.binary, "--nproc", str(RANKS), "train.toml"], scratch)
    try:
        ranks, words, inject = trainer_kind(kind, rank)
        if kind != "killed while joining":
            launch.wait_for("steps", lambda: len(steps(scratch)) > 60 + random.randrange(40))
        workers = launch.wait_for("workers", launch.workers)
        if kind == "killed while joining":
            time.sleep(random.random() * 0.1)
        failed = time.time()
        inject(launch, workers)
        launch.wait_for("failure", lambda: "; restarting" in launch.text(), exited_is_fine=True)
        start = step = None
        if "; restarting" in launch.text():
            new = launch.wait_for("restart", lambda: (w := launch.workers()) and w[0] != workers[0] and w)
            start = started(new[0]) - failed
            after = launch.wait_for("step", lambda: [at for at in steps(scratch) if at[1] > failed + start])
            step = after[0][1] - failed
        blamed, cause = named(launch.text())
        right = blamed in ranks and words in cause
        if kind == "save fails":
            start = step = None  # The time until the next save is not part of the recovery.
        return Result(right, f"{blamed}: {cause[:200]}" if not right else "", start, step)
    finally:
        launch.end()


def command_run(options, kind, rank, scratch, torchrun=None):
    """Runs under torchrun if `torchrun` is the number of restarts to allow."""
    how = {"exception": "exception", "exit 0 early": "exit", "killed": "nothing"}[kind.split(": ")[1]]
    log = scratch / "log"
    script = [str(HERE / "fail.py"), "--how", how, "--rank", str(rank), "--times", str(log)]
    flags = ["--nproc-per-node", str(RANKS), "--max-restarts", str(1 if torchrun is None else torchrun)]
    launcher = [options.binary] if torchrun is None else [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch = Launch(launcher + flags + script, scratch)
    try:
        found = launch.wait_for("failing rank", lambda: re.search(r"failing ([\d.]+) (\d+)", launch.text()))
        failed = float(found[1])
        if how == "nothing":
            time.sleep(0.5)
            failed = time.time()
            os.kill(int(found[2]), signal.SIGKILL)

        def times(event):
            lines = log.read_text().split("\n") if log.exists() else []
            return [float(line.split()[1]) for line in lines if line.startswith(event)]

        if torchrun == 0:
            launch.wait_for("end", lambda: False, exited_is_fine=True)
            blamed = re.search(r"Root Cause[\s\S]*?rank\s*: (\d+)", launch.text())
            blamed = int(blamed[1]) if blamed else None
            return Result(blamed == rank, str(blamed), None, None)
        launch.wait_for("step", lambda: len(times("step")) > 1)
        start, step = times("start")[1] - failed, times("step")[1] - failed
        if torchrun is not None:
            return Result(True, "", start, step)
        blamed, cause = named(launch.text())
        words = {"exception": "RuntimeError: the disk is on fire", "exit": "code 0", "nothing": "SIGKILL"}[how]
        right = blamed == rank and words in cause
        return Result(right, f"{blamed}: {cause[:200]}" if not right else "", start, step)
    finally:
        launch.end()


def spread(values):
    values = sorted(value for value in values if value is not None)
    if not values:
        return "-"
    at = lambda part: values[min(len(values) - 1, int(part * len(values)))]
    return f"{statistics.median(values):.2f}, {at(0.95):.2f}, {values[-1]:.2f}"


def row(name, results):
    right = sum(result.right for result in results)
    start, step = spread([result.start for result in results]), spread([result.step for result in results])
    print(f"| {name} | {right} of {len(results)} | {start} | {step} |", flush=True)
    for result in results:
        if not result.right:
            print(f"  blamed: {result.blamed}", file=sys.stderr, flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=pathlib.Path, default=HERE.parents[1] / "target/release/xlaunch")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--kinds", help="comma-separated; default: all")
    parser.add_argument("--torchrun", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.binary = str(options.binary.resolve())
    random.seed(options.seed)
    kinds = TRAINER_KINDS + COMMAND_KINDS
    chosen = options.kinds.split(",") if options.kinds else kinds
    print("| failure | first cause right | to the next start: median, 95 %, most (s) | to the next step (s) |")
    print("|---|---|---|---|")
    everything = []
    for kind in chosen:
        results = []
        for number in range(max(1, options.runs // len(kinds))):
            run = trainer_run if kind in TRAINER_KINDS else command_run
            with tempfile.TemporaryDirectory(prefix="xfc-") as scratch:
                results.append(run(options, kind, number % RANKS, pathlib.Path(scratch)))
        row(kind, results)
        everything += results
    row("all", everything)
    for kind in [kind for kind in chosen if kind in COMMAND_KINDS and options.torchrun]:
        results = []
        for number in range(options.torchrun):
            outcomes = []
            for restarts in [0, 1]:
                if restarts == 1 and kind == "command: exit 0 early":
                    continue  # torchrun waits for the other ranks to fail and restarts them, as after an exception.
                with tempfile.TemporaryDirectory(prefix="xfc-") as scratch:
                    try:
                        outcomes.append(command_run(options, kind, number % RANKS, pathlib.Path(scratch), restarts))
                    except RuntimeError as error:
                        print(f"  torchrun, {kind}: {error}", file=sys.stderr)
                        outcomes.append(Result(False, "it did not run again", None, None))
            last = outcomes[-1]
            results.append(Result(outcomes[0].right, outcomes[0].blamed, last.start, last.step))
        row(f"torchrun, {kind}", results)


if __name__ == "__main__":
    main()
