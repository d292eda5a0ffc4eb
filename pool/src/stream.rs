//! Names of the streams that a pool tells apart.

/// Number of streams that one pool can tell apart, its first included.
pub const MAX_STREAMS: usize = 8;

/// Names a stream of one pool. The default, stream 0, is the one that the pool was created for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamId(pub(crate) u8);

impl StreamId {
    /// Position among the streams of the pool, in the order in which they were added; below [`MAX_STREAMS`].
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}
