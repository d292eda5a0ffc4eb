"""Ranks that all-reduce endlessly until one of them fails, to test the launcher.

    torchrun --nproc-per-node 2 tests/peers/fail.py --how exception|exit|memory|assert|nothing [--rank 1] [--times FILE]

Just before it fails, the rank prints `failing TIME PID`. With `assert` an index is out of range, which is detected by a
kernel on a GPU. With `nothing` the rank continues, to be killed from outside. After a restart no rank fails. For each
attempt, rank 0 appends `start TIME`, and `step TIME` for the first step, to a log.
"""

import argparse
import os
import time

STARTED = time.time()

import torch
import torch.distributed as dist


def log(options, event):
    if options.times and os.environ["RANK"] == "0":
        with open(options.times, "a") as file:
            file.write(f"{event} {STARTED if event == 'start' else time.time()}\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", choices=["exception", "exit", "memory", "assert", "nothing"], required=True)
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--times")
    options = parser.parse_args()
    log(options, "start")
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, local = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    x = torch.ones(1 << 20, device=device)
    for step in range(1_000_000):
        dist.all_reduce(x)
        x /= dist.get_world_size()
        if cuda:
            torch.cuda.synchronize()
        if step == 0:
            log(options, "step")
        if rank == options.rank and step == 50 and not restarted:
            print(f"failing {time.time()} {os.getpid()}", flush=True)
            if options.how == "exception":
                raise RuntimeError("the disk is on fire")
            if options.how == "exit":
                os._exit(0)
            if options.how == "memory":
                hold = [torch.empty(1 << 34, device=device) for _ in range(1000)]
                print(len(hold))
            if options.how == "assert":
                print(x[torch.tensor([x.numel()], device=device)])


if __name__ == "__main__":
    main()
