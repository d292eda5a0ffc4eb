"""GPUs of launched commands: their status, and what is set for each rank.

    python3 tests/gpu/devices.py --binary target/release/xlaunch --gpus 2

Checks utilisation and memory in `xlaunch status`, one visible GPU per rank (`--virtual-local-rank`), CPU affinity near
a rank's GPU (`--numa-binding`), and a restart of ranks that had allocated nearly all GPU memory. The first failed check
ends the script.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import runner
from runner import check

HOLD = str(runner.ROOT / "tests/peers/hold.py")
LIMIT = 120


def launch(options, *words):
    """Runs `hold.py` under xlaunch. Returns each rank's description of itself, by rank, and stderr."""
    command = [str(options.binary), "--nproc-per-node", str(options.gpus), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr[-3000:]}")
    lines = [json.loads(line[line.index("{"):]) for line in done.stdout.splitlines() if "{" in line]
    return sorted(lines, key=lambda line: line["rank"]), done.stderr


def check_status(options):
    """Utilisation and memory of each rank's GPU in `xlaunch status`."""
    with tempfile.TemporaryDirectory(prefix="xd-") as scratch:
        environment = os.environ | {"XDG_RUNTIME_DIR": scratch}
        command = [str(options.binary), "--nproc-per-node", str(options.gpus)]
        command += [HOLD, "--share", "0.25", "--seconds", "8"]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as launched:
            for _ in range(options.gpus):
                line = launched.stdout.readline()
                allocated = json.loads(line[line.index("{"):])["allocated"] if "{" in line else 0
            time.sleep(4)

            def status(*words):
                command = [str(options.binary), "status", *words]
                return subprocess.run(command, env=environment, capture_output=True, text=True).stdout

            ranks, table = json.loads(status("--json"))["ranks"], status()
            launched.communicate()
    found = [(rank["rank"], rank["gpu_percent"], rank["gpu_memory_bytes"]) for rank in ranks]
    plausible = lambda percent, memory: percent and percent > 50 and allocated < memory < 2 * allocated
    check("utilisation and memory of each rank", all(plausible(*rank[1:]) for rank in found), found)
    print(table)


def local_cpus(address):
    """Returns the CPUs of a PCI device's NUMA node, from sysfs; None if it names no node."""
    path = pathlib.Path("/sys/bus/pci/devices") / address.removeprefix("0000")
    node = int((path / "numa_node").read_text())
    if node < 0:
        return None
    cpus = (pathlib.Path(f"/sys/devices/system/node/node{node}") / "cpulist").read_text().strip()
    spans = [span.split("-") for span in cpus.split(",")]
    return {cpu for span in spans for cpu in range(int(span[0]), int(span[-1]) + 1)}


def check_binding(binding, ranks, stderr):
    local = [local_cpus(rank["pci"]) for rank in ranks]
    cpus = [set(rank["cpus"]) for rank in ranks]
    found = [f"{len(own)} of {min(own)}-{max(own)}" for own in cpus]
    if None in local:
        print(f"     --numa-binding {binding}: sysfs has no NUMA node for {ranks[0]['pci']}; ranks got {found} "
              f"{stderr.strip()}")
    elif binding == "node":
        check("--numa-binding node: all CPUs of the GPU's node", cpus == local, found)
    else:
        is_local = all(own <= node for own, node in zip(cpus, local))
        check("--numa-binding exclusive: CPUs of the GPU's node", is_local, found)
        check("that no other rank has", sum(map(len, cpus)) == len(set().union(*cpus)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=pathlib.Path, default=runner.ROOT / "target/release/xlaunch")
    parser.add_argument("--gpus", type=int, default=2)
    options = parser.parse_args()
    options.binary = options.binary.resolve()
    os.environ["PYTHON_EXEC"] = sys.executable
    print(f"{runner.hardware()}; tests/gpu/devices.py --gpus {options.gpus}")
    check_status(options)

    ranks, _ = launch(options, "--virtual-local-rank", HOLD)
    seen = [(rank["local_rank"], rank["count"]) for rank in ranks]
    check("--virtual-local-rank: each rank sees one GPU, as number 0", seen == [("0", 1)] * options.gpus, seen)
    own = [rank["uuid"] for rank in ranks]
    check("all GPUs are distinct", len(set(own)) == options.gpus, own)
    ranks, _ = launch(options, HOLD)
    check("in the same order as without the option", [rank["uuid"] for rank in ranks] == own)

    for binding in ["node", "exclusive"]:
        ranks, stderr = launch(options, "--numa-binding", binding, HOLD)
        check_binding(binding, ranks, stderr)

    began = time.monotonic()
    ranks, _ = launch(options, "--max-restarts", "1", HOLD, "--share", "0.9", "--fail")
    check("ranks that had allocated 90 % of GPU memory can do so again after a restart",
          len(ranks) == 2 * options.gpus, f"{time.monotonic() - began:.1f} s in total")


if __name__ == "__main__":
    main()
