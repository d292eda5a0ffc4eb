"""Compares training on preferences with trl's `DPOTrainer`, in fp32 on the CPU.

    python3 tests/peers/dpo.py --xlaunch PATH     # needs torch, transformers, trl, peft

Both read the same file of pairs, with the same tokenizer and template. All pairs are one batch. The losses of 50 steps
of AdamW and the shares of pairs in the right order must be within 1e-4, the margins within 1e-3. The adapter of the
last case was trained before. Prints a line for each case that holds.
"""

import json
import re

import datasets
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

from chats import ROOT
from model_families import run_comparison
from sft import LR, RANK, SEQ, STEPS, adapter, make, silence_libraries

PAIRS, BETA = 8, 0.2
# The learning rate of all weights. With LR, the loss may rise again, and then no two programs agree.
SLOW = LR / 3


class Recorder(DPOTrainer):
    """The loss in the log is rounded."""

    def training_step(self, *arguments, **keys):
        value = super().training_step(*arguments, **keys)
        metrics = self._metrics["train"]
        self.steps = [*getattr(self, "steps", []),
                      [value.item(), metrics["rewards/accuracies"][-1], metrics["rewards/margins"][-1]]]
        return value


def pairs():
    """Returns rows in several forms: each answer is better than that of the next chat."""
    lines = (ROOT / "examples/chats.jsonl").read_text().splitlines()[:PAIRS + 1]
    chats = [json.loads(line)["messages"] for line in lines]
    for chat, other in zip(chats, chats[1:]):
        yield {"chosen": chat, "rejected": [*chat[:-1], other[-1]]}


def theirs(folder, lora):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model = adapter(folder / "adapter", model) if lora else model
    settings = DPOConfig(
        output_dir=str(folder / "out"), max_steps=STEPS, per_device_train_batch_size=PAIRS, max_length=SEQ, beta=BETA,
        learning_rate=LR if lora else SLOW, lr_scheduler_type="constant", weight_decay=0.1, adam_beta2=0.95,
        max_grad_norm=1.0, use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no", report_to=[],
        disable_tqdm=True, logging_steps=STEPS + 1, seed=0,
    )
    trainer = Recorder(model=model, args=settings, train_dataset=datasets.Dataset.from_list(list(pairs())),
                       processing_class=AutoTokenizer.from_pretrained(folder))
    trainer.train()
    return trainer.steps


def ours(xlaunch, folder, lora):
    data = folder / "pairs"
    xlaunch.call("data", "prepare", "--preferences", "--tokenizer", folder, "--val", "0", "--output", data,
                 folder / "pairs.jsonl")
    section = f'[dpo]\nbeta = {BETA}\n'
    section += f'[lora]\nrank = {RANK}\nalpha = 8\ntargets = "all-linear"' if lora else ""

    def run(name, steps, batch):
        keys = f"steps = {steps}\nbatch = {batch}\nlr = {LR if lora else SLOW}\nclip = 1\nweight_decay = 0.1"
        init = folder / "adapter" if lora else folder
        return xlaunch.run(name, init, f'train = ["{data}"]', keys, section, seq=SEQ)[1]

    run(f"{folder.name}-rows", 1, 1)
    rows = re.search(r"packed into (\d+) sequence", xlaunch.stderr)[1]
    here = run(f"{folder.name}-job", STEPS, rows)
    lines = [json.loads(line) for line in (here / "runs/train/latest/metrics.jsonl").read_text().splitlines()]
    names = ("train/loss", "preferences/accuracy", "preferences/margin")
    return [[line[name] for name in names] for line in lines if "train/loss" in line]


def compare(xlaunch, case):
    family, *kinds = case.split(", ")
    lora = "LoRA" in kinds
    folder = xlaunch.folder / case.replace(", ", "-").lower()
    make(folder, family)
    # trl also counts what the template writes after an answer, here a new line.
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("\n        {{- '\\n' }}", ""))
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs()))
    expected, found = theirs(folder, lora), ours(xlaunch, folder, lora)
    apart = [max(abs(a[i] - b[i]) for a, b in zip(found, expected, strict=True)) for i in range(3)]
    holds = max(*apart[:2], apart[2] / 10) <= 1e-4 and expected[-1][0] < 0.7 * expected[0][0]
    print(f"{case}: {'equal' if holds else 'DIFFERENT'}: losses {apart[0]:.1e} apart, shares {apart[1]:.1e}, margins "
          f"{apart[2]:.1e} in {STEPS} steps, from {expected[0][0]:.4f} to {expected[-1][0]:.4f}", flush=True)
    return holds


def main():
    silence_libraries()
    run_comparison(__doc__, compare, ("llama", "qwen3, LoRA"))


if __name__ == "__main__":
    main()
