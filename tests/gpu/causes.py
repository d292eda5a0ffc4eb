"""Failures specific to GPUs and NCCL: checks that the first cause is named, and measures the time until the end.

    python3 tests/gpu/causes.py --binary target/release/xlaunch [--gpus 2] [--cases fault killed ...]

Jobs of the trainer (model A):

    fault      the last rank's kernel stores to an illegal address (`tests/src/hang.c`)
    recovery   the same, and the job restarts: seconds until the next step
    killed     NCCL over sockets, and the last rank is killed: the other ranks, which lose it, are not to blame
    sockets    NCCL over sockets, and all connections of the last rank are shut down while both processes live
    memory     another process has taken the memory of the last GPU
    straggler  another process computes on the last GPU: its rank is reported, and nothing is ended

Commands (`tests/peers/fail.py`, `examples/ddp.py`) with NCCL:

    assert     a kernel of the last rank finds an index out of range
    kill       the last rank is killed while the others wait for it in an all-reduce
    recorder   rank 1 hangs before an all-reduce: all ranks dump PyTorch's flight recorder, and the job restarts

A failed check does not end the suite. Needs PyTorch.
"""

import argparse
import os
import pathlib
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback

import launch
import runner
from hang import HANG, PHASE
from restart import workers
from runner import steps

EXAMPLE = runner.ROOT / "examples/ddp.py"
# Time limit of any wait, in seconds.
LIMIT = 60
# Hang timeout of the trainer in seconds: a failure that no rank notices ends as a hang.
HANG_TIMEOUT = 20
# Hang timeout of the command that hangs.
COMMAND_HANG_TIMEOUT = 15
STEPS = 20
# Leaves NCCL no connection between ranks other than TCP.
SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"}
SOCKETS |= {"NCCL_NET_PLUGIN": "none"}
KILLED = "cause: killed by SIGKILL"
CUDA_FAULT = "CUDA_ERROR_(ILLEGAL_ADDRESS|LAUNCH_FAILED)|illegal memory access"
HELD = "xlaunch: .*(made no progress|sent no heartbeat)|; restarting"
# Other processes on a GPU: one holds all of its memory except a GiB, one multiplies matrices. They end with their
# input.
HOG = """
import sys, threading, torch
what, device = sys.argv[1], torch.device("cuda", int(sys.argv[2]))
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
torch.cuda.set_device(device)
if what == "memory":
    torch.zeros(1, device=device)
    held = torch.empty(torch.cuda.mem_get_info()[0] - (1 << 30), dtype=torch.uint8, device=device)
    print("ready", flush=True)
    ended.wait()
else:
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    while not ended.is_set():
        for _ in range(50):
            b = a @ a
        torch.cuda.synchronize()
        print("ready", flush=True)
"""
FAILED = []


def check(what, ok, found=""):
    """Like `runner.check`, but a failed check does not end the script."""
    try:
        runner.check(what, ok, found)
    except SystemExit:
        FAILED.append(what)


