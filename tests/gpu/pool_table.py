"""The effect of the memory pool: model A with driver allocations only, with the pool, and with planned memory.

    python3 tests/gpu/pool_table.py --binary target/release/xlaunch --gpus 1 2 4
    python3 tests/gpu/pool_table.py --threads --gpus 1 2 4

Speed is that of a run's median step; utilisation is sampled by nvidia-smi over the GPUs in use. Fails if losses differ
in any digit between the three, or if the pool makes driver allocations after the first steps.

--threads compares a process per GPU with one process that has a thread and a context per GPU, each without and with
the pool, by `xlaunch bench train`. Fails if a run fails or takes too long, or if the last losses differ in any digit.
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
# Time limit in seconds of a run of --threads: threads share the driver's locks, so one may wait for another forever.
RUN_TIMEOUT = 120


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
        # Start and end of a run are not training, but the busiest half of the samples is.
        busiest = sorted(self.samples)[len(self.samples) // 2 :]
        return statistics.mean(busiest) if busiest else 0.0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=pathlib.Path, default=runner.ROOT / "target/release/xlaunch")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--model", default="A")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--threads", action="store_true", help="compare processes with threads of one process")
    options = parser.parse_args()
    threads = "--threads " if options.threads else ""
    print(f"{runner.hardware()}; python3 tests/gpu/pool_table.py {threads}--gpus {' '.join(map(str, options.gpus))}")
    with tempfile.TemporaryDirectory() as scratch:
        data = runner.tokens(pathlib.Path(scratch) / "tokens.bin")
        same = modes(options, data) if options.threads else pools(options, data)
    sys.exit(0 if same else 1)


def pools(options, data):
    """Prints the table of pool modes. Returns whether their losses are equal."""
    print("\n| pool | " + " | ".join(f"{n} GPU | busy" for n in options.gpus) + " | scaling |")
    print("|---|" + "---|---|" * len(options.gpus) + "---|")
    losses = {pool: row(options, data, pool) for pool in ["off", "on", "plan"]}
    same = losses["off"] == losses["on"] == losses["plan"]
    print(f"\nlosses of all {options.steps} steps, off, on and planned: {'equal' if same else 'DIFFERENT'}")
    return same


def settings(pool):
    return {"engine.pool": pool, "engine.device": "cuda", "engine.exec": "stream", "engine.deterministic": True,
            "train.warmup": 10}


def row(options, data, pool):
    cells, rates, losses = [], [], []
    for gpus in options.gpus:
        utilisation = Utilisation(gpus)
        utilisation.start()
        steps, _ = runner.train(options.binary, options.model, data, gpus, **settings(pool) | {
            "train.steps": options.steps, "checkpoint.every": 0,
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


def modes(options, data):
    """Prints the table of processes and threads. Returns whether all runs have ended with the same losses."""
    print("\n| ranks | pool | " + " | ".join(f"{n} GPU" for n in options.gpus) + " | scaling |")
    print("|---|---|" + "---|" * (len(options.gpus) + 1))
    rows = [(mode, pool) for mode in ["processes", "threads"] for pool in ["off", "on"]]
    losses = [mode_row(options, data, mode, pool) for mode, pool in rows]
    same = None not in losses[0] and all(found == losses[0] for found in losses)
    print(f"\nlosses of step {WARMUP + options.steps} in all rows: {'equal' if same else 'DIFFERENT'}")
    print("in parentheses: step without all-reduce in ms")
    return same


def mode_row(options, data, mode, pool):
    found = [bench(options, data, mode, pool, gpus) for gpus in options.gpus]
    rates = [run and run["tokens_per_second"] for run in found]
    cells = [f"{run['tokens_per_second'] / 1e3:.0f}K ({run['step_ms_without_all_reduce']:.2f})" if run else "failed"
             for run in found]
    scaling = f"{rates[-1] / rates[0]:.2f}" if rates[0] and rates[-1] else ""
    print(f"| {mode} | {pool} | " + " | ".join(cells) + f" | {scaling} |", flush=True)
    return [run and run["final_loss"] for run in found]


def bench(options, data, mode, pool, gpus):
    """Returns the result of `xlaunch bench train`; None if it fails, so that the rest of the table is still printed."""
    config, sizes = runner.configuration(options.model)
    keys = {"data.train": [str(data)], "data.val_fraction": 0.0} | sizes | settings(pool)
    command = [str(options.binary), "bench", "train", str(config), "--json", "--nproc", str(gpus),
               "--warmup", str(WARMUP), "--steps", str(options.steps), *runner.overrides(keys)]
    command += ["--threads"] if mode == "threads" else []
    try:
        return runner.bench(command, timeout=RUN_TIMEOUT)
    except subprocess.TimeoutExpired:
        print(f"{' '.join(command)}: not over after {RUN_TIMEOUT} s", file=sys.stderr)
    except RuntimeError as error:
        print(error, file=sys.stderr)
    return None


if __name__ == "__main__":
    main()
