"""A small training script with Lightning, which detects the environment that torchrun sets. Prints every loss."""

import os
import warnings

import lightning
import torch

warnings.filterwarnings("ignore")


class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, step):
        inputs, targets = batch
        loss = (self.layer(inputs) - targets).pow(2).mean()
        mean = self.all_gather(loss.detach()).mean()
        if self.trainer.is_global_zero:
            print(f"step {step} ranks {self.trainer.world_size} loss {mean.item():.9e}", flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def main():
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(64, 8, generator=generator)
    data = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Line(), torch.utils.data.DataLoader(data, batch_size=4))


if __name__ == "__main__":
    main()
    # Exit without the interpreter's cleanup: a thread of Gloo that releases its last tensor during cleanup aborts the
    # process (pytorch/pytorch#179291).
    os._exit(0)
