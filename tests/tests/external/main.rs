//! xlaunch with the software of others: PyTorch's scripts and torchrun, tokenizers, Hugging Face's models, systemd and
//! dpkg.

#![expect(clippy::unwrap_used, reason = "tests")]

mod generate;
mod systemd;
mod tokens;
mod torch;
mod transformers;

xlaunch_harness::suite! {
    modules generate, systemd, tokens, torch, transformers;
}
