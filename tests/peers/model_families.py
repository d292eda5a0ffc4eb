"""Compares models of every family in transformers with the same models here.

    python3 tests/peers/model_families.py compare --xlaunch PATH [--device cuda] [NAME...]   # needs torch, transformers
    python3 tests/peers/model_families.py fixture FILE      # configurations and tensors of all cases, for unit tests

Each case is a small model with random weights. Of each are compared, in fp32, transformers on the CPU and xlaunch there
or on a GPU:

- the loss before training, within 1e-6 of a model in double precision, or within transformers' own distance to that;
- the losses of 20 steps of AdamW, within 1e-4 of torch's, with the losses of routers in models with experts;
- greedy text;
- the bits of all tensors after import, a step that changes nothing, and export; and the export loads without a warning.

The loss and the export of a model with MXFP4 weights are those of the model with the weights that transformers decodes.

Prints a line for each case that holds; exit code 1 if one does not.
"""

import argparse
import array
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import byte_vocabulary
import model as peer
from exported import Warnings

VOCAB, SEQ, STEPS, LR = 300, 32, 20, 1e-3
PROMPT, TOKENS = "Once upon a time", 12
SIZES = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=None)
ROPE = {
    "llama3": dict(rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=32),
    "linear": dict(rope_type="linear", rope_theta=300.0, factor=4.0),
    "dynamic": dict(rope_type="dynamic", rope_theta=1e4, factor=4.0),
    "yarn": dict(rope_type="yarn", rope_theta=300.0, factor=4.0, original_max_position_embeddings=16),
    "yarn-set": dict(rope_type="yarn", rope_theta=300.0, factor=4.0, original_max_position_embeddings=16,
                     beta_fast=8.0, beta_slow=0.5, attention_factor=1.3, truncate=False),
}
def longrope(width, original):
    """LongRoPE of heads whose first `width` elements are rotated."""
    pairs = range(width // 2)
    return dict(rope_parameters=dict(rope_type="longrope", rope_theta=300.0, short_factor=[1 + 0.1 * i for i in pairs],
                                     long_factor=[2 + 0.5 * i for i in pairs]),
                original_max_position_embeddings=original)


THETA = dict(rope_type="default", rope_theta=300.0)
BIASES = dict(attention_bias=True, mlp_bias=True)
KINDS = {"s": "sliding_attention", "f": "full_attention"}


def layers(kinds):
    return dict(num_hidden_layers=len(kinds), layer_types=[KINDS[kind] for kind in kinds])


def by_kind(full, sliding):
    return dict(rope_parameters={"full_attention": full, "sliding_attention": sliding})


NO_DROPOUT = dict(attention_dropout=0.0, residual_dropout=0.0)
NO_GROUPS = dict(num_key_value_heads=None)
GPT2 = dict(vocab_size=VOCAB, n_embd=64, n_inner=80, n_layer=2, n_head=4, n_positions=SEQ, bos_token_id=None,
            eos_token_id=None, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)
# Type and keys of each case; `+` after a name: bf16 in several files.
CASES = {
    "gpt2": ("gpt2", dict(layer_norm_epsilon=1e-3)),
    "gpt2-gelu+": ("gpt2", dict(activation_function="gelu", tie_word_embeddings=False)),
    "llama": ("llama", dict(rope_parameters=THETA)),
    "llama-biases+": ("llama", dict(**BIASES, tie_word_embeddings=True, head_dim=32, rope_parameters=ROPE["llama3"])),
    "llama-linear": ("llama", dict(attention_bias=True, hidden_act="gelu", rope_parameters=ROPE["linear"])),
    "llama-dynamic": ("llama", dict(mlp_bias=True, hidden_act="relu2", rope_parameters=ROPE["dynamic"])),
    "llama-yarn": ("llama", dict(rope_parameters=ROPE["yarn"], hidden_act="gelu_pytorch_tanh")),
    "mistral": ("mistral", dict(sliding_window=None, head_dim=32)),
    "mistral-window+": ("mistral", dict(sliding_window=8, rope_parameters=ROPE["yarn-set"])),
    "qwen2": ("qwen2", dict(tie_word_embeddings=True)),
    "qwen2-windows+": ("qwen2", dict(use_sliding_window=True, sliding_window=8, max_window_layers=0)),
    "qwen3": ("qwen3", dict(head_dim=32, tie_word_embeddings=True)),
    "qwen3-windows+": ("qwen3", dict(head_dim=16, attention_bias=True, use_sliding_window=True, sliding_window=8,
                                     max_window_layers=4, **layers("sfsf"))),
    "smollm3": ("smollm3", dict(num_hidden_layers=4)),
    "smollm3-biases+": ("smollm3", dict(**BIASES, num_hidden_layers=3, no_rope_layer_interval=2,
                                        tie_word_embeddings=False)),
    "olmo2": ("olmo2", dict()),
    "olmo2-bias+": ("olmo2", dict(attention_bias=True, tie_word_embeddings=True, rope_parameters=ROPE["linear"])),
    "olmo3": ("olmo3", dict(sliding_window=8, num_hidden_layers=4)),
    "olmo3-yarn+": ("olmo3", dict(sliding_window=8, attention_bias=True, **layers("sfs"),
                                  **by_kind(ROPE["yarn"], dict(rope_type="default", rope_theta=500.0)))),
    "gemma": ("gemma", dict(head_dim=32)),
    "gemma-bias+": ("gemma", dict(head_dim=16, attention_bias=True, tie_word_embeddings=False)),
    "gemma2": ("gemma2", dict(head_dim=32, query_pre_attn_scalar=24, sliding_window=8, attn_logit_softcapping=2.0,
                              final_logit_softcapping=3.0)),
    "gemma2-bias+": ("gemma2", dict(head_dim=16, attention_bias=True, sliding_window=8, query_pre_attn_scalar=16,
                                    attn_logit_softcapping=None, final_logit_softcapping=None,
                                    tie_word_embeddings=False)),
    "gemma3": ("gemma3_text", dict(head_dim=32, sliding_window=8, query_pre_attn_scalar=24, **layers("sfs"))),
    "gemma3-cap+": ("gemma3_text", dict(head_dim=16, attention_bias=True, sliding_window=8, final_logit_softcapping=3.0,
                                         num_hidden_layers=7,
                                         **by_kind(ROPE["linear"], dict(rope_type="default", rope_theta=50.0)))),
    "phi": ("phi", dict(num_attention_heads=2, num_key_value_heads=1)),
    "phi-quarter+": ("phi", dict(num_attention_heads=2, num_key_value_heads=2, hidden_act="gelu",
                                 partial_rotary_factor=0.25, layer_norm_eps=1e-3)),
    "phi3": ("phi3", dict()),
    "phi3-window+": ("phi3", dict(num_attention_heads=2, num_key_value_heads=1, sliding_window=8,
                                  partial_rotary_factor=0.75, tie_word_embeddings=True)),
    # Sequences are shorter than the length before the scaling, or longer; greedy texts are shorter.
    "phi3-short": ("phi3", longrope(16, 40)),
    "phi3-long+": ("phi3", dict(partial_rotary_factor=0.75, **longrope(12, 30))),
    "stablelm": ("stablelm", dict(num_attention_heads=2, use_qkv_bias=True)),
    "stablelm-parallel+": ("stablelm", dict(num_attention_heads=2, use_parallel_residual=True, num_key_value_heads=1,
                                            partial_rotary_factor=0.5, tie_word_embeddings=True)),
    "starcoder2": ("starcoder2", dict(sliding_window=8)),
    "starcoder2-plain+": ("starcoder2", dict(use_bias=False, tie_word_embeddings=False)),
    "granite": ("granite", dict(embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.1,
                                logits_scaling=3.0)),
    "granite-biases+": ("granite", dict(**BIASES, tie_word_embeddings=True, attention_multiplier=0.25)),
    "gpt_neox": ("gpt_neox", dict(num_attention_heads=2, **NO_GROUPS)),
    "gpt_neox-sequential+": ("gpt_neox", dict(num_attention_heads=2, use_parallel_residual=False, attention_bias=False,
                                              rotary_pct=0.5, tie_word_embeddings=True, **NO_GROUPS)),
    "arcee": ("arcee", dict()),
    "arcee-biases+": ("arcee", dict(**BIASES, tie_word_embeddings=True, head_dim=32, rope_parameters=ROPE["yarn"])),
    "ernie4_5": ("ernie4_5", dict(head_dim=32)),
    "ernie4_5-biases+": ("ernie4_5", dict(head_dim=None, use_bias=True, tie_word_embeddings=False)),
    "exaone4": ("exaone4", dict(sliding_window=8, num_hidden_layers=4)),
    "exaone4-whole+": ("exaone4", dict(sliding_window=None, tie_word_embeddings=True, rope_parameters=ROPE["llama3"],
                                       **layers("ff"))),
    # The window that no block has ends the rotation of all.
    "exaone4-still": ("exaone4", dict(sliding_window=8, **layers("ff"))),
    "glm": ("glm", dict(head_dim=32)),
    "glm-plain+": ("glm", dict(head_dim=24, attention_bias=False, tie_word_embeddings=True, partial_rotary_factor=1.0)),
    "glm4": ("glm4", dict(head_dim=16, attention_bias=False)),
    "glm4-bias+": ("glm4", dict(head_dim=32, attention_bias=True, tie_word_embeddings=True,
                                rope_parameters=dict(**ROPE["yarn"], partial_rotary_factor=0.5))),
    "ministral": ("ministral", dict(sliding_window=8, head_dim=16)),
    "ministral-some+": ("ministral", dict(sliding_window=8, head_dim=32, tie_word_embeddings=True, **layers("sfsf"))),
    "seed_oss": ("seed_oss", dict(head_dim=32, **NO_DROPOUT)),
    "seed_oss-biases+": ("seed_oss", dict(head_dim=None, attention_bias=False, attention_out_bias=True, mlp_bias=True,
                                          tie_word_embeddings=True, **NO_DROPOUT)),
    "mixtral": ("mixtral", dict(num_local_experts=4)),
    "mixtral-window+": ("mixtral", dict(num_local_experts=3, num_experts_per_tok=1, sliding_window=8)),
    # All logits of the routers are equal.
    "mixtral-ties": ("mixtral", dict(num_local_experts=4)),
    "olmoe": ("olmoe", dict(num_experts=6, num_experts_per_tok=3)),
    "qwen3_moe": ("qwen3_moe", dict(num_experts=5, num_experts_per_tok=3, moe_intermediate_size=48, head_dim=24,
                                    norm_topk_prob=True, attention_bias=True, tie_word_embeddings=True)),
    "qwen2_moe": ("qwen2_moe", dict(num_experts=5, num_experts_per_tok=3, moe_intermediate_size=48,
                                    shared_expert_intermediate_size=96)),
    "qwen2_moe-normalised+": ("qwen2_moe", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=40,
                                                shared_expert_intermediate_size=40, norm_topk_prob=True,
                                                qkv_bias=False, tie_word_embeddings=True)),
    "glm4_moe": ("glm4_moe", dict(n_routed_experts=6, num_experts_per_tok=3, moe_intermediate_size=48, head_dim=24,
                                  num_hidden_layers=3, use_qk_norm=True, attention_bias=True,
                                  routed_scaling_factor=2.5)),
    "glm4_moe-plain+": ("glm4_moe", dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=40,
                                         n_shared_experts=2, norm_topk_prob=False, first_k_dense_replace=0,
                                         tie_word_embeddings=True)),
    "gpt_oss": ("gpt_oss", dict(num_local_experts=5, num_experts_per_tok=3, head_dim=24, sliding_window=8,
                                swiglu_limit=0.6, intermediate_size=96, num_hidden_layers=3,
                                rope_parameters=dict(rope_type="yarn", rope_theta=300.0, factor=4.0, truncate=False,
                                                     original_max_position_embeddings=16))),
    "gpt_oss-plain+": ("gpt_oss", dict(num_local_experts=4, num_experts_per_tok=2, head_dim=16, attention_bias=False,
                                       tie_word_embeddings=True, sliding_window=8, rope_parameters=THETA,
                                       **layers("fff"))),
}
# Factors of the losses of routers, and the change of biases per step.
BALANCE, Z, BIAS_RATE = 0.02, 0.003, 0.01


