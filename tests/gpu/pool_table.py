"""What the pool is worth: model A with the driver for every buffer, with the pool, and with plans, by number of GPUs.

    python3 tests/gpu/pool_table.py --binary target/release/xlaunch --gpus 1 2 4

A run's figure is its median step; utilisation is what nvidia-smi sampled during the run, over the GPUs in use. Losses of
the three must be the same in every digit, and no driver allocation may follow the first steps: it fails otherwise.
"""

import argparse
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading

import runner

WARMUP = 10
# Plans are taken up within the first steps.
SETTLED = 5


class Utilisation(threading.Thread):
    """Samples what the GPUs in use are busy."""

    def __init__(self, gpus):
        super().__init__(daemon=True)
        self.gpus, self.samples, self.ended = gpus, [], threading.Event()

    def run(self):
        query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
        while not self.ended.wait(0.2):
            lines = subprocess.run(query, capture_output=True, text=True).stdout.split()[: self.gpus]
            self.samples.append(statistics.mean(map(float, lines)))

    def end(self):
        self.ended.set()
        self.join()
        # Start and end of a run are not training: the busiest half is.
        busiest = sorted(self.samples)[len(self.samples) // 2 :]
        return statistics.mean(busiest) if busiest else 0.0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=pathlib.Path, default=runner.ROOT / "target/release/xlaunch")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--model", default="A")
    parser.add_argument("--steps", type=int, default=80)
    options = parser.parse_args()
    print(f"{runner.hardware()}; python3 tests/gpu/pool_table.py --gpus {' '.join(map(str, options.gpus))}")
    print("\n| pool | " + " | ".join(f"{n} GPU | busy" for n in options.gpus) + " | scaling |")
    print("|---|" + "---|---|" * len(options.gpus) + "---|")
    with tempfile.TemporaryDirectory() as scratch:
        data = runner.tokens(pathlib.Path(scratch) / "tokens.bin")
        losses = {pool: row(options, data, pool) for pool in ["off", "on", "plan"]}
    same = losses["off"] == losses["on"] == losses["plan"]
    print(f"\nlosses of all {options.steps} steps, off, on and planned: {'the same' if same else 'DIFFERENT'}")
    sys.exit(0 if same else 1)


def row(options, data, pool):
    cells, rates, losses = [], [], []
    for gpus in options.gpus:
        sampled = Utilisation(gpus)
        sampled.start()
        steps, _ = runner.train(options.binary, options.model, data, gpus, **{
            "train.steps": options.steps, "train.warmup": 10, "checkpoint.every": 0,
            "engine.pool": pool, "engine.device": "cuda", "engine.exec": "stream",
            "engine.deterministic": True,
        })
        busy = sampled.end()
        calls = [step["pool/driver_allocations"] for step in steps]
        if pool != "off" and calls[-1] != calls[SETTLED]:
            sys.exit(f"pool {pool}, {gpus} GPUs: driver allocations went on after step {SETTLED}: {calls}")
        rates.append(statistics.median(step["perf/tokens_per_second"] for step in steps[WARMUP:]))
        losses.append([step["train/loss"] for step in steps])
        per_step = (calls[-1] - calls[SETTLED]) / (len(calls) - 1 - SETTLED)
        cells.append(f"{rates[-1] / 1e3:.0f}K ({per_step:.0f} driver allocations a step) | {busy:.0f} %")
    print(f"| {pool} | " + " | ".join(cells) + f" | {rates[-1] / rates[0]:.2f} |", flush=True)
    return losses


if __name__ == "__main__":
    main()
