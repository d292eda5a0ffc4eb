"""Compares the speed of `xlaunch data prepare` with tiktoken, on two threads, in one run.

    cargo build --release && python3 tests/peers/prepare_speed.py        # needs tiktoken, tokenizers, transformers

xlaunch is timed from end to end: its start, reading, encoding as GPT-2, writing and syncing the shards. tiktoken only
encodes, with `encode_ordinary_batch` on texts that are in memory. Both run in turn, ROUNDS times; a figure is the
fastest round, as other work on the machine can only slow it down. Exit code 1 if xlaunch is slower than the targets: 5
times tiktoken on prose and code, once on random Unicode.
"""

import argparse
import json
import pathlib
import sys
import tempfile
import time

from tokens import ROOT, Xlaunch, gpt2_reference, machine_text, random_unicode

ROUNDS = 3
TARGETS = {"prose and code": 5.0, "random Unicode": 1.0}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", default=ROOT / "target/release/xlaunch", type=pathlib.Path)
    parser.add_argument("--megabytes", default=100.0, type=float)
    options = parser.parse_args()
    size, reached = int(options.megabytes * 1e6), True
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        xlaunch = Xlaunch(options.binary, folder, ["--threads", "2"])
        reference = gpt2_reference(folder, xlaunch.prepare("gpt2", "a")[1])
        print(f"{'text':<15} {'MB':>6} {'xlaunch MB/s':>13} {'tiktoken MB/s':>14} {'ratio':>6}")
        for name, make in (("prose and code", machine_text), ("random Unicode", random_unicode)):
            text = make(size if name == "prose and code" else size // 5)
            # Documents of some kilobytes, each a line of JSONL.
            pieces = [text[at:at + 5000] for at in range(0, len(text), 5000)]
            lines = "\n".join(json.dumps({"text": piece}, ensure_ascii=False) for piece in pieces)
            megabytes, ours, theirs = len(text.encode()) / 1e6, [], []
            for _ in range(ROUNDS):
                ours.append(xlaunch.prepare("gpt2", lines, suffix="jsonl")[3])
                start = time.monotonic()
                reference.encode_ordinary_batch(pieces, num_threads=2)
                theirs.append(time.monotonic() - start)
            ours, theirs = megabytes / min(ours), megabytes / min(theirs)
            reached &= ours / theirs >= TARGETS[name]
            print(f"{name:<15} {megabytes:>6.1f} {ours:>13.1f} {theirs:>14.1f} {ours / theirs:>6.2f}", flush=True)
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
