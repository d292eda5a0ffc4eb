"""What a launch of any command shows of GPUs and sets for its ranks.

    python3 tests/gpu/devices.py --binary target/release/xlaunch --gpus 2

Use and memory in `xlaunch status`, one visible GPU for each rank (`--virtual-local-rank`), cores beside a rank's GPU
(`--numa-binding`), and a restart of ranks that had nearly all memory of their GPUs. Checks stop it with a message.
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
    """What the ranks said of themselves, by rank, and what the launch said."""
    command = [str(options.binary), "--nproc-per-node", str(options.gpus), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr[-3000:]}")
    lines = [json.loads(line[line.index("{"):]) for line in done.stdout.splitlines() if "{" in line]
    return sorted(lines, key=lambda line: line["rank"]), done.stderr


def uses(options):
    """Each rank's use of its GPU, and what it has there, as `xlaunch status` shows it."""
    with tempfile.TemporaryDirectory(prefix="xd-") as place:
        environment = os.environ | {"XDG_RUNTIME_DIR": place}
        command = [str(options.binary), "--nproc-per-node", str(options.gpus), HOLD, "--share", "0.25", "--seconds", "8"]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as launched:
            for _ in range(options.gpus):
                total = json.loads(line[line.index("{"):])["held"] if "{" in (line := launched.stdout.readline()) else 0
            time.sleep(4)
            status = lambda *words: subprocess.run([str(options.binary), "status", *words], env=environment, capture_output=True, text=True).stdout
            ranks, shown = json.loads(status("--json"))["ranks"], status()
            launched.communicate()
    found = [(rank["rank"], rank["gpu_percent"], rank["gpu_memory_bytes"]) for rank in ranks]
    check("use and memory of each rank", all(use and use > 50 and total < memory < 2 * total for _, use, memory in found), found)
    print(shown)


def local_cpus(address):
    """Cores of the NUMA node beside a PCI device, as sysfs says; None where it names none."""
    path = pathlib.Path("/sys/bus/pci/devices") / address.removeprefix("0000")
    node = int((path / "numa_node").read_text())
    if node < 0:
        return None
    cpus = (pathlib.Path(f"/sys/devices/system/node/node{node}") / "cpulist").read_text().strip()
    spans = [span.split("-") for span in cpus.split(",")]
    return {cpu for span in spans for cpu in range(int(span[0]), int(span[-1]) + 1)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=pathlib.Path, default=runner.ROOT / "target/release/xlaunch")
    parser.add_argument("--gpus", type=int, default=2)
    options = parser.parse_args()
    options.binary = options.binary.resolve()
    os.environ["PYTHON_EXEC"] = sys.executable
    print(f"{runner.hardware()}; tests/gpu/devices.py --gpus {options.gpus}")
    uses(options)

    ranks, _ = launch(options, "--virtual-local-rank", HOLD)
    seen = [(rank["local_rank"], rank["count"]) for rank in ranks]
    check("--virtual-local-rank: each rank sees one GPU, as number 0", seen == [("0", 1)] * options.gpus, seen)
    own = [rank["uuid"] for rank in ranks]
    check("all of them different", len(set(own)) == options.gpus, own)
    ranks, _ = launch(options, HOLD)
    check("in the order of those that are seen without", [rank["uuid"] for rank in ranks] == own)

    for how in ["node", "exclusive"]:
        ranks, stderr = launch(options, "--numa-binding", how, HOLD)
        beside = [local_cpus(rank["pci"]) for rank in ranks]
        cores = [f"{len(rank['cpus'])} of {rank['cpus'][0]}-{rank['cpus'][-1]}" for rank in ranks]
        if None in beside:
            print(f"     --numa-binding {how}: the system does not say which cores are beside {ranks[0]['pci']}; ranks got {cores} {stderr.strip()}")
        elif how == "node":
            check("--numa-binding node: the cores of the GPU's node", all(set(r["cpus"]) == b for r, b in zip(ranks, beside)), cores)
        else:
            sets = [set(rank["cpus"]) for rank in ranks]
            check("--numa-binding exclusive: cores of the GPU's node", all(s <= b for s, b in zip(sets, beside)), cores)
            check("that no other rank has", sum(map(len, sets)) == len(set().union(*sets)))

    began = time.monotonic()
    ranks, _ = launch(options, "--max-restarts", "1", HOLD, "--share", "0.9", "--fail")
    check("ranks that had 90 % of the memory have it again behind a restart", len(ranks) == 2 * options.gpus, f"{time.monotonic() - began:.1f} s in all")


if __name__ == "__main__":
    main()
