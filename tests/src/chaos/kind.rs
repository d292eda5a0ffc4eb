//! The kinds of faults of a chaos run.

use Kind::*;

/// Defines [`Kind`] with its names for tables.
macro_rules! kinds {
    ($($kind:ident: $name:literal,)*) => {
        /// Kind of a fault.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Kind {
            $(#[doc = $name] $kind,)*
        }

        impl Kind {
            /// All kinds.
            pub(super) const ALL: &[Self] = &[$($kind,)*];

            /// Returns the name in tables.
            pub(super) fn name(self) -> &'static str {
                match self {
                    $($kind => $name,)*
                }
            }
        }
    };
}

kinds! {
    KillRank: "SIGKILL of a rank",
    KillTwoRanks: "SIGKILL of two ranks",
    KillStartingRank: "SIGKILL of a rank after 0 to 300 ms",
    SegmentationFault: "SIGSEGV of a rank",
    Abort: "SIGABRT of a rank",
    ExitEarly: "a rank exits with code 0",
    CrashForward: "crash in the forward pass",
    CrashBackward: "crash in the backward pass",
    CrashAllReduce: "crash in all-reduce",
    CrashOptimizer: "crash in the optimizer",
    CrashEvaluation: "crash in an evaluation",
    CrashSnapshot: "crash after a snapshot",
    CrashSaveWrite: "crash while a checkpoint is written",
    CrashSaveSync: "crash while a checkpoint is synced",
    CrashCommit: "crash before a checkpoint is renamed",
    CrashDelete: "crash before a checkpoint is deleted",
    CrashResume: "two crashes: a step, then resuming",
    DiskFull: "ENOSPC in a save",
    DiskError: "EIO in a save",
    SlowDisk: "each sync takes 200 ms more",
    SlowRank: "a rank waits 20 ms in each forward pass",
    PausedRank: "SIGSTOP, SIGCONT after 300 ms",
    FlippedBit: "a bit of the parameters flipped",
    DamagedCheckpoint: "newest checkpoint damaged, SIGKILL",
    StoppedRank: "SIGSTOP",
}

impl Kind {
    /// Returns whether the fault occurs in the save of a given step.
    pub(super) fn is_in_save(self) -> bool {
        matches!(
            self,
            CrashSnapshot | CrashSaveWrite | CrashSaveSync | CrashCommit | CrashDelete | DiskFull | DiskError
        )
    }

    /// Returns the number of restarts that the fault causes.
    pub(super) fn restarts(self) -> u32 {
        match self {
            DiskFull | DiskError | SlowDisk | SlowRank | PausedRank => 0,
            CrashResume => 2,
            _ => 1,
        }
    }
}
