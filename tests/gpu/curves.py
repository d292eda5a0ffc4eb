"""Loss curves compared with PyTorch's, on the same tokens from the same initial weights.

    python3 tests/gpu/curves.py --binary target/release/xlaunch [--models A B llama-1b] [--batch N]

PyTorch runs eagerly, in strict fp32 or under bf16 autocast with fp32 weights. Under bf16 it runs a second time with
another attention kernel, which adds in another order: that shows how far rounding alone drives two runs apart. (That
kernel does not support grouped queries, so models with them run once.) Learning rates decay to a tenth, as in practice;
at a constant rate, such runs differ by 2 % after 1,000 steps. Tolerances: fp32 within 1e-4 relative over the first 20
steps, bf16 within 0.5 % for the mean of the last 50 losses. Runs have one GPU each, and share those of the host.

Models that do not fit into one GPU are divided among all, by `comm.shard = "parameters"` and by FSDP2, and compared
while the learning rate rises: the first 8 losses in bf16 within 0.5 %. (Their losses jump at first, and runs soon
drift apart.)
"""

import argparse
import concurrent.futures
import math
import multiprocessing
import os
import pathlib
import statistics
import sys
import tempfile
import types

import numpy
import torch

import compare
import peer
import runner
from runner import SIZES

sys.path.insert(0, str(runner.ROOT / "tests/peers"))
from model import GPT, loss, optimizer  # noqa: E402

LR, MIN_LR_RATIO, WARMUP = 6e-4, 0.1, 20
# Number of losses that are averaged at the end of a bf16 run, and number of steps of an fp32 run.
LAST, FP32_STEPS = 50, 20
FP32_TOLERANCE, BF16_TOLERANCE = 1e-4, 5e-3
# For divided models: learning rate after the warm-up, number of steps before the measured ones, and number of those.
DIVIDED_LR, DIVIDED_STEPS = 3e-5, types.SimpleNamespace(warmup=10, steps=14)
DIVIDED_FIRST, DIVIDED_TOLERANCE = 8, 5e-3


def learning_rate(step, steps):
    """The trainer's cosine schedule."""
    if step < WARMUP:
        return LR * (step + 1) / WARMUP
    decay = 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / max(1, steps - WARMUP)))
    return LR * (MIN_LR_RATIO + (1 - MIN_LR_RATIO) * decay)


def run_xlaunch(binary, model, batch, data, weights, precision, steps):
    lines, _ = runner.train(binary, model, data, 1, **{
        "train.steps": steps, "train.warmup": WARMUP, "train.lr": LR, "train.batch": batch, "checkpoint.every": 0,
        "train.schedule": "cosine", "train.min_lr_ratio": MIN_LR_RATIO, "data.shuffle": False,
        "checkpoint.init": str(weights), "engine.precision": precision, "engine.device": "cuda",
    })
    rates = [learning_rate(step, steps) for step in range(steps)]
    assert numpy.allclose([line["train/lr"] for line in lines], rates), "learning rates differ from those of PyTorch"
    return [line["train/loss"] for line in lines]


def run_pytorch(model, batch, data, precision, steps, attention):
    sizes = SIZES[model]
    net = GPT(sizes)
    net.load_state_dict(peer.initial(model))
    net.cuda()
    torch.backends.cuda.matmul.allow_tf32 = False
    if attention == "efficient":
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
    opt = optimizer(net, LR, fused=True)
    tokens = torch.from_numpy(numpy.fromfile(data, dtype=numpy.uint16).astype(numpy.int64))
    count, losses = batch * sizes["seq"], []
    for step in range(steps):
        window = tokens[step * count : (step + 1) * count + 1].cuda()
        x, y = window[:-1].view(batch, -1), window[1:].view(batch, -1)
        for group in opt.param_groups:
            group["lr"] = learning_rate(step, steps)
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            logits = net(x)
        value = loss(logits, y)
        del logits
        value.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        losses.append(value.detach())
    return [value.item() for value in losses]


