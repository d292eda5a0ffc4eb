"""Hangs of a rank of a training job: seconds until it is named, and until training continues after the restart.

    python3 tests/gpu/hang.py --binary target/release/xlaunch --gpus 2 [--model A]

In turn, the process of the last rank is stopped, its training thread loops, its data loader is blocked
(`tests/src/hang.c`), and its GPU is occupied by an endless kernel. Each time the rank must be named, and training must
continue within the hang timeout plus 15 s.
Before that, a rank whose training thread is stopped by a debugger (`tests/peers/freeze.py`) must only be reported.
Meanwhile the job evaluates and saves checkpoints, which must not be reported.
"""

import argparse
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

import runner
from restart import wait_for, workers
from runner import check

FREEZE = runner.ROOT / "tests/peers/freeze.py"
HANG = runner.ROOT / "tests/src/hang.c"
LIMIT = 180
HANG_TIMEOUT = 30
# Seconds after the hang timeout for evidence, restart and start-up.
MARGIN = 15
# `PHASE_WAIT_FOR_DATA`: a replayed graph has no phases between it and read back.
PHASE = 1
# A message of the launcher about ranks that hang. Output of a rank itself begins with `[rank N]`.
REPORT = re.compile(r"xlaunch: ranks? \d.* (made no progress|sent no heartbeat)")


class Stderr:
    """Collects the lines of the launcher with their times."""

    def __init__(self, pipe):
        self.lines, self.changed = [], threading.Condition()
        threading.Thread(target=self.read, args=[pipe], daemon=True).start()

    def read(self, pipe):
        for line in pipe:
            with self.changed:
                self.lines.append((time.monotonic(), line.strip()))
                self.changed.notify_all()

    def find(self, pattern, since=0.0):
        return [(at, line) for at, line in self.lines if at >= since and re.search(pattern, line)]

    def wait_for(self, pattern, since):
        """Returns time and text of the first matching line after `since`."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.find(pattern, since), LIMIT):
                raise SystemExit(f"no line with `{pattern}` within {LIMIT} s: {self.lines[-20:]}")
            return self.find(pattern, since)[0]


class Training:
    """A job that runs until it is interrupted."""

    def __init__(self, options, scratch, data, mode):
        self.out, self.trigger = str(scratch / mode), scratch / f"{mode}.trigger"
        settings = {"data.train": [str(data)], "train.eval_every": 100, "train.steps": 1_000_000}
        settings |= {"checkpoint.every": 200, "job.output": self.out, "launch.max_restarts": 1}
        settings |= {"launch.hang_timeout": HANG_TIMEOUT}
        command = [str(options.binary.resolve()), "--nproc", str(options.gpus)]
        command += [str(runner.ROOT / runner.MODELS[options.model]), *runner.overrides(settings)]
        environment = os.environ | {"LD_PRELOAD": str(scratch / "hang.so"), "HANG_MODE": mode}
        environment |= {"HANG_RANK": str(options.gpus - 1), "HANG_PHASE": str(PHASE)}
        environment |= {"HANG_TRIGGER": str(self.trigger)}
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
        )
        self.stderr = Stderr(self.process.stderr)
        wait_for("steps", lambda: len(runner.steps(self.out)) > 250, self.process)

    def wait_for_steps(self):
        # Steps that are repeated replace the earlier ones.
        since = time.time()
        wait_for("steps", lambda: runner.steps(self.out)[-1]["_timestamp"] > since, self.process)

    def interrupt(self):
        self.process.send_signal(signal.SIGINT)
        return self.process.wait()


def under_debugger(training, rank):
    since = time.monotonic()
    freeze = [sys.executable, str(FREEZE), str(workers(training.process.pid)[-1])]
    frozen = subprocess.Popen(freeze, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    at, line = training.stderr.wait_for(REPORT, since)
    check(f"under a debugger: reported after {at - since:.1f} s", f"rank {rank} " in line, line)
    _, line = training.stderr.wait_for("is traced by", since)
    frozen.communicate()
    training.wait_for_steps()
    check("under a debugger: not ended", not training.stderr.find("restarting"), line)


def hangs(training, mode, rank):
    since = time.monotonic()
    if mode == "stopped":
        os.kill(workers(training.process.pid)[-1], signal.SIGSTOP)
    else:
        training.trigger.touch()
    at, line = training.stderr.wait_for(REPORT, since)
    named = f"rank {rank} " in line
    check(f"{mode}: reported after {at - since:.1f} s", named, line)
    training.stderr.wait_for("restarting", since)
    training.wait_for_steps()
    took = time.monotonic() - since
    check(f"{mode}: {took:.1f} s until steps are made again", took < HANG_TIMEOUT + MARGIN)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=pathlib.Path, default=runner.ROOT / "target/release/xlaunch")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--model", choices=runner.MODELS, default="A")
    parser.add_argument("--modes", nargs="+", default=["debugger", "stopped", "spin", "read", "kernel"])
    options = parser.parse_args()
    print(f"{runner.hardware()}; tests/gpu/hang.py --gpus {options.gpus} --model {options.model}")
    rank = options.gpus - 1
    with tempfile.TemporaryDirectory(prefix="xh-") as scratch:
        scratch = pathlib.Path(scratch)
        subprocess.run(["cc", "-shared", "-fPIC", str(HANG), "-o", str(scratch / "hang.so")], check=True)
        data = runner.tokens(scratch / "tokens.bin", 2_000_000)
        for mode in options.modes:
            training = Training(options, scratch, data, mode)
            try:
                under_debugger(training, rank) if mode == "debugger" else hangs(training, mode, rank)
            finally:
                code = training.interrupt()
            reports = training.stderr.find(REPORT)
            check(f"{mode}: one report", len(reports) == 1, "; ".join(line for _, line in reports))
            check(f"{mode}: the interrupted job exits with code 143", code == 143, code)


if __name__ == "__main__":
    main()
