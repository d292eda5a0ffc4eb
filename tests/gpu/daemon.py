"""A node's daemon with real GPUs: what it shows of them, who gets them, and what its callers cost a job that trains.

    python3 tests/gpu/daemon.py --binary target/release/xlaunch --load target/release/daemon_load [--gpus 1] [--model A]

Checks stop it with a message; figures are printed. `daemon_load` is built by `cargo build --release -p xlaunch-tests`.
"""

import argparse
import contextlib
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

import runner
from runner import check

ADDRESS = "127.0.0.1:9471"
LIMIT = 120
RATE, FOLLOWERS, SECONDS = 10_000, 100, 12
# Holds a context and some memory until its stdin ends.
STRANGER = "import torch, sys; x = torch.ones(1 << 28, device='cuda:0'); print('holds', flush=True); sys.stdin.read()"
# What a worker of a job sees.
WORKER = """
import json, os, torch
gpus = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
print(json.dumps({"visible": os.environ["CUDA_VISIBLE_DEVICES"], "rank": os.environ["LOCAL_RANK"], "gpus": gpus}), flush=True)
"""


def wait_for(what, look, limit=LIMIT):
    """What `look` returns, once that is true."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.02)
    raise SystemExit(f"{what}: not within {limit} s")


class Node:
    """A daemon in a directory of its own."""

    def __init__(self, binary, place):
        self.binary, self.place = str(binary), pathlib.Path(place)
        self.place.chmod(0o755)
        (self.place / "daemon.toml").write_text(
            f'[jobs]\nallow_root = true\nallow_commands = true\n[web]\nlisten = "{ADDRESS}"\n'
        )
        self.environment = os.environ | {"XLAUNCH_SOCKET": str(self.socket), "XDG_RUNTIME_DIR": str(place)}

    @property
    def socket(self):
        return self.place / "xlaunch.sock"

    def start(self):
        command = [self.binary, "daemon", "--foreground", "--config", str(self.place / "daemon.toml")]
        command += ["--state-dir", str(self.place / "state"), "--socket", str(self.socket)]
        with open(self.place / "daemon.log", "a") as log:
            self.daemon = subprocess.Popen(command, stdout=log, stderr=log, cwd="/")
        wait_for("the daemon", lambda: self.run("node", check=False))

    def run(self, *words, check=True):
        done = subprocess.run([self.binary, *words], capture_output=True, text=True, cwd=self.place, env=self.environment)
        if check and done.returncode != 0:
            raise SystemExit(f"xlaunch {' '.join(words)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout if done.returncode == 0 else ""

    def json(self, *words):
        return json.loads(self.run(*words, "--json"))

    def submit(self, *words):
        return int(self.run("submit", *words).split()[1])

    def wait(self, job, *states):
        def look():
            found = self.json("status", str(job))
            if found["state"] in ("failed", "lost") and found["state"] not in states:
                raise SystemExit(f"job {job}: {found['state']}, {found['reason']}\n{found['report']}")
            return found if found["state"] in states else None

        return wait_for(f"job {job} {' or '.join(states)}", look)

    def metrics(self):
        with urllib.request.urlopen(f"http://{ADDRESS}/metrics") as reply:
            return reply.read().decode()


def inventory(node, gpus):
    query = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    theirs = [line.split(", ") for line in lines][:gpus]
    ours = [[str(gpu["index"]), gpu["uuid"], gpu["name"], str(gpu["memory_bytes"] >> 20)] for gpu in node.json("node")["gpus"]]
    check("GPUs as nvidia-smi says", ours[:gpus] == theirs, ours)
    shown = node.metrics()
    check("/metrics names them by UUID", all(f'UUID="{gpu[1]}"' in shown for gpu in theirs))
    print(node.run("node"))
    return [gpu[1] for gpu in theirs]


def strangers(node, gpus):
    """A GPU that somebody else uses gets no job until they are gone."""
    stranger = subprocess.Popen([sys.executable, "-c", STRANGER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stranger.stdout.readline()
    began = time.monotonic()
    wait_for("the stranger is seen", lambda: node.json("node")["gpus"][0]["state"] == "foreign")
    seen = time.monotonic() - began
    job = node.submit("--gpus", str(gpus), "--nproc-per-node", "1", "--", "true")
    waits = wait_for("a reason", lambda: node.json("status", str(job))["reason"])
    check("a job waits while a stranger holds a GPU", "waits for GPUs" in waits, waits)
    stranger.stdin.close()
    stranger.wait()
    began = time.monotonic()
    node.wait(job, "done")
    check(f"a stranger was seen after {seen:.1f} s; the job ended {time.monotonic() - began:.1f} s after they had gone", True)


def places(node, uuids):
    """Jobs see their own GPUs alone, and start behind each other at once."""
    script = node.place / "worker.py"
    script.write_text(WORKER)
    each = max(1, len(uuids) // 2)
    jobs = [node.submit("--nproc-per-node", str(each), str(script)) for _ in range(3)]
    seen = []
    for job in jobs:
        held = node.wait(job, "done")["gpus"] or []
        logs = [node.run("logs", str(job), "--rank", str(rank)) for rank in range(each)]
        lines = [json.loads(line[line.index("{"):]) for log in logs for line in log.splitlines() if "{" in line]
        check(f"job {job}: {each} workers", len(lines) == each and len(held) in (0, each), lines)
        visible = lines[0]["visible"].split(",")
        check("CUDA_VISIBLE_DEVICES names GPUs of this node by UUID", set(visible) <= set(uuids) and len(visible) == each)
        plain = [uuid.removeprefix("GPU-") for uuid in visible]
        check("torch sees these", all(line["gpus"] == plain for line in lines), plain)
        seen.append(visible)
    began = time.monotonic()
    jobs = [node.submit("--gpus", str(len(uuids)), "--", "true") for _ in range(10)]
    node.wait(jobs[-1], "done")
    print(f"10 jobs of all GPUs behind each other: {time.monotonic() - began:.2f} s")


def draining(node, gpus):
    node.run("drain", "--gpu", "0", "--reason", "fan")
    job = node.submit("--gpus", str(gpus), "--", "true")
    waits = wait_for("a reason", lambda: node.json("status", str(job))["reason"])
    check("a drained GPU gets no job", "waits for GPUs" in waits and node.json("node")["gpus"][0]["state"] == "drained", waits)
    node.run("drain", "--gpu", "0", "--undo")
    node.wait(job, "done")


def steps(node):
    return runner.steps(node.place / "out")


def training(node, options, data):
    """A job that trains: shown with its GPUs, adopted after SIGKILL, and as fast while the daemon is asked."""
    config = runner.ROOT / runner.MODELS[options.model]
    settings = {"data.train": [str(data)], "data.val_fraction": 0.0, "train.eval_every": 0, "train.steps": 1_000_000}
    settings |= {"job.output": str(node.place / "out"), "checkpoint.every": 0}
    job = node.submit("--gpus", str(options.gpus), "--nproc", str(options.gpus), str(config), *runner.overrides(settings))
    wait_for("steps", lambda: len(steps(node)) > 50)
    time.sleep(3)
    status = wait_for("GPU columns", lambda: (found := node.json("status", str(job))) and found["status"]
                      and all(rank["gpu_memory_bytes"] for rank in found["status"]["ranks"]) and found)
    ranks = [(rank["rank"], rank["device_uuid"], rank["gpu_percent"], rank["gpu_memory_bytes"] >> 20) for rank in status["status"]["ranks"]]
    check("each rank has its GPU's use and memory", all(use and use > 50 and memory > 1000 for _, _, use, memory in ranks), ranks)
    check("ranks are on the job's GPUs", sorted(rank[1] for rank in ranks) == sorted(status["gpus"]))
    print(node.run("status", str(job)))
    print(node.run("node"))
    print("\n".join(line for line in node.metrics().splitlines() if f'job="{job}"' in line or "UUID" in line))
    load(node, options, job)
    before = len(steps(node))
    began = time.monotonic()
    node.daemon.send_signal(signal.SIGKILL)
    node.daemon.wait()
    node.start()
    wait_for("its status", lambda: (found := node.json("status", str(job)))["state"] == "running" and found["status"])
    print(f"SIGKILL of the daemon to the adopted job's status: {time.monotonic() - began:.2f} s, with the clients' starts")
    wait_for("steps go on", lambda: len(steps(node)) > before + 50)
    numbers = [line["_step"] for line in steps(node)]
    check("no step is missing or made twice", numbers == list(range(len(numbers))), len(numbers))
    began = time.monotonic()
    node.run("cancel", str(job))
    node.wait(job, "cancelled")
    print(f"cancelled with a checkpoint after {time.monotonic() - began:.1f} s")
    wait_for("free GPUs", lambda: all(gpu["state"] == "free" for gpu in node.json("node")["gpus"][:options.gpus]))


def load(node, options, job):
    """The step alone and under calls, by turns."""
    found = {False: [], True: []}
    print(f"\nmodel {options.model}, {options.gpus} GPUs; {RATE} queries/s and {FOLLOWERS} log followers by turns of {SECONDS} s")
    for turn in range(2 * options.turns):
        asked = turn % 2 == 1
        command = [str(options.load), "callers", str(node.socket), str(job), str(RATE), str(FOLLOWERS), str(SECONDS)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) if asked else contextlib.nullcontext() as callers:
            time.sleep(1)
            first = len(steps(node))
            time.sleep(SECONDS - 2)
            taken = [line["perf/step_seconds"] * 1e3 for line in steps(node)[first:]]
            answered = callers.communicate()[0].strip() if asked else "nobody asks"
        found[asked].append(statistics.mean(taken))
        print(f"mean {statistics.mean(taken):.3f} ms, median {statistics.median(taken):.3f} ms of {len(taken)} steps; {answered}", flush=True)
    alone, asked = statistics.mean(found[False]), statistics.mean(found[True])
    print(f"mean step {alone:.3f} ms alone, {asked:.3f} ms asked: {(asked / alone - 1) * 100:+.2f} %\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=pathlib.Path, default=runner.ROOT / "target/release/xlaunch")
    parser.add_argument("--load", type=pathlib.Path, default=runner.ROOT / "target/release/daemon_load")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--model", choices=runner.MODELS, default="A")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    print(f"{runner.hardware()}; tests/gpu/daemon.py --gpus {options.gpus} --model {options.model}")
    # A short path: that of a socket is limited.
    with tempfile.TemporaryDirectory(prefix="xd-") as place:
        node = Node(options.binary.resolve(), place)
        node.start()
        try:
            uuids = inventory(node, options.gpus)
            strangers(node, options.gpus)
            places(node, uuids)
            draining(node, options.gpus)
            training(node, options, runner.tokens(node.place / "tokens.bin", 2_000_000))
        finally:
            print((node.place / "daemon.log").read_text()[-3000:], file=sys.stderr)
            node.daemon.terminate()
            node.daemon.wait()


if __name__ == "__main__":
    main()
