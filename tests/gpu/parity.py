"""The same global batch on 1, 2 and 4 GPUs in strict fp32: losses agree within 1e-5, parameters are equal on all ranks.

    python3 tests/gpu/parity.py --binary target/release/xlaunch --gpus 1 2 4
"""

import argparse
import pathlib
import re
import sys
import tempfile

import runner

BATCH, STEPS, TOLERANCE = 32, 20, 1e-5


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=pathlib.Path, default=runner.ROOT / "target/release/xlaunch")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4])
    options = parser.parse_args()
    print(f"{runner.hardware()}; python3 tests/gpu/parity.py --gpus {' '.join(map(str, options.gpus))}")
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        data = runner.tokens(pathlib.Path(scratch) / "tokens.bin", 2_000_000)
        for model in ["A"]:
            reference = None
            for gpus in options.gpus:
                steps, summary = runner.train(options.binary, model, data, gpus, **{
                    "train.steps": STEPS, "train.lr": 6e-5, "train.warmup": 0, "train.batch": BATCH // gpus,
                    "checkpoint.every": 0, "engine.precision": "fp32", "engine.device": "cuda",
                    "observe.check_replicas": True,
                })
                losses = [step["train/loss"] for step in steps]
                reference = reference or losses
                worst = max(abs(a - b) / b for a, b in zip(losses, reference))
                replicas = re.search(r"replicas.*", summary)
                print(f"model {model}, {gpus} GPUs: loss {losses[0]:.6f} -> {losses[-1]:.6f}, largest relative "
                      f"difference from {options.gpus[0]} GPU {worst:.1e}; "
                      f"{replicas.group(0) if replicas else 'one replica'}")
                failed |= worst > TOLERANCE
    sys.exit(failed)


if __name__ == "__main__":
    main()
