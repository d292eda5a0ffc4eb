"""Faults in every phase of training on GPUs: the final weights and moments equal those of a run without faults.

    cargo build --release -p xlaunch --features fail
    python3 tests/gpu/chaos.py --binary target/release/xlaunch --gpus 2 [--model B] [--faults 50] [--seed 1] [--sharded]

First each phase separately, with fail points (docs/fail-points.md): a rank is killed there, and the job restarts. Then
jobs with up to ten seeded faults each: crashes, exits, hangs, flipped bits, failing disks, delays, and signals from
outside. All runs use `engine.deterministic`, and `engine.exec = "stream"`, as a replayed graph runs no fail points.
"""

import argparse
import hashlib
import os
import pathlib
import random
import re
import signal
import statistics
import subprocess
import tempfile
import time

import runner
from restart import workers
from runner import check, steps

STEPS, EVERY, SHORT = 120, 10, 12
LIMIT = 300
HANG_TIMEOUT = 5
# Places where a rank dies: in training steps, or while a checkpoint of the last step is saved.
IN_STEPS = ["data", "forward", "backward", "all_reduce", "optimizer", "read_back"]
IN_SAVES = ["snapshot", "save_write", "save_sync", "save_commit"]
KINDS = IN_STEPS + ["signal", "exit", "hang", "slow", "errno", "corrupt", "snapshot", "save_write"]
SIGNALS = [signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP]


def saved_state(out):
    """Returns hashes of the weights and moments of the newest checkpoint."""
    newest = sorted(pathlib.Path(out).glob("*/latest/checkpoints/step-*"))[-1]
    digest = lambda path: hashlib.sha256(path.read_bytes()).hexdigest()
    return newest.name, {path.name: digest(path) for path in newest.glob("*.safetensors")}


def run(options, data, out, gpus, rules="", signals=(), **settings):
    """Runs a job; `signals` are sent to (step, rank). Returns exit code, output, and the number of faults."""
    settings = {"data.train": [str(data)], "train.batch": 8, "train.eval_every": 40, "launch.max_restarts": 30,
                "checkpoint.every": EVERY, "engine.deterministic": True, "engine.exec": "stream",
                "launch.hang_timeout": HANG_TIMEOUT, "job.output": str(out)} | settings
    command = [str(options.binary.resolve()), "--nproc", str(gpus), str(runner.ROOT / runner.MODELS[options.model])]
    environment = os.environ | ({"XLAUNCH_FAIL": rules} if rules else {})
    sent = 0
    with open(f"{out}.log", "w+") as log:
        command += runner.overrides(settings)
        job = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        for step, rank, number in signals:
            while job.poll() is None and max((line["_step"] for line in steps(out)), default=0) < step:
                time.sleep(0.02)
            found = workers(job.pid) if job.poll() is None else []
            if len(found) == gpus:
                os.kill(found[rank], number)
                sent += 1
        try:
            code = job.wait(LIMIT)
        except subprocess.TimeoutExpired:
            job.kill()
            code = f"not within {LIMIT} s"
        log.seek(0)
        text = log.read()
        return code, text, sent + len(set(re.findall(r"fail point reached: (\S+)", text)))


def phases(options, data, scratch, gpus, sharded):
    """Runs a fault in each phase separately."""
    settings = {"train.steps": SHORT, "train.eval_every": 4, "checkpoint.every": 4,
                "comm.shard": "optimizer" if sharded else "none"}
    name = f"{gpus} GPUs{', sharded' if sharded else ''}"
    code, text, _ = run(options, data, scratch / "whole", gpus, **settings)
    check(f"{name}: whole run", code == 0, "" if code == 0 else text[-2000:])
    expected, last = saved_state(scratch / "whole"), gpus - 1
    rules = {f"{place}@{last}:6/0=crash": False for place in IN_STEPS} | {f"evaluation@{last}:8/0=crash": False}
    rules |= {f"{place}@{0 if place == 'save_commit' else last}:{SHORT}/0=crash": True for place in IN_SAVES}
    rules |= {f"forward@0:7/0=crash;resume@{last}:0/1=crash": False, f"join@{last}:0/0=crash": False}
    for number, (rule, saves) in enumerate(rules.items()):
        if options.places and not any(rule.startswith(place) for place in options.places):
            continue
        out = scratch / f"phase{number}"
        code, text, faults = run(options, data, out, gpus, rule, **settings, **{"checkpoint.async": saves})
        again = text.count("; restarting")
        same = code == 0 and faults == again == rule.count("/") and saved_state(out) == expected
        check(f"{name}: {rule}", same, f"{again} restarts" if same else f"{faults} faults, {text[-3000:]}")


