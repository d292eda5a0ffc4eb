"""From a failure to the first new step: a worker of a training job is killed, and the group starts again from its checkpoint.

    python3 tests/gpu/restart.py --binary target/release/xlaunch --gpus 4 [--model B] [--times 2] [--peer]

Seconds from the kill until the first step behind the checkpoint is reported, by xlaunch's metrics.jsonl; and what the new
attempt computed is what the first one had: the losses of the steps that were made twice. xlaunch waits a second before the
second restart in a row, which is in the figure. With `--peer`, PyTorch's side of `compare.py` does the same under torchrun,
without a checkpoint: it begins again from its initial weights.
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


def wait_for(what, look, process):
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline and process.poll() is None:
        if found := look():
            return found
        time.sleep(0.01)
    raise SystemExit(f"{what}: not within {LIMIT} s, exit code {process.poll()}")


def workers(launcher):
    """Process ids of its workers."""
    listed = subprocess.run(["pgrep", "-P", str(launcher)], capture_output=True, text=True).stdout.split()
    is_worker = lambda pid: b"\0worker\0" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    return [int(pid) for pid in listed if is_worker(pid)]


def behind(lines, number):
    """Index of the first step of attempt `number`: steps go back at each restart."""
    starts = [at for at in range(1, len(lines)) if lines[at]["_step"] <= lines[at - 1]["_step"]]
    return starts[number - 1] if len(starts) >= number else None


def peer(options, data, place):
    """Seconds from the kill of a worker under torchrun to its successors' first step."""
    import peer as theirs

    weights = place / "init.safetensors"
    theirs.save_initial(options.model, weights)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
    command += ["--nproc-per-node", str(options.gpus), str(runner.ROOT / "tests/gpu/peer.py"), "--announce", "--steps", "600"]
    command += ["--model", options.model, "--data", str(data), "--weights", str(weights)]
    began = time.time()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as launched:
        # `first step TIME RANK PID` of all ranks, and then of all again.
        said = (line.split()[2:] for line in launched.stdout if line.startswith("first step "))
        first = [next(said) for _ in range(options.gpus)]
        print(f"torchrun: first step {max(float(at) for at, _, _ in first) - began:.2f} s from the command")
        killed = time.time()
        os.kill(max((int(rank), int(pid)) for _, rank, pid in first)[1], signal.SIGKILL)
        again = [next(said) for _ in range(options.gpus)]
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
    with tempfile.TemporaryDirectory(prefix="xr-") as place:
        out = pathlib.Path(place) / "out"
        data = runner.tokens(pathlib.Path(place) / "tokens.bin", 2_000_000)
        settings = {"data.train": [str(data)], "data.val_fraction": 0.0, "train.eval_every": 0, "train.steps": 1_000_000}
        settings |= {"job.output": str(out), "checkpoint.every": EVERY, "launch.max_restarts": options.times}
        command = [str(options.binary.resolve()), "--nproc", str(options.gpus), str(runner.ROOT / runner.MODELS[options.model])]
        began = time.time()
        launched = subprocess.Popen(command + runner.overrides(settings), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            for number in range(1, options.times + 1):
                first = behind(steps(out), number - 1) if number > 1 else 0
                wait_for("steps", lambda: len(steps(out)) >= first + 2 * EVERY + EVERY // 2, launched)
                if number == 1:
                    print(f"first step {steps(out)[0]['_timestamp'] - began:.2f} s from the command")
                killed = time.time()
                os.kill(workers(launched.pid)[-1], signal.SIGKILL)
                at = wait_for("a new step", lambda: behind(steps(out), number), launched)
                lines = steps(out)
                took = lines[at]["_timestamp"] - killed
                made = {line["_step"]: line["train/loss"] for line in lines[:at]}
                wait_for("steps made again", lambda: steps(out)[-1]["_step"] > lines[at - 1]["_step"], launched)
                again = [line for line in steps(out)[at:] if line["_step"] in made]
                apart = max(abs(line["train/loss"] - made[line["_step"]]) for line in again)
                print(f"kill {number}: {took:.2f} s from step {lines[at - 1]['_step']} to step {lines[at]['_step']}; "
                      f"{len(again)} steps made again, losses at most {apart:.1e} apart", flush=True)
        finally:
            launched.terminate()
            print("\n".join(line for line in launched.communicate()[1].splitlines() if line.startswith("xlaunch:")))
        if options.peer:
            peer(options, data, pathlib.Path(place))


if __name__ == "__main__":
    main()
