"""A small training script with DistributedDataParallel. It gets its ranks from the environment that torchrun sets.

    torchrun --nproc-per-node 2 tests/peers/ddp.py [--fail RANK]      # or xlaunch instead of torchrun

Rank 0 prints every loss. With --fail, that rank raises an exception after five steps.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fail", type=int, default=-1)
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, local = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).to(device)
    model = DistributedDataParallel(model, device_ids=[local] if cuda else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(100 + rank)
    for step in range(20):
        x = torch.randn(16, 8, generator=generator).to(device)
        loss = (model(x) - x.sum(dim=1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step} loss {total.item() / dist.get_world_size():.9e}", flush=True)
        if rank == options.fail and step == 5:
            raise RuntimeError("the disk is on fire")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # Exit without the interpreter's cleanup: a thread of Gloo that releases its last tensor during cleanup aborts the
    # process (pytorch/pytorch#179291).
    os._exit(0)
