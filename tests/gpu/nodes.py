"""One job on two nodes, simulated on one host with several GPUs: each agent has its own GPUs and is a host to NCCL.

    cargo build --release -p xlaunch
    python3 tests/gpu/nodes.py --binary target/release/xlaunch --gpus 2 [--model B] [--steps 120]

The losses and the final weights of two agents with half of the GPUs each equal those of one agent with all of them.
Then one agent is killed: the other ends with 75, or the job continues with another agent in its place. NCCL connects
over sockets (`NCCL_HOSTID`), as between hosts. For comparison, torchrun runs with two agents of the same sizes.
"""

import argparse
import os
import pathlib
import re
import signal
import subprocess
import tempfile
import time

import runner
from chaos import saved_state
from restart import workers
from runner import check, steps

TOKEN = "0123456789abcdef" * 4
LIMIT = 300
SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
value = torch.ones(1 << 20, device="cuda")
for step in range(int(sys.argv[1])):
    dist.all_reduce(value)
    value /= dist.get_world_size()
    torch.cuda.synchronize()
    if dist.get_rank() == 0:
        print(f"step {step} {time.time()}", flush=True)
    time.sleep(0.05)
"""


class Node:
    """An agent with its own GPUs."""

    def __init__(self, launcher, number, gpus, port, arguments, out):
        own = range(number * gpus, (number + 1) * gpus)
        environment = os.environ | {
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, own)),
            "NCCL_HOSTID": f"h{number}",
            "NCCL_SOCKET_IFNAME": "lo",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        if launcher[0] != "torchrun":
            environment["XLAUNCH_TOKEN"] = TOKEN
        command = launcher + ["--nnodes", "2", "--node-rank", str(number), "--rdzv-endpoint", f"127.0.0.1:{port}"]
        self.log = pathlib.Path(f"{out}.node{number}.log")
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(command + arguments, stdout=log, stderr=log, env=environment)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)

    def wait(self, seconds=LIMIT):
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            return "never"


def train(options, data, out):
    settings = {
        "data.train": [str(data)], "train.batch": 8, "train.steps": options.steps, "train.eval_every": 0,
        "checkpoint.every": 20, "engine.deterministic": True, "job.output": str(out),
    }
    return [str(runner.ROOT / runner.MODELS[options.model])] + runner.overrides(settings)


def until_step(out, step, seconds=LIMIT):
    end = time.time() + seconds
    while max((line["_step"] for line in steps(out)), default=0) < step:
        if time.time() > end:
            return False
        time.sleep(0.02)
    return True


def losses(out):
    return [(line["_step"], line["train/loss"]) for line in steps(out)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--binary", type=pathlib.Path, required=True)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--model", choices=runner.MODELS, default="B")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--skip-torchrun", action="store_true")
    options = parser.parse_args()
    launcher, half = [str(options.binary.resolve())], options.gpus // 2
    base = pathlib.Path(tempfile.mkdtemp(prefix="nodes-"))
    data = runner.tokens(base / "tokens.bin", 2_000_000)
    port = 29600

    one = base / "one"
    with open(f"{one}.log", "w") as log:
        code = subprocess.call(
            launcher + ["--nproc", str(options.gpus)] + train(options, data, one), stdout=log, stderr=log
        )
    check(f"{options.gpus} GPUs on one node", code == 0, pathlib.Path(f"{one}.log").read_text()[-3000:] if code else "")
    reference = saved_state(one)

    def start(name, *more):
        nonlocal port
        port += 1
        out = base / name
        arguments = ["--nproc", str(half)] + train(options, data, out) + list(more)
        return out, [Node(launcher, number, half, port, arguments, out) for number in (0, 1)], arguments

    def reach(out, nodes):
        if not until_step(out, 30):
            check("30 steps", False, nodes[0].log.read_text()[-3000:])

    def equal(out):
        state = saved_state(out)
        return state == reference and losses(out) == losses(one)

    def show(name, text):
        print(f"{name:60} {text}", flush=True)

    out, nodes, _ = start("two")
    codes = [node.wait() for node in nodes]
    sockets = "NET/Socket" if "NET/Socket" in nodes[0].log.read_text() else ""
    texts = "\n".join(node.log.read_text()[-3000:] for node in nodes)
    check("two nodes", codes == [0, 0], f"{codes}\n{texts}" if any(codes) else "")
    show(f"{half} + {half} GPUs: losses, weights, moments as {options.gpus} on one node", f"{equal(out)} {sockets}")

    for killed in (1, 0):
        out, nodes, _ = start(f"killed{killed}")
        reach(out, nodes)
        at = time.time()
        nodes[killed].kill()
        code = nodes[1 - killed].wait(60)
        show(f"agent {killed} killed, no restarts: exit of the other, after", f"{code}, {time.time() - at:.2f} s")

    out, nodes, arguments = start("replaced", "--set", "launch.max_restarts=3")
    reach(out, nodes)
    nodes[1].kill()
    at = time.time()
    reached = max(line["_step"] for line in steps(out))
    nodes[1] = Node(launcher, 1, half, port, arguments, out)
    back = until_step(out, reached + 1, 120)
    after = time.time() - at
    codes = [node.wait() for node in nodes]
    result = f"{after:.2f} s, {codes}, {equal(out)}" if back else "never"
    show("agent 1 killed and started anew: next step after, exits, equal", result)

    out, nodes, _ = start("worker", "--set", "launch.max_restarts=3")
    reach(out, nodes)
    reached, at = max(line["_step"] for line in steps(out)), time.time()
    os.kill(workers(nodes[1].process.pid)[0], signal.SIGKILL)
    back = until_step(out, reached + 1, 120)
    after = time.time() - at
    codes = [node.wait() for node in nodes]
    result = f"{after:.2f} s, {codes}, {equal(out)}" if back else "never"
    show("worker of node 1 killed: next step after, exits, equal", result)

    script = base / "script.py"
    script.write_text(SCRIPT)
    launchers = {"xlaunch": launcher} | ({} if options.skip_torchrun else {"torchrun": ["torchrun"]})
    for name, program in launchers.items():
        port += 1
        more = ["--rdzv-backend", "c10d", "--rdzv-id", "job", "--nproc-per-node", str(half), str(script), "600"]
        at, out = time.time(), base / f"ddp-{name}"
        nodes = [Node(program, number, half, port, more, out) for number in (0, 1)]
        text = lambda: "".join(node.log.read_text() for node in nodes)
        while not (found := re.search(r"step 0 ([\d.]+)", text())) and time.time() < at + 120:
            time.sleep(0.05)
        first = f"{float(found[1]) - at:.2f} s" if found else "never"
        time.sleep(2)
        at = time.time()
        nodes[1].kill()
        code = nodes[0].wait(40)
        gone = f"exit {code} after {time.time() - at:.2f} s" if code != "never" else "never in 40 s"
        show(f"{name}, PyTorch with NCCL: first all-reduce; agent 1 killed", f"{first}; the other: {gone}")
        subprocess.call(["pkill", "-9", "-f", str(script)])


if __name__ == "__main__":
    main()
