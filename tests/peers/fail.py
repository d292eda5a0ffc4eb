"""Ranks that all-reduce endlessly until one of them fails, to test what the launcher does.

    torchrun --nproc-per-node 2 tests/peers/fail.py --how exception|memory|nothing [--rank 1]

Just before, the failing rank prints `failing TIME PID`. With `nothing` it goes on, to be killed from outside.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", choices=["exception", "memory", "nothing"], required=True)
    parser.add_argument("--rank", type=int, default=1)
    options = parser.parse_args()
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
        if rank == options.rank and step == 50:
            print(f"failing {time.time()} {os.getpid()}", flush=True)
            if options.how == "exception":
                raise RuntimeError("the disk is on fire")
            if options.how == "memory":
                hold = [torch.empty(1 << 34, device=device) for _ in range(1000)]
                print(len(hold))


if __name__ == "__main__":
    main()
