"""Speed, memory and loss of models with each choice of what is divided among the GPUs (`comm.shard`).

    python3 tests/gpu/shards.py --binary target/release/xlaunch --gpus 2 [--models B llama-1b]

Waiting and communication are shares of a step's time, as in `compare.py`. Used memory is the first GPU's, by NVML,
minus the amount in use before the run. A second run of each, with `engine.deterministic`, must end with the same loss,
bit for bit, for all but "none". Exit code 1 if one does not.
"""

import argparse
import pathlib
import sys
import tempfile

import pynvml

import runner
from memory import gib, measure

WARMUP, STEPS = 10, 40
SHARDS = ["none", "optimizer", "gradients", "parameters"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=pathlib.Path, default=runner.ROOT / "target/release/xlaunch")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--models", nargs="+", default=["B", "llama-1b"], choices=runner.SIZES)
    options = parser.parse_args()
    pynvml.nvmlInit()
    arguments = f"--gpus {options.gpus} --models {' '.join(options.models)}"
    print(f"{runner.hardware()}; python3 tests/gpu/shards.py {arguments}\n")
    print("| model | comm.shard | tok/s | waiting | communication | pool | used | predicted | first step "
          "| loss, deterministic |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    differ = False
    with tempfile.TemporaryDirectory() as scratch:
        data = runner.tokens(pathlib.Path(scratch) / "tokens.bin", 8_000_000)
        for model in options.models:
            losses = {}
            for shard in SHARDS:
                run = lambda **keys: measure(options.binary, model, options.gpus, data, {"comm.shard": shard} | keys,
                                             WARMUP, STEPS)
                found, used, expected, _ = run()
                losses[shard] = run(**{"engine.deterministic": True, "train.batch": 2})[0]["final_loss"]
                print(f"| {model} | {shard} | {found['tokens_per_second'] / 1e3:.0f}K | "
                      f"{runner.share(found, 'waiting_ms')} | {runner.share(found, 'communication_ms')} | "
                      f"{gib(found['pool_peak_bytes'])} | {gib(used)} | {gib(expected)} | "
                      f"{found['first_step_seconds']:.1f} s | {losses[shard]} |", flush=True)
            differ |= len({losses[shard] for shard in SHARDS[1:]}) > 1
    print("losses of divided runs differ" if differ else "losses of divided runs are equal")
    sys.exit(differ)


if __name__ == "__main__":
    main()
