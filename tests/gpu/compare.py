"""xlaunch and PyTorch compared: models on 1, 2, ... GPUs of this host, in one run.

    python3 tests/gpu/compare.py --binary target/release/xlaunch --gpus 1 2 4

Both train on the same tokens in the same order from the same weights with the same AdamW and clipping, in bf16 with
fp32 master weights: by default 20 steps of warm-up and 60 measured ones; figures are medians. PyTorch runs `peer.py`
in the mode of torch.compile that was the fastest for the model, reduce-overhead (CUDA graphs) for A and default for
others, or in all of `--modes`; the fastest counts. Models that do not fit into one GPU are divided, by
`comm.shard = "parameters"` and by FSDP2. Columns:

- sharded: xlaunch with a sharded optimizer;
- scaling: relative to 1 GPU of the same run;
- waiting: average share of a step's time that a rank spends waiting for the slowest one;
- communication: share of a step's time that is saved without the exchange of gradients and weights;
- clocks: xlaunch's during the measured steps: SM clock, power and throttle reasons;
- memory: peak of each side's allocator;
- first step: seconds from the start of the command.

Exit code 1 if PyTorch is faster anywhere.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import torch

import peer
import runner

MODES = {"A": ["reduce-overhead"]}
TOKENS = 12_000_000
COLUMNS = ["model", "precision", "GPUs", "xlaunch tok/s", "sharded", "PyTorch tok/s", "ratio", "scaling", "waiting",
           "communication", "memory", "first step", "clocks", "last loss"]


def run_xlaunch(options, model, gpus, data, weights, precision, shard):
    settings = {
        "data.train": [str(data)], "data.val_fraction": 0.0, "data.shuffle": False, "checkpoint.init": str(weights),
        "train.batch": runner.BATCHES[model], "train.lr": peer.LR,
        "train.schedule": "constant", "train.warmup": peer.WARMUP,
        "engine.precision": precision, "engine.device": "cuda", "comm.shard": shard,
    }
    config, sizes = runner.configuration(model)
    command = [str(options.binary), "bench", "train", str(config), "--json"]
    command += ["--nproc", str(gpus), "--warmup", str(options.warmup), "--steps", str(options.steps)]
    command += runner.overrides(settings | sizes | dict(pair.split("=", 1) for pair in options.xlaunch_set))
    return runner.bench(command)


def run_pytorch(options, model, gpus, data, weights, precision, mode, lr=peer.LR):
    """Returns the peer's measurements in this mode of torch.compile."""
    script = pathlib.Path(peer.__file__)
    launcher = [sys.executable]
    if gpus > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
    command = launcher + [str(script), "--model", model, "--data", str(data), "--weights", str(weights)]
    command += ["--precision", precision, "--mode", mode, "--lr", str(lr)]
    command += ["--warmup", str(options.warmup), "--steps", str(options.steps)]
    command += ["--fsdp"] if model in runner.DIVIDED else []
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr[-4000:]}")
    return json.loads(lines[-1])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=pathlib.Path, default=runner.ROOT / "target/release/xlaunch")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--models", nargs="+", default=["A", "B"], choices=runner.SIZES)
    parser.add_argument("--precisions", nargs="+", default=["bf16"])
    parser.add_argument("--modes", nargs="+", metavar="MODE", help="of torch.compile, such as default reduce-overhead")
    parser.add_argument("--warmup", type=int, default=20, help="steps before the measured ones")
    parser.add_argument("--steps", type=int, default=60, help="measured steps")
    parser.add_argument("--xlaunch-set", nargs="*", default=[], help="more keys for xlaunch, as KEY=VALUE")
    options = parser.parse_args()
    if options.warmup + options.steps < peer.WARMUP:
        # xlaunch shortens the warm-up of the learning rate in a run with few steps.
        parser.error(f"losses are comparable from {peer.WARMUP} steps on")
    arguments = " ".join(sys.argv[1:])
    print(f"{runner.hardware()}; torch {torch.__version__}; python3 tests/gpu/compare.py {arguments}\n")
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    slower = False
    with tempfile.TemporaryDirectory() as scratch:
        data = runner.tokens(pathlib.Path(scratch) / "tokens.bin", TOKENS, options.models)
        for model in options.models:
            weights = pathlib.Path(scratch) / f"{model}.safetensors"
            peer.save_initial(model, weights)
            for precision in options.precisions:
                # Tokens per second on one GPU, for each side.
                single = {}
                for gpus in options.gpus:
                    slower |= row(options, model, precision, gpus, data, weights, single)
    sys.exit(slower)


def row(options, model, precision, gpus, data, weights, single):
    """Measures and prints one row. Returns whether PyTorch is faster."""
    divided = model in runner.DIVIDED
    run = lambda shard: run_xlaunch(options, model, gpus, data, weights, precision, shard)
    x = run("parameters" if divided else "none")
    sharded = "-"
    if gpus > 1 and not divided:
        sharded = f"{run('optimizer')['tokens_per_second'] / 1e3:.0f}K"
    modes = options.modes or MODES.get(model, ["default"])
    runs = [(run_pytorch(options, model, gpus, data, weights, precision, mode), mode) for mode in modes]
    p, mode = max(runs, key=lambda pair: pair[0]["tokens_per_second"])
    scaling = []
    for name, side in [("xlaunch", x), ("PyTorch", p)]:
        if gpus == 1:
            single[name] = side["tokens_per_second"]
        scaling.append(f"{side['tokens_per_second'] / single[name]:.2f}" if name in single else "-")
    ratio = x["tokens_per_second"] / p["tokens_per_second"]
    gib = [x["pool_peak_bytes"] / 2**30, p["peak_bytes"] / 2**30]
    difference = abs(x["final_loss"] - p["losses"][-1]) / p["losses"][-1]
    cells = [
        model, precision, gpus, f"{x['tokens_per_second'] / 1e3:.0f}K", sharded,
        f"{p['tokens_per_second'] / 1e3:.0f}K, {mode}", f"{ratio:.2f}", ", ".join(scaling),
        runner.share(x, "waiting_ms"), runner.share(x, "communication_ms"), f"{gib[0]:.1f}, {gib[1]:.1f} GiB",
        f"{x['first_step_seconds']:.1f}, {p['first_step_seconds']:.1f} s", runner.clocks(x),
        f"{x['final_loss']:.4f}, {p['losses'][-1]:.4f} ({100 * difference:.2f} %)",
    ]
    print(f"| {' | '.join(map(str, cells))} |", flush=True)
    return ratio < 1


if __name__ == "__main__":
    main()
