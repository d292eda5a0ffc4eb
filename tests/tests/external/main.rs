//! xlaunch with the software of others: PyTorch's scripts and torchrun, systemd and dpkg.

#![expect(clippy::unwrap_used, reason = "tests")]

mod generate;
mod systemd;
mod torch;

xlaunch_harness::suite! {
    modules generate, systemd, torch;
}
