"""What is divided among the GPUs (`comm.shard`): speed, memory and loss of models with each choice.

    python3 tests/gpu/shards.py --binary target/release/xlaunch --gpus 2 [--models B llama-1b]

Used memory is the first GPU's, by NVML, without what was used before. A second run of each, with
`engine.deterministic`, must end with the same loss, bit for bit, for all but "none". Exit code 1 if one does not.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import pynvml

import runner
from memory import Used, predicted

WARMUP, STEPS = 10, 40
SHARDS = ["none", "optimizer", "gradients", "parameters"]


def bench(options, model, shard, data, **settings):
    """The JSON of a run, and what the first GPU used."""
    config, sizes = runner.configuration(model)
    settings = {"data.train": [str(data)], "data.val_fraction": 0.0, "engine.device": "cuda", "comm.shard": shard,
                "train.batch": runner.BATCHES.get(model, runner.BATCH)} | sizes | settings
    words = [str(config), "--nproc", str(options.gpus), *runner.overrides(settings)]
    command = [str(options.binary), "bench", "train", *words, "--json", "--warmup", str(WARMUP), "--steps", str(STEPS)]
    with Used() as used:
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout), used.peak, predicted([str(options.binary), "--dry-run", *words])[0]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=pathlib.Path, default=runner.ROOT / "target/release/xlaunch")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--models", nargs="+", default=["B", "llama-1b"], choices=runner.SIZES)
    options = parser.parse_args()
    pynvml.nvmlInit()
    arguments = f"--gpus {options.gpus} --models {' '.join(options.models)}"
    print(f"{runner.hardware()}; python3 tests/gpu/shards.py {arguments}\n")
    print("| model | comm.shard | tok/s | exposed | pool | used | predicted | first step | loss, deterministic |")
    print("|---|---|---|---|---|---|---|---|---|")
    gib, differ = lambda size: f"{size / 2**30:.2f} GiB", False
    with tempfile.TemporaryDirectory() as scratch:
        data = runner.tokens(pathlib.Path(scratch) / "tokens.bin", 8_000_000)
        for model in options.models:
            losses = {}
            for shard in SHARDS:
                found, used, expected = bench(options, model, shard, data)
                exact, _, _ = bench(options, model, shard, data, **{"engine.deterministic": True, "train.batch": 2})
                losses[shard] = exact["final_loss"]
                exposed = 100 * found["exposed_communication_ms"] / found["step_ms"]
                print(f"| {model} | {shard} | {found['tokens_per_second'] / 1e3:.0f}K | {exposed:.1f} % | "
                      f"{gib(found['pool_peak_bytes'])} | {gib(used)} | {gib(expected)} | "
                      f"{found['first_step_seconds']:.1f} s | {losses[shard]} |", flush=True)
            differ |= len({losses[shard] for shard in SHARDS[1:]}) > 1
    print("losses of divided runs differ" if differ else "losses of divided runs are equal")
    sys.exit(differ)


if __name__ == "__main__":
    main()
