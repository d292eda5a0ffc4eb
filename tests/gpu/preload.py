"""Starts and restarts with `--preload torch`, compared with plain starts and torchrun: seconds, and equal losses.

    python3 tests/gpu/preload.py --binary target/release/xlaunch --workers 4 [--times 5]

Workers train with `tests/peers/resume.py`. Measured in turn, medians of `--times` launches: from the command to the
first all-reduce of the last rank; from the SIGKILL of the last rank to the first step of the next attempt. Without GPUs
the workers use gloo.
"""

import argparse
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests/peers/resume.py"
STEPS, STOP_AT = 6, 3
TIMEOUT = 300


def launchers(binary):
    return {
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
        "xlaunch": [str(binary)],
        "xlaunch --preload torch": [str(binary), "--preload", "torch"],
    }


def measure(launcher, workers):
    """Returns the seconds from the command to the last first all-reduce, and from the kill to the next step; losses by
    step.

    None if the launch failed."""
    with tempfile.TemporaryDirectory(prefix="preload-") as state:
        command = [*launcher, "--nproc-per-node", str(workers), "--max-restarts", "1", str(SCRIPT)]
        command += ["--state", state, "--steps", str(STEPS), "--stop-at", str(STOP_AT)]
        environment = os.environ | {"PYTHON_EXEC": sys.executable, "OMP_NUM_THREADS": "1"}
        # Otherwise torchrun's attempts share a store, in which ranks on gloo find addresses of the previous attempt.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        began = time.time()
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        with process:
            reduced, losses, killed, resumed = {}, {}, None, None
            for line in process.stdout:
                # The line may have a prefix.
                words = line[line.find("reduced ") if "reduced " in line else line.find("step ") :].split()
                if words[:1] == ["reduced"] and killed is None:
                    reduced[int(words[2])] = (float(words[1]), int(words[3]))
                elif words[:1] == ["step"]:
                    losses[int(words[1])] = words[3]
                    resumed = resumed or (float(words[4]) if killed else None)
                if killed is None and len(reduced) == workers and STOP_AT - 1 in losses:
                    # The others wait in the same place.
                    time.sleep(1)
                    killed = time.time()
                    os.kill(reduced[workers - 1][1], signal.SIGKILL)
            stderr = process.stderr.read()
            code = process.wait(TIMEOUT)
        if code != 0 or resumed is None or len(losses) != STEPS:
            print(f"failed: {' '.join(command)}: exit {code}, losses {losses}\n{stderr[-3000:]}", flush=True)
            return None
        return max(at for at, _ in reduced.values()) - began, resumed - killed, losses


def hardware():
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, NCCL"
    model = next((line for line in open("/proc/cpuinfo") if line.startswith("model name")), ": unknown CPU\n")
    return f"{len(os.sched_getaffinity(0))} cores of {model.split(':')[1].strip()}, gloo"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=pathlib.Path, default=ROOT / "target/release/xlaunch")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    arguments = f"--workers {options.workers} --times {options.times}"
    print(f"{hardware()}; torch {torch.__version__}; python3 tests/gpu/preload.py {arguments}\n")
    results = {name: [] for name in launchers(options.binary)}
    for _ in range(options.times):
        # Launchers take turns, so that other load on the machine affects all of them.
        for name, launcher in launchers(options.binary.resolve()).items():
            if run := measure(launcher, options.workers):
                results[name].append(run)
                print(f"{name}: first all-reduce after {run[0]:.2f} s, next step after {run[1]:.2f} s", flush=True)
    if not all(results.values()):
        raise SystemExit("no result of " + ", ".join(name for name, runs in results.items() if not runs))
    print("\n| launcher | start to first all-reduce | kill to next step |\n|---|---|---|")
    medians = {name: [statistics.median(run[i] for run in runs) for i in range(2)] for name, runs in results.items()}
    for name, runs in results.items():
        cells = []
        for i, median in enumerate(medians[name]):
            times = [run[i] for run in runs]
            ratio = medians["torchrun"][i] / median
            cells.append(f"{median:.2f} s ({min(times):.2f} to {max(times):.2f}), {ratio:.1f}x")
        print(f"| {name} | {' | '.join(cells)} |")
    losses = [run[2] for runs in results.values() for run in runs]
    equal = all(other == losses[0] for other in losses)
    print(f"\nlosses of {len(losses)} runs, {STEPS} steps each: {'equal' if equal else 'DIFFER'}")
    faster = medians["torchrun"][1] / medians["xlaunch --preload torch"][1]
    print(f"kill to next step: {faster:.1f} times faster than torchrun with --preload torch (target: 3)")
    sys.exit(not equal or faster < 3)


if __name__ == "__main__":
    main()
