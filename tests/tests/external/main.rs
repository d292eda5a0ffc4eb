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
    // The longest test first, then the one with the most requirements, which the others share.
    modules systemd, tuning, exported, generate, manifests, serve, tokens, torch, trackers, transformers;
}
