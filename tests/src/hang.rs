//! Makes a rank of a training job hang in a given place.

use std::path::PathBuf;

use xlaunch_proto::v1::Phase;

use crate::{Job, c_library};

/// Way in which a rank hangs.
#[derive(Clone, Copy, Debug)]
pub enum HangMode {
    /// The training thread computes forever when it enters this phase.
    Spin(Phase),
    /// The training thread is slow in this phase.
    Slow(Phase),
    /// The data loader never returns from reading a file.
    Read,
}

/// A rank of a job that can be made to hang in its first attempt.
#[derive(Debug)]
pub struct InjectedHang {
    trigger: PathBuf,
}

impl InjectedHang {
    /// Prepares the job before it is started.
    ///
    /// # Panics
    /// If the library cannot be built.
    pub fn prepare(job: &mut Job, rank: u32, mode: HangMode) -> Self {
        let library = job.path().join("hang.so");
        c_library::build("hang.c", &library);
        let trigger = job.path().join("hang");
        let (mode, phase) = match mode {
            HangMode::Spin(phase) => ("spin", phase),
            HangMode::Slow(phase) => ("slow", phase),
            HangMode::Read => ("read", Phase::Unspecified),
        };
        job.set_env("LD_PRELOAD", &library.display().to_string());
        job.set_env("HANG_TRIGGER", &trigger.display().to_string());
        job.set_env("HANG_MODE", mode);
        job.set_env("HANG_RANK", &rank.to_string());
        job.set_env("HANG_PHASE", &i32::from(phase).to_string());
        Self { trigger }
    }

    /// Makes the rank hang from now on.
    ///
    /// # Panics
    /// If a file cannot be written.
    pub fn begin(&self) {
        std::fs::write(&self.trigger, "").expect("write a file");
    }
}
