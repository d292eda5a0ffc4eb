"""The models of xlaunch in PyTorch, with the same parameter names: for goldens and comparisons."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


# The keys of `[model]` in which the families differ, with their values for llama and gpt2.
LLAMA = dict(
    norm="rms", norm_eps=1e-5, norm_place="pre", norm_offset=False, qk_norm="none", qkv_bias=False,
    attention_bias=False, mlp_bias=False, head_bias=False, activation="silu", gated=True, parallel="no",
    positions="rotary", rope_theta=1e4, rope_scaling=None, rope_fraction=1.0, no_rope_every=0, window=0,
    window_pattern=0, windowed_rope_theta=0.0, attention_softcap=0.0, logit_softcap=0.0, query_scale=0.0,
    embedding_scale=1.0, residual_scale=1.0, logit_scale=1.0, experts=0, experts_per_token=2, expert_ffn=0,
    router="softmax", normalise=True, dense_layers=0, glu_limit=0.0, glu_offset=0.0, attention_sinks=False,
    router_logit_bias=False,
)
GPT2 = LLAMA | dict(
    norm="layer", qkv_bias=True, attention_bias=True, mlp_bias=True, activation="gelu_tanh", gated=False,
    positions="learned",
)
ACTIVATIONS = dict(
    silu=F.silu, gelu=F.gelu, gelu_tanh=lambda x: F.gelu(x, approximate="tanh"), relu2=lambda x: F.relu(x).square(),
    quick_gelu=lambda x: x * torch.sigmoid(1.702 * x),
)


# Factors of the losses of routers: the defaults of `[train]`.
AUX_LOSS, Z_LOSS = 0.01, 0.001


def rotate(x, cos, sin):
    """Rotary position embedding on pairs (i, i + D/2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def softcap(x, cap):
    return cap * torch.tanh(x / cap) if cap else x


def rotary(c, windowed):
    """Returns cosines and sines [T, D/2]. Pairs beyond the rotated fraction of a head have the angle 0."""
    width = int(c["head_dim"] * c["rope_fraction"]) // 2 * 2
    theta, scaling, factor = c["rope_theta"], c["rope_scaling"], 1.0
    if windowed and c["windowed_rope_theta"]:
        theta, scaling = c["windowed_rope_theta"], None
    kind = scaling and scaling.get("rope_type", "llama3")
    if kind == "dynamic" and c["seq"] > scaling["original_max_position_embeddings"]:
        stretch = scaling["factor"] * c["seq"] / scaling["original_max_position_embeddings"] - scaling["factor"] + 1
        theta *= stretch ** (width / (width - 2))
    plain = theta ** (-torch.arange(0, width, 2).float() / width)
    if kind == "linear":
        plain = plain / scaling["factor"]
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
        smooth = ((turns - low) / (high - low)).clamp(0, 1)
        plain = (1 - smooth) * plain / scaling["factor"] + smooth * plain
    if kind == "yarn":
        # The pair whose wavelength fits `turns` times into the original context.
        original = scaling["original_max_position_embeddings"]
        pair = lambda turns: width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
        low, high = max(math.floor(pair(32)), 0), min(math.ceil(pair(1)), width - 1)
        stretched = ((torch.arange(width // 2) - low) / (high - low + (0.001 if high == low else 0))).clamp(0, 1)
        plain = plain / scaling["factor"] * stretched + plain * (1 - stretched)
        factor = 0.1 * math.log(scaling["factor"]) + 1
    angle = torch.outer(torch.arange(c["seq"]).float(), plain)
    still = (0, c["head_dim"] // 2 - width // 2)
    return F.pad(angle.cos() * factor, still, value=1.0), F.pad(angle.sin() * factor, still)


class RMSNorm(nn.Module):
    """RMSNorm whose weight is relative to 1."""

    def __init__(self, dim, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(dim)), eps

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], 1 + self.weight, self.eps)


def make_norm(c, dim, rms=False):
    if c["norm"] == "layer" and not rms:
        return nn.LayerNorm(dim, eps=c["norm_eps"])
    return (RMSNorm if c["norm_offset"] else nn.RMSNorm)(dim, eps=c["norm_eps"])


GROUPED_MM = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def grouped(x, weight, offsets):
    """Multiplies the rows up to each offset by a matrix of their own, [E, O, I]."""
    if x.is_cuda:
        return GROUPED_MM(x.bfloat16(), weight.bfloat16().transpose(1, 2), offs=offsets)
    counts = offsets.diff(prepend=offsets.new_zeros(1)).tolist()
    return torch.cat([rows @ matrix.mT for rows, matrix in zip(x.split(counts), weight)])


class Matrices(nn.Module):
    """The weights of a layer of each expert, and its biases."""

    def __init__(self, *shape, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape[:2])) if bias else None

    def forward(self, x, experts, offsets):
        y = grouped(x, self.weight, offsets)
        return y if self.bias is None else y + self.bias[experts].to(y.dtype)


class Block(nn.Module):
    def __init__(self, c, index):
        super().__init__()
        self.has_experts = c["experts"] > 0 and index >= c["dense_layers"]
        self.c, dim, width = c, c["dim"], c["head_dim"]
        is_multiple = lambda every: every and (index + 1) % every == 0
        self.window = 0 if is_multiple(c["window_pattern"]) else c["window"]
        self.rotates = c["positions"] == "rotary" and not is_multiple(c["no_rope_every"])
        heads, kv_heads = c["heads"], c["kv_heads"]
        pre, post = c["norm_place"] != "post", c["norm_place"] != "pre"
        self.ln1 = make_norm(c, dim) if pre else None
        self.ln2 = make_norm(c, dim) if pre and c["parallel"] != "shared_norm" else None
        self.post1, self.post2 = (make_norm(c, dim) if post else None for _ in range(2))
        self.qkv = nn.Linear(dim, (heads + 2 * kv_heads) * width, bias=c["qkv_bias"])
        sizes = dict(head=(width, width), full=(heads * width, kv_heads * width)).get(c["qk_norm"])
        self.q_norm, self.k_norm = (make_norm(c, size, rms=True) for size in sizes) if sizes else (None, None)
        self.proj = nn.Linear(heads * width, dim, bias=c["attention_bias"])
        self.sinks = nn.Parameter(torch.zeros(heads)) if c["attention_sinks"] else None
        if self.has_experts:
            count, ffn = c["experts"], c["expert_ffn"] or c["ffn"]
            self.router = nn.Linear(dim, count, bias=c["router_logit_bias"])
            self.fc = Matrices(count, 2 * ffn, dim, bias=c["mlp_bias"])
            self.out = Matrices(count, dim, ffn, bias=c["mlp_bias"])
            return
        self.fc = nn.Linear(dim, (2 if c["gated"] else 1) * c["ffn"], bias=c["mlp_bias"])
        self.out = nn.Linear(c["ffn"], dim, bias=c["mlp_bias"])

    def attention(self, x, rope):
        c, (B, T, _), width = self.c, x.shape, self.c["head_dim"]
        kv = c["kv_heads"] * width
        q, k, v = self.qkv(x).split([c["heads"] * width, kv, kv], dim=2)
        if c["qk_norm"] == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q = q.view(B, T, c["heads"], width).transpose(1, 2)
        k, v = (t.view(B, T, c["kv_heads"], width).transpose(1, 2) for t in (k, v))
        if c["qk_norm"] == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotates:
            q, k = (rotate(t, *rope[1 if self.window else 0]) for t in (q, k))
        scale = c["query_scale"] or width**-0.5
        gqa = {"enable_gqa": True} if c["kv_heads"] != c["heads"] else {}
        positions = torch.arange(T, device=x.device)
        distance = positions[:, None] - positions
        seen = (distance >= 0) & (distance < (self.window or T))
        if not c["attention_softcap"] and self.sinks is None:
            mask = {"attn_mask": seen} if 0 < self.window < T else {"is_causal": True}
            y = F.scaled_dot_product_attention(q, k, v, scale=scale, **mask, **gqa)
        else:
            k, v = (t.repeat_interleave(c["heads"] // c["kv_heads"], dim=1) for t in (k, v))
            scores = softcap(q @ k.mT * scale, c["attention_softcap"]).masked_fill(~seen, -math.inf)
            if self.sinks is not None:
                scores = torch.cat([scores, self.sinks.to(scores.dtype).view(-1, 1, 1).expand(B, -1, T, 1)], -1)
            y = scores.softmax(-1)[..., :T] @ v
        return self.proj(y.transpose(1, 2).reshape(B, T, c["heads"] * width))

    def gated(self, h):
        gate, up = h.chunk(2, dim=-1)
        if limit := self.c["glu_limit"]:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        f, offset = ACTIVATIONS[self.c["activation"]], self.c["glu_offset"]
        return f(gate) * (up + offset if offset else up)

    def mlp(self, x):
        h = self.fc(x)
        return self.out(self.gated(h) if self.c["gated"] else ACTIVATIONS[self.c["activation"]](h))

    def experts(self, x):
        """Returns the output, the balance loss and the z loss. Rows are sorted by expert, and none is dropped."""
        c, shape, count, chosen = self.c, x.shape, self.c["experts"], self.c["experts_per_token"]
        x = x.reshape(-1, c["dim"])
        with torch.autocast(x.device.type, enabled=False):
            wide = torch.promote_types(x.dtype, torch.float32)
            logits = x.to(wide) @ self.router.weight.to(wide).t()
            logits = logits if self.router.bias is None else logits + self.router.bias.to(wide)
        scores = logits.softmax(-1) if c["router"] == "softmax" else logits.sigmoid()
        weights, experts = scores.topk(chosen, -1)
        if c["normalise"]:
            weights = weights / weights.sum(-1, keepdim=True)
        order = experts.flatten().argsort(stable=True)
        loads = torch.zeros(count, dtype=torch.int32, device=x.device).scatter_add_(
            0, experts.flatten(), torch.ones_like(order, dtype=torch.int32))
        offsets = loads.cumsum(0, dtype=torch.int32)
        sorted_experts = experts.flatten()[order]
        a = self.gated(self.fc(x[order // chosen], sorted_experts, offsets))
        y = self.out(a, sorted_experts, offsets)
        y = (y * weights.flatten()[order, None].to(y.dtype)).to(wide)
        out = torch.zeros(x.shape, dtype=wide, device=x.device).index_add_(0, order // chosen, y).to(x.dtype)
        probabilities = scores / scores.sum(-1, keepdim=True)
        balance = count * (loads / order.numel() * probabilities.mean(0)).sum()
        return out.reshape(shape), balance, logits.logsumexp(-1).square().mean()

    def forward(self, x, rope):
        if self.has_experts:
            through = lambda norm, x: norm(x) if norm is not None else x
            x = x + through(self.post1, self.attention(through(self.ln1, x), rope))
            y, balance, z = self.experts(through(self.ln2, x))
            return x + through(self.post2, y), AUX_LOSS * balance + Z_LOSS * z
        through = lambda norm, x: norm(x) if norm is not None else x
        scaled = lambda branch: branch if self.c["residual_scale"] == 1 else self.c["residual_scale"] * branch
        y = through(self.ln1, x)
        attention = through(self.post1, self.attention(y, rope))
        if self.c["parallel"] == "no":
            x = x + scaled(attention)
            return x + scaled(through(self.post2, self.mlp(through(self.ln2, x))))
        return x + scaled(attention + self.mlp(self.ln2(x) if self.ln2 is not None else y))


class GPT(nn.Module):
    """c: the keys of `[model]`: arch (gpt2 or llama), layers, heads, dim, ffn, seq, vocab, tied; optional: kv_heads,
    head_dim, and those above. `rope_scaling` without a type is Llama 3's."""

    def __init__(self, c):
        super().__init__()
        derived = dict(kv_heads=c["heads"], head_dim=c["dim"] // c["heads"])
        c = derived | (LLAMA if c["arch"] == "llama" else GPT2) | c
        self.c, dim = c, c["dim"]
        self.wte = nn.Embedding(c["vocab"], dim)
        self.wpe = nn.Embedding(c["seq"], dim) if c["positions"] == "learned" else None
        self.blocks = nn.ModuleList(Block(c, index) for index in range(c["layers"]))
        self.lnf = make_norm(c, dim)
        self.head = nn.Linear(dim, c["vocab"], bias=c["head_bias"])
        if c["tied"]:
            self.head.weight = self.wte.weight
        for name, windowed in (("", False), ("windowed_", True)):
            cos, sin = rotary(c, windowed)
            self.register_buffer(name + "cos", cos, persistent=False)
            self.register_buffer(name + "sin", sin, persistent=False)
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif p.dim() >= 2:
                std = 0.02 / math.sqrt(2 * c["layers"]) if name.endswith(("proj.weight", "out.weight")) else 0.02
                nn.init.normal_(p, 0.0, std)

    def forward(self, tokens, with_routers=False):
        """Returns the logits; with routers, also the sum of their losses with their factors."""
        c, T = self.c, tokens.shape[1]
        x = self.wte(tokens)
        if c["embedding_scale"] != 1:
            x = x * (c["embedding_scale"] or c["dim"] ** 0.5)
        if self.wpe is not None:
            x = x + self.wpe(torch.arange(T, device=tokens.device))
        rope = (self.cos[:T], self.sin[:T]), (self.windowed_cos[:T], self.windowed_sin[:T])
        routers = 0.0
        for block in self.blocks:
            if block.has_experts:
                x, added = block(x, rope)
                routers = routers + added
            else:
                x = block(x, rope)
        x = self.lnf(x)
        logits = softcap(self.head(x * c["logit_scale"] if c["logit_scale"] != 1 else x), c["logit_softcap"])
        return (logits, routers) if with_routers else logits


def loss(logits, targets):
    return F.cross_entropy(logits.reshape(-1, logits.size(-1)).float() if logits.dtype != torch.float64
                           else logits.reshape(-1, logits.size(-1)), targets.reshape(-1).long())


def optimizer(model, lr, weight_decay=0.1, **more):
    """Returns AdamW with weight decay on matrices only."""
    # Biases of all experts are one matrix.
    is_matrix = {p: p.dim() >= 2 and not name.endswith("bias") for name, p in model.named_parameters()}
    groups = [
        {"params": [p for p in is_matrix if is_matrix[p]], "weight_decay": weight_decay},
        {"params": [p for p in is_matrix if not is_matrix[p]], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, **more)