def configuration(case):
    kind, keys = CASES[case]
    keys = {**(GPT2 if kind == "gpt2" else SIZES), **keys}
    return AutoConfig.for_model(kind, **{name: value for name, value in keys.items() if value is not None or
                                         name not in NO_GROUPS})


def make(case, directory):
    torch.manual_seed(len(case))
    model = AutoModelForCausalLM.from_config(configuration(case), attn_implementation="eager").eval()
    with torch.no_grad():
        # Weights are larger than initial ones and biases are not zero, so that every term matters.
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for _, bias in router_biases(model):
            bias.copy_(torch.randn_like(bias) * 0.1)
        if "ties" in case:
            # torch and xlaunch choose other experts of equal logits, which therefore have equal weights.
            for name, parameter in model.named_parameters():
                if ".experts." in name or name.endswith("mlp.gate.weight"):
                    parameter.copy_(parameter[:1].expand_as(parameter).clone())
    if case.endswith("+"):
        biases = [bias.clone() for _, bias in router_biases(model)]
        model.to(torch.bfloat16)
        # They stay in fp32, as in published files.
        for (router, _), bias in zip(router_biases(model), biases, strict=True):
            router.e_score_correction_bias = bias
        model.save_pretrained(directory, max_shard_size="30KB")
    else:
        model.save_pretrained(directory)
    byte_vocabulary.write(pathlib.Path(directory) / "tokenizer.json", VOCAB)


