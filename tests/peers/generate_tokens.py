"""Checks that greedy texts of `xlaunch generate` equal those of transformers, for random models of both architectures.

    python3 tests/peers/generate_tokens.py --xlaunch PATH      # needs torch, transformers

Generates 64 tokens after each of 20 prompts of five lengths, on the CPU in fp32: xlaunch with all prompts in one batch,
transformers with those of one length, which it does not pad. Exit code 1 if any text differs.
"""

import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import byte_vocabulary

VOCAB, TOKENS = 700, 64
# In bytes.
LENGTHS, PER_LENGTH = (2, 5, 23, 64, 101), 4
PROMPTS = len(LENGTHS) * PER_LENGTH


def models():
    torch.manual_seed(1)
    gpt2 = GPT2Config(vocab_size=VOCAB, n_positions=192, n_embd=64, n_layer=3, n_head=4, initializer_range=0.2,
                      attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    yield "gpt2", GPT2LMHeadModel(gpt2)
    for kv_heads, tied in [(4, False), (2, True), (1, False)]:
        llama = LlamaConfig(vocab_size=VOCAB, max_position_embeddings=192, hidden_size=64, intermediate_size=96,
                            num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=kv_heads,
                            tie_word_embeddings=tied, initializer_range=0.2, bos_token_id=None, eos_token_id=None)
        yield f"llama, {kv_heads} key heads, {'tied' if tied else 'untied'}", LlamaForCausalLM(llama)


def prompt(pick, length):
    """Returns a random text that is this long in UTF-8, with one character of two bytes."""
    letters = [*pick.choices("abc de\nf", k=length - 2), "\u00e9"]
    pick.shuffle(letters)
    return "".join(letters)


def main():
    # The models are so small that more threads would only wait for each other.
    torch.set_num_threads(1)
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--xlaunch", required=True)
    binary = options.parse_args().xlaunch
    pick = random.Random(3)
    texts = [prompt(pick, length) for length in LENGTHS for _ in range(PER_LENGTH)]
    different = 0
    for name, model in models():
        model = model.eval()
        model.generation_config.eos_token_id = None
        with tempfile.TemporaryDirectory() as directory:
            path = pathlib.Path(directory)
            model.save_pretrained(path)
            byte_vocabulary.write(path / "tokenizer.json", VOCAB)
            lines = "".join(json.dumps({"prompt": text}) + "\n" for text in texts)
            command = [binary, "generate", directory, "--prompts", "-", "--device", "cpu", "--temperature", "0",
                       "--max-tokens", str(TOKENS), "--json"]
            done = subprocess.run(command, input=lines, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{name}: exit code {done.returncode}: {done.stderr}")
        # This is not splitlines, which also cuts at characters within a text.
        ours = [json.loads(line)["text"] for line in done.stdout.split("\n") if line]
        theirs = []
        for at in range(0, PROMPTS, PER_LENGTH):
            ids = torch.tensor([byte_vocabulary.encode(text) for text in texts[at : at + PER_LENGTH]])
            with torch.no_grad():
                out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False,
                                     pad_token_id=0)
            theirs += [byte_vocabulary.decode(row[ids.shape[1]:].tolist()) for row in out]
        equal = sum(a == b for a, b in zip(ours, theirs, strict=True))
        print(f"{name}: {equal} of {PROMPTS} texts of {TOKENS} tokens are equal")
        different += PROMPTS - equal
    sys.exit(different > 0)


if __name__ == "__main__":
    main()
