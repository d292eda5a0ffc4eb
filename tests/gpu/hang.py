"""Hang detection: seconds until a hanging rank of a training job is reported, and what is reported.

    python3 tests/gpu/hang.py --binary target/release/xlaunch --gpus 2 [--model A]

The process of the last rank is stopped, and later its trainer thread only (`tests/peers/freeze.py`), so that its
heartbeats continue. Both are continued afterwards. Meanwhile the job evaluates and saves checkpoints, which must not be
reported.
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
TIMEOUT = 120
# Seconds within which a hang is to be reported.
GOAL = 60
# A message of the launcher about ranks. Output of a rank itself begins with `[rank N]`.
REPORT = re.compile(r"xlaunch: ranks? \d")


class Stderr:
    """The lines of the launcher with their times."""

    def __init__(self, pipe):
        self.lines, self.changed = [], threading.Condition()
        threading.Thread(target=self.read, args=[pipe], daemon=True).start()

    def read(self, pipe):
        for line in pipe:
            with self.changed:
                self.lines.append((time.monotonic(), line.strip()))
                self.changed.notify_all()

    def reports(self, since=0.0):
        return [(at, line) for at, line in self.lines if at >= since and REPORT.match(line)]

    def wait_for_report(self, since):
        """Time and text of the first report after `since`."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.reports(since), TIMEOUT):
                raise SystemExit(f"no report of a hang within {TIMEOUT} s")
            return self.reports(since)[0]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=pathlib.Path, default=runner.ROOT / "target/release/xlaunch")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--model", choices=runner.MODELS, default="A")
    options = parser.parse_args()
    print(f"{runner.hardware()}; tests/gpu/hang.py --gpus {options.gpus} --model {options.model}")
    rank = options.gpus - 1
    with tempfile.TemporaryDirectory(prefix="xh-") as scratch:
        data, out = runner.tokens(pathlib.Path(scratch) / "tokens.bin", 2_000_000), f"{scratch}/out"
        settings = {"data.train": [str(data)], "train.eval_every": 100, "train.steps": 1_000_000}
        settings |= {"checkpoint.every": 200, "job.output": out}
        command = [str(options.binary.resolve()), "--nproc", str(options.gpus)]
        command += [str(runner.ROOT / runner.MODELS[options.model]), *runner.overrides(settings)]
        launched = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        stderr = Stderr(launched.stderr)
        try:
            wait_for("steps", lambda: len(runner.steps(out)) > 250, launched)
            worker = workers(launched.pid)[-1]
            for what in ["process", "trainer thread"]:
                time.sleep(5)
                since = time.monotonic()
                if what == "process":
                    os.kill(worker, signal.SIGSTOP)
                else:
                    freeze = [sys.executable, str(FREEZE), str(worker)]
                    frozen = subprocess.Popen(freeze, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
                at, line = stderr.wait_for_report(since)
                ok = at - since < GOAL and f"rank {rank} " in line
                check(f"{what} stopped: reported after {at - since:.1f} s", ok, line)
                since, made = time.monotonic(), len(runner.steps(out))
                if what == "process":
                    os.kill(worker, signal.SIGCONT)
                else:
                    frozen.communicate()
                wait_for("steps", lambda: len(runner.steps(out)) > made + 1, launched)
                check(f"{what} continued: {time.monotonic() - since:.1f} s until steps are made", True)
        finally:
            launched.send_signal(signal.SIGINT)
            code = launched.wait()
        others = [line for _, line in stderr.reports() if f"rank {rank} " not in line]
        check("no other rank was reported", not others, "; ".join(others))
        check("the interrupted job exits with code 143", code == 143, code)


if __name__ == "__main__":
    main()
