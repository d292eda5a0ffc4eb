"""Seconds and tokens to a validation loss: AdamW and Muon of xlaunch, and of PyTorch under torch.compile.

    python3 tests/gpu/time_to_loss.py --binary target/release/xlaunch [--model B] [--gpus 1] [--seconds 75]
        [--seeds 1] [--target LOSS] [--data TRAIN.bin VAL.bin] [--runs xlaunch,adamw xlaunch,muon ...]

All runs begin with the same weights and see the same sequences in the same order; a seed decides about both. After a
linear warm-up, learning rates are constant, so that a run can end at any time. Every `--every` steps the loss over the
same validation sequences is computed. Seconds are those of training steps: neither start, compilation and capture (the
first interval counts as much as the median one) nor evaluation. A run ends when they exceed `--seconds`, or when it has
reached `--target`. Without one, the target is the last loss of PyTorch's AdamW with the same seed.

PyTorch is that of `compare.py` (see `peer.py`), with `torch.optim.AdamW`, or `torch.optim.Muon` for the matrices of
blocks and AdamW for the rest. Its Muon takes queries, keys and values as one matrix; xlaunch divides them.

`xlaunch,speedrun` trains the preset `speedrun-124m` as `deploy/speedrun-124m.toml` does, in place of B: as many
parameters in blocks of a later design.

By default the data are the Python files of the host, as in `tokens.py`; of every 40 stretches of 8 sequences, one is
for validation. `--data` names token files instead, of 16 bits without a header. `--set` and `--cpu` are for trials
without a GPU. Four runs of model B take about eight minutes on a GPU.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy

import runner
from runner import BATCHES, SIZES

DEFAULT_RUNS = ["pytorch,adamw", "pytorch,muon", "xlaunch,adamw", "xlaunch,muon"]
RUNS = DEFAULT_RUNS + ["xlaunch,speedrun"]
SPEEDRUN, SPEEDRUN_LR = SIZES["speedrun-124m"], 3e-3
WARMUP, DECAY = 100, 0.1
# Stretches of 8 sequences of which one is for validation.
STRETCHES = 40
POLL_SECONDS, STOP_SECONDS = 0.5, 60


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=pathlib.Path, default=runner.ROOT / "target/release/xlaunch")
    parser.add_argument("--model", choices=SIZES, default="B")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--batch", type=int, help="sequences per GPU")
    parser.add_argument("--seconds", type=float, default=75, help="of training, per run")
    parser.add_argument("--steps", type=int, default=1_000_000, help="most steps of a run")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds")
    parser.add_argument("--target", type=float)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=DEFAULT_RUNS)
    parser.add_argument("--lr", type=float, default=1e-3, help="of AdamW")
    parser.add_argument("--muon-lr", type=float, default=0.02, help="of matrices with Muon")
    parser.add_argument("--every", type=int, default=50, help="steps between evaluations")
    parser.add_argument("--val-tokens", type=int, default=131_072)
    parser.add_argument("--tokens", type=int, default=60_000_000, help="most tokens to take from the host's files")
    parser.add_argument("--data", type=pathlib.Path, nargs=2, help="token files for training and validation")
    parser.add_argument("--xlaunch-set", nargs="*", default=[], help="more keys for xlaunch, as KEY=VALUE")
    parser.add_argument("--set", nargs="*", default=[], help="sizes of the model, as KEY=NUMBER")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.batch = options.batch or BATCHES[options.model]
    options.sizes = SIZES[options.model] | {key: int(value) for key, value in (pair.split("=") for pair in options.set)}
    return options


def split(options, folder):
    """Returns the tokens for training, in sequences, and those for validation."""
    seq, vocab = options.sizes["seq"], options.sizes["vocab"]
    needed = -(-options.val_tokens // seq) * seq
    if options.data:
        train, val = (numpy.fromfile(path, dtype=numpy.uint16) for path in options.data)
    else:
        path = folder / "all.bin"
        command = [sys.executable, str(runner.ROOT / "tests/gpu/tokens.py"), str(path), str(options.tokens),
                   str(min(vocab, 1 << 16))]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found = numpy.fromfile(path, dtype=numpy.uint16)
        stretches = found[: len(found) // (8 * seq) * 8 * seq].reshape(-1, 8 * seq)
        is_val = numpy.arange(len(stretches)) % STRETCHES == STRETCHES // 2
        train, val = stretches[~is_val].ravel(), stretches[is_val].ravel()
    if len(val) <= needed or max(train.max(), val.max()) >= vocab:
        sys.exit(f"{len(val)} tokens for validation, {needed + 1} needed; ids below {vocab} needed")
    return train[: len(train) // seq * seq].reshape(-1, seq), val[: needed + 1]


def prepare(options, folder, train, seed):
    """Writes the sequences in the order of this seed, and its initial weights."""
    order = numpy.random.default_rng(seed).permutation(len(train))
    train[order].tofile(folder / "train.bin")
    write_weights(options, options.sizes, folder / "init.safetensors", seed)
    if "xlaunch,speedrun" in options.runs:
        write_weights(options, SPEEDRUN, folder / "speedrun.safetensors", seed)


def write_weights(options, sizes, path, seed):
    import torch
    from safetensors.torch import save_file
    from model import GPT

    torch.manual_seed(seed)
    with torch.device("cpu" if options.cpu else "cuda"):
        state = GPT(sizes).state_dict()
    if sizes["tied"]:
        del state["head.weight"]
    save_file({name: tensor.cpu().contiguous() for name, tensor in state.items()}, path)
    del state
    if not options.cpu:
        torch.cuda.empty_cache()


def curve(intervals, losses, options):
    """Returns points (tokens, seconds, loss) from the seconds of intervals between evaluations."""
    usual = statistics.median(intervals[1:] or intervals)
    seconds = numpy.cumsum([min(intervals[0], usual)] + intervals[1:])
    tokens = options.every * options.batch * options.gpus * options.sizes["seq"]
    return [(tokens * (i + 1), float(seconds[i]), loss) for i, loss in enumerate(losses[: len(intervals)])]


def is_done(intervals, losses, options):
    if options.target and losses and losses[-1] <= options.target:
        return True
    steps = len(intervals) * options.every
    return bool(intervals) and (curve(intervals, losses, options)[-1][1] >= options.seconds or steps >= options.steps)


def read(out, options):
    """Returns intervals and losses in the metrics of an xlaunch run so far."""
    path = next(pathlib.Path(out).glob("*/latest/metrics.jsonl"), None)
    # The last line may be incomplete.
    lines = [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path else []
    took = [line["perf/step_seconds"] for line in lines if "train/loss" in line]
    losses = [line["val/loss"] for line in lines if "val/loss" in line]
    return [sum(took[i : i + options.every]) for i in range(0, len(losses) * options.every, options.every)], losses


def run_xlaunch(options, folder, kind):
    config, _ = runner.configuration(options.model)
    sizes, weights, lr, optimizer = options.sizes, "init.safetensors", options.lr, kind
    if kind == "speedrun":
        sizes, weights, lr, optimizer = SPEEDRUN, "speedrun.safetensors", SPEEDRUN_LR, "muon"
    # The schedule's decay of one step is never reached.
    steps = options.steps + WARMUP + 1
    settings = {f"model.{key}": value for key, value in sizes.items()} | {
        "data.train": [str(folder / "train.bin")], "data.val": [str(folder / "val.bin")], "data.shuffle": False,
        "data.tokenizer": "bin", "train.eval_tokens": options.val_tokens, "train.eval_every": options.every,
        "train.batch": options.batch, "train.steps": steps, "train.schedule": "wsd", "train.decay_steps": 1,
        "train.warmup": WARMUP, "train.lr": lr, "train.weight_decay": DECAY, "train.optimizer": optimizer,
        "train.sample": 0, "muon.lr": options.muon_lr, "checkpoint.every": 0,
        "checkpoint.init": str(folder / weights), "engine.device": "cpu" if options.cpu else "cuda",
    }
    with tempfile.TemporaryDirectory() as out, open(folder / "xlaunch.log", "w+") as log:
        command = [str(options.binary), "--nproc", str(options.gpus), str(config), "--set", f"job.output={out}"]
        command += runner.overrides(settings) + [word for key in options.xlaunch_set for word in ("--set", key)]
        job = subprocess.Popen(command, stdout=log, stderr=log)
        while job.poll() is None and not is_done(*read(out, options), options):
            time.sleep(POLL_SECONDS)
        intervals, losses = read(out, options)
        if job.poll() is None:
            job.terminate()
            try:
                job.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                job.kill()
                job.wait()
        elif job.returncode != 0:
            log.seek(0)
            raise RuntimeError(f"{' '.join(command)}: exit {job.returncode}\n{log.read()[-4000:]}")
        # Steps until the job was told to stop do not count.
        ends = [end for end in range(1, len(losses)) if is_done(intervals[:end], losses[:end], options)]
        end = ends[0] if ends else len(losses)
        return curve(intervals[:end], losses[:end], options)


def run_pytorch(options, folder, optimizer):
    command = [sys.executable]
    if options.gpus > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.gpus)]
    command += [str(pathlib.Path(__file__).resolve()), *sys.argv[1:], "--worker", f"{optimizer},{folder}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr[-4000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return curve(found["intervals"], found["losses"], options)


def optimizers(whole, options, muon):
    import torch

    matrices = {name for name, p in whole.named_parameters() if muon and ".blocks." in name and p.dim() == 2}
    others = [(name, p) for name, p in whole.named_parameters() if name not in matrices]
    groups = [{"params": [p for _, p in others if p.dim() >= 2], "weight_decay": DECAY},
              {"params": [p for _, p in others if p.dim() < 2], "weight_decay": 0.0}]
    found = [torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95), eps=1e-8, fused=True)]
    if muon:
        whole_matrices = [p for name, p in whole.named_parameters() if name in matrices]
        found.append(torch.optim.Muon(whole_matrices, lr=options.muon_lr, weight_decay=DECAY, momentum=0.95))
    return found


def worker(options):
    """Trains in PyTorch and prints intervals and losses."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from peer import WithLoss, load

    name, folder = options.worker.split(",", 1)
    folder = pathlib.Path(folder)
    rank, world, local = (int(os.environ.get(k, d)) for k, d in [("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)])
    device = torch.device("cpu") if options.cpu else torch.device("cuda", local)
    synchronize = (lambda: None) if options.cpu else torch.cuda.synchronize
    if not options.cpu:
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = True
    if world > 1:
        dist.init_process_group("gloo" if options.cpu else "nccl", device_id=None if options.cpu else device)
    with device:
        whole = WithLoss(options.sizes)
    load(whole.model, folder / "init.safetensors")
    compiled = whole if options.cpu else torch.compile(whole, fullgraph=True)
    net = compiled
    if world > 1:
        net = DistributedDataParallel(compiled, device_ids=None if options.cpu else [local],
                                      gradient_as_bucket_view=True, static_graph=True)
    opts = optimizers(whole, options, name == "muon")
    rates = [[group["lr"] for group in opt.param_groups] for opt in opts]
    rows, seq = options.batch, options.sizes["seq"]
    train, val = (torch.from_numpy(numpy.fromfile(folder / f"{part}.bin", dtype=numpy.uint16).astype(numpy.int64))
                  for part in ("train", "val"))
    autocast = lambda: torch.autocast(device.type, torch.bfloat16, enabled=not options.cpu)

    def pairs(tokens, first, count):
        """Returns inputs and targets of `count` rows."""
        window = tokens[first * seq : (first + count) * seq + 1]
        parts = (window[:-1].view(count, seq), window[1:].view(count, seq))
        return [part if options.cpu else part.pin_memory().to(device, non_blocking=True) for part in parts]

    total = (len(train) - 1) // seq
    usable = total // (rows * world) * rows * world

    def step(index):
        for opt, peaks in zip(opts, rates):
            for group, peak in zip(opt.param_groups, peaks):
                group["lr"] = peak * min(1.0, (index + 1) / WARMUP)
        x, y = pairs(train, (index * world + rank) * rows % usable, rows)
        with autocast():
            value = net(x, y)
        value.backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0, foreach=True)
        for opt in opts:
            opt.step()
        for opt in opts:
            opt.zero_grad(set_to_none=world == 1)

    # Batches of the size of a training batch, so that nothing is compiled again: without gradients it would be, too.
    batches = max(1, options.val_tokens // (rows * seq))

    def evaluate():
        total = torch.zeros((), device=device)
        for index in range(batches):
            x, y = pairs(val, index * rows, rows)
            with autocast():
                total += compiled(x, y).detach()
        return total.item() / batches

    intervals, losses, index = [], [], 0
    stop = torch.zeros(1, device=device)
    while not stop.item():
        synchronize()
        begin = time.perf_counter()
        for _ in range(options.every):
            step(index)
            index += 1
        synchronize()
        intervals.append(time.perf_counter() - begin)
        losses.append(evaluate())
        stop.fill_(float(is_done(intervals, losses, options)))
        if world > 1:
            dist.broadcast(stop, 0)
    if rank == 0:
        print(json.dumps({"intervals": intervals, "losses": losses}), flush=True)
    if world > 1:
        dist.destroy_process_group()


def crossing(points, target):
    """Returns tokens and seconds at which a curve reaches the target, between the evaluations around it."""
    before = None
    for point in points:
        if point[2] <= target:
            if before is None:
                return point[:2]
            share = (before[2] - target) / max(before[2] - point[2], 1e-12)
            return tuple(a + share * (b - a) for a, b in zip(before[:2], point[:2]))
        before = point
    return None


def report(curves, options):
    """Prints a row for each run. PyTorch's best is the lowest of its runs with the same seed."""
    print("| run | seed | steps | tokens | seconds | last val loss | target | tokens to it | seconds to it | "
          "PyTorch's best tokens / these | PyTorch's best seconds / these |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for seed in range(options.seeds):
        own = {run: points for (run, other), points in curves.items() if other == seed and points}
        reference = own.get("pytorch,adamw") or own.get("xlaunch,adamw")
        target = options.target or (reference[-1][2] if reference else None)
        found = {run: crossing(points, target) if target else None for run, points in own.items()}
        theirs = [cross for run, cross in found.items() if run.startswith("pytorch") and cross]
        for run, points in own.items():
            tokens, seconds, loss = points[-1]
            cells = [f"{tokens / 1e6:.1f}M", f"{seconds:.1f}", f"{loss:.4f}", f"{target:.4f}" if target else "-"]
            cross = found[run]
            cells += [f"{cross[0] / 1e6:.1f}M", f"{cross[1]:.1f}"] if cross else ["-", "-"]
            best = [min(other[i] for other in theirs) / cross[i] if cross and theirs else None for i in range(2)]
            cells += [f"{factor:.2f}x" if factor else "-" for factor in best]
            print(f"| {run.replace(',', ' ')} | {seed + 1} | {len(points) * options.every} | {' | '.join(cells)} |")
    print()
    for (run, seed), points in curves.items():
        print(f"{run.replace(',', ' ')}, seed {seed + 1}: " + ", ".join(f"{loss:.3f}" for _, _, loss in points))


def main():
    options = parse()
    sys.path.insert(0, str(runner.ROOT / "tests/peers"))
    if options.worker:
        worker(options)
        return
    curves = {}
    print(f"{'CPU' if options.cpu else runner.hardware()}; model {options.model}, {options.gpus} x {options.batch} x "
          f"{options.sizes['seq']} tokens a step, learning rates {options.lr:g} and {options.muon_lr:g} (Muon)")
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        train, val = split(options, folder)
        val.tofile(folder / "val.bin")
        print(f"{train.size} tokens for training, {len(val) - 1} for validation", flush=True)
        for seed in range(options.seeds):
            prepare(options, folder, train, seed + 1)
            for run in options.runs:
                trainer, kind = run.split(",")
                measure = run_xlaunch if trainer == "xlaunch" else run_pytorch
                try:
                    curves[run, seed] = measure(options, folder, kind)
                except RuntimeError as error:
                    print(f"{run}, seed {seed + 1}: {error}", flush=True)
    report(curves, options)
    if len(curves) < options.seeds * len(options.runs):
        sys.exit(1)


if __name__ == "__main__":
    main()
