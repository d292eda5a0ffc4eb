"""Writes worker/tests/goldens/*.safetensors: PyTorch's results for tiny models in double precision.

    python tests/peers/goldens.py [NAME...]    # needs torch and safetensors

Contents, F32 (ids I32): param.<name>, tokens, targets [B,T], logits [B,T,V], loss [1], grad.<name>; then three AdamW
steps (lr 1e-3, betas 0.9 and 0.95, eps 1e-8, weight decay 0.1 on matrices, clipping at 1.0) on step_tokens,
step_targets [3,B,T]: step_losses, step_norms [3], after.<name>.
"""

import pathlib
import sys

import torch
from safetensors.torch import save_file

from model import GPT, loss, optimizer

SIZES = dict(layers=2, heads=4, dim=32, ffn=48, seq=16, vocab=61)
MODELS = {
    "gpt2": dict(arch="gpt2", tied=True, **SIZES),
    "llama": dict(arch="llama", tied=False, **SIZES),
    "llama_gqa": dict(arch="llama", tied=True, kv_heads=2, **SIZES),
    "llama_wide": dict(arch="llama", tied=False, kv_heads=2, head_dim=16, norm_eps=1e-3, rope_theta=500.0,
                       rope_scaling=dict(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                         original_max_position_embeddings=32), **SIZES),
    "head_norms": dict(arch="llama", tied=True, kv_heads=2, head_dim=16, qk_norm="head", qkv_bias=True,
                       attention_bias=True, mlp_bias=True, no_rope_every=2,
                       rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=8), **SIZES),
    "post_norms": dict(arch="llama", tied=False, kv_heads=2, norm_place="post", qk_norm="full", activation="gelu",
                       rope_scaling=dict(rope_type="linear", factor=2.0), **SIZES),
    "windows": dict(arch="llama", tied=True, kv_heads=1, norm_place="both", norm_offset=True, qk_norm="head",
                    activation="gelu_tanh", window=5, window_pattern=2, rope_theta=500.0, windowed_rope_theta=50.0,
                    attention_softcap=3.0, logit_softcap=2.0, query_scale=0.5, embedding_scale=0.0, **SIZES),
    "two_norms": dict(arch="gpt2", tied=False, positions="rotary", parallel="two_norms", rope_fraction=0.5,
                      activation="gelu", rope_scaling=dict(rope_type="dynamic", factor=2.0,
                                                           original_max_position_embeddings=8), **SIZES),
    "shared_norm": dict(arch="gpt2", tied=False, positions="rotary", parallel="shared_norm", head_bias=True,
                        qkv_bias=False, activation="relu2", **SIZES),
    "factors": dict(arch="llama", tied=True, embedding_scale=3.0, residual_scale=0.4, query_scale=0.2,
                    logit_scale=0.3, attention_bias=True, mlp_bias=True, **SIZES),
    "sinks": dict(arch="llama", tied=False, kv_heads=2, attention_sinks=True, qkv_bias=True, attention_bias=True,
                  mlp_bias=True, activation="quick_gelu", glu_limit=0.3, glu_offset=1.0, window=5, window_pattern=2,
                  experts=6, experts_per_token=3, router_logit_bias=True, **SIZES),
}
B, T, V = 2, SIZES["seq"], SIZES["vocab"]


def golden(config):
    generator = torch.Generator().manual_seed(7)
    torch.manual_seed(7)
    model = GPT(config)
    # Weights are larger than initial ones, so that every term matters; rounded to F32, because they are stored as F32.
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.1)
    model.double()
    for name in ("cos", "sin", "windowed_cos", "windowed_sin"):
        # xlaunch stores the RoPE table in F32.
        setattr(model, name, getattr(model, name).float().double())
    ids = lambda *shape: torch.randint(0, V, shape, generator=generator)
    tokens, targets = ids(B, T), ids(B, T)
    step_tokens, step_targets = ids(3, B, T), ids(3, B, T)

    named = lambda: {n: p for n, p in model.named_parameters()}
    out = {f"param.{n}": p.detach().clone() for n, p in named().items()}
    logits = model(tokens)
    value = loss(logits, targets)
    value.backward()
    out |= {"logits": logits.detach(), "loss": value.detach().reshape(1)}
    out |= {f"grad.{n}": p.grad.clone() for n, p in named().items()}

    opt, losses, norms = optimizer(model, 1e-3), [], []
    for x, y in zip(step_tokens, step_targets):
        opt.zero_grad()
        value = loss(model(x), y)
        value.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        opt.step()
        losses.append(value.detach())
    out |= {"step_losses": torch.stack(losses), "step_norms": torch.stack(norms)}
    out |= {f"after.{n}": p.detach().clone() for n, p in named().items()}
    out = {name: tensor.float().contiguous() for name, tensor in out.items()}
    ints = {"tokens": tokens, "targets": targets, "step_tokens": step_tokens, "step_targets": step_targets}
    return out | {name: tensor.int().contiguous() for name, tensor in ints.items()}


if __name__ == "__main__":
    folder = pathlib.Path(__file__).parents[2] / "worker/tests/goldens"
    folder.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:] or MODELS:
        save_file(golden(MODELS[name]), folder / f"{name}.safetensors")
        print(folder / f"{name}.safetensors")
