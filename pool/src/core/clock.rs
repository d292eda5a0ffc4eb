//! Tracks the order of streams with vector clocks: which work is known to run after which, without asking the driver.
//!
//! Each stream has a count, which starts a new epoch whenever another stream or the host waits for the stream. A freed
//! block is stamped with the current count of every stream that used it; `seen[r][s]` is the count of `s` that all
//! later work of `r` runs after. A block is ready for `r` if no part of its stamp exceeds what `r` has seen. A free
//! therefore makes no driver call and advances no count.

use crate::stream::{MAX_STREAMS, StreamId};

/// Work that must complete before memory may be used again: one count per stream, 0 for none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stamp([u32; MAX_STREAMS]);

impl Stamp {
    /// Adds the work in `other`.
    pub(crate) fn join(&mut self, other: &Self) {
        for (mine, theirs) in self.0.iter_mut().zip(other.0) {
            *mine = (*mine).max(theirs);
        }
    }
}

/// The counts of all streams, and the counts that each stream has seen of the others.
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
            // A stream always runs after its own earlier work.
            seen[stream] = u32::MAX;
        }
        Self { streams: 1, now: [1; MAX_STREAMS], seen }
    }

    pub(crate) fn streams(&self) -> impl Iterator<Item = StreamId> + use<> {
        (0..self.streams).map(|stream| StreamId(stream as u8))
    }

    /// Adds a stream; `None` if there are [`MAX_STREAMS`] already.
    pub(crate) fn add_stream(&mut self) -> Option<StreamId> {
        (self.streams < MAX_STREAMS).then(|| {
            self.streams += 1;
            StreamId((self.streams - 1) as u8)
        })
    }

    /// Adds all work submitted to `stream` so far to the stamp.
    pub(crate) fn stamp(&self, stamp: &mut Stamp, stream: StreamId) {
        stamp.0[stream.index()] = self.now[stream.index()];
    }

    /// Returns whether all later work of `stream` runs after the work in the stamp.
    pub(crate) fn ready(&self, stamp: &Stamp, stream: StreamId) -> bool {
        let seen = &self.seen[stream.index()];
        stamp.0.iter().zip(seen).all(|(stamp, seen)| stamp <= seen)
    }

    /// Returns the streams that `stream` must wait for before it may use memory with this stamp.
    pub(crate) fn missing(&self, stamp: &Stamp, stream: StreamId) -> impl Iterator<Item = StreamId> + use<> {
        let (stamp, seen) = (*stamp, self.seen[stream.index()]);
        self.streams().filter(move |other| stamp.0[other.index()] > seen[other.index()])
    }

    /// Records that `to` waits for all work submitted to `from` so far, and thereby for all work that `from` has waited
    /// for. Returns false and records nothing if the count of `from` is exhausted: see [`reset`](Self::reset).
    pub(crate) fn record_wait(&mut self, from: StreamId, to: StreamId) -> bool {
        let seen_by_from = self.seen[from.index()];
        self.can_advance(from) && {
            self.merge(to, from, &seen_by_from);
            self.now[from.index()] += 1;
            true
        }
    }

    /// Records that the host has waited for all work submitted to `stream` so far: all work submitted to any stream
    /// from now on runs after it. Returns false and records nothing if the count is exhausted.
    pub(crate) fn record_synchronize(&mut self, stream: StreamId) -> bool {
        let seen_by_stream = self.seen[stream.index()];
        self.can_advance(stream) && {
            for other in self.streams() {
                self.merge(other, stream, &seen_by_stream);
            }
            self.now[stream.index()] += 1;
            true
        }
    }

    /// Records that `to` has now seen the current count of `from` and everything that `from` has seen.
    fn merge(&mut self, to: StreamId, from: StreamId, seen_by_from: &[u32; MAX_STREAMS]) {
        let now = self.now[from.index()];
        let seen = &mut self.seen[to.index()];
        for (stream, (seen, theirs)) in seen.iter_mut().zip(seen_by_from).enumerate() {
            let known = if stream == from.index() { now } else { *theirs };
            *seen = (*seen).max(known);
        }
    }

    /// Returns whether the count of `stream` can advance and stay below `u32::MAX`, which means "always ordered".
    fn can_advance(&self, stream: StreamId) -> bool {
        self.now[stream.index()] < u32::MAX - 1
    }

    /// Restarts all counts, once all work of all streams has completed. Every stamp must be cleared at the same time.
    pub(crate) fn reset(&mut self) {
        let streams = self.streams;
        *self = Self { streams, ..Self::new() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backing::Segments;
    use crate::backing::host::Host;
    use crate::core::{Core, Request};

    const A: StreamId = StreamId(0);
    const B: StreamId = StreamId(1);
    const C: StreamId = StreamId(2);

    fn three_streams() -> Clocks {
        let mut clocks = Clocks::new();
        assert_eq!((clocks.add_stream(), clocks.add_stream()), (Some(B), Some(C)));
        clocks
    }

    fn stamp_of(clocks: &Clocks, streams: &[StreamId]) -> Stamp {
        let mut stamp = Stamp::default();
        streams.iter().for_each(|stream| clocks.stamp(&mut stamp, *stream));
        stamp
    }

    #[test]
    fn stream_is_ordered_after_itself_only() {
        let clocks = three_streams();
        let stamp = stamp_of(&clocks, &[A]);
        assert!(clocks.ready(&stamp, A) && !clocks.ready(&stamp, B));
        assert_eq!(clocks.missing(&stamp, B).collect::<Vec<_>>(), [A]);
    }

    #[test]
    fn wait_covers_earlier_work_but_not_later_work() {
        let mut clocks = three_streams();
        let early = stamp_of(&clocks, &[A]);
        clocks.record_wait(A, B);
        let late = stamp_of(&clocks, &[A]);
        assert!(clocks.ready(&early, B) && !clocks.ready(&late, B));
    }

    #[test]
    fn waits_are_transitive() {
        let mut clocks = three_streams();
        let stamp = stamp_of(&clocks, &[A]);
        clocks.record_wait(A, B);
        clocks.record_wait(B, C);
        assert!(clocks.ready(&stamp, C));
    }

    #[test]
    fn host_synchronize_orders_all_streams() {
        let mut clocks = three_streams();
        let stamp = stamp_of(&clocks, &[A, B]);
        clocks.record_wait(A, B);
        clocks.record_synchronize(B);
        assert!(clocks.ready(&stamp, C) && clocks.ready(&stamp, A));
        assert!(!clocks.ready(&stamp_of(&clocks, &[B]), C));
    }

    #[test]
    fn exhausted_count_does_not_advance() {
        let mut clocks = three_streams();
        clocks.now[A.index()] = u32::MAX - 2;
        assert!(clocks.record_wait(A, B));
        assert_eq!(clocks.now[A.index()], u32::MAX - 1);
        let stamp = stamp_of(&clocks, &[A]);
        assert!(!clocks.record_wait(A, B) && !clocks.record_synchronize(A));
        assert!(!clocks.ready(&stamp, B) && !clocks.ready(&stamp, C));
        clocks.reset();
        assert_eq!((clocks.streams().count(), clocks.now), (3, [1; MAX_STREAMS]));
    }

    #[test]
    fn exhausted_count_synchronizes_the_device_and_clears_stamps() {
        let waits: [fn(&mut Core); 2] = [|core| core.record_wait(A, B), |core| core.record_synchronize(A)];
        for wait in waits {
            let mut core = Core::new(Box::new(Segments::new(Host)));
            core.add_stream();
            core.clocks.now[A.index()] = u32::MAX - 1;
            let handle = core.alloc(&Request::new(1000)).unwrap();
            core.free(handle).unwrap();
            assert_eq!(core.pending(B).len(), 1);
            wait(&mut core);
            assert_eq!(core.pending(B), []);
            assert_eq!(core.clocks.now, [1; MAX_STREAMS]);
        }
    }

    #[test]
    fn number_of_streams_is_limited() {
        let mut clocks = Clocks::new();
        assert_eq!(std::iter::from_fn(|| clocks.add_stream()).count(), MAX_STREAMS - 1);
    }
}
