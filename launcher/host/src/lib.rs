//! One machine: its processes, sockets, GPUs and libraries. Shared by the agent and the daemon.
//!
//! - [`process`] reads `/proc`; [`spawn`] starts, watches and kills process trees; [`signals`] to this process;
//! - [`net`]: credentials of peers and limits on connections; [`network`]: addresses and interfaces;
//! - [`devices`]: the GPUs and the placement of workers on them; [`doctor`]: their health; [`gpu_clocks`]: clocks;
//! - [`libraries`]: the CUDA libraries that workers load; [`memory`]: free memory;
//! - [`clock`]: wall-clock time and time since boot; [`naming`], [`escape`], [`redact`]: names and text from outside,
//!   made safe;
//! - [`system_errors`]: advice for errors of system calls.
//!
//! Nothing here calls CUDA; GPUs and their usage come from NVML, loaded at run time.
#![deny(unsafe_code)]

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
