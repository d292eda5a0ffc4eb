"""Train a small network with Hugging Face Accelerate, which reads the same environment.

    xlaunch --nproc-per-node 2 examples/accelerate_script.py      # in place of `accelerate launch`
"""

import os

import torch
from accelerate import Accelerator


def main():
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x = torch.randn(4096, 16)
    data = torch.utils.data.TensorDataset(x, x.square().sum(dim=1, keepdim=True))
    loader = torch.utils.data.DataLoader(data, batch_size=64, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for epoch in range(3):
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        mean = accelerator.reduce(loss.detach(), "mean")
        accelerator.print(f"epoch {epoch}  loss {mean.item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
    # Without the interpreter's cleanup: a thread of Gloo that releases its last tensor during it aborts the process
    # (pytorch/pytorch#179291).
    os._exit(0)