def router_biases(model):
    """Routers with biases, in the order of blocks, and these."""
    return [(module, module.e_score_correction_bias) for module in model.modules()
            if hasattr(module, "e_score_correction_bias")]


def fixture(path):
    """A line per case: its configuration, and the shapes of its tensors."""
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            directory = pathlib.Path(folder) / case
            make(case, directory)
            config = json.loads((directory / "config.json").read_text())
            config.pop("transformers_version")
            lines.append(f"{json.dumps(case)}: {json.dumps({'config': config, 'tensors': shapes(directory)})}")
    pathlib.Path(path).write_text("{\n" + ",\n".join(lines) + "\n}\n")


def tensors(directory):
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        found.update(load_file(path))
    return found


def shapes(directory):
    """Those outside of blocks, and of the first block."""
    first = lambda name: not any(f".{index}." in name for index in range(1, 9))
    return {name: list(tensor.shape) for name, tensor in sorted(tensors(directory).items()) if first(name)}


class Xlaunch:
    def __init__(self, program, folder, device="cpu"):
        self.program, self.folder, self.device, self.stderr = program, folder, device, ""
        self.ids = [(i * i * 31 + 7 * i) % (VOCAB - 3) + 3 for i in range(SEQ + 1)]
        (folder / "ids.bin").write_bytes(array.array("H", self.ids).tobytes())

    def call(self, *words, cwd=None, stdin=None):
        done = subprocess.run([self.program, *map(str, words)], capture_output=True, text=True, cwd=cwd, input=stdin)
        if done.returncode != 0:
            raise AssertionError(f"xlaunch {words[0]}: exit code {done.returncode}: {done.stderr}")
        self.stderr = done.stderr
        return done.stdout

    def run(self, name, init, data, train, more="", seq=SEQ):
        """Trains from `init`, with these keys of [data] and [train] and more sections; returns the loss before each
        step, and the directory of the job."""
        here = self.folder / name
        here.mkdir()
        (here / "train.toml").write_text(
            f'[checkpoint]\ninit = "{init}"\n[model]\nseq = {seq}\n[data]\n{data}\n'
            f'[engine]\ndevice = "{self.device}"\nprecision = "fp32"\n'
            f'[train]\nwarmup = 0\nschedule = "constant"\nsample = 0\neval_every = 0\n{train}\n{more}\n'
        )
        self.call("train.toml", cwd=here)
        lines = [json.loads(line) for line in (here / "runs/train/latest/metrics.jsonl").read_text().splitlines()]
        return [line["train/loss"] for line in lines if "train/loss" in line], here

    def ids_data(self):
        """Returns the keys of [data] for one sequence."""
        return f'train = ["{self.folder}/ids.bin"]\nval = ["{self.folder}/ids.bin"]\ntokenizer = "bin"'

    def train(self, case, init, steps, lr, more="clip = 0\nrouter_bias_rate = 0"):
        """Trains on one sequence, with more keys of [train] and other sections; returns the loss before each step, and
        the directory of the job."""
        decay = "weight_decay = 0\n" if steps == 1 else ""
        keys = f"steps = {steps}\nbatch = 1\nlr = {lr}\n{decay}{more}"
        return self.run(f"{case}-{steps}", init, self.ids_data(), keys)

    def train_nothing(self, case, init):
        """Makes a step that changes no bit. Returns the loss, and the directory of the export."""
        [value], here = self.train(case, init, 1, 1.2e-38)
        out = here / "out"
        self.call("export", "runs/train/latest", "--output", "out",
                  *(["--dtype", "bf16"] if case.endswith("+") else []), cwd=here)
        return value, out

    def generate(self, directory):
        line = self.call("generate", directory, "--prompt", PROMPT, "--device", self.device, "--precision", "fp32",
                         "--temperature", "0", "--max-tokens", TOKENS, "--json")
        return json.loads(line)["text"]


