"""A rank of a training job hangs: seconds until it is named, and what is said of it.

    python3 tests/gpu/hang.py --binary target/release/xlaunch --gpus 2 [--model A]

The last rank's process is stopped as a whole, and later its trainer's thread alone (`tests/peers/freeze.py`), whose
heartbeats go on then. Both times it goes on afterwards. Meanwhile the job evaluates and saves: nothing else may be named.
"""

import argparse
import os
import pathlib
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
LIMIT = 120
GOAL = 60


class Told:
    """The lines of the launcher, as they come."""

    def __init__(self, pipe):
        self.lines, self.more = [], threading.Condition()
        threading.Thread(target=self.read, args=[pipe], daemon=True).start()

    def read(self, pipe):
        for line in pipe:
            with self.more:
                self.lines.append((time.monotonic(), line.strip()))
                self.more.notify_all()

    def wait(self, text, since):
        """When a line with this text came, not before `since`, and the line."""
        find = lambda: next((found for found in self.lines if found[0] >= since and text in found[1]), None)
        with self.more:
            if not self.more.wait_for(find, LIMIT):
                raise SystemExit(f"no line with `{text}` within {LIMIT} s")
            return find()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=pathlib.Path, default=runner.ROOT / "target/release/xlaunch")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--model", choices=runner.MODELS, default="A")
    options = parser.parse_args()
    print(f"{runner.hardware()}; tests/gpu/hang.py --gpus {options.gpus} --model {options.model}")
    rank = options.gpus - 1
    with tempfile.TemporaryDirectory(prefix="xh-") as place:
        data = runner.tokens(pathlib.Path(place) / "tokens.bin", 2_000_000)
        settings = {"data.train": [str(data)], "train.eval_every": 100, "train.steps": 1_000_000, "checkpoint.every": 200}
        settings |= {"job.output": f"{place}/out"}
        command = [str(options.binary.resolve()), "--nproc", str(options.gpus), str(runner.ROOT / runner.MODELS[options.model])]
        launched = subprocess.Popen(command + runner.overrides(settings), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        told = Told(launched.stderr)
        try:
            wait_for("steps", lambda: len(runner.steps(f"{place}/out")) > 250, launched)
            last = workers(launched.pid)[-1]
            for what in ["process", "trainer's thread"]:
                time.sleep(5)
                since = time.monotonic()
                if what == "process":
                    os.kill(last, signal.SIGSTOP)
                else:
                    frozen = subprocess.Popen([sys.executable, str(FREEZE), str(last)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
                at, line = told.wait("waiting for it", since)
                check(f"the {what} is stopped: named after {at - since:.1f} s", at - since < GOAL and f"rank {rank} " in line, line)
                since = time.monotonic()
                if what == "process":
                    os.kill(last, signal.SIGCONT)
                else:
                    frozen.communicate()
                at, line = told.wait("steps continue", since)
                check(f"it goes on: {at - since:.1f} s until steps do", True)
        finally:
            launched.send_signal(signal.SIGINT)
            code = launched.wait()
        named = [line for _, line in told.lines if "waiting for it" in line]
        check("nothing else was named", len(named) == 2, "; ".join(named[2:]))
        check("the job ended as it was asked to", code == 143, code)


if __name__ == "__main__":
    main()
