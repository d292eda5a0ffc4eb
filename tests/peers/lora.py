"""Compares LoRA with PEFT: adapters of models in transformers, trained there and here.

    python3 tests/peers/lora.py --xlaunch PATH [NAME...]     # needs torch, transformers, peft

Each case is a small model with random weights, and an adapter whose B is not zero. Of each are compared, on the CPU in
fp32:

- the loss before training with PEFT's adapter, within 1e-6;
- the losses of 50 steps of AdamW on the adapter, within 1e-4;
- logits of the adapter that is exported and loaded by PEFT, within 1e-5 of those of PEFT's merged export of it, and of
  the model that is exported whole, which loads strictly;
- the loss that `xlaunch eval` has with the adapter, and with the merged model.

Prints a line for each case that holds; exit code 1 if one does not.
"""

import array
import json

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import model_families as families

STEPS, LR, RANK = 50, 1e-3, 4
# Data for evaluation: whole windows of every model.
LONG = [(i * i * 17 + 5 * i) % (families.VOCAB - 3) + 3 for i in range(2 * 64 + 1)]
# Keys of `[lora]`, and of PEFT's configuration, for each case.
ATTENTION = ("[\"q\", \"v\"]", ["q_proj", "v_proj"])
ALL = ("\"all-linear\"", "all-linear")
CASES = {
    "llama": (ALL, dict()),
    "llama-layers": (ATTENTION, dict(layers_to_transform=[1])),
    "qwen3": (ATTENTION, dict(use_rslora=True)),
    "gpt2": (ALL, dict(fan_in_fan_out=True)),
    "gpt2-attention": (("[\"qkv\", \"o\"]", ["attn.c_attn", "attn.c_proj"]), dict(fan_in_fan_out=True)),
    "gemma2": (ALL, dict()),
    "gemma3": (ALL, dict()),
    "qwen2": (ALL, dict()),
    "phi3": (ALL, dict()),
    "stablelm": (ALL, dict()),
    "gpt_neox": (ALL, dict()),
    "glm4": (ALL, dict()),
    # Experts have no adapters.
    "qwen3_moe": (("\"all-linear\"", ["q_proj", "k_proj", "v_proj", "o_proj"]), dict()),
    "glm4_moe": (("[\"q\", \"v\", \"o\"]", ["q_proj", "v_proj", "o_proj"]), dict()),
}


def base(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def make(case, directory, adapter):
    """Writes a model, and an adapter of it. Biases and norms of the model are not those of a new one either."""
    families.make(case.split("-")[0], directory)
    torch.manual_seed(1)
    (_, targets), keys = CASES[case]
    config = LoraConfig(r=RANK, lora_alpha=6, target_modules=targets, lora_dropout=0.0, task_type="CAUSAL_LM", **keys)
    model = get_peft_model(base(directory), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    model.save_pretrained(adapter)


def train(xlaunch, case, adapter):
    """Trains the adapter on one sequence. Returns the losses, and the directory of the job."""
    (targets, _), keys = CASES[case]
    lora = (f'[lora]\nrank = {RANK}\nalpha = 6\ntargets = {targets}\n'
            f'rslora = {str("use_rslora" in keys).lower()}')
    return xlaunch.run(f"{case}-job", adapter, xlaunch.ids_data(), f"steps = {STEPS}\nbatch = 1\nlr = {LR}\nclip = 0",
                       lora)


def expected_losses(init, adapter, ids):
    model = PeftModel.from_pretrained(base(init), adapter, is_trainable=True).train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    losses = []
    for _ in range(STEPS):
        value = families.loss(model, ids)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def logits(model, ids):
    with torch.no_grad():
        return model.eval()(torch.tensor([ids])[:, :-1]).logits


def long_loss(model, window):
    starts = range(0, len(LONG) - 1, window)
    with torch.no_grad():
        return sum(families.loss(model, LONG[at:at + window + 1]).item() for at in starts) / len(starts)


def compare(xlaunch, case):
    init, adapter = xlaunch.folder / case, xlaunch.folder / f"{case}-adapter"
    make(case, init, adapter)
    ids, failures = xlaunch.ids, []

    def check(what, distance, limit):
        if not distance <= limit:
            failures.append(f"{what}: {distance:.2e} apart")

    expected = expected_losses(init, adapter, ids)
    losses, here = train(xlaunch, case, adapter)
    assert len(losses) == STEPS, losses
    check("first loss", abs(losses[0] - expected[0]), 1e-6 * abs(expected[0]))
    check("steps", max(abs(a - b) for a, b in zip(expected, losses)), 1e-4 * max(map(abs, expected)))
    xlaunch.call("export", "runs/train/latest", "--adapter", "--output", "adapter", cwd=here)
    xlaunch.call("export", "runs/train/latest", "--merge", "--output", "merged", cwd=here)
    model = PeftModel.from_pretrained(base(init), here / "adapter")
    ours = logits(model, ids)
    scale = ours.abs().max().item()
    merged, info = AutoModelForCausalLM.from_pretrained(
        here / "merged", dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    wrong = [f"{what}: {names}" for what, names in info.items() if names]
    failures += wrong
    check("merged export", (ours - logits(merged, ids)).abs().max().item(), 1e-5 * scale)
    check("merged by PEFT", (ours - logits(model.merge_and_unload(), ids)).abs().max().item(), 1e-5 * scale)
    # The exported adapter is imported again, as a checkpoint is.
    score = lambda *words: json.loads(xlaunch.call(
        "eval", *words, "--data", xlaunch.folder / "long.bin", "--device", "cpu", "--json", cwd=here))["data"]["loss"]
    whole = getattr(merged.config, "n_positions", None) or merged.config.max_position_embeddings
    for window, words in (
        (whole, [init, "--adapter", "adapter"]), (whole, [init, "--adapter", "runs/train/latest"]),
        (families.SEQ, ["runs/train/latest"]), (whole, ["adapter"]), (whole, ["merged"]),
    ):
        exact = long_loss(merged, window)
        check(f"eval {words}", abs(score(*words) - exact), 2e-6 * abs(exact))
    for failure in failures:
        print(f"{case}: DIFFERENT: {failure}", flush=True)
    if not failures:
        print(f"{case}: equal: first loss, {STEPS} steps, adapter and merged export", flush=True)
    return not failures


def main():
    long = array.array("H", LONG).tobytes()
    families.run_comparison(__doc__, compare, CASES, lambda xlaunch: (xlaunch.folder / "long.bin").write_bytes(long))


if __name__ == "__main__":
    main()