def loss(model, ids):
    ids = torch.tensor([ids])
    return peer.loss(model(ids[:, :-1]).logits, ids[:, 1:])


def router_loss(model, ids):
    """The losses of all routers with their factors; 0 in a dense model."""
    config = model.config
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if not experts:
        return 0.0
    logits = model(torch.tensor([ids[:-1]]), output_router_logits=True).router_logits
    chosen, biases = config.num_experts_per_tok, [bias for _, bias in router_biases(model)]
    if biases:
        balance = sum(biased_loss(layer, bias, chosen) for layer, bias in zip(logits, biases, strict=True))
    else:
        # The library's loss of a balanced load is the number of chosen experts.
        balance = sum(load_balancing_loss_func((layer,), experts, chosen) for layer in logits) / chosen
    return BALANCE * balance + Z * sum(layer.logsumexp(-1).square().mean() for layer in logits)


def biased_loss(logits, bias, chosen):
    """The balance loss of sigmoid scores, which the library does not have. Also moves the biases."""
    scores = logits.sigmoid()
    experts = (scores + bias).topk(chosen).indices.flatten()
    loads = torch.bincount(experts, minlength=len(bias))
    bias += BIAS_RATE * (len(experts) - loads * len(bias)).sign()
    shares = loads / len(experts)
    return len(bias) * (shares * (scores / scores.sum(-1, keepdim=True)).mean(0)).sum()


