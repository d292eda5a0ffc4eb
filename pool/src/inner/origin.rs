//! The origin of a buffer's memory, which determines how it is freed.

use super::Inner;
use crate::core::Handle;
use crate::direct::DirectAllocator;
use crate::leases::Leases;
use crate::options::Space;
use crate::plan::PlannedSlot;

/// The origin of a buffer's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Origin {
    /// The allocator.
    Block { inner: &'static Inner, handle: Handle },
    /// The driver, because the pool is off; also the requested bytes.
    Driver { inner: &'static Inner, bytes: u64 },
    /// The plan of a step.
    Slot(PlannedSlot),
}

impl Origin {
    pub(crate) fn leases(&self) -> &Leases {
        match self {
            Self::Block { inner, .. } | Self::Driver { inner, .. } => &inner.leases,
            Self::Slot(slot) => &slot.server().leases,
        }
    }

    pub(crate) fn space(&self) -> Space {
        match self {
            Self::Block { inner, .. } | Self::Driver { inner, .. } => inner.space,
            Self::Slot(slot) => slot.server().space,
        }
    }

    /// Frees the memory of a dropped buffer, unless a lease inherits it. Takes `self` by value, so that it stays in
    /// registers.
    #[inline(never)]
    pub(crate) fn buffer_dropped(self, address: u64) {
        if !self.leases().inherit(address) {
            self.free(address);
        }
    }

    /// Frees the memory.
    pub(crate) fn free(&self, address: u64) {
        match self {
            Self::Block { inner, handle } => inner.free_block(*handle),
            Self::Driver { inner, bytes } => inner.free_direct(address, *bytes),
            Self::Slot(slot) => slot.free(),
        }
    }

    /// See [`PoolBuf::segment`](crate::PoolBuf::segment).
    pub(crate) fn segment(&self, address: u64) -> Option<(u64, u64)> {
        match self {
            Self::Block { inner, handle } => inner.segment_of(*handle),
            Self::Driver { bytes, .. } => Some((address, DirectAllocator::rounded(*bytes))),
            Self::Slot(_) => None,
        }
    }
}
