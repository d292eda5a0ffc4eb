"""Compares the speed of generation on the CPU with transformers: GPT-2 124M, fp32, greedy, one prompt, same threads.

    cargo build --release && python3 tests/peers/generate_speed.py [--xlaunch PATH]      # needs torch, transformers

Both run in turn, ROUNDS times, in separate processes or after a warm-up; a figure is the best of a program's
rounds. Exit code 1 if tokens differ, or if transformers is not at least 1.5 times slower.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import byte_vocabulary

ROOT = pathlib.Path(__file__).resolve().parents[2]
VOCAB, TOKENS, ROUNDS, GOAL = 50257, 96, 3, 1.5
PROMPT = "the model reads one word after another"


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--xlaunch", type=pathlib.Path, default=ROOT / "target/release/xlaunch")
    binary = options.parse_args().xlaunch

    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(initializer_range=0.08, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)).eval()
    model.generation_config.eos_token_id = None
    ids = torch.tensor([byte_vocabulary.encode(PROMPT)])

    def theirs(tokens):
        start = time.perf_counter()
        with torch.no_grad():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False,
                                 pad_token_id=0)
        return byte_vocabulary.decode(out[0, ids.shape[1]:].tolist()), tokens / (time.perf_counter() - start)

    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory)
        model.save_pretrained(path)
        byte_vocabulary.write(path / "tokenizer.json", VOCAB)
        command = [str(binary), "generate", str(path), "--prompt", PROMPT, "--device", "cpu", "--temperature", "0",
                   "--max-tokens", str(TOKENS), "--json"]

        def ours():
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            return found["text"], found["tokens_per_second"]

        theirs(8)
        rounds = [(ours(), theirs(TOKENS)) for _ in range(ROUNDS)]
    equal = all(mine[0] == other[0] for mine, other in rounds)
    mine, other = (max(speeds) for speeds in zip(*((mine[1], other[1]) for mine, other in rounds)))
    print(f"{threads} threads, torch {torch.__version__}: xlaunch {mine:.1f}, transformers {other:.1f} tokens/s: "
          f"{mine / other:.2f}x, goal {GOAL}x; tokens are {'equal' if equal else 'different'}")
    sys.exit(not equal or mine < GOAL * other)


if __name__ == "__main__":
    main()