def compare(xlaunch, case):
    directory = xlaunch.folder / case
    make(case, directory)
    read = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager").eval()
    ids = xlaunch.ids
    with torch.no_grad():
        theirs = loss(read, ids).item()
        exact = loss(read.double(), ids).item()
    # The same bits as before.
    read.float()
    results = []

    def check(what, holds, detail=""):
        results.append((what, holds, detail))

    # Bits.
    first, out = xlaunch.train_nothing(case, directory)
    before, after = tensors(directory), tensors(out)
    different = [name for name in before.keys() | after.keys()
                 if name not in before or name not in after or before[name].shape != after[name].shape
                 or before[name].dtype != after[name].dtype
                 or before[name].contiguous().view(torch.uint8).ne(after[name].contiguous().view(torch.uint8)).any()]
    check("bits", not different, str(sorted(different)[:4]))
    # Strict load without a warning, as the same class.
    with Warnings() as warned:
        loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, dtype=torch.float32)
    wrong = [f"{what}: {names}" for what, names in info.items() if names] + warned.texts
    check("load", not wrong, str(wrong))
    with torch.no_grad():
        again = loss(loaded.eval(), ids).item()
    check("export", abs(again - theirs) <= 1e-6 * abs(theirs), f"{again} after export, {theirs} before")
    # Loss before training.
    tolerance = max(1e-6 * abs(exact), 2 * abs(theirs - exact))
    detail = f"{first} here, {theirs} in transformers, {exact} in double precision"
    check("loss", abs(first - exact) <= tolerance, detail)
    prompt = torch.tensor([byte_vocabulary.encode(PROMPT)])
    greedy = read.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=TOKENS,
                           do_sample=False, pad_token_id=0)[0, prompt.shape[1]:]
    greedy, ours = byte_vocabulary.decode(greedy.tolist()), xlaunch.generate(directory)
    check("greedy", greedy == ours, f"{ours!r} here, {greedy!r} in transformers")
    # Steps.
    trained = read.train()
    optimizer = peer.optimizer(trained, LR)
    expected = []
    for _ in range(STEPS):
        value = loss(trained, ids)
        optimizer.zero_grad()
        (value + router_loss(trained, ids)).backward()
        optimizer.step()
        expected.append(value.item())
    routers = f"clip = 0\nrouter_aux_loss_coef = {BALANCE}\nrouter_z_loss_coef = {Z}\nrouter_bias_rate = {BIAS_RATE}"
    losses, _ = xlaunch.train(case, directory, STEPS, LR, routers)
    distance = max(abs(a - b) for a, b in zip(expected, losses, strict=True))
    check("steps", distance <= 1e-4 * max(map(abs, expected)), f"{distance:.2e} apart: {losses[-1]}, {expected[-1]}")
    for what, holds, detail in results:
        if not holds:
            print(f"{case}: {what} DIFFERENT: {detail}", flush=True)
    good = [what for what, holds, _ in results if holds]
    print(f"{case}: equal: {', '.join(good)}", flush=True)
    return len(good) == len(results)


