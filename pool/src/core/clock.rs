//! Order between streams, by counting: which work is known to come after which, without asking the driver.
//!
//! Each stream counts the marks that were put on it. A freed block is stamped with the present count of every stream that
//! used it; `seen[r][s]` is the count of `s` that all further work of `r` comes after. A block is ready for `r` when no
//! part of its stamp is above what `r` has seen. Counts move on when one stream is made to wait for another, and when the
//! host has waited for a stream: never at a free.

/// Most streams that one pool can tell apart.
pub const MAX_STREAMS: usize = 8;

/// Names a stream of a pool. Zero is the one that the pool was made for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamId(pub(crate) u8);

impl StreamId {
    pub(crate) fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// Work that must be done before memory may be used again: a count per stream, zero for none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stamp([u32; MAX_STREAMS]);

impl Stamp {
    /// Also everything in `other`.
    pub(crate) fn join(&mut self, other: &Self) {
        for (mine, theirs) in self.0.iter_mut().zip(other.0) {
            *mine = (*mine).max(theirs);
        }
    }
}

/// The counts of all streams, and what each has seen of the others.
#[derive(Clone, Debug)]
pub(crate) struct Clocks {
    streams: usize,
    now: [u32; MAX_STREAMS],
    seen: [[u32; MAX_STREAMS]; MAX_STREAMS],
}

impl Clocks {
    pub(crate) fn new() -> Self {
        let mut seen = [[0; MAX_STREAMS]; MAX_STREAMS];
        for (stream, seen) in seen.iter_mut().enumerate() {
            // A stream is always ordered after its own work.
            seen[stream] = u32::MAX;
        }
        Self { streams: 1, now: [1; MAX_STREAMS], seen }
    }

    /// Streams known.
    pub(crate) fn streams(&self) -> impl Iterator<Item = StreamId> + use<> {
        (0..self.streams).map(|stream| StreamId(stream as u8))
    }

    /// One more stream, if there is room.
    pub(crate) fn add(&mut self) -> Option<StreamId> {
        (self.streams < MAX_STREAMS).then(|| {
            self.streams += 1;
            StreamId((self.streams - 1) as u8)
        })
    }

    /// Puts all work of `stream` so far into the stamp.
    pub(crate) fn stamp(&self, stamp: &mut Stamp, stream: StreamId) {
        stamp.0[stream.index()] = self.now[stream.index()];
    }

    /// Whether further work of `stream` comes after all work in the stamp.
    pub(crate) fn ready(&self, stamp: &Stamp, stream: StreamId) -> bool {
        let seen = &self.seen[stream.index()];
        stamp.0.iter().zip(seen).all(|(stamp, seen)| stamp <= seen)
    }

    /// The streams whose work in the stamp `stream` does not come after yet.
    pub(crate) fn missing(&self, stamp: &Stamp, stream: StreamId) -> impl Iterator<Item = StreamId> + use<> {
        let (stamp, seen) = (*stamp, self.seen[stream.index()]);
        self.streams().filter(move |other| stamp.0[other.index()] > seen[other.index()])
    }

    /// `to` was made to wait for all work of `from` so far, and with it for all that `from` had waited for. False, and
    /// nothing learned, when the count of `from` is at its end: see [`restart`](Self::restart).
    pub(crate) fn ordered(&mut self, from: StreamId, to: StreamId) -> bool {
        let before = self.seen[from.index()];
        self.has_room(from) && {
            self.learn(to, from, &before);
            self.now[from.index()] += 1;
            true
        }
    }

    /// The host has waited for all work of `stream` so far: all that is given to any stream from now on comes after.
    /// False as in [`ordered`](Self::ordered).
    pub(crate) fn host_waited(&mut self, stream: StreamId) -> bool {
        let before = self.seen[stream.index()];
        self.has_room(stream) && {
            for other in self.streams() {
                self.learn(other, stream, &before);
            }
            self.now[stream.index()] += 1;
            true
        }
    }

    fn learn(&mut self, to: StreamId, from: StreamId, before: &[u32; MAX_STREAMS]) {
        let now = self.now[from.index()];
        let seen = &mut self.seen[to.index()];
        for (stream, (seen, before)) in seen.iter_mut().zip(before).enumerate() {
            let known = if stream == from.index() { now } else { *before };
            *seen = (*seen).max(known);
        }
    }

    /// Whether the count of `stream` can go on, below the mark of "always ordered".
    fn has_room(&self, stream: StreamId) -> bool {
        self.now[stream.index()] < u32::MAX - 1
    }

    /// All work of all streams is done: counting starts anew. Every stamp must be cleared with it.
    pub(crate) fn restart(&mut self) {
        let streams = self.streams;
        *self = Self { streams, ..Self::new() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: StreamId = StreamId(0);
    const B: StreamId = StreamId(1);
    const C: StreamId = StreamId(2);

    fn three() -> Clocks {
        let mut clocks = Clocks::new();
        assert_eq!((clocks.add(), clocks.add()), (Some(B), Some(C)));
        clocks
    }

    fn stamped(clocks: &Clocks, streams: &[StreamId]) -> Stamp {
        let mut stamp = Stamp::default();
        streams.iter().for_each(|stream| clocks.stamp(&mut stamp, *stream));
        stamp
    }

    #[test]
    fn a_stream_follows_itself_and_nobody_else_unasked() {
        let clocks = three();
        let stamp = stamped(&clocks, &[A]);
        assert!(clocks.ready(&stamp, A) && !clocks.ready(&stamp, B));
        assert_eq!(clocks.missing(&stamp, B).collect::<Vec<_>>(), [A]);
    }

    #[test]
    fn a_wait_covers_earlier_work_and_not_later_work() {
        let mut clocks = three();
        let early = stamped(&clocks, &[A]);
        clocks.ordered(A, B);
        let late = stamped(&clocks, &[A]);
        assert!(clocks.ready(&early, B) && !clocks.ready(&late, B));
    }

    #[test]
    fn a_wait_passes_on_what_the_other_stream_had_seen() {
        let mut clocks = three();
        let stamp = stamped(&clocks, &[A]);
        clocks.ordered(A, B);
        clocks.ordered(B, C);
        assert!(clocks.ready(&stamp, C));
    }

    #[test]
    fn after_the_host_waited_every_stream_is_ordered() {
        let mut clocks = three();
        let stamp = stamped(&clocks, &[A, B]);
        clocks.ordered(A, B);
        clocks.host_waited(B);
        assert!(clocks.ready(&stamp, C) && clocks.ready(&stamp, A));
        assert!(!clocks.ready(&stamped(&clocks, &[B]), C));
    }

    #[test]
    fn there_are_eight_streams() {
        let mut clocks = Clocks::new();
        assert_eq!(std::iter::from_fn(|| clocks.add()).count(), MAX_STREAMS - 1);
    }
}
