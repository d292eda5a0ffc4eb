"""False alarms of hang detection: a healthy job whose disk pauses and whose host is suspended must raise none.

    python3 tests/peers/healthy.py --binary target/release/xlaunch [--minutes 30] [--ranks 4]

Trains on the CPU with evaluations and checkpoints, with default settings of hang detection. In turn, the file system of
the run is frozen for 20 s (as root: an ext4 image, mounted for the run, by `fsfreeze`), and all processes of the launch
are stopped for 40 s and continued, as when a laptop sleeps. Fails if any rank is reported or restarted.
"""

import argparse
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
ALARM = re.compile(r"made no progress|sent no heartbeat|restarting|has not opened|straggler|failed")
PAUSE, FREEZE, SUSPEND = 60, 20, 40


def tree(pid):
    """The process and its descendants, parents first."""
    children = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split()
    return [pid] + [found for child in children for found in tree(int(child))]


def signal_tree(pid, number):
    for member in tree(pid):
        try:
            os.kill(member, number)
        except ProcessLookupError:
            pass


def frozen(mount):
    subprocess.run(["fsfreeze", "--freeze", mount], check=True)
    time.sleep(FREEZE)
    subprocess.run(["fsfreeze", "--unfreeze", mount], check=True)


def suspended(pid):
    signal_tree(pid, signal.SIGSTOP)
    time.sleep(SUSPEND)
    signal_tree(pid, signal.SIGCONT)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=pathlib.Path, default=ROOT / "target/release/xlaunch")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="xl-") as scratch:
        image, mount = pathlib.Path(scratch) / "image", pathlib.Path(scratch) / "disk"
        mount.mkdir()
        subprocess.run(["truncate", "--size", "512M", image], check=True)
        subprocess.run(["mkfs.ext4", "-q", image], check=True)
        subprocess.run(["mount", "-o", "loop", image, mount], check=True)
        try:
            run(options, mount)
        finally:
            subprocess.run(["fsfreeze", "--unfreeze", mount], stderr=subprocess.DEVNULL)
            subprocess.run(["umount", mount], check=True)


def run(options, mount):
    settings = ["train.steps=10000000", "train.batch=2", "train.eval_every=100", "checkpoint.every_seconds=20"]
    settings += [f"job.output={mount}/runs", "launch.max_restarts=3", "data.val_fraction=0.1"]
    command = [str(options.binary.resolve()), "--nproc", str(options.ranks), "deploy/train.toml"]
    command += [word for setting in settings for word in ("--set", setting)]
    began, freezes, suspensions = time.monotonic(), 0, 0
    with open(mount.parent / "stderr", "w+") as log:
        job = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=log)
        while time.monotonic() - began < 60 * options.minutes and job.poll() is None:
            time.sleep(PAUSE)
            frozen(mount)
            freezes += 1
            time.sleep(PAUSE)
            suspended(job.pid)
            suspensions += 1
        job.send_signal(signal.SIGINT)
        code = job.wait(120)
        log.seek(0)
        text = log.read()
    alarms = [line for line in text.splitlines() if ALARM.search(line)]
    lines = next(mount.glob("runs/*/latest/metrics.jsonl")).read_text().splitlines()
    steps = max(json.loads(line)["_step"] for line in lines)
    minutes = (time.monotonic() - began) / 60
    print(f"{minutes:.0f} minutes, {options.ranks} ranks, {steps} steps, load {os.getloadavg()[2]:.0f} of "
          f"{os.cpu_count()} cores, {freezes} frozen disks, {suspensions} suspensions: {len(alarms)} alarms, "
          f"exit code {code}")
    print("\n".join(alarms))
    sys.exit(bool(alarms) or code != 143)


if __name__ == "__main__":
    main()
