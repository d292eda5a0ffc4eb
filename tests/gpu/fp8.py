"""Loss curves and speed in FP8 compared with those in bf16, on the same tokens from the same weights, on one GPU.

    python3 tests/gpu/fp8.py --binary target/release/xlaunch [--models A B llama-1b] [--steps 1000] [--batch N]

Learning rates decay to a tenth, as in practice. Both precisions run with two seeds, whose difference shows how far
runs drift apart without a change of precision. Tolerance: 0.5 % for the mean of the last 50 losses.
"""

import argparse
import pathlib
import statistics
import sys
import tempfile

import runner

LR, MIN_LR_RATIO, WARMUP, LAST, TOLERANCE = 6e-4, 0.1, 20, 50, 5e-3
TOKENS = 12_000_000


def run(binary, model, batch, data, precision, seed, steps):
    lines, _ = runner.train(binary, model, data, 1, **{
        "train.steps": steps, "train.warmup": WARMUP, "train.lr": LR, "train.batch": batch,
        "train.schedule": "cosine", "checkpoint.every": 0, "train.min_lr_ratio": MIN_LR_RATIO, "job.seed": seed,
        "engine.precision": precision, "engine.device": "cuda",
    })
    rate = statistics.median(line["perf/tokens_per_second"] for line in lines[WARMUP:])
    return [line["train/loss"] for line in lines], rate


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=pathlib.Path, default=runner.ROOT / "target/release/xlaunch")
    parser.add_argument("--models", nargs="+", default=["A", "B"], choices=runner.SIZES)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, help="sequences per step; default: those of compare.py")
    options = parser.parse_args()
    print(f"{runner.hardware()}; python3 tests/gpu/fp8.py {' '.join(sys.argv[1:])}")
    mean = lambda losses: sum(losses[-LAST:]) / LAST
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        data = runner.tokens(pathlib.Path(scratch) / "tokens.bin", TOKENS)
        for model in options.models:
            ends, rates, batch = {}, {}, options.batch or runner.BATCHES[model]
            for precision in ("bf16", "fp8"):
                for seed in (1, 2):
                    losses, rate = run(options.binary, model, batch, data, precision, seed, options.steps)
                    ends[precision, seed], rates[precision] = mean(losses), rate
                    shown = "  ".join(f"{losses[step]:.4f}" for step in range(0, options.steps, options.steps // 10))
                    print(f"model {model}, {precision}, seed {seed}: {shown}  last {LAST} {mean(losses):.5f}, "
                          f"{rate / 1e3:.0f}K tokens per second", flush=True)
            bf16, fp8 = ((ends[precision, 1] + ends[precision, 2]) / 2 for precision in ("bf16", "fp8"))
            apart = abs(ends["bf16", 1] - ends["bf16", 2]) / bf16
            difference = fp8 / bf16 - 1
            print(f"model {model}: fp8 {100 * difference:+.2f} % of bf16, whose seeds differ by {100 * apart:.2f} %, "
                  f"{rates['fp8'] / rates['bf16']:.2f} times as fast", flush=True)
            failed |= difference > TOLERANCE
    sys.exit(failed)


if __name__ == "__main__":
    main()
