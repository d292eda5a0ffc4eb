"""The cost of checkpoints: how much a save delays the next step, the steps during writing, and the whole run. Checks
that a resumed run equals an uninterrupted one.

    python3 tests/gpu/checkpoints.py --binary target/release/xlaunch --gpus 1 2 --model B [--seconds 75] [--dir DIR]

Saves begin every `--every` seconds. `delay` is the time between the reports of the steps before and after a save, minus
the median time of a step; `while writing` compares the steps until the manifest appears with all others. Checkpoints go
to `--dir`, whose file system determines how long writing takes.
"""

import argparse
import json
import pathlib
import statistics
import sys
import tempfile
import time

import runner


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=pathlib.Path, default=runner.ROOT / "target/release/xlaunch")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--model", default="B")
    parser.add_argument("--seconds", type=float, default=75)
    parser.add_argument("--every", type=float, default=30)
    parser.add_argument("--dir", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()))
    options = parser.parse_args()
    arguments = f"--gpus {' '.join(map(str, options.gpus))} --model {options.model} --seconds {options.seconds:g}"
    print(f"{runner.hardware()}; python3 tests/gpu/checkpoints.py {arguments} --every {options.every:g}")
    with tempfile.TemporaryDirectory() as scratch:
        data = runner.tokens(pathlib.Path(scratch) / "tokens.bin")
        for gpus in options.gpus:
            cost(options, data, gpus)
            resumed_equals_whole(options, data, gpus)


def train(options, data, gpus, saved, steps, **settings):
    written, _ = runner.train(options.binary, options.model, data, gpus, **{
        "train.steps": steps, "train.warmup": 5, "checkpoint.every": 0, "checkpoint.keep": 0,
        "checkpoint.dir": json.dumps(str(saved)), "engine.device": "cuda", "train.sample": 0,
    } | settings)
    return written


def cost(options, data, gpus):
    with tempfile.TemporaryDirectory(dir=options.dir) as out:
        out = pathlib.Path(out)
        # Number of steps that take as long as the run should.
        probe = train(options, data, gpus, out / "probe", 60)
        step = statistics.median(line["perf/step_seconds"] for line in probe[20:])
        steps = int(options.seconds / step)
        walls = {}
        for every in [0, options.every]:
            saved = out / f"every-{every:g}"
            start = time.time()
            lines = train(options, data, gpus, saved, steps, **{"checkpoint.every_seconds": every})
            # Measured from the second step on: start-up time does not count.
            walls[every] = lines[-1]["_timestamp"] - lines[1]["_timestamp"]
        ends = {int(path.parent.name[5:]): path.stat().st_mtime for path in saved.glob("step-*/manifest.json")}
        report(options, gpus, lines, ends, walls, start)


def report(options, gpus, lines, ends, walls, start):
    times = {line["_step"]: line["_timestamp"] for line in lines}
    gaps = {step: times[step] - times[step - 1] for step in times if step - 1 in times}
    median = statistics.median(gaps.values())
    saves = sorted(step for step in ends if step + 1 in gaps)
    runner.check(f"{gpus} GPUs: saves during the run", len(saves) >= 2, str(saves))
    writing = set()
    for step in saves:
        during = {later for later in gaps if later > step + 1 and times[later] < ends[step]}
        writing |= during
        print(f"    step {step}: delay {1e3 * (gaps[step + 1] - median):.0f} ms, "
              f"written in {ends[step] - times[step]:.2f} s, {len(during)} steps meanwhile")
    after = {step + 1 for step in saves}
    others = statistics.mean(gap for step, gap in gaps.items() if step > 10 and step not in writing | after)
    delays = [gaps[step + 1] - median for step in saves]
    slower = statistics.mean(gaps[step] for step in writing) / others - 1 if writing else 0.0
    whole = walls[options.every] / walls[0] - 1
    print(f"model {options.model}, {gpus} GPUs, step {1e3 * median:.1f} ms: largest delay {1e3 * max(delays):.0f} ms, "
          f"steps while writing {100 * slower:+.1f} %, run with {len(saves)} saves {100 * whole:+.2f} %", flush=True)


def resumed_equals_whole(options, data, gpus):
    exact = {"engine.deterministic": True, "train.batch": 8, "checkpoint.every": 10}
    with tempfile.TemporaryDirectory(dir=options.dir) as out:
        saved = pathlib.Path(out) / "saved"
        whole = train(options, data, gpus, saved, 30, **exact)
        rest = train(options, data, gpus, saved, 30, **exact, **{
            "checkpoint.resume": json.dumps(str(saved / "step-00000010")),
        })
    curve = lambda lines: [(line["_step"], line["train/loss"], line["train/grad_norm"]) for line in lines]
    runner.check(f"{gpus} GPUs: resumed run equals an uninterrupted one", curve(rest) == curve(whole[10:]))


if __name__ == "__main__":
    sys.exit(main())
