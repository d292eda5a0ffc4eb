"""Recovery time: a worker of a training job is killed, and the group restarts from its checkpoint.

    python3 tests/gpu/restart.py --binary target/release/xlaunch --gpus 4 [--model B] [--times 2] [--peer]

Measures seconds from the kill until metrics.jsonl has the first step after the checkpoint, and compares the losses of
steps that were made twice. The figure for the second restart in a row includes xlaunch's retry delay of one second.
With `--peer`, `peer.py` does the same under torchrun, but without a checkpoint: it starts from its initial weights.
"""

import argparse
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import runner
from runner import steps

LIMIT = 180
EVERY = 20


def wait_for(what, poll, process):
    """The result of `poll`, once that is true. Fails if the process exits first."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline and process.poll() is None:
        if found := poll():
            return found
        time.sleep(0.01)
    raise SystemExit(f"{what}: not within {LIMIT} s, exit code {process.poll()}")


def workers(launcher):
    """Process ids of a launcher's workers."""
    listed = subprocess.run(["pgrep", "-P", str(launcher)], capture_output=True, text=True).stdout.split()
    is_worker = lambda pid: b"\0worker\0" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    return [int(pid) for pid in listed if is_worker(pid)]


def first_step_after_restart(lines, number):
    """Index of the first step after restart `number`, counted from 1; None if there is none yet."""
    # Step numbers go back at each restart.
    starts = [at for at in range(1, len(lines)) if lines[at]["_step"] <= lines[at - 1]["_step"]]
    return starts[number - 1] if len(starts) >= number else None


def restart_torchrun(options, data, scratch):
    """Seconds from the kill of a worker under torchrun to the first step of the next attempt."""
    import peer

    weights = scratch / "init.safetensors"
    peer.save_initial(options.model, weights)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
    command += ["--nproc-per-node", str(options.gpus), peer.__file__, "--announce", "--steps", "600"]
    command += ["--model", options.model, "--data", str(data), "--weights", str(weights)]
    began = time.time()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as launched:
        # One line `first step TIME RANK PID` per rank and attempt.
        announced = (line.split()[2:] for line in launched.stdout if line.startswith("first step "))
        first = [next(announced) for _ in range(options.gpus)]
        print(f"torchrun: first step {max(float(at) for at, _, _ in first) - began:.2f} s from the command")
        killed = time.time()
        os.kill(max((int(rank), int(pid)) for _, rank, pid in first)[1], signal.SIGKILL)
        again = [next(announced) for _ in range(options.gpus)]
        print(f"torchrun: {max(float(at) for at, _, _ in again) - killed:.2f} s from the kill to the next first step")
        launched.terminate()
        launched.communicate()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=pathlib.Path, default=runner.ROOT / "target/release/xlaunch")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--model", choices=runner.MODELS, default="B")
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--peer", action="store_true")
    options = parser.parse_args()
    print(f"{runner.hardware()}; tests/gpu/restart.py --gpus {options.gpus} --model {options.model}")
    with tempfile.TemporaryDirectory(prefix="xr-") as scratch:
        out = pathlib.Path(scratch) / "out"
        data = runner.tokens(pathlib.Path(scratch) / "tokens.bin", 2_000_000)
        settings = {"data.train": [str(data)], "data.val_fraction": 0.0, "train.eval_every": 0}
        settings |= {"train.steps": 1_000_000, "checkpoint.every": EVERY, "launch.max_restarts": options.times}
        settings |= {"job.output": str(out)}
        config = runner.ROOT / runner.MODELS[options.model]
        command = [str(options.binary.resolve()), "--nproc", str(options.gpus), str(config)]
        command += runner.overrides(settings)
        began = time.time()
        launched = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            for number in range(1, options.times + 1):
                first = first_step_after_restart(steps(out), number - 1) if number > 1 else 0
                wait_for("steps", lambda: len(steps(out)) >= first + 2 * EVERY + EVERY // 2, launched)
                if number == 1:
                    print(f"first step {steps(out)[0]['_timestamp'] - began:.2f} s from the command")
                killed = time.time()
                os.kill(workers(launched.pid)[-1], signal.SIGKILL)
                at = wait_for("a new step", lambda: first_step_after_restart(steps(out), number), launched)
                lines = steps(out)
                took = lines[at]["_timestamp"] - killed
                before = {line["_step"]: line["train/loss"] for line in lines[:at]}
                wait_for("steps made again", lambda: steps(out)[-1]["_step"] > lines[at - 1]["_step"], launched)
                again = [line for line in steps(out)[at:] if line["_step"] in before]
                apart = max(abs(line["train/loss"] - before[line["_step"]]) for line in again)
                print(f"kill {number}: {took:.2f} s from step {lines[at - 1]['_step']} to step {lines[at]['_step']}; "
                      f"{len(again)} steps made again, losses at most {apart:.1e} apart", flush=True)
        finally:
            launched.terminate()
            print("\n".join(line for line in launched.communicate()[1].splitlines() if line.startswith("xlaunch:")))
        if options.peer:
            restart_torchrun(options, data, pathlib.Path(scratch))


if __name__ == "__main__":
    main()
