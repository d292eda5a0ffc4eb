"""Scripts of PyTorch's users under xlaunch and under torchrun: the same losses, and what a failure comes to.

    python3 tests/gpu/launch.py --binary target/release/xlaunch --gpus 2 4

DDP, Accelerate and Lightning (where they are installed) must print the same losses under both. Then one rank raises an
exception, runs out of GPU memory, or is killed: seconds from there until the launcher has ended and no process of the launch is
left, and what xlaunch says of it. Without GPUs the same runs on gloo, but for memory.
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
MARK = "XLAUNCH_TEST_LAUNCH"
LIMIT = 120


def launchers(binary):
    return {
        "xlaunch": [str(binary)],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
    }


def start(launcher, gpus, script, *arguments):
    command = [*launcher, "--nproc-per-node", str(gpus), str(PEERS / script), *arguments]
    mark = f"{os.getpid()}-{time.time_ns()}"
    environment = os.environ | {MARK: mark, "PYTHON_EXEC": sys.executable}
    return mark, subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def losses(launcher, gpus, script):
    _, process = start(launcher, gpus, script)
    stdout, stderr = process.communicate(timeout=LIMIT)
    if process.returncode != 0:
        raise RuntimeError(f"{launcher[0]} {script}: exit {process.returncode}\n{stderr[-3000:]}")
    return [line for line in stdout.splitlines() if line.startswith("step ")]


def left(mark):
    """Processes with this mark in their environment."""
    found, wanted = [], f"{MARK}={mark}".encode()
    for directory in pathlib.Path("/proc").iterdir():
        if directory.name.isdigit():
            try:
                if wanted in (directory / "environ").read_bytes().split(b"\0"):
                    found.append(int(directory.name))
            except OSError:
                pass
    return found


def failure(launcher, gpus, how):
    """Seconds until the launcher has ended, and until all is gone; exit code; what was said."""
    mark, process = start(launcher, gpus, "fail.py", "--how", "nothing" if how == "kill -9" else how)
    line = next(line for line in process.stdout if line.startswith("failing "))
    _, began, pid = line.split()
    began = float(began)
    if how == "kill -9":
        began = time.time()
        os.kill(int(pid), signal.SIGKILL)
    try:
        _, stderr = process.communicate(timeout=LIMIT)
        ended = time.time() - began
        while left(mark) and time.time() - began < LIMIT:
            time.sleep(0.01)
        return ended, time.time() - began, process.returncode, stderr
    finally:
        for stray in left(mark):
            os.kill(stray, signal.SIGKILL)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=pathlib.Path, default=ROOT / "target/release/xlaunch")
    parser.add_argument("--gpus", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    cuda, both = torch.cuda.is_available(), launchers(options.binary.resolve())
    where = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if cuda else "CPU, gloo"
    print(f"{where}; torch {torch.__version__}; python3 tests/gpu/launch.py --gpus {' '.join(map(str, options.gpus))}\n")
    failed = False
    for gpus in options.gpus:
        for module, script in SCRIPTS:
            if subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True).returncode != 0:
                print(f"{script}, {gpus} workers: skipped, {module} is not installed")
                continue
            ours, theirs = (losses(launcher, gpus, script) for launcher in both.values())
            equal = ours == theirs and len(ours) > 0
            failed |= not equal
            print(f"{script}, {gpus} workers: {len(ours)} losses {'equal' if equal else 'DIFFER'}; last {ours[-1]}", flush=True)
    print("\n| failure | workers | launcher | ended after | all gone after | exit code |\n|---|---|---|---|---|---|")
    said = []
    for gpus in options.gpus:
        for how in ["exception", *(["memory"] if cuda else []), "kill -9"]:
            for name, launcher in both.items():
                ended, gone, code, stderr = failure(launcher, gpus, how)
                print(f"| {how} | {gpus} | {name} | {ended:.2f} s | {gone:.2f} s | {code} |", flush=True)
                if name == "xlaunch":
                    said.append(f"{how}, {gpus} workers:\n{stderr[stderr.find('xlaunch: the job failed'):]}")
    print("\n" + "\n".join(said))
    sys.exit(failed)


if __name__ == "__main__":
    main()
