"""Determinism: losses are the same bit for bit with CUDA graphs, with a stream, and when repeated.

    python3 tests/gpu/repeat.py --binary target/release/xlaunch --gpus 1 2 4

Runs of one row differ only in `engine.exec`, or not at all. Every second row accumulates gradients over two
micro-steps.
"""

import argparse
import pathlib
import sys
import tempfile

import runner

STEPS = 30


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=pathlib.Path, default=runner.ROOT / "target/release/xlaunch")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--models", nargs="+", default=["A", "B"])
    options = parser.parse_args()
    print(f"{runner.hardware()}; python3 tests/gpu/repeat.py --gpus {' '.join(map(str, options.gpus))}")
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        data = runner.tokens(pathlib.Path(scratch) / "tokens.bin", 2_000_000)
        for model in options.models:
            for gpus in options.gpus:
                for accumulate in [1, 2]:
                    failed |= not row(options, data, model, gpus, accumulate)
    sys.exit(failed)


def row(options, data, model, gpus, accumulate):
    """Returns whether the runs are equal."""
    runs = [curve(options, data, model, gpus, accumulate, mode) for mode in ["graph", "stream", "graph"]]
    equal = runs[0] == runs[1] == runs[2]
    first = next((i for i, steps in enumerate(zip(*runs)) if len(set(steps)) > 1), None)
    result = "are equal" if equal else f"DIFFER from step {first + 1} on"
    print(f"model {model}, {gpus} GPUs, {accumulate} micro-steps: {STEPS} losses and gradient norms of graph, stream, "
          f"graph {result}; last loss {runs[0][-1][0]:.6f}", flush=True)
    return equal


def curve(options, data, model, gpus, accumulate, mode):
    steps, _ = runner.train(options.binary, model, data, gpus, **{
        "train.steps": STEPS, "train.warmup": 5, "train.batch": 8, "train.accumulate": accumulate,
        "checkpoint.every": 0, "engine.device": "cuda", "engine.exec": mode, "engine.deterministic": True,
    })
    return [(step["train/loss"], step["train/grad_norm"]) for step in steps]


if __name__ == "__main__":
    main()
