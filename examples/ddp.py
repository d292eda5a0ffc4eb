"""Train a small network with DistributedDataParallel, and survive failures and hangs.

    xlaunch --nproc-per-node 2 --max-restarts 3 examples/ddp.py [--steps 200] [--checkpoint DIR]

The launcher sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which init_process_group reads. When a rank
fails, the launcher ends the group and starts it again; the script continues from the checkpoint that rank 0 wrote last.

The lines marked "heartbeat" tell xlaunch that a rank makes progress. To see what it does about one that hangs:

    xlaunch --nproc-per-node 2 --max-restarts 1 --hang-timeout 10 examples/ddp.py --hang-at 120
"""

import argparse
import os
import pathlib
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

# Heartbeat: a file of this rank. Without xlaunch, steps are written nowhere.
HEARTBEAT = pathlib.Path(os.environ.get("XLAUNCH_HEARTBEAT", os.devnull))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint", type=pathlib.Path, default=pathlib.Path("runs/ddp"))
    parser.add_argument("--hang-at", type=int, help="let rank 1 hang at this step, until the first restart")
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
        x = load_batch(step, hang=rank == 1 and step == options.hang_at).to(device)
        # Heartbeat: before the first collective of the step, so that ranks which wait in it are a step ahead of the one
        # that hangs.
        HEARTBEAT.write_text(str(step))
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


def load_batch(step, hang):
    """Draws this rank's part of the batch, the same one after a restart."""
    while hang and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        time.sleep(1)
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    return torch.randn(64, 16, generator=generator)


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
