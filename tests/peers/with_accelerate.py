"""A small training script with Accelerate, which reads the environment that torchrun sets. Prints every loss."""

import os

import torch
from accelerate import Accelerator


def main():
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(64, 8, generator=generator)
    data = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step, (inputs, targets) in enumerate(loader):
        loss = (model(inputs) - targets).pow(2).mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        mean = accelerator.reduce(loss.detach(), "mean")
        if accelerator.is_main_process:
            print(f"step {step} ranks {accelerator.num_processes} loss {mean.item():.9e}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
    # Exit without the interpreter's cleanup: a thread of Gloo that releases its last tensor during cleanup aborts the
    # process (pytorch/pytorch#179291).
    os._exit(0)
