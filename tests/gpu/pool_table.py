"""The effect of the memory pool: model A with driver allocations only, with the pool, and with planned memory.

    python3 tests/gpu/pool_table.py --binary target/release/xlaunch --gpus 1 2 4

Speed is that of a run's median step; utilisation is sampled by nvidia-smi over the GPUs in use. Fails if losses differ
in any digit between the three, or if the pool makes driver allocations after the first steps.
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
# Step after which plans are in use and the pool makes no driver allocations.
SETTLED = 5


class Utilisation(threading.Thread):
    """Samples the utilisation of the GPUs in use."""

    def __init__(self, gpus):
        super().__init__(daemon=True)
        self.gpus, self.samples, self.stopped = gpus, [], threading.Event()

    def run(self):
        query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
        while not self.stopped.wait(0.2):
            lines = subprocess.run(query, capture_output=True, text=True).stdout.split()[: self.gpus]
            self.samples.append(statistics.mean(map(float, lines)))

    def stop(self):
        self.stopped.set()
        self.join()
        # Start and end of a run are not training; the busiest half of the samples is.
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
    print(f"\nlosses of all {options.steps} steps, off, on and planned: {'equal' if same else 'DIFFERENT'}")
    sys.exit(0 if same else 1)


def row(options, data, pool):
    cells, rates, losses = [], [], []
    for gpus in options.gpus:
        utilisation = Utilisation(gpus)
        utilisation.start()
        steps, _ = runner.train(options.binary, options.model, data, gpus, **{
            "train.steps": options.steps, "train.warmup": 10, "checkpoint.every": 0,
            "engine.pool": pool, "engine.device": "cuda", "engine.exec": "stream",
            "engine.deterministic": True,
        })
        busy = utilisation.stop()
        calls = [step["pool/driver_allocations"] for step in steps]
        if pool != "off" and calls[-1] != calls[SETTLED]:
            sys.exit(f"pool {pool}, {gpus} GPUs: driver allocations after step {SETTLED}: {calls}")
        rates.append(statistics.median(step["perf/tokens_per_second"] for step in steps[WARMUP:]))
        losses.append([step["train/loss"] for step in steps])
        per_step = (calls[-1] - calls[SETTLED]) / (len(calls) - 1 - SETTLED)
        cells.append(f"{rates[-1] / 1e3:.0f}K ({per_step:.0f} driver allocations per step) | {busy:.0f} %")
    print(f"| {pool} | " + " | ".join(cells) + f" | {rates[-1] / rates[0]:.2f} |", flush=True)
    return losses


if __name__ == "__main__":
    main()
