"""Compares the memory that `--dry-run` predicts with the memory use of a GPU, for models and settings that save memory.

    python3 tests/gpu/memory.py --binary target/release/xlaunch [--models A B llama-1b] [--limit 3]

Used memory is the device's, by NVML, minus the amount in use before the run; pool is the peak of the trainer's own
allocator. `other` is the rest: context, kernels, libraries, NCCL. Exit code 1 if a prediction is off by more than
`--limit` percent.
"""

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import time

import pynvml

import runner

WARMUP, STEPS = 3, 12
# Settings to try in addition to a model's defaults.
SETTINGS = [{}, {"train.recompute": "cheap"}, {"train.recompute": "block"}, {"train.classifier_chunk": 2048},
            {"train.recompute": "block", "train.classifier_chunk": 2048}]
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def predicted(command):
    """Returns the bytes of one rank, and of its libraries."""
    done = subprocess.run(command, capture_output=True, text=True)
    found = dict(re.findall(r"^(each rank|libraries) +(.+)$", done.stdout, re.MULTILINE))
    if not found:
        sys.exit(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr[-2000:]}")
    value = lambda text: float(text.split()[0]) * UNITS[text.split()[1]]
    return value(found["each rank"]), value(found["libraries"])


class Used:
    """Measures the peak memory use of the first GPU while this exists."""

    def __enter__(self):
        self.device = pynvml.nvmlDeviceGetHandleByIndex(0)
        self.idle, self.peak, self.ended = self.now(), 0, False
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def now(self):
        return pynvml.nvmlDeviceGetMemoryInfo(self.device).used

    def watch(self):
        while not self.ended:
            self.peak = max(self.peak, self.now() - self.idle)
            time.sleep(0.02)

    def __exit__(self, *_):
        self.ended = True
        self.thread.join()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=pathlib.Path, default=runner.ROOT / "target/release/xlaunch")
    parser.add_argument("--models", nargs="+", default=["A", "B", "llama-1b"], choices=runner.SIZES)
    parser.add_argument("--limit", type=float, default=3.0)
    options = parser.parse_args()
    pynvml.nvmlInit()
    print(f"{runner.hardware()}; python3 tests/gpu/memory.py --models {' '.join(options.models)}\n")
    print("| model | settings | predicted | used | difference | pool | other | tok/s | first step |")
    print("|---|---|---|---|---|---|---|---|---|")
    off = False
    with tempfile.TemporaryDirectory() as scratch:
        data = runner.tokens(pathlib.Path(scratch) / "tokens.bin", 2_000_000)
        for model in options.models:
            for changed in SETTINGS:
                off |= abs(row(options, model, changed, data)) > options.limit
    sys.exit(off)


def measure(binary, model, gpus, data, changed, warmup, steps):
    """Returns the JSON of a run, the memory use of the first GPU, and the predictions for a rank and its libraries."""
    config, sizes = runner.configuration(model)
    settings = {"data.train": [str(data)], "data.val_fraction": 0.0, "engine.device": "cuda",
                "train.batch": runner.BATCHES[model]} | sizes | changed
    words = [str(config), "--nproc", str(gpus), *runner.overrides(settings)]
    total, libraries = predicted([str(binary), "--dry-run", *words])
    command = [str(binary), "bench", "train", *words, "--json", "--warmup", str(warmup), "--steps", str(steps)]
    with Used() as used:
        found = runner.bench(command)
    return found, used.peak, total, libraries


def gib(size):
    return f"{size / 2**30:.2f} GiB"


def row(options, model, changed, data):
    """Measures and prints one row. Returns the error of the prediction in percent."""
    found, used, total, libraries = measure(options.binary, model, 1, data, changed, WARMUP, STEPS)
    pool = found["pool_peak_bytes"]
    difference = 100 * (total - used) / used
    name = ", ".join(f"{key} = {value}" for key, value in changed.items()) or "-"
    print(f"| {model} | {name} | {gib(total)} | {gib(used)} | {difference:+.1f} % | "
          f"{gib(pool)} (predicted {gib(total - libraries)}) | {gib(used - pool)} | "
          f"{found['tokens_per_second'] / 1e3:.0f}K | {found['first_step_seconds']:.1f} s |", flush=True)
    return difference


if __name__ == "__main__":
    main()
