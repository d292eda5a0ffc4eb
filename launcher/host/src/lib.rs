//! One machine: its processes, sockets, GPUs and libraries. Shared by the agent, the cluster and the daemon.
//!
//! - [`process`]: snapshots from `/proc`; [`cgroups`]: those of this process; [`signals`]: signals to this process;
//! - [`spawn`]: starts, watches and kills the process trees of workers;
//! - [`net`]: unix sockets of servers, credentials of their clients, and limits on connections;
//! - [`network`]: addresses and interfaces of this host;
//! - [`devices`]: GPUs, and the placement of workers on them; [`doctor`]: their health; [`gpu_clocks`]: their clocks;
//! - [`libraries`]: CUDA libraries for the workers; [`memory`]: free memory;
//! - [`clock`]: wall-clock time and time since boot;
//! - [`naming`], [`escape`], [`redact`]: text from outside, made into file names, safe to print, and free of secrets;
//! - [`system_errors`]: advice for errors of system calls; [`task_limit`]: the limit that refuses a thread or process.
//!
//! This crate never calls CUDA: GPUs and their usage are read through NVML, which is loaded at run time.
#![deny(unsafe_code)]

pub mod cgroups;
pub mod clock;
pub mod devices;
pub mod doctor;
pub mod escape;
pub mod gpu_clocks;
pub mod libraries;
pub mod memory;
pub mod naming;
pub mod net;
pub mod network;
pub mod process;
pub mod redact;
pub mod signals;
pub mod spawn;
pub mod system_errors;
pub mod task_limit;
