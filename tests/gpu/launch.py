"""PyTorch scripts under xlaunch and under torchrun: equal losses, and the handling of failures.

    python3 tests/gpu/launch.py --binary target/release/xlaunch --gpus 2 4

DDP, Accelerate and Lightning (if installed) must print the same losses under both. Then one rank raises an exception,
runs out of GPU memory, or is killed: measures seconds until the launcher has exited and until no process of the launch
is left, and prints what xlaunch reports. Without GPUs, everything except the memory failure runs on gloo.
"""

import argparse
import os
import pathlib
import signal
import subprocess
import sys
import time

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
PEERS = ROOT / "tests/peers"
SCRIPTS = [("torch", "ddp.py"), ("accelerate", "with_accelerate.py"), ("lightning", "with_lightning.py")]
# An environment variable that all processes of a launch inherit.
MARKER = "XLAUNCH_TEST_LAUNCH"
TIMEOUT = 120


def launchers(binary):
    return {
        "xlaunch": [str(binary)],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
    }


def start(launcher, gpus, script, *arguments):
    command = [*launcher, "--nproc-per-node", str(gpus), str(PEERS / script), *arguments]
    marker = f"{os.getpid()}-{time.time_ns()}"
    environment = os.environ | {MARKER: marker, "PYTHON_EXEC": sys.executable}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return marker, process


def losses(launcher, gpus, script):
    _, process = start(launcher, gpus, script)
    stdout, stderr = process.communicate(timeout=TIMEOUT)
    if process.returncode != 0:
        raise RuntimeError(f"{launcher[0]} {script}: exit {process.returncode}\n{stderr[-3000:]}")
    return [line for line in stdout.splitlines() if line.startswith("step ")]


def processes(marker):
    """Returns the process ids of a launch, found by its marker."""
    found, variable = [], f"{MARKER}={marker}".encode()
    for directory in pathlib.Path("/proc").iterdir():
        if directory.name.isdigit():
            try:
                if variable in (directory / "environ").read_bytes().split(b"\0"):
                    found.append(int(directory.name))
            except OSError:
                pass
    return found


def fail(launcher, gpus, failure):
    """Returns the seconds until the launcher has exited and until all processes are gone, the exit code and stderr."""
    marker, process = start(launcher, gpus, "fail.py", "--how", "nothing" if failure == "kill -9" else failure)
    line = next(line for line in process.stdout if line.startswith("failing "))
    _, began, pid = line.split()
    began = float(began)
    if failure == "kill -9":
        began = time.time()
        os.kill(int(pid), signal.SIGKILL)
    try:
        _, stderr = process.communicate(timeout=TIMEOUT)
        exited = time.time() - began
        while processes(marker) and time.time() - began < TIMEOUT:
            time.sleep(0.01)
        return exited, time.time() - began, process.returncode, stderr
    finally:
        for stray in processes(marker):
            os.kill(stray, signal.SIGKILL)


def compare_losses(both, gpus):
    """Returns whether the losses of a script differ between the launchers."""
    differ = False
    for module, script in SCRIPTS:
        if subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True).returncode != 0:
            print(f"not run: {script}, {gpus} workers: {module} is not installed")
            continue
        ours, theirs = (losses(launcher, gpus, script) for launcher in both.values())
        equal = ours == theirs and len(ours) > 0
        differ |= not equal
        result = "equal" if equal else "DIFFER"
        print(f"{script}, {gpus} workers: {len(ours)} losses {result}; last {ours[-1]}", flush=True)
    return differ


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=pathlib.Path, default=ROOT / "target/release/xlaunch")
    parser.add_argument("--gpus", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    cuda, both = torch.cuda.is_available(), launchers(options.binary.resolve())
    hardware = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if cuda else "CPU, gloo"
    arguments = " ".join(map(str, options.gpus))
    print(f"{hardware}; torch {torch.__version__}; python3 tests/gpu/launch.py --gpus {arguments}\n")
    differ = any([compare_losses(both, gpus) for gpus in options.gpus])
    print("\n| failure | workers | launcher | exited after | all gone after | exit code |\n|---|---|---|---|---|---|")
    reports = []
    for gpus in options.gpus:
        for failure in ["exception", *(["memory"] if cuda else []), "kill -9"]:
            for name, launcher in both.items():
                exited, gone, code, stderr = fail(launcher, gpus, failure)
                print(f"| {failure} | {gpus} | {name} | {exited:.2f} s | {gone:.2f} s | {code} |", flush=True)
                if name == "xlaunch":
                    reports.append(f"{failure}, {gpus} workers:\n{stderr[stderr.find('xlaunch: the job failed'):]}")
    print("\n" + "\n".join(reports))
    sys.exit(differ)


if __name__ == "__main__":
    main()
