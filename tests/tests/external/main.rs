//! xlaunch with third-party software: PyTorch's scripts and torchrun, tokenizers, Hugging Face's models and PEFT,
//! systemd, dpkg and the schemas of Kubernetes.

#![expect(clippy::unwrap_used, reason = "tests")]

mod exported;
mod generate;
mod lora;
mod manifests;
mod systemd;
mod tokens;
mod torch;
mod trackers;
mod transformers;

xlaunch_harness::suite! {
    threads_per_core 2;
    modules exported, generate, lora, manifests, systemd, tokens, torch, trackers, transformers;
}
