//! xlaunch with the software of others: PyTorch's scripts and torchrun, Hugging Face's models, systemd and dpkg.

#![expect(clippy::unwrap_used, reason = "tests")]

mod generate;
mod systemd;
mod torch;
mod transformers;

xlaunch_harness::suite! {
    modules generate, systemd, torch, transformers;
}
