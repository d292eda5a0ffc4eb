"""Recovery time: a worker of a training job is killed, and the group restarts from its checkpoint.

    python3 tests/gpu/restart.py --binary target/release/xlaunch --gpus 4 [--model B] [--times 2] [--peer]

Measures seconds from the kill until metrics.jsonl has the first step after the checkpoint, and compares the losses of
steps that were repeated. The figure for the second consecutive restart includes xlaunch's retry delay of one second.
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
# Time in seconds for reports in flight; no restart is that fast.
IN_FLIGHT = 0.2


def wait_for(what, poll, process):
    """Returns the result of `poll` once it is true. Fails if the process exits first."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline and process.poll() is None:
        if found := poll():
            return found
        time.sleep(0.01)
    raise SystemExit(f"{what}: not within {LIMIT} s, exit code {process.poll()}")


def workers(launcher):
    """Returns the process ids of a launcher's workers."""
    listed = subprocess.run(["pgrep", "-P", str(launcher)], capture_output=True, text=True).stdout.split()
    is_worker = lambda pid: b"\0worker\0" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    return [int(pid) for pid in listed if is_worker(pid)]


def first_step_since(lines, at):
    """Returns the index of the first step reported since this time; None if there is none yet."""
    return next((index for index, line in enumerate(lines) if line["_timestamp"] >= at), None)


def restart_torchrun(options, data, scratch):
    """Returns the seconds from the kill of a worker under torchrun to the first step of the next attempt."""
    import peer

    weights = scratch / "init.safetensors"
    peer.save_initial(options.model, weights)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
    command += ["--nproc-per-node", str(options.gpus), peer.__file__, "--announce", "--steps", "600"]
    command += ["--model", options.model, "--data", str(data), "--weights", str(weights)]
    began = time.time()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as launched:
        # There is one line `first step TIME RANK PID` per rank and attempt.
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
            first = 0
            for number in range(1, options.times + 1):
                wait_for("steps", lambda: len(steps(out)) >= first + 2 * EVERY + EVERY // 2, launched)
                if number == 1:
                    print(f"first step {steps(out)[0]['_timestamp'] - began:.2f} s from the command")
                before, killed = steps(out), time.time()
                os.kill(workers(launched.pid)[-1], signal.SIGKILL)
                # Reports of the killed attempt may still be in flight. Steps that are repeated replace the earlier
                # ones.
                since = killed + IN_FLIGHT
                first = wait_for("a new step", lambda: first_step_since(steps(out), since), launched)
                line = steps(out)[first]
                wait_for("steps made again", lambda: steps(out)[-1]["_step"] > before[-1]["_step"], launched)
                losses = {line["_step"]: line["train/loss"] for line in before}
                again = [line for line in steps(out)[first:] if line["_step"] in losses]
                apart = max((abs(line["train/loss"] - losses[line["_step"]]) for line in again), default=0.0)
                print(f"kill {number}: {line['_timestamp'] - killed:.2f} s from step {before[-1]['_step']} to step "
                      f"{line['_step']}; {len(again)} steps made again, losses at most {apart:.1e} apart", flush=True)
        finally:
            launched.terminate()
            print("\n".join(line for line in launched.communicate()[1].splitlines() if line.startswith("xlaunch:")))
        if options.peer:
            restart_torchrun(options, data, pathlib.Path(scratch))


if __name__ == "__main__":
    main()
