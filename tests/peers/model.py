"""The models of xlaunch in PyTorch, with the same parameter names: for goldens and comparisons."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def rotate(x, cos, sin):
    """Rotary position embedding on pairs (i, i + D/2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def frequencies(c):
    """Returns the angle per position of each pair, with Llama 3's scaling if the model has it."""
    width = c.get("head_dim", c["dim"] // c["heads"])
    plain = c.get("rope_theta", 10000.0) ** (-torch.arange(0, width, 2).float() / width)
    if not (scaling := c.get("rope_scaling")):
        return plain
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * plain / scaling["factor"] + smooth * plain


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        dim, llama = c["dim"], c["arch"] == "llama"
        self.heads, self.kv_heads, self.llama = c["heads"], c.get("kv_heads", c["heads"]), llama
        self.width, eps = c.get("head_dim", dim // self.heads), c.get("norm_eps", 1e-5)
        norm = (lambda: nn.RMSNorm(dim, eps=eps)) if llama else (lambda: nn.LayerNorm(dim, eps=eps))
        self.ln1, self.ln2 = norm(), norm()
        self.qkv = nn.Linear(dim, (self.heads + 2 * self.kv_heads) * self.width, bias=not llama)
        self.proj = nn.Linear(self.heads * self.width, dim, bias=not llama)
        self.fc = nn.Linear(dim, (2 if llama else 1) * c["ffn"], bias=not llama)
        self.out = nn.Linear(c["ffn"], dim, bias=not llama)

    def forward(self, x, cos, sin):
        B, T, _ = x.shape
        kv = self.kv_heads * self.width
        q, k, v = self.qkv(self.ln1(x)).split([self.heads * self.width, kv, kv], dim=2)
        q = q.view(B, T, self.heads, self.width).transpose(1, 2)
        k, v = (t.view(B, T, self.kv_heads, self.width).transpose(1, 2) for t in (k, v))
        if self.llama:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        gqa = {"enable_gqa": True} if self.kv_heads != self.heads else {}
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, **gqa)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, self.heads * self.width))
        h = self.fc(self.ln2(x))
        if self.llama:
            gate, up = h.chunk(2, dim=-1)
            h = F.silu(gate) * up
        else:
            h = F.gelu(h, approximate="tanh")
        return x + self.out(h)


class GPT(nn.Module):
    """c: arch, layers, heads, dim, ffn, seq, vocab, tied; optional: kv_heads, head_dim, norm_eps, rope_theta,
    rope_scaling (Llama 3's)."""

    def __init__(self, c):
        super().__init__()
        dim, self.llama = c["dim"], c["arch"] == "llama"
        self.wte = nn.Embedding(c["vocab"], dim)
        self.wpe = None if self.llama else nn.Embedding(c["seq"], dim)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c["layers"]))
        eps = c.get("norm_eps", 1e-5)
        self.lnf = nn.RMSNorm(dim, eps=eps) if self.llama else nn.LayerNorm(dim, eps=eps)
        self.head = nn.Linear(dim, c["vocab"], bias=False)
        if c["tied"]:
            self.head.weight = self.wte.weight
        frequency = frequencies(c)
        angle = torch.outer(torch.arange(c["seq"]).float(), frequency)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                std = 0.02 / math.sqrt(2 * c["layers"]) if name.endswith(("proj.weight", "out.weight")) else 0.02
                nn.init.normal_(p, 0.0, std)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, tokens):
        x = self.wte(tokens)
        if not self.llama:
            x = x + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        T = tokens.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:T], self.sin[:T])
        return self.head(self.lnf(x))


def loss(logits, targets):
    return F.cross_entropy(logits.reshape(-1, logits.size(-1)).float() if logits.dtype != torch.float64
                           else logits.reshape(-1, logits.size(-1)), targets.reshape(-1).long())


def optimizer(model, lr, weight_decay=0.1, **more):
    """Returns AdamW with weight decay on matrices only."""
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() == 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() != 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, **more)
