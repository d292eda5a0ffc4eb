"""Training speed with each cuDNN of this host, on one GPU, without variables that say where libraries are.

    python3 tests/gpu/libraries.py --binary target/release/xlaunch

First prints what `xlaunch env` selects. Then each row is a model, trained with the selected cuDNN, with every other one
that was found, and without one. Losses of the same model must agree. Exit code 1 if the selected cuDNN is slower than
another by more than 2 %.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import compare
import peer
import runner


def measure(options, model, data, weights, path):
    """Returns the measurements with this cuDNN: a path, or `None` for the selected one."""
    if path is not None:
        os.environ["XLAUNCH_CUDNN"] = path
    try:
        return compare.run_xlaunch(options, model, 1, data, weights, "bf16", "none")
    finally:
        os.environ.pop("XLAUNCH_CUDNN", None)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=pathlib.Path, default=runner.ROOT / "target/release/xlaunch")
    parser.add_argument("--models", nargs="+", default=["long-4k", "smollm-size"], choices=runner.SIZES)
    parser.add_argument("--warmup", type=int, default=15)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    print(runner.hardware(), flush=True)
    print(subprocess.run([options.binary, "env"], capture_output=True, text=True, check=True).stdout)
    found = json.loads(subprocess.run([options.binary, "env", "--json"], capture_output=True, check=True).stdout)
    cudnn = next(library for library in found["libraries"] if library["name"] == "cuDNN")
    others = [(other["version"], other["path"]) for other in cudnn["passed_over"]]
    choices = [(f"{cudnn['version']} (selected)", None), *others, ("none", "/none")]
    print("| model | cuDNN | tok/s | last loss |\n|---|---|---|---|")
    slower = False
    with tempfile.TemporaryDirectory() as scratch:
        data = runner.tokens(pathlib.Path(scratch) / "tokens.bin")
        for model in options.models:
            weights = pathlib.Path(scratch) / f"{model}.safetensors"
            peer.save_initial(model, weights)
            runs = [(name, measure(options, model, data, weights, path)) for name, path in choices]
            for name, run in runs:
                print(
                    f"| {model} | {name} | {run['tokens_per_second'] / 1e3:.0f}K | {run['final_loss']:.4f} |",
                    flush=True,
                )
            fastest = max(run["tokens_per_second"] for _, run in runs)
            slower |= runs[0][1]["tokens_per_second"] < 0.98 * fastest
            losses = [run["final_loss"] for _, run in runs]
            slower |= max(losses) - min(losses) > 0.01 * max(losses)
    sys.exit(slower)


if __name__ == "__main__":
    main()