class Launch:
    """A launch with its output in a file."""

    def __init__(self, command, log, **variables):
        self.log = log
        with open(log, "w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | variables)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.interrupt()

    def text(self):
        return self.log.read_text(errors="replace")

    def wait_for(self, what, poll):
        """Returns the result of `poll` once it is true."""
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            running = self.process.poll() is None
            if found := poll():
                return found
            if not running:
                break
            time.sleep(0.01)
        code = self.process.poll()
        raise RuntimeError(f"no {what} within {LIMIT} s, exit code {code}: {self.text()[-3000:]}")

    def wait_for_line(self, pattern):
        """Returns the first line that contains this text."""
        find = lambda: next((line for line in self.text().split("\n") if re.search(pattern, line)), None)
        return self.wait_for(f"`{pattern}`", find)

    def ended(self):
        self.wait_for("end", lambda: self.process.poll() is not None)
        return self.process.returncode

    def interrupt(self):
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class Training(Launch):
    """A job of the trainer that runs until something ends it. `mode` is that of hang.c."""

    def __init__(self, options, scratch, name, mode=None, restarts=0, **variables):
        self.out, self.trigger = str(scratch / name), scratch / f"{name}.trigger"
        settings = {"data.train": [str(scratch / "tokens.bin")], "data.val_fraction": 0.0, "train.eval_every": 0}
        settings |= {"train.steps": 1_000_000, "checkpoint.every": 50, "job.output": self.out}
        settings |= {"launch.max_restarts": restarts, "launch.hang_timeout": HANG_TIMEOUT}
        command = [str(options.binary), "--nproc", str(options.gpus), str(runner.ROOT / runner.MODELS["A"])]
        if mode:
            variables |= {"LD_PRELOAD": str(scratch / "hang.so"), "HANG_MODE": mode, "HANG_PHASE": str(PHASE)}
            variables |= {"HANG_RANK": str(options.gpus - 1), "HANG_TRIGGER": str(self.trigger)}
        super().__init__(command + runner.overrides(settings), scratch / f"{name}.log", **variables)

    def wait_for_steps(self):
        self.wait_for("steps", lambda: len(steps(self.out)) >= STEPS)

    def pull_trigger(self):
        self.trigger.touch()
        return time.time()


class Hog:
    """Another process on a GPU."""

    def __init__(self, what, device):
        command = [sys.executable, "-c", HOG, what, str(device)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self):
        if self.process.stdout.readline().strip() != "ready":
            raise RuntimeError("the other process has failed")
        return self

    def __exit__(self, *_):
        self.process.communicate()


def root_cause(text):
    """Rank and description of the first failure in a report, and the last lines of that rank on stderr."""
    report = text.split("xlaunch: the job failed\n", 1)[-1]
    description, _, last = re.split(r"\n  (?:then:|logs:|exit code )", report)[0].partition("its last lines on stderr:")
    rank = re.match(r"\s*rank (\d+)", description)
    return (int(rank[1]) if rank else None), description, last


def check_report(case, text, seconds, code, ranks, pattern, expected_code, in_stderr=False):
    """Checks that the first cause is one of these ranks, with this pattern in its description or its last lines."""
    rank, description, last = root_cause(text)
    lines = [line.strip() for line in (description + last * in_stderr).split("\n")]
    found = [line for line in lines if re.search(pattern, line, re.IGNORECASE)]
    ok = rank in ranks and found
    what = "; ".join(dict.fromkeys([lines[0], *found[:1]])) if ok else text[-3000:]
    check(f"{case}: ended after {seconds:.2f} s, first cause", ok, what)
    then = text.partition("\n  then:\n")[2].split("\n")[0].strip()
    if then:
        print(f"     then {then}", flush=True)
    check(f"{case}: exit code {expected_code}", code == expected_code, "" if code == expected_code else code)


def fault(options, scratch, last):
    with Training(options, scratch, "fault", "fault") as job:
        job.wait_for_steps()
        began = job.pull_trigger()
        code = job.ended()
        check_report("fault", job.text(), time.time() - began, code, [last], CUDA_FAULT, 76)


def recovery(options, scratch, last):
    with Training(options, scratch, "recovery", "fault", restarts=1) as job:
        job.wait_for_steps()
        began = job.pull_trigger()
        line = job.wait_for_line("; restarting")
        restarted = time.time()
        check("recovery: first cause", f"xlaunch: rank {last}: " in line and re.search(CUDA_FAULT, line), line)
        new = lambda: next((step for step in steps(job.out) if step["_timestamp"] > restarted), None)
        step = job.wait_for("new step", new)
        seconds = step["_timestamp"] - began
        check(f"recovery: restarting after {restarted - began:.2f} s, step {step['_step']} after {seconds:.2f} s", True)
        code = job.interrupt()
        check("recovery: the interrupted job exits with code 143", code == 143, code)


def killed(options, scratch, last):
    with Training(options, scratch, "killed", **SOCKETS) as job:
        job.wait_for_steps()
        began = time.time()
        os.kill(workers(job.process.pid)[-1], signal.SIGKILL)
        code = job.ended()
        check_report("killed", job.text(), time.time() - began, code, [last], KILLED, 1)


def sockets(options, scratch, last):
    with Training(options, scratch, "sockets", "sockets", **SOCKETS) as job:
        job.wait_for_steps()
        began = job.pull_trigger()
        code = job.ended()
        text, seconds = job.text(), time.time() - began
        line = re.search(r"(\d+) connections shut down", text)
        check("sockets: connections were shut down", line and int(line[1]) > 0, line and line[0])
        lost = "NCCL says|lost the connection to rank"
        check_report("sockets", text, seconds, code, range(options.gpus), lost, 75)
        wrong = re.search(f"SIGKILL, |{HELD}", root_cause(text)[1])
        check("sockets: neither killed nor a hang", not wrong, wrong[0] if wrong else "")


def memory(options, scratch, last):
    with Hog("memory", last):
        began = time.time()
        with Training(options, scratch, "memory") as job:
            code = job.ended()
            pattern = "out of memory|out_of_memory|cannot allocate"
            check_report("memory", job.text(), time.time() - began, code, [last], pattern, 76, in_stderr=True)


def straggler(options, scratch, last):
    with Training(options, scratch, "straggler") as job:
        job.wait_for_steps()
        with Hog("compute", last):
            began = time.time()
            line = job.wait_for_line("slows the others down")
            seconds = time.time() - began
            check(f"straggler: reported after {seconds:.2f} s", f"xlaunch: rank {last} slows" in line, line)
        code = job.interrupt()
        check("straggler: nothing was ended", not re.search(HELD, job.text()) and code == 143, f"exit code {code}")


def command(case, failure, pattern):
    def run(options, scratch, last):
        # The last of two ranks fails.
        seconds, gone, code, text = launch.fail([str(options.binary)], 2, failure)
        check_report(case, text, seconds, code, [1], pattern, 1)
        check(f"{case}: all processes are gone after {gone:.2f} s", gone < launch.TIMEOUT)

    return run


def collectives(dump):
    """Names of the collectives in a dump of the flight recorder."""
    return [entry["profiling_name"] for entry in pickle.loads(dump.read_bytes())["entries"]]


def recorder(options, scratch, last):
    logs = scratch / "recorder"
    command = [str(options.binary), "--nproc-per-node", "2", "--max-restarts", "1", "--flight-recorder"]
    command += ["--hang-timeout", str(COMMAND_HANG_TIMEOUT), "--log-dir", str(logs), str(EXAMPLE), "--hang-at", "60"]
    command += ["--checkpoint", str(scratch / "ddp")]
    with Launch(command, scratch / "recorder.log", PYTHON_EXEC=sys.executable) as job:
        line = job.wait_for_line("xlaunch: .*sent no heartbeat")
        named = time.time()
        check("recorder: the rank that hangs is named", "xlaunch: rank 1 sent no heartbeat" in line, line)
        line = job.wait_for_line("; restarting")
        check(f"recorder: restarting {time.time() - named:.2f} s later", "xlaunch: rank 1: " in line, line)
        code = job.ended()
        check(f"recorder: ended {time.time() - named:.2f} s later with exit code 0", code == 0, code)
        check("recorder: went on from the checkpoint", "resuming at step 50" in job.text())
    for rank in range(2):
        dumps = list(logs.glob(f"*/attempt_0/{rank}/nccl_trace_rank_{rank}"))
        names = collectives(dumps[0]) if dumps else []
        found = f"{len(names)} collectives, the last {names[-1]}" if names else f"{len(dumps)} dumps"
        check(f"recorder: dump of rank {rank}", any("all_reduce" in name for name in names), found)


CASES = {
    "fault": fault,
    "recovery": recovery,
    "killed": killed,
    "sockets": sockets,
    "memory": memory,
    "straggler": straggler,
    "assert": command("assert", "assert", "device-side assert"),
    "kill": command("kill", "kill -9", KILLED),
    "recorder": recorder,
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=pathlib.Path, default=runner.ROOT / "target/release/xlaunch")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    options.binary = options.binary.resolve()
    print(f"{runner.hardware()}; tests/gpu/causes.py --gpus {options.gpus}", flush=True)
    # Makes the ranks and the other processes number the same GPUs.
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(options.gpus))))
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="xf-") as scratch:
        scratch = pathlib.Path(scratch)
        subprocess.run(["cc", "-Wall", "-shared", "-fPIC", str(HANG), "-o", str(scratch / "hang.so")], check=True)
        runner.tokens(scratch / "tokens.bin", 2_000_000)
        for name in options.cases:
            try:
                CASES[name](options, scratch, options.gpus - 1)
            except Exception:
                check(f"{name}: runs", False, traceback.format_exc())
    print(f"{len(FAILED)} checks failed; {time.monotonic() - began:.0f} s", flush=True)
    sys.exit(bool(FAILED))


if __name__ == "__main__":
    main()
