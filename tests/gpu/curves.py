"""Losses beside PyTorch's, on the same tokens from the same initial weights, on one GPU.

    python3 tests/gpu/curves.py --binary target/release/xlaunch [--models A B]

PyTorch runs eagerly, in strict fp32 or under bf16 autocast with fp32 weights, with the learning rates that xlaunch
reports. Wanted: fp32 within 1e-4 relative over the first 20 steps, bf16 within 0.5 % at the end (mean of the last 50).
"""

import argparse
import pathlib
import sys
import tempfile

import numpy
import torch

import runner
from peer import initial, save_initial
from runner import BATCH, SIZES

sys.path.insert(0, str(runner.ROOT / "tests/peers"))
from model import GPT, loss, optimizer  # noqa: E402

LR, WARMUP, LAST = 6e-4, 20, 50


def peer(model, data, precision, rates):
    """PyTorch's losses with these learning rates."""
    sizes = SIZES[model]
    net = GPT(sizes)
    net.load_state_dict(initial(model))
    net.cuda()
    torch.backends.cuda.matmul.allow_tf32 = False
    opt = optimizer(net, LR, fused=True)
    tokens = torch.from_numpy(numpy.fromfile(data, dtype=numpy.uint16).astype(numpy.int64))
    count, losses = BATCH * sizes["seq"], []
    for step, rate in enumerate(rates):
        window = tokens[step * count : (step + 1) * count + 1].cuda()
        x, y = window[:-1].view(BATCH, -1), window[1:].view(BATCH, -1)
        for group in opt.param_groups:
            group["lr"] = rate
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            logits = net(x)
        value = loss(logits, y)
        del logits
        value.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        losses.append(value.item())
    return losses


def compare(options, model, data, scratch, precision, steps):
    weights = pathlib.Path(scratch) / "init.safetensors"
    save_initial(model, weights)
    lines, _ = runner.train(options.binary, model, data, 1, **{
        "train.steps": steps, "train.warmup": WARMUP, "train.lr": LR, "train.batch": BATCH, "checkpoint.every": 0,
        "train.schedule": "constant", "data.shuffle": False, "checkpoint.init": str(weights),
        "engine.precision": precision, "engine.device": "cuda",
    })
    ours = [line["train/loss"] for line in lines]
    theirs = peer(model, data, precision, [line["train/lr"] for line in lines])
    difference = [abs(a - b) / b for a, b in zip(ours, theirs)]
    first = max(difference[:20])
    mean = lambda values: sum(values[-LAST:]) / len(values[-LAST:])
    last = abs(mean(ours) - mean(theirs)) / mean(theirs)
    print(f"model {model} {precision}: first loss {ours[0]:.6f} and {theirs[0]:.6f}, last {LAST} {mean(ours):.5f} and "
          f"{mean(theirs):.5f}; largest difference over 20 steps {first:.1e}, of the last {LAST} of {steps} {last:.1e}")
    for step in [*range(0, 20, 4), *range(20, steps, max(20, steps // 20)), steps - 1]:
        print(f"  step {step + 1:3}  xlaunch {ours[step]:.6f}  PyTorch {theirs[step]:.6f}  {difference[step]:.1e}")
    sys.stdout.flush()
    return first > 1e-4 if precision == "fp32" else last > 5e-3


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=pathlib.Path, default=runner.ROOT / "target/release/xlaunch")
    parser.add_argument("--models", nargs="+", default=["A", "B"])
    parser.add_argument("--steps", type=int, default=1000, help="under bf16; fp32 is looked at for 20")
    options = parser.parse_args()
    print(f"{runner.hardware()}; torch {torch.__version__}; python3 tests/gpu/curves.py")
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        for model in options.models:
            # Every token is seen once: both sides read the file from its beginning.
            count = options.steps * BATCH * SIZES[model]["seq"] + 1
            data = runner.tokens(pathlib.Path(scratch) / f"{model}.bin", count)
            failed |= compare(options, model, data, scratch, "bf16", options.steps)
            failed |= compare(options, model, data, scratch, "fp32", 20)
    sys.exit(failed)


if __name__ == "__main__":
    main()