def plan(choose, gpus, faults):
    """Returns fail-point rules and signals of one job, in order of their steps, and the kinds."""
    rules, signals, kinds, attempt, flipped = [], [], [], 0, False
    for number in range(faults):
        step, rank = 8 + 11 * number, choose.randrange(gpus)
        kind = choose.choice(KINDS)
        if kind == "corrupt" and flipped:
            kind = "signal"
        kinds.append(kind)
        if kind == "signal":
            signals.append((step, rank, choose.choice(SIGNALS)))
        elif kind == "slow":
            rules.append(f"forward@{rank}:{step}=slow(300)")
        elif kind == "errno":
            # Any step, because a save is skipped while the previous one is being written.
            rules.append(f"save_write@{rank}:*/{attempt}=errno({choose.choice([5, 28])})")
        elif kind == "corrupt":
            flipped = True
            rules.append(f"parameters@{rank}:{step}/{attempt}=corrupt({choose.randrange(1 << 20)})")
        elif kind in ("snapshot", "save_write"):
            rules.append(f"{kind}@{rank}:*/{attempt}=crash")
        else:
            place = kind if kind in IN_STEPS else "forward"
            action = {"exit": "exit(3)", "hang": "hang"}.get(kind, "crash")
            rules.append(f"{place}@{rank}:{step}/{attempt}={action}")
        attempt += kind not in ("slow", "errno")
    return ";".join(rules), signals, kinds


def chaos(options, data, scratch, gpus):
    settings = {"train.steps": STEPS, "observe.check_every": 5, "checkpoint.on_error": "continue"}
    code, text, _ = run(options, data, scratch / "undisturbed", gpus, **settings)
    check("undisturbed run", code == 0, "" if code == 0 else text[-2000:])
    expected, choose = saved_state(scratch / "undisturbed"), random.Random(options.seed)
    left, injected, recoveries, restarts, planned, useful = options.faults, 0, [], 0, {}, []
    while left > 0:
        rules, signals, kinds = plan(choose, gpus, min(left, 10))
        out = scratch / f"chaos{left}"
        code, text, faults = run(options, data, out, gpus, rules, signals, **settings)
        same = code == 0 and saved_state(out) == expected
        lines = steps(out)
        # Seconds between two steps if the second is not the successor of the first, or follows a restart.
        gaps = [b["_timestamp"] - a["_timestamp"] for a, b in zip(lines, lines[1:])]
        again = text.count("; restarting")
        recoveries += sorted(gaps, reverse=True)[:again]
        restarts, left, injected = restarts + again, left - max(faults, 1), injected + faults
        planned |= {kind: planned.get(kind, 0) + kinds.count(kind) for kind in set(kinds)}
        useful += [float(share) for share in re.findall(r"useful time ([\d.]+)", text)[-1:]]
        check(f"job with {faults} faults", same,
              f"{again} restarts" if same else f"{rules} {signals} {code} {text[-3000:]}")
    middle = statistics.median(recoveries)
    print(f"planned {planned}; {injected} injected, {restarts} restarts, seed {options.seed}: final states equal; "
          f"last step before a restart to the next: median {middle:.2f} s, most {max(recoveries):.2f} s; "
          f"useful time {useful} %")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=pathlib.Path, default=runner.ROOT / "target/release/xlaunch")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--model", choices=runner.MODELS, default="B")
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sharded", action="store_true", help="phases with a sharded optimizer too")
    parser.add_argument("--places", nargs="+", help="of the phases alone; default: all")
    parser.add_argument("--skip-phases", action="store_true")
    options = parser.parse_args()
    print(f"{runner.hardware()}; tests/gpu/chaos.py --gpus {options.gpus} --model {options.model}")
    with tempfile.TemporaryDirectory(prefix="xc-") as scratch:
        scratch = pathlib.Path(scratch)
        data = runner.tokens(scratch / "tokens.bin", 2_000_000)
        for sharded in [False, True][: options.sharded + 1] * (not options.skip_phases):
            (scratch / f"sharded{sharded}").mkdir()
            phases(options, data, scratch / f"sharded{sharded}", options.gpus, sharded)
        if options.faults:
            chaos(options, data, scratch, options.gpus)


if __name__ == "__main__":
    main()
