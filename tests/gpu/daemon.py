"""A node's daemon with real GPUs: its inventory, their allocation to jobs, and the cost of queries to a training job.

    python3 tests/gpu/daemon.py --binary target/release/xlaunch --load target/release/daemon_load [--gpus 1] [--model A]

The first failed check ends the script; figures are printed. `cargo build --release -p xlaunch-tests` builds
`daemon_load`.
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
TIMEOUT = 120
RATE, FOLLOWERS, SECONDS = 10_000, 100, 12
# Holds a CUDA context and some memory until its stdin is closed.
FOREIGN = "import torch, sys; x = torch.ones(1 << 28, device='cuda:0'); print('ready', flush=True); sys.stdin.read()"
# Prints the environment and GPUs as seen by a worker of a job.
WORKER = """
import json, os, torch
gpus = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
seen = {"visible": os.environ["CUDA_VISIBLE_DEVICES"], "rank": os.environ["LOCAL_RANK"], "gpus": gpus}
print(json.dumps(seen), flush=True)
"""


def wait_for(what, poll):
    """Returns the result of `poll` once it is true."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        if found := poll():
            return found
        time.sleep(0.02)
    raise SystemExit(f"{what}: not within {TIMEOUT} s")


class Node:
    """A daemon in a directory of its own, which uses the first GPUs of the host."""

    def __init__(self, binary, dir, gpus):
        self.binary, self.dir = str(binary), pathlib.Path(dir)
        self.dir.chmod(0o755)
        query = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
        others = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[gpus:]
        (self.dir / "daemon.toml").write_text(
            f'[jobs]\nallow_root = true\nallow_commands = true\nleave_gpus = {json.dumps(others)}\n'
            f'[web]\nlisten = "{ADDRESS}"\n'
        )
        self.environment = os.environ | {"XLAUNCH_SOCKET": str(self.socket), "XDG_RUNTIME_DIR": str(dir)}

    @property
    def socket(self):
        return self.dir / "xlaunch.sock"

    def start(self):
        command = [self.binary, "daemon", "--foreground", "--config", str(self.dir / "daemon.toml")]
        command += ["--state-dir", str(self.dir / "state"), "--socket", str(self.socket)]
        with open(self.dir / "daemon.log", "a") as log:
            self.daemon = subprocess.Popen(command, stdout=log, stderr=log, cwd="/")
        wait_for("the daemon", lambda: self.run("node", check=False))

    def stop(self):
        """Cancels jobs that a failed check has left behind, and terminates the daemon."""
        left = [job["id"] for job in self.json("jobs")]
        for job in left:
            self.run("cancel", str(job), check=False)
        wait_for("cancelled jobs", lambda: not self.json("jobs"))
        self.daemon.terminate()
        self.daemon.wait()

    def run(self, *words, check=True):
        """Returns the standard output of a client command."""
        command = [self.binary, *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=self.dir, env=self.environment)
        if check and done.returncode != 0:
            raise SystemExit(f"xlaunch {' '.join(words)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout if done.returncode == 0 else ""

    def json(self, *words):
        return json.loads(self.run(*words, "--json"))

    def submit(self, *words):
        return int(self.run("submit", *words).split()[1])

    def job(self, job):
        return self.json("status", str(job))

    def gpus(self):
        return self.json("node")["gpus"]

    def wait(self, job, state):
        """Waits until the job is in this state, and fails if that is no longer possible."""
        def poll():
            found = self.job(job)
            if found["state"] in ("failed", "lost") and found["state"] != state:
                raise SystemExit(f"job {job}: {found['state']}, {found['reason']}\n{found['report']}")
            return found if found["state"] == state else None

        return wait_for(f"job {job} {state}", poll)

    def waiting_reason(self, job):
        return wait_for("a reason", lambda: self.job(job)["reason"])

    def metrics(self):
        with urllib.request.urlopen(f"http://{ADDRESS}/metrics") as reply:
            return reply.read().decode()

    def steps(self):
        return runner.steps(self.dir / "out")


def check_inventory(node, gpus):
    """Checks that GPUs are listed as by nvidia-smi. Returns their UUIDs."""
    query = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    expected = [line.split(", ") for line in lines][:gpus]
    found = [[str(gpu["index"]), gpu["uuid"], gpu["name"], str(gpu["memory_bytes"] >> 20)] for gpu in node.gpus()]
    check("GPUs as in nvidia-smi", found[:gpus] == expected, found)
    metrics = node.metrics()
    check("/metrics names them by UUID", all(f'UUID="{gpu[1]}"' in metrics for gpu in expected))
    print(node.run("node"))
    return [gpu[1] for gpu in expected]


def check_foreign_process(node, gpus):
    """A GPU that a process outside any job uses is not allocated until that process has exited."""
    command = [sys.executable, "-c", FOREIGN]
    foreign = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    foreign.stdout.readline()
    began = time.monotonic()
    wait_for("detection of the foreign process", lambda: node.gpus()[0]["state"] == "foreign")
    detected = time.monotonic() - began
    job = node.submit("--gpus", str(gpus), "--nproc-per-node", "1", "--", "true")
    reason = node.waiting_reason(job)
    check("a job waits while a foreign process uses a GPU", "GPUs" in reason, reason)
    foreign.stdin.close()
    foreign.wait()
    began = time.monotonic()
    node.wait(job, "done")
    waited = time.monotonic() - began
    print(f"foreign process: detected after {detected:.1f} s; the job was done {waited:.1f} s after its exit")


def check_allocation(node, uuids):
    """Jobs see only their own GPUs, and a queued job starts as soon as its GPUs are free."""
    script = node.dir / "worker.py"
    script.write_text(WORKER)
    each = max(1, len(uuids) // 2)
    jobs = [node.submit("--nproc-per-node", str(each), str(script)) for _ in range(3)]
    for job in jobs:
        held = node.wait(job, "done")["gpus"] or []
        logs = [node.run("logs", str(job), "--rank", str(rank)) for rank in range(each)]
        lines = [json.loads(line[line.index("{"):]) for log in logs for line in log.splitlines() if "{" in line]
        check(f"job {job}: {each} workers", len(lines) == each and len(held) in (0, each), lines)
        visible = lines[0]["visible"].split(",")
        check("CUDA_VISIBLE_DEVICES has UUIDs of this node's GPUs", set(visible) <= set(uuids) and len(visible) == each)
        expected = [uuid.removeprefix("GPU-") for uuid in visible]
        check("torch sees these GPUs", all(line["gpus"] == expected for line in lines), expected)
    began = time.monotonic()
    jobs = [node.submit("--gpus", str(len(uuids)), "--", "true") for _ in range(10)]
    node.wait(jobs[-1], "done")
    print(f"10 consecutive jobs on all GPUs: {time.monotonic() - began:.2f} s")


def check_drain(node, gpus):
    node.run("drain", "--gpu", "0", "--reason", "fan")
    job = node.submit("--gpus", str(gpus), "--", "true")
    reason = node.waiting_reason(job)
    check("a drained GPU is not allocated", "GPUs" in reason and node.gpus()[0]["state"] == "drained", reason)
    node.run("drain", "--gpu", "0", "--undo")
    node.wait(job, "done")


def start_training(node, options, data):
    """Submits a training job and waits until its status has GPU columns. Returns its number and status."""
    config = runner.ROOT / runner.MODELS[options.model]
    settings = {"data.train": [str(data)], "data.val_fraction": 0.0, "train.eval_every": 0, "train.steps": 1_000_000}
    settings |= {"job.output": str(node.dir / "out"), "checkpoint.every": 0}
    gpus = str(options.gpus)
    job = node.submit("--gpus", gpus, "--nproc", gpus, str(config), *runner.overrides(settings))
    wait_for("50 steps", lambda: len(node.steps()) > 50)
    time.sleep(3)

    def sampled():
        found = node.job(job)
        return found["status"] and all(rank["gpu_memory_bytes"] for rank in found["status"]["ranks"]) and found

    return job, wait_for("GPU columns", sampled)


def check_training(node, options, data):
    """A training job: status with GPUs, step time under load, adoption after SIGKILL of the daemon, cancellation."""
    job, status = start_training(node, options, data)
    ranks = status["status"]["ranks"]
    found = [(rank["rank"], rank["device_uuid"], rank["gpu_percent"], rank["gpu_memory_bytes"] >> 20) for rank in ranks]
    plausible = lambda percent, mib: percent and percent > 50 and mib > 1000
    check("utilisation and memory of each rank", all(plausible(*rank[2:]) for rank in found), found)
    check("ranks are on the job's GPUs", sorted(rank["device_uuid"] for rank in ranks) == sorted(status["gpus"]))
    print(node.run("status", str(job)))
    print(node.run("node"))
    print("\n".join(line for line in node.metrics().splitlines() if f'job="{job}"' in line or "UUID" in line))
    measure_load(node, options, job)
    before = len(node.steps())
    began = time.monotonic()
    node.daemon.send_signal(signal.SIGKILL)
    node.daemon.wait()
    node.start()
    wait_for("its status", lambda: (found := node.job(job))["state"] == "running" and found["status"])
    adopted = time.monotonic() - began
    print(f"SIGKILL of the daemon to status of the adopted job: {adopted:.2f} s, including client starts")
    wait_for("50 more steps", lambda: len(node.steps()) > before + 50)
    numbers = [line["_step"] for line in node.steps()]
    check("no step is missing or repeated", numbers == list(range(1, len(numbers) + 1)), len(numbers))
    began = time.monotonic()
    node.run("cancel", str(job))
    node.wait(job, "cancelled")
    print(f"cancelled with a checkpoint after {time.monotonic() - began:.1f} s")
    wait_for("free GPUs", lambda: all(gpu["state"] == "free" for gpu in node.gpus()[:options.gpus]))


def measure_load(node, options, job):
    """Step time without and with clients, in turn."""
    means = {False: [], True: []}
    print(f"\nmodel {options.model}, {options.gpus} GPUs; {RATE} queries/s and {FOLLOWERS} log followers in turns of "
          f"{SECONDS} s")
    for turn in range(2 * options.turns):
        loaded = turn % 2 == 1
        command = [str(options.load), "clients", *map(str, [node.socket, job, RATE, FOLLOWERS, SECONDS])]
        load = subprocess.Popen(command, stdout=subprocess.PIPE, text=True) if loaded else contextlib.nullcontext()
        with load:
            time.sleep(1)
            first = len(node.steps())
            time.sleep(SECONDS - 2)
            times = [line["perf/step_seconds"] * 1e3 for line in node.steps()[first:]]
            replies = load.communicate()[0].strip() if loaded else "no clients"
        means[loaded].append(statistics.mean(times))
        print(f"mean {means[loaded][-1]:.3f} ms, median {statistics.median(times):.3f} ms of {len(times)} steps; "
              f"{replies}", flush=True)
    alone, loaded = statistics.mean(means[False]), statistics.mean(means[True])
    print(f"mean step {alone:.3f} ms alone, {loaded:.3f} ms under load: {(loaded / alone - 1) * 100:+.2f} %\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=pathlib.Path, default=runner.ROOT / "target/release/xlaunch")
    parser.add_argument("--load", type=pathlib.Path, default=runner.ROOT / "target/release/daemon_load")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--model", choices=runner.MODELS, default="A")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    print(f"{runner.hardware()}; tests/gpu/daemon.py --gpus {options.gpus} --model {options.model}")
    # The prefix is short, because the length of a socket's path is limited.
    with tempfile.TemporaryDirectory(prefix="xd-") as scratch:
        node = Node(options.binary.resolve(), scratch, options.gpus)
        node.start()
        try:
            uuids = check_inventory(node, options.gpus)
            check_foreign_process(node, options.gpus)
            check_allocation(node, uuids)
            check_drain(node, options.gpus)
            check_training(node, options, runner.tokens(node.dir / "tokens.bin", 2_000_000))
        finally:
            print((node.dir / "daemon.log").read_text()[-3000:], file=sys.stderr)
            node.stop()


if __name__ == "__main__":
    main()
