"""Models whose GPUs divide experts among themselves (`comm.experts`), compared with data parallelism.

    python3 tests/gpu/expert_parallel.py --binary target/release/xlaunch --gpus 2 [--models experts-16 olmoe-4]

Every run has the same tokens and initial weights. In strict fp32, with small batches, losses of step 8 must agree
within 1e-4; later ones differ, because rounding changes which experts are chosen. Runs in bf16 and FP8 show speed and
memory. A deterministic run of a captured step must end with the same loss, bit for bit, as one that runs operation by
operation. Used memory is the first GPU's, by NVML, minus the amount in use before the run. The exit code is 1 if losses
differ.
"""

import argparse
import pathlib
import sys
import tempfile

import pynvml

import runner
from memory import gib, measure

# Steps before the measured ones, and measured ones.
STEPS = {"fp32": (2, 6), "bf16": (10, 40), "fp8": (10, 40)}
TOLERANCE = 1e-4


def divisors(gpus):
    return [size for size in range(1, gpus + 1) if gpus % size == 0]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=pathlib.Path, default=runner.ROOT / "target/release/xlaunch")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--models", nargs="+", default=["experts-16", "olmoe-4"], choices=runner.SIZES)
    parser.add_argument("--shards", nargs="+", default=["none", "optimizer"], choices=["none", "optimizer"])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"], choices=STEPS)
    options = parser.parse_args()
    pynvml.nvmlInit()
    arguments = " ".join(sys.argv[1:])
    print(f"{runner.hardware()}; python3 tests/gpu/expert_parallel.py {arguments}\n")
    print("| model | precision | comm.shard | comm.experts | tok/s | waiting | communication | pool | used | predicted "
          "| loss | relative difference |")
    print("|---" * 12 + "|")
    differ = False
    with tempfile.TemporaryDirectory() as scratch:
        data = runner.tokens(pathlib.Path(scratch) / "tokens.bin", 8_000_000)
        for model in options.models:
            for precision in options.precisions:
                differ |= rows(options, model, precision, data)
            differ |= stream(options, model, data)
    print("losses differ" if differ else "losses agree")
    sys.exit(differ)


def run(options, model, data, precision, keys):
    # A small batch is enough to compare losses.
    batch = {"train.batch": 1} if precision == "fp32" else {}
    settings = {"engine.precision": precision} | batch | keys
    return measure(options.binary, model, options.gpus, data, settings, *STEPS[precision])


def rows(options, model, precision, data):
    """Prints a row for each division. Returns whether a loss is too far from that of data parallelism."""
    expected, differ = None, False
    for shard in options.shards:
        for size in divisors(options.gpus):
            found, used, predicted, _ = run(options, model, data, precision,
                                            {"comm.shard": shard, "comm.experts": size})
            loss = found["final_loss"]
            expected = loss if expected is None else expected
            apart = abs(loss - expected) / expected
            differ |= precision == "fp32" and not apart <= TOLERANCE
            print(f"| {model} | {precision} | {shard} | {size} | {found['tokens_per_second'] / 1e3:.0f}K | "
                  f"{runner.share(found, 'waiting_ms')} | {runner.share(found, 'communication_ms')} | "
                  f"{gib(found['pool_peak_bytes'])} | {gib(used)} | {gib(predicted)} | {loss:.6f} | {apart:.1e} |",
                  flush=True)
    return differ


def stream(options, model, data):
    """Prints the deterministic losses of graphs and streams. Returns whether they differ."""
    losses = []
    for mode in ["graph", "stream"]:
        keys = {"engine.deterministic": True, "engine.exec": mode, "comm.experts": options.gpus, "train.batch": 2}
        losses.append(run(options, model, data, "bf16", keys)[0]["final_loss"])
    print(f"{model}, deterministic: graph {losses[0]}, stream {losses[1]}", flush=True)
    return losses[0] != losses[1]


if __name__ == "__main__":
    main()
