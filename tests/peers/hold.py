"""A rank that prints its view of its GPU and its CPU affinity, allocates memory, and computes for some seconds.

    torchrun --nproc-per-node 2 tests/peers/hold.py [--share 0.5] [--seconds 5] [--fail]

With `--fail`, rank 0 of the first attempt exits with code 1 as soon as all ranks have allocated their memory.
"""

import argparse
import json
import os
import time

import torch
import torch.distributed as dist


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--share", type=float, default=0.1, help="fraction of GPU memory to allocate")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--fail", action="store_true")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    properties = torch.cuda.get_device_properties(device)
    total = properties.total_memory
    memory = torch.empty(int(total * options.share), dtype=torch.uint8, device=device)
    print(json.dumps({
        "rank": dist.get_rank(),
        "local_rank": os.environ["LOCAL_RANK"],
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "count": torch.cuda.device_count(),
        "uuid": f"GPU-{properties.uuid}",
        "pci": f"{properties.pci_domain_id:08x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0",
        "cpus": sorted(os.sched_getaffinity(0)),
        "allocated": memory.numel(),
    }), flush=True)
    dist.barrier()
    if options.fail and dist.get_rank() == 0 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(1)
    end, x = time.monotonic() + options.seconds, torch.ones(4096, 4096, device=device)
    while time.monotonic() < end:
        x = (x @ x).clamp_(-1, 1)
        torch.cuda.synchronize()
    dist.barrier()


if __name__ == "__main__":
    main()
