"""Runs Hugging Face's models for comparison with ours.

    python huggingface.py loss DIR TOKENS BYTES SEQ   # mean loss of DIR's model, in fp32, on a file of token ids
    python huggingface.py logits DIR OUT ID...        # logits after each id, in fp32, as a file of f32
    python huggingface.py text DIR TEXT               # ids of a text, and the text of these ids
    python huggingface.py make DIR                    # a model with random weights of each case, by its name

Prints JSON on a line for each of several commands, which are separated by `--`, as importing takes most of the time.
BYTES per id: 1 or 2. The file is cut into windows of SEQ ids, each predicting the next one.
"""

import itertools
import json
import pathlib
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

GPT2 = dict(vocab_size=300, n_positions=64, n_embd=64, n_layer=2, n_head=4)
LLAMA = dict(vocab_size=300, max_position_embeddings=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
             num_attention_heads=4)
LLAMA3 = dict(rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32)
CASES = {
    "gpt2": (lambda: GPT2LMHeadModel(GPT2Config(**GPT2)), torch.float32, "5GB"),
    "gpt2-untied-inner-fp16": (
        lambda: GPT2LMHeadModel(GPT2Config(**GPT2, n_inner=96, tie_word_embeddings=False, layer_norm_epsilon=1e-4)),
        torch.float16, "5GB"),
    "gpt2-files": (lambda: GPT2LMHeadModel(GPT2Config(**GPT2)), torch.float32, "100KB"),
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)), torch.float32, "5GB"),
    "llama-grouped-tied-bf16-files": (
        lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, num_key_value_heads=2, tie_word_embeddings=True,
                                             rms_norm_eps=1e-3)), torch.bfloat16, "50KB"),
    "llama3-wide": (
        lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, num_key_value_heads=1, head_dim=32, rope_parameters=LLAMA3)),
        torch.float32, "5GB"),
    "llama-theta": (
        lambda: LlamaForCausalLM(LlamaConfig(
            **LLAMA, rope_parameters=dict(rope_type="default", rope_theta=300.0))), torch.float32, "5GB"),
}


def make(path):
    torch.manual_seed(7)
    for case, (create, dtype, size) in CASES.items():
        model = create()
        with torch.no_grad():
            # Weights are larger than initial ones and biases are not zero, so that every term matters.
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        model.to(dtype).save_pretrained(pathlib.Path(path) / case, max_shard_size=size)
    return list(CASES)


def loss(path, tokens, width, seq):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    data = open(tokens, "rb").read()
    step = int(width)
    ids = torch.tensor([int.from_bytes(data[at:at + step], "little") for at in range(0, len(data), step)])
    seq = int(seq)
    windows = [ids[at:at + seq + 1] for at in range(0, len(ids) - seq, seq)]
    batch = torch.stack(windows)
    with torch.no_grad():
        logits = model(batch[:, :-1]).logits
        value = torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), batch[:, 1:].flatten())
    return {"loss": value.item(), "windows": len(windows), "model": type(model).__name__, "vocab": logits.shape[-1]}


def logits(path, out, *ids):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        values = model(torch.tensor([[int(id) for id in ids]])).logits
    pathlib.Path(out).write_bytes(values.float().numpy().tobytes())
    return {"model": type(model).__name__, "vocab": values.shape[-1]}


def text(path, value):
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer(value)["input_ids"]
    return {"ids": ids, "text": tokenizer.decode(ids), "eos": tokenizer.eos_token_id, "length": len(tokenizer)}


def main():
    # The models are so small that more threads would only wait for each other.
    torch.set_num_threads(1)
    for separates, words in itertools.groupby(sys.argv[1:], lambda word: word == "--"):
        if not separates:
            command, *rest = words
            print(json.dumps({"loss": loss, "logits": logits, "text": text, "make": make}[command](*rest)))


if __name__ == "__main__":
    main()
