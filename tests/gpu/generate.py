"""`xlaunch generate` compared with transformers: speed in bf16, greedy tokens in fp32. Needs one GPU.

    cargo build --release && python3 tests/gpu/generate.py [--ours]        # needs torch, transformers

The model has GPT-2's sizes (124M) and random weights, written by transformers in its own layout, which xlaunch reads.
transformers runs with a static cache and compiled decoding (CUDA graphs), after a warm-up; xlaunch's times include its
prompts and the capture of its graph. `--ours` leaves out the speed of transformers, whose compilation takes minutes.
Exit code 1 if tokens differ, or if the goals of 3x at batch 1 and 1.5x at batch 32 are missed.
"""

import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests/peers"))

import byte_vocabulary  # noqa: E402

VOCAB, NEW_TOKENS, CHECKED_TOKENS, CHECKED_PROMPTS, PROMPT_BYTES = 50257, 800, 64, 20, 100
GOALS = {1: 3.0, 32: 1.5}
WORDS = "the of a model token learns from text that it reads and writes one word after another until its end".split()


def prompts(count, size=None):
    pick = random.Random(7)
    return [" ".join(pick.choices(WORDS, k=60))[: size or pick.randint(1, 200)] for _ in range(count)]


def make_model(path):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    # Weights are larger than usual: with those of a fresh model, greedy text repeats one token.
    config = GPT2Config(initializer_range=0.08, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    model = GPT2LMHeadModel(config)
    model.save_pretrained(path)
    byte_vocabulary.write(path / "tokenizer.json", VOCAB)
    # No token ends a text.
    model.generation_config.eos_token_id = None
    return model.eval().cuda()


def ours(binary, path, texts, tokens, precision):
    """Returns greedy texts, and the total tokens per second."""
    file = path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    command = [str(binary), "generate", str(path), "--prompts", str(file), "--device", "cuda", "--precision", precision,
               "--temperature", "0", "--max-tokens", str(tokens), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"FAIL xlaunch generate: exit code {done.returncode}: {done.stderr}")
    found = [json.loads(line) for line in done.stdout.split("\n")[:-1]]
    return found, sum(it["tokens"] for it in found) / max(it["seconds"] for it in found)


def theirs(model, texts, tokens, **options):
    """Returns the ids that transformers generates greedily after texts of one length, and the duration in seconds."""
    import torch

    ids = torch.tensor([byte_vocabulary.encode(text) for text in texts], device="cuda")
    torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False,
                             pad_token_id=0, **options)
    torch.cuda.synchronize()
    assert out.shape[1] == ids.shape[1] + tokens
    return out[:, ids.shape[1]:].tolist(), time.perf_counter() - start


def check_tokens(binary, path, model):
    """Returns the number of prompts with the same greedy text in fp32 as in transformers."""
    texts = prompts(CHECKED_PROMPTS)
    found, _ = ours(binary, path, texts, CHECKED_TOKENS, "fp32")
    equal = 0
    for text, mine in zip(texts, found):
        other = byte_vocabulary.decode(theirs(model, [text], CHECKED_TOKENS)[0][0])
        equal += other == mine["text"]
        if other != mine["text"]:
            print(f"differs after {text!r}:\n  transformers {other!r}\n  xlaunch      {mine['text']!r}")
    return equal


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--xlaunch", type=pathlib.Path, default=ROOT / "target/release/xlaunch")
    options.add_argument("--ours", action="store_true", help="leave out the speed of transformers")
    options = options.parse_args()

    import torch
    import transformers

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers.__version__}")
    missed = False
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory)
        model = make_model(path)
        equal = check_tokens(options.xlaunch, path, model)
        missed |= equal != CHECKED_PROMPTS
        print(f"{'FAIL' if missed else 'ok  '} fp32: greedy text of {CHECKED_TOKENS} tokens equal for {equal} of "
              f"{CHECKED_PROMPTS} prompts", flush=True)
        model = model.to(torch.bfloat16)
        for batch, goal in GOALS.items():
            texts = prompts(batch, PROMPT_BYTES)
            mine = max(ours(options.xlaunch, path, texts, NEW_TOKENS, "bf16")[1] for _ in range(2))
            print(f"     bf16, batch {batch}: xlaunch {mine:.0f} tokens/s, {1e3 * batch / mine:.3f} ms per step",
                  flush=True)
            if options.ours:
                continue
            # The first run compiles.
            runs = [theirs(model, texts, NEW_TOKENS, cache_implementation="static")[1] for _ in range(3)]
            other = NEW_TOKENS * batch / min(runs[1:])
            ratio = mine / other
            print(f"{'ok  ' if ratio >= goal else 'FAIL'} bf16, batch {batch}: transformers {other:.0f} tokens/s: "
                  f"{ratio:.2f}x, goal {goal}x", flush=True)
            missed |= ratio < goal
    sys.exit(missed)


if __name__ == "__main__":
    main()
