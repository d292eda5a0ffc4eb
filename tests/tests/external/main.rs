//! xlaunch with third-party software: PyTorch's scripts and torchrun, tokenizers, Hugging Face's models, PEFT and trl,
//! systemd, dpkg and the schemas of Kubernetes.

#![expect(clippy::unwrap_used, reason = "tests")]

mod exported;
mod generate;
mod manifests;
mod serve;
mod systemd;
mod tokens;
mod torch;
mod trackers;
mod transformers;
mod tuning;

xlaunch_harness::suite! {
    threads_per_core 2;
    modules exported, generate, manifests, serve, systemd, tokens, torch, trackers, transformers, tuning;
}
