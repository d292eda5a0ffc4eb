"""Compares training with Muon to `torch.optim.Muon` and AdamW on the same models of transformers, in fp32 on the CPU.

    python3 tests/peers/muon.py --xlaunch PATH     # needs torch 2.9, transformers

torch computes the orthogonal factor in bf16 with five equal steps; here it has this trainer's coefficients and fp32, so
that everything else can be compared closely: momentum, decay, learning rates, and which matrices there are.
NorMuon, which torch does not have, is below, after "NorMuon", Li et al., 2025.

Prints a line for each case that holds; exit code 1 if one does not.
"""


import torch
from torch.optim import _muon
from transformers import AutoModelForCausalLM

from model_families import loss, make, run_comparison

STEPS, LR, BETA2, MUON_LR = 50, 1e-3, 0.9, {"original": 1e-2, "match_rms_adamw": 1e-3}
# "The Polar Express", Amsel et al., 2025.
COEFFICIENTS = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]


def orthogonal(grad, _coefficients, _steps, eps):
    x = grad.T if grad.size(0) > grad.size(1) else grad
    x = x / (1.02 * x.norm() + eps)
    for a, b, c in COEFFICIENTS:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if grad.size(0) > grad.size(1) else x


class NorMuon(torch.optim.Optimizer):
    """Muon whose rows are divided by the root of a moving average of their mean squares, with the same norm."""

    def __init__(self, matrices, lr, weight_decay, momentum, adjust_lr_fn):
        super().__init__(matrices, dict(lr=lr, weight_decay=weight_decay, momentum=momentum))
        self.adjust_lr_fn = adjust_lr_fn

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            lr, decay, beta = group["lr"], group["weight_decay"], group["momentum"]
            for matrix in group["params"]:
                state = self.state[matrix]
                if not state:
                    state["momentum"], state["rows"] = torch.zeros_like(matrix), torch.zeros(len(matrix), 1)
                state["momentum"].lerp_(matrix.grad, 1 - beta)
                update = orthogonal(matrix.grad.lerp(state["momentum"], beta), None, None, 1e-7)
                state["rows"].lerp_(update.square().mean(1, keepdim=True), 1 - BETA2)
                scaled = update / (state["rows"].sqrt() + 1e-8)
                scaled *= update.norm() / scaled.norm()
                rate = _muon._adjust_lr(lr, self.adjust_lr_fn, matrix.shape)
                matrix.mul_(1 - lr * decay).sub_(scaled, alpha=rate)


def losses_of_torch(directory, ids, adjust_lr, muon):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").train()
    matrices, others = [], {True: [], False: []}
    for name, tensor in model.named_parameters():
        if tensor.ndim == 2 and ".layers." in name:
            matrices.append(tensor)
        else:
            others[tensor.ndim == 2].append(tensor)
    groups = [dict(params=others[True], weight_decay=0.1), dict(params=others[False], weight_decay=0.0)]
    optimizers = [
        torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8),
        muon(matrices, lr=MUON_LR[adjust_lr], weight_decay=0.05, momentum=0.95, adjust_lr_fn=adjust_lr),
    ]
    values = []
    for _ in range(STEPS):
        value = loss(model, ids)
        model.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        values.append(value.item())
    return values


def compare(xlaunch, case):
    family, adjust_lr, muon = case.split(", ")
    directory = xlaunch.folder / f"{family}-{adjust_lr}-{muon}"
    make(family, directory)
    keys = (f'clip = 1\noptimizer = "muon"\n[muon]\nlr = {MUON_LR[adjust_lr]}\nweight_decay = 0.05\n'
            f'cautious = false\nadjust_lr = "{adjust_lr}"\nnormuon = {str(muon == "normuon").lower()}\nbeta2 = {BETA2}')
    ours, _ = xlaunch.train(f"{family}-{adjust_lr}-{muon}-trained", directory, STEPS, LR, keys)
    optimizer = NorMuon if muon == "normuon" else torch.optim.Muon
    theirs = losses_of_torch(directory, xlaunch.ids, adjust_lr, optimizer)
    distance = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    holds = distance <= 1e-4 * max(theirs) and theirs[-1] < 0.7 * theirs[0]
    print(f"{case}: {'equal' if holds else 'DIFFERENT'}: {distance:.1e} apart, from {theirs[0]:.4f} to "
          f"{theirs[-1]:.4f}", flush=True)
    return holds


def main():
    _muon._zeropower_via_newtonschulz = orthogonal
    cases = [f"{family}, {adjust_lr}, muon" for family in ("llama", "qwen3", "olmo2") for adjust_lr in MUON_LR]
    cases += [f"{family}, match_rms_adamw, normuon" for family in ("llama", "qwen3")]
    run_comparison(__doc__, compare, cases)


if __name__ == "__main__":
    main()
