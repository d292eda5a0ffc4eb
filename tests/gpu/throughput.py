"""Tokens per second of both models by number of GPUs and precision, with the pool on and off.

    python3 tests/gpu/throughput.py --binary target/release/xlaunch --gpus 1 2 4

Each figure is the median step of one run after warm-up, from the run's metrics.jsonl. Prints a Markdown table; scaling
is relative to one GPU of the same row.
"""

import argparse
import pathlib
import statistics
import tempfile
import sys

import runner

WARMUP = 10


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=pathlib.Path, default=runner.ROOT / "target/release/xlaunch")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--models", nargs="+", default=["A", "B"])
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp32"])
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    print(f"{runner.hardware()}; python3 tests/gpu/throughput.py --gpus {' '.join(map(str, options.gpus))}")
    print("\n| model | precision | pool | " + " | ".join(f"{n} GPU" for n in options.gpus) + " | scaling | pool size |")
    print("|---|---|---|" + "---|" * (len(options.gpus) + 2))
    with tempfile.TemporaryDirectory() as scratch:
        data = runner.tokens(pathlib.Path(scratch) / "tokens.bin")
        for model in options.models:
            for precision in options.precisions:
                for pool in ["on", "off"]:
                    row(options, data, model, precision, pool)


def row(options, data, model, precision, pool):
    rates, mapped = [], 0
    for gpus in options.gpus:
        try:
            steps, _ = runner.train(options.binary, model, data, gpus, **{
                "train.steps": options.steps, "train.warmup": 10, "checkpoint.every": 0,
                "engine.precision": precision, "engine.pool": pool, "engine.device": "cuda",
            })
        except RuntimeError as error:
            print(error, file=sys.stderr)
            rates.append(None)
            continue
        rates.append(statistics.median(step["perf/tokens_per_second"] for step in steps[WARMUP:]))
        mapped = max(step["pool/mapped_bytes"] for step in steps)
    cells = ["failed" if rate is None else f"{rate / 1e3:.0f}K" for rate in rates]
    scaling = f"{rates[-1] / rates[0]:.2f}" if rates[0] and rates[-1] else "-"
    # Without a pool, no memory is kept between steps.
    size = f"{mapped / 2**30:.2f} GiB" if pool == "on" else "-"
    print(f"| {model} | {precision} | {pool} | " + " | ".join(cells) + f" | {scaling} | {size} |", flush=True)


if __name__ == "__main__":
    main()
