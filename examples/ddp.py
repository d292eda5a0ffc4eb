"""Train a small network with DistributedDataParallel, and survive restarts.

    xlaunch --nproc-per-node 2 --max-restarts 3 examples/ddp.py [--steps 200] [--checkpoint DIR]

The launcher sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which init_process_group reads. When a rank
fails, the launcher ends the group and starts it again; the script continues from the checkpoint that rank 0 wrote last.
"""

import argparse
import os
import pathlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint", type=pathlib.Path, default=pathlib.Path("runs/ddp"))
    options = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")

    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)).to(device)
    model = DistributedDataParallel(network, device_ids=[local_rank] if cuda else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    path, first_step = options.checkpoint / "checkpoint.pt", 0
    if path.exists():
        state = torch.load(path, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_step = state["step"]
        if rank == 0:
            done = f"; all {options.steps} steps are done" if first_step >= options.steps else ""
            print(f"resuming at step {first_step} from {path}{done}", flush=True)

    for step in range(first_step, options.steps):
        # Each rank draws its own part of the batch, the same one after a restart.
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + rank)
        x = torch.randn(64, 16, generator=generator).to(device)
        loss = (model(x) - x.square().sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        mean = loss.detach().clone()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        if rank == 0 and (step + 1) % 50 == 0:
            print(f"step {step + 1}  loss {mean.item():.4f}", flush=True)
            save(path, model, optimizer, step + 1)
    dist.destroy_process_group()


def save(path, model, optimizer, step):
    """Writes beside the old file and renames, so that a crash leaves a whole checkpoint."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, new)
    new.rename(path)


if __name__ == "__main__":
    main()
    # Without the interpreter's cleanup: a thread of Gloo that releases its last tensor during it aborts the process
    # (pytorch/pytorch#179291).
    os._exit(0)
