#!/usr/bin/env python3
"""Compares two builds of xlaunch on one GPU: time of a training step, in alternation, and the losses.

    tests/gpu/builds.py OLD NEW [--models A B] [--rounds 3]
"""

import argparse
import pathlib
import statistics
import tempfile

import runner


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("old", type=pathlib.Path)
    parser.add_argument("new", type=pathlib.Path)
    parser.add_argument("--models", nargs="+", choices=runner.MODELS, default=list(runner.MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    print(runner.hardware())
    print("| model | old ms | new ms | old / new | last loss |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        data = runner.tokens(pathlib.Path(folder) / "tokens.bin")
        for model in options.models:
            found = [(step(options, binary, model, data)) for _ in range(options.rounds)
                     for binary in (options.old, options.new)]
            old, new = found[::2], found[1::2]
            times = [statistics.median(it["step_ms"] for it in build) for build in (old, new)]
            losses = ", ".join(f"{build[0]['final_loss']:.4f}" for build in (old, new))
            cells = [", ".join(f"{it['step_ms']:.3f}" for it in build) for build in (old, new)]
            print(f"| {model} | {cells[0]} | {cells[1]} | {times[0] / times[1]:.3f} | {losses} |", flush=True)


def step(options, binary, model, data):
    config, sizes = runner.configuration(model)
    command = [str(binary), "bench", "train", str(config), "--json", "--nproc", "1", "--warmup", "30"]
    command += ["--steps", str(options.steps)]
    return runner.bench(command + runner.overrides({"data.train": [str(data)]} | sizes))


if __name__ == "__main__":
    main()
