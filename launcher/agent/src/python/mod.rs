//! Support for workers that run Python.
//!
//! - [`preload`] forks workers from a process that has already imported their modules;
//! - [`faulthandler`] makes programs print their stacks;
//! - [`flight_recorder`] reads PyTorch's record of collectives.

pub(crate) mod faulthandler;
pub(crate) mod flight_recorder;
pub(crate) mod preload;
