"""The effect on the loss of gradient all-reduces in bf16 instead of fp32.

    python3 tests/gpu/wire.py --binary target/release/xlaunch --gpus 4 [--models A B]

Runs differ only in `comm.dtype` and the seed. Losses are means of the last 100 steps. Seeds determine initial weights
and the order of tokens, so the spread between them shows how much of a difference is random.
"""

import argparse
import pathlib
import statistics
import tempfile

import runner

LAST = 100


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=pathlib.Path, default=runner.ROOT / "target/release/xlaunch")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--models", nargs="+", default=["A"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    print(f"{runner.hardware()}; python3 tests/gpu/wire.py --gpus {options.gpus} --steps {options.steps}")
    with tempfile.TemporaryDirectory() as scratch:
        data = runner.tokens(pathlib.Path(scratch) / "tokens.bin")
        for model in options.models:
            differences = []
            for seed in options.seeds:
                exact, rounded = (final_loss(options, model, data, dtype, seed) for dtype in ["fp32", "bf16"])
                differences.append(100 * (rounded - exact) / exact)
                print(f"model {model}, {options.gpus} GPUs, seed {seed}: loss {exact:.4f} with all-reduces in fp32, "
                      f"{rounded:.4f} in bf16, {differences[-1]:+.2f} %", flush=True)
            print(f"model {model}: {statistics.mean(differences):+.2f} %", flush=True)


def final_loss(options, model, data, dtype, seed):
    steps, _ = runner.train(options.binary, model, data, options.gpus, **{
        "train.steps": options.steps, "job.seed": seed, "comm.dtype": dtype, "checkpoint.every": 0,
        "engine.device": "cuda",
    })
    return statistics.mean(step["train/loss"] for step in steps[-LAST:])


if __name__ == "__main__":
    main()
