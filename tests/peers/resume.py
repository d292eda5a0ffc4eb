"""DistributedDataParallel with a checkpoint after every step, to measure starts and restarts.

    torchrun --nproc-per-node 2 --max-restarts 1 tests/peers/resume.py --state DIR [--steps 6] [--stop-at|--kill-at 3]

Every rank prints `reduced TIME RANK PID` after its first all-reduce, and rank 0 `step N loss LOSS TIME` after every
step. At a given step of the first attempt, all ranks wait to be killed (--stop-at), or rank 1 kills itself (--kill-at).
An attempt resumes after the newest checkpoint in DIR.
"""

import argparse
import os
import pathlib
import signal
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--state", type=pathlib.Path, required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--stop-at", type=int, default=-1)
    parser.add_argument("--kill-at", type=int, default=-1)
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()
    ones = torch.ones(1, device=device)
    dist.all_reduce(ones)
    assert ones.item() == dist.get_world_size()
    print(f"reduced {time.time()} {rank} {os.getpid()}\n", end="", flush=True)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    checkpoint = options.state / "state.pt"
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["steps"]
    model = DistributedDataParallel(model, device_ids=[local] if cuda else None)
    for step in range(first, options.steps):
        if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
            if step == options.stop_at:
                time.sleep(1000)
            if step == options.kill_at:
                # Rank 0 has saved the previous step.
                dist.barrier()
                if rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(16, 8, generator=generator).to(device)
        loss = (model(x) - x.sum(dim=1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "steps": step + 1}
            torch.save(state, options.state / "new.pt")
            (options.state / "new.pt").rename(checkpoint)
            print(f"step {step} loss {total.item() / dist.get_world_size():.9e} {time.time()}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # Exit without the interpreter's cleanup: see ddp.py.
    os._exit(0)
