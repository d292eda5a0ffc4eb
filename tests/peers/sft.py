"""Compares fine-tuning on chats with trl's `SFTTrainer`, in fp32 on the CPU.

    python3 tests/peers/sft.py --xlaunch PATH     # needs torch, transformers, trl, peft

Both read the same file of chats, with the same tokenizer and template, and count the loss of what the assistant writes.
All chats are one batch: packed or padded in trl, packed here. The loss before training must be within 1e-6, relative,
and the losses of 50 steps of AdamW within 1e-4. Prints a line for each case that holds.
"""

import json
import logging
import re
import warnings

import datasets
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config
from trl import SFTConfig, SFTTrainer

from chats import ROOT, TEMPLATES, families
from model_families import run_comparison

STEPS, LR, SEQ, CHATS, RANK = 50, 1e-3, 256, 10, 4
SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=SEQ, tie_word_embeddings=False)
CONFIGS = {"llama": LlamaConfig, "qwen3": Qwen3Config}


class Recorder(SFTTrainer):
    """The loss in the log is rounded."""

    def training_step(self, *arguments, **keys):
        value = super().training_step(*arguments, **keys)
        self.losses = [*getattr(self, "losses", []), value.item()]
        return value


def make(folder, family):
    """Writes a model with random weights, and its tokenizer and template."""
    text = (ROOT / "docs/data.md").read_text()
    name, tokenizer, bos, eos, _ = next(entry for entry in families(text) if entry[0] == "chatml_generation")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token="<|endoftext|>")
    fast.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    keys = dict(head_dim=16) if family == "qwen3" else {}
    config = CONFIGS[family](vocab_size=len(fast), **SIZES, **keys)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def adapter(folder, model):
    """Adds an adapter that changes the model, and writes it."""
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    model.save_pretrained(folder)
    return model


def theirs(folder, chats, packed, lora):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model = adapter(folder / "adapter", model) if lora else model
    settings = SFTConfig(
        output_dir=str(folder / "out"), max_steps=STEPS, per_device_train_batch_size=CHATS, max_length=SEQ,
        packing=packed, assistant_only_loss=True, learning_rate=LR, lr_scheduler_type="constant", weight_decay=0.1,
        adam_beta2=0.95, max_grad_norm=1.0, use_cpu=True, bf16=False, gradient_checkpointing=False,
        save_strategy="no", report_to=[], disable_tqdm=True, logging_steps=STEPS + 1, seed=0,
    )
    rows = datasets.Dataset.from_list([json.loads(line) for line in chats.read_text().splitlines()])
    trainer = Recorder(model=model, args=settings, train_dataset=rows,
                       processing_class=AutoTokenizer.from_pretrained(folder))
    trainer.train()
    return trainer.losses


def ours(xlaunch, folder, chats, lora):
    data = folder / "chats"
    xlaunch.call("data", "prepare", "--chat", "--tokenizer", folder, "--val", "0", "--output", data, chats)
    section = f'[lora]\nrank = {RANK}\nalpha = 8\ntargets = "all-linear"' if lora else ""
    init = folder / "adapter" if lora else folder

    def run(name, steps, batch):
        keys = f"steps = {steps}\nbatch = {batch}\nlr = {LR}\nclip = 1\nweight_decay = 0.1"
        return xlaunch.run(name, init, f'train = ["{data}"]\ndocuments = "packed"', keys, section, seq=SEQ)[0]

    run(f"{folder.name}-rows", 1, 1)
    rows = re.search(r"packed into (\d+) sequence", xlaunch.stderr)[1]
    return run(f"{folder.name}-job", STEPS, rows)


def compare(xlaunch, case):
    family, *kinds = case.split(", ")
    packed, lora = "packed" in kinds, "LoRA" in kinds
    folder = xlaunch.folder / case.replace(", ", "-").lower()
    make(folder, family)
    chats = folder / "chats.jsonl"
    lines = (ROOT / "examples/chats.jsonl").read_text().splitlines()
    chats.write_text("".join(line + "\n" for line in lines[:CHATS]))
    expected = theirs(folder, chats, packed, lora)
    found = ours(xlaunch, folder, chats, lora)
    first = abs(found[0] - expected[0]) / expected[0]
    distance = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    holds = first <= 1e-6 and distance <= 1e-4 * max(expected) and expected[-1] < expected[0]
    print(f"{case}: {'equal' if holds else 'DIFFERENT'}: {first:.1e} apart before training, {distance:.1e} in {STEPS} "
          f"steps, from {expected[0]:.4f} to {expected[-1]:.4f}", flush=True)
    return holds


def silence_libraries():
    """Turns off warnings and progress bars."""
    for name in ("trl", "transformers", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    warnings.filterwarnings("ignore")


def main():
    silence_libraries()
    run_comparison(__doc__, compare, ("llama, packed", "llama, padded", "qwen3, packed, LoRA"))


if __name__ == "__main__":
    main()
