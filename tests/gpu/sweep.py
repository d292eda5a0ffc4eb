"""Times every operation at many sizes, as a share of the minimum time that the device's peak rates allow.

    python3 tests/gpu/sweep.py [--binary target/release/xlaunch] [--sweep PATH] [--only NAME]

`--sweep` is the test binary of that name, for hosts without cargo. The floor of an operation is its bytes at the rate
of copies, or its floating-point operations at that of large GEMMs (`xlaunch bench device`, in the same run). A share
far below that of the neighbouring size is marked with `<`, and makes the exit code 1.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys

import runner

# Minimum share, relative to that of the next smaller size.
LEAST = 0.7


def rates(binary):
    command = [str(binary), "bench", "device", "--json"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found["copy_bytes_per_second"], found["gemm_flops"]


def measure(sweep, only):
    command = [str(sweep)] if sweep else "cargo test --release -p xlaunch-engine --test sweep --".split()
    done = subprocess.run(command + ["--nocapture"], capture_output=True, text=True, cwd=runner.ROOT,
                          env=os.environ | {"XLAUNCH_TIMES": only})
    if done.returncode != 0 or "not run:" in done.stderr:
        sys.exit(f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=pathlib.Path, default=runner.ROOT / "target/release/xlaunch")
    parser.add_argument("--sweep", type=pathlib.Path)
    parser.add_argument("--only", default="1", help="an operation, such as norm or `tf32 attention`")
    options = parser.parse_args()
    copy, gemm = rates(options.binary)
    print(f"{runner.hardware()}; python3 tests/gpu/sweep.py; copies {copy / 1e12:.2f} TB/s, "
          f"bf16 GEMMs {gemm['bf16'] / 1e12:.0f} TFLOP/s, tf32 {gemm['tf32'] / 1e12:.0f}\n")
    print("| operation | axis | size | us | share of the floor | by |\n|---|---|---|---|---|---|")
    last, cliff = {}, False
    for row in measure(options.sweep, options.only):
        precision = "tf32" if row["operation"].startswith("tf32") else "bf16"
        # FP8 multiplies at twice the rate of bf16.
        rate = gemm[precision] * (2 if row["operation"].startswith("FP8") else 1)
        share = (row["bytes"] / copy + row["flops"] / rate) * 1e6 / row["us"]
        series = row["operation"], row["axis"]
        below = share < LEAST * last.get(series, 0.0)
        last[series], cliff = share, cliff or below
        print(f"| {row['operation']} | {row['axis']} | {row['size']} | {row['us']} | "
              f"{'< ' if below else ''}{share:.2f} | {row['by']} |")
    sys.exit(cliff)


if __name__ == "__main__":
    main()
