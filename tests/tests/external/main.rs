//! xlaunch with the software of others: PyTorch's scripts and torchrun, tokenizers, systemd and dpkg.

#![expect(clippy::unwrap_used, reason = "tests")]

mod systemd;
mod tokens;
mod torch;

xlaunch_harness::suite! {
    modules systemd, tokens, torch;
}
