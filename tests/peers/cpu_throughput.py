"""Compares training speed on CPUs with PyTorch: the model and batch of the README, on the same cores, in one run.

    cargo build --release && python3 tests/peers/cpu_throughput.py        # needs torch

Compares xlaunch with 1 process and with 2 ranks, and PyTorch eager and torch.compile with 1 process on all threads and
with 2 ranks over gloo (DDP, torchrun). All train 16 sequences of 128 tokens per step with AdamW and gradient
clipping, and read the loss. They run in turn, ROUNDS times; a figure is the median over rounds of the median step of a
run. Exit code 1 if PyTorch is faster anywhere.
"""

import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
SIZES = dict(arch="llama", layers=4, heads=4, kv_heads=4, dim=128, ffn=352, seq=128, vocab=256, tied=True)
BATCH, STEPS, WARMUP, ROUNDS = 16, 120, 30, 3


def run_xlaunch(binary, ranks):
    with tempfile.TemporaryDirectory() as out:
        settings = {"job.output": out, "train.steps": STEPS, "train.batch": BATCH // ranks, "train.eval_every": 0,
                    "train.sample": 0, "engine.device": "cpu"}
        command = [str(binary), "--nproc", str(ranks), str(ROOT / "deploy/train.toml")]
        command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        subprocess.run(command, check=True, capture_output=True)
        path = next(pathlib.Path(out).glob("*/latest/metrics.jsonl"))
        steps = [json.loads(line) for line in path.read_text().splitlines()]
        return statistics.median(step["perf/tokens_per_second"] for step in steps[WARMUP:])


def run_pytorch(mode, ranks):
    """Runs `train` in separate processes."""
    command = [sys.executable, __file__, "--train", mode]
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    if ranks > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = launcher + command[1:]
    env = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    return float(done.stdout.split()[-1])


def train(mode):
    """Runs one PyTorch rank. Rank 0 prints tokens per second of the job."""
    import torch
    from model import GPT, loss, optimizer

    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(1337)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model = GPT(SIZES)
    net = torch.compile(model) if mode == "compile" else model
    if world > 1:
        torch.distributed.init_process_group("gloo")
        net = torch.nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True, static_graph=True)
    opt = optimizer(model, 1e-3, fused=True)
    generator = torch.Generator().manual_seed(rank)
    data = torch.randint(0, SIZES["vocab"], (STEPS, BATCH // world, SIZES["seq"] + 1), generator=generator)
    seconds = []
    for batch in data:
        start = time.perf_counter()
        value = loss(net(batch[:, :-1]), batch[:, 1:])
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=world == 1)
        value.item()
        seconds.append(time.perf_counter() - start)
    if rank == 0:
        print(BATCH * SIZES["seq"] / statistics.median(seconds[WARMUP:]))
    if world > 1:
        torch.distributed.destroy_process_group()


def cpu():
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=pathlib.Path, default=ROOT / "target/release/xlaunch")
    parser.add_argument("--train", choices=["eager", "compile"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        return train(options.train)
    try:
        import torch
    except ImportError:
        print("not run: torch is not installed (pip install torch)")
        return
    runs = {}
    for ranks in (1, 2):
        runs[f"xlaunch, {ranks}"] = lambda ranks=ranks: run_xlaunch(options.binary, ranks)
        for mode in ("eager", "compile"):
            runs[f"PyTorch {mode}, {ranks}"] = lambda mode=mode, ranks=ranks: run_pytorch(mode, ranks)
    rates = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            rates[name].append(run())
    median = {name: statistics.median(values) for name, values in rates.items()}
    print(f"{cpu()}; torch {torch.__version__}; python3 tests/peers/cpu_throughput.py\n")
    print("| processes | xlaunch | PyTorch eager | torch.compile | ratio |\n|---|---|---|---|---|")
    slower = False
    for ranks in (1, 2):
        names = ("xlaunch", "PyTorch eager", "PyTorch compile")
        ours, eager, compiled = (median[f"{name}, {ranks}"] for name in names)
        ratios = ours / eager, ours / compiled
        slower |= min(ratios) < 1
        print(f"| {ranks} | {ours / 1e3:.1f}K tok/s | {eager / 1e3:.1f}K | {compiled / 1e3:.1f}K | "
              f"{ratios[0]:.2f}x, {ratios[1]:.2f}x |")
    sys.exit(slower)


if __name__ == "__main__":
    main()
