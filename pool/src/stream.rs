//! Identifiers of the streams that a pool distinguishes.

/// Maximum number of streams that one pool can distinguish, including its first.
pub const MAX_STREAMS: usize = 8;

/// Identifies a stream of one pool. The default, stream 0, is the one for which the pool was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamId(pub(crate) u8);

impl StreamId {
    /// Returns the position among the streams of the pool, in the order in which they were added; below
    /// [`MAX_STREAMS`].
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}