def take_gpu(numbers):
    """Initializer of a worker process, before CUDA is initialized."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(numbers.get())


def report(model, precision, steps, xlaunch, pytorch, efficient):
    """Prints the curves; `efficient` is PyTorch's with the other kernel, if any. Returns whether they differ."""
    difference = [abs(a - b) / b for a, b in zip(xlaunch, pytorch)]
    mean = lambda losses: sum(losses[-LAST:]) / len(losses[-LAST:])
    apart = lambda losses: abs(mean(losses) - mean(pytorch)) / mean(pytorch)
    other = f" ({mean(efficient):.5f} with another attention kernel: {apart(efficient):.1e})" if efficient else ""
    print(f"model {model} {precision}: first loss {xlaunch[0]:.6f} and {pytorch[0]:.6f}, last {LAST} "
          f"{mean(xlaunch):.5f} and {mean(pytorch):.5f}{other}; largest difference over {FP32_STEPS} steps "
          f"{max(difference[:FP32_STEPS]):.1e}, of the last {LAST} of {steps} {apart(xlaunch):.1e}")
    for step in [*range(0, 20, 4), *range(20, steps, max(20, steps // 20)), steps - 1]:
        other = f"  other kernel {efficient[step]:.6f}" if efficient else ""
        print(f"  step {step + 1:3}  xlaunch {xlaunch[step]:.6f}  PyTorch {pytorch[step]:.6f}{other}  "
              f"{difference[step]:.1e}")
    sys.stdout.flush()
    if precision == "fp32":
        return max(difference[:FP32_STEPS]) > FP32_TOLERANCE
    return apart(xlaunch) > BF16_TOLERANCE


def compare_divided(binary, model, gpus, scratch):
    """Returns whether the losses of a divided model differ too much."""
    steps, batch = DIVIDED_STEPS.warmup + DIVIDED_STEPS.steps, runner.BATCHES[model]
    data = runner.tokens(scratch / "divided.bin", gpus * steps * batch * SIZES[model]["seq"] + 1)
    weights = scratch / f"{model}.safetensors"
    peer.save_initial(model, weights)
    lines, _ = runner.train(binary, model, data, gpus, **{
        "train.steps": steps, "train.warmup": peer.WARMUP, "train.lr": DIVIDED_LR, "train.schedule": "constant",
        "train.batch": batch, "checkpoint.every": 0, "data.shuffle": False, "checkpoint.init": str(weights),
        "engine.device": "cuda", "comm.shard": "parameters",
    })
    xlaunch = [line["train/loss"] for line in lines]
    speed = statistics.median(line["perf/tokens_per_second"] for line in lines[DIVIDED_STEPS.warmup :])
    found = compare.run_pytorch(DIVIDED_STEPS, model, gpus, data, weights, "bf16", "default", DIVIDED_LR)
    difference = [abs(a - b) / b for a, b in zip(xlaunch, found["losses"])]
    largest = max(difference[:DIVIDED_FIRST])
    print(f"model {model} divided among {gpus} GPUs, bf16: {speed / 1e3:.1f}K and "
          f"{found['tokens_per_second'] / 1e3:.1f}K tok/s, {speed / found['tokens_per_second']:.2f}; "
          f"largest difference over {DIVIDED_FIRST} steps {largest:.1e}")
    for step, (ours, theirs) in enumerate(zip(xlaunch, found["losses"])):
        print(f"  step {step + 1:3}  xlaunch {ours:.6f}  PyTorch {theirs:.6f}  {difference[step]:.1e}")
    sys.stdout.flush()
    return largest > DIVIDED_TOLERANCE


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=pathlib.Path, default=runner.ROOT / "target/release/xlaunch")
    parser.add_argument("--models", nargs="+", default=["A", "B"], choices=SIZES)
    parser.add_argument("--batch", type=int, help="sequences per step; default: those of compare.py")
    parser.add_argument("--steps", type=int, default=1000, help=f"of bf16 runs; fp32 runs have {FP32_STEPS}")
    options = parser.parse_args()
    arguments = " ".join(sys.argv[1:])
    print(f"{runner.hardware()}; torch {torch.__version__}; python3 tests/gpu/curves.py {arguments}")
    spawn = multiprocessing.get_context("spawn")
    gpus, numbers = torch.cuda.device_count(), spawn.Queue()
    for number in range(gpus):
        numbers.put(number)
    failed = False
    with tempfile.TemporaryDirectory() as scratch, concurrent.futures.ProcessPoolExecutor(
            gpus, spawn, take_gpu, (numbers,)) as pool:
        for model in runner.DIVIDED.intersection(options.models):
            failed |= compare_divided(options.binary, model, gpus, pathlib.Path(scratch))
        whole = [model for model in options.models if model not in runner.DIVIDED]
        # Every run reads the file once, from the beginning.
        batches = {model: options.batch or runner.BATCHES[model] for model in whole}
        count = options.steps * max((batches[model] * SIZES[model]["seq"] for model in whole), default=0) + 1
        data, runs = runner.tokens(pathlib.Path(scratch) / "tokens.bin", count), {}
        for model in sorted(whole, key=lambda model: -SIZES[model]["seq"]):
            weights = pathlib.Path(scratch) / f"{model}.safetensors"
            peer.save_initial(model, weights)
            batch, grouped = batches[model], SIZES[model]["kv_heads"] < SIZES[model]["heads"]
            for precision, steps in [("bf16", options.steps), ("fp32", FP32_STEPS)]:
                pytorch = lambda attention: pool.submit(run_pytorch, model, batch, data, precision, steps, attention)
                runs[model, precision] = [
                    pool.submit(run_xlaunch, options.binary, model, batch, data, weights, precision, steps),
                    pytorch("default"),
                    pytorch("efficient") if precision == "bf16" and not grouped else None,
                ]
        for (model, precision), futures in runs.items():
            xlaunch, pytorch, efficient = (future and future.result() for future in futures)
            failed |= report(model, precision, len(pytorch), xlaunch, pytorch, efficient)
    sys.exit(failed)


if __name__ == "__main__":
    main()