def other_head(xlaunch, case):
    """The configuration ties head and embedding, but the files have both: the head counts."""
    directory = xlaunch.folder / f"{case}-other-head"
    make(case, directory)
    config = json.loads((directory / "config.json").read_text())
    assert not config["tie_word_embeddings"]
    (directory / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with torch.no_grad():
        theirs = loss(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval(), xlaunch.ids).item()
    [ours], _ = xlaunch.train(f"{case}-other-head", directory, 1, 1.2e-38)
    same = abs(ours - theirs) <= 1e-6 * theirs and "a head of their own" in xlaunch.stderr
    print(f"{case}: other head {'is used' if same else 'DIFFERENT'}: loss {ours} here, {theirs}", flush=True)
    return same


def mxfp4(xlaunch, case):
    """Experts in MXFP4 have the values that transformers decodes, and exports have these."""
    plain, packed = xlaunch.folder / f"{case}-decoded", xlaunch.folder / f"{case}-mxfp4"
    make(case, plain)
    shutil.copytree(plain, packed)
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = dict(quant_method="mxfp4", modules_to_not_convert=["lm_head"])
    (packed / "config.json").write_text(json.dumps(config))
    decoded = tensors(plain)
    files = {}
    for name, tensor in decoded.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            files[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 124, (experts, outputs, inputs // 32), dtype=torch.uint8)
        files |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        decoded[name] = convert_moe_packed_tensors(blocks, scales).float().cpu()
    save_file(decoded, plain / "model.safetensors", {"format": "pt"})
    save_file(files, packed / "model.safetensors", {"format": "pt"})
    with torch.no_grad():
        theirs = loss(AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval(), xlaunch.ids).item()
    ours, out = xlaunch.train_nothing(f"{case}-mxfp4", packed)
    exported, written = tensors(out), json.loads((out / "config.json").read_text())
    same = abs(ours - theirs) <= 1e-6 * theirs and "quantization_config" not in written
    # The step moves zeros by less than any other number would change.
    equal = lambda name: torch.allclose(decoded[name], exported[name], rtol=0, atol=1e-30)
    same &= decoded.keys() == exported.keys() and all(map(equal, decoded))
    print(f"{case}: MXFP4 {'is decoded' if same else 'DIFFERENT'}: loss {ours} here, {theirs}", flush=True)
    return same


def all_hold(xlaunch, comparison, cases):
    """Compares all cases, also after one that fails."""
    failed = 0
    for case in cases:
        try:
            failed += not comparison(xlaunch, case)
        except AssertionError as error:
            failed += 1
            print(f"{case}: FAILED: {error}", flush=True)
    return failed == 0


def run_comparison(description, comparison, cases, prepare=lambda xlaunch: None):
    """Compares all cases in a directory of their own, and ends with the exit code."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="compare only these cases")
    parser.add_argument("--xlaunch", required=True)
    options = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        xlaunch = Xlaunch(options.xlaunch, pathlib.Path(folder))
        prepare(xlaunch)
        sys.exit(not all_hold(xlaunch, comparison, options.names or cases))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["compare", "fixture"])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--xlaunch")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    if options.command == "fixture":
        fixture(options.names[0])
        return
    with tempfile.TemporaryDirectory() as folder:
        xlaunch = Xlaunch(options.xlaunch, pathlib.Path(folder), options.device)
        hold = all([other_head(xlaunch, case) for case in ("llama", "gpt_neox")] if not options.names else [])
        hold &= bool(options.names) or mxfp4(xlaunch, "gpt_oss")
        hold &= all_hold(xlaunch, compare, options.names or CASES)
    sys.exit(not hold)


if __name__ == "__main__":
    main()
