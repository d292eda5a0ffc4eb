//! The most recent allocations and frees, kept for snapshots.

use std::collections::VecDeque;
use std::time::Instant;

use crate::core::Site;
use crate::stream::StreamId;

/// Kind of an [`Event`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// A buffer was allocated.
    Alloc,
    /// A buffer was freed.
    Free,
    /// A request failed because memory ran out.
    OutOfMemory,
}

/// One allocation, free or failed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Kind of the event.
    pub action: Action,
    /// Microseconds since the pool was created.
    pub micros: u64,
    /// Address of the buffer; 0 for a failed request.
    pub address: u64,
    /// Size of the buffer in bytes, rounded up to granules; for a failed request, the requested bytes.
    pub bytes: u64,
    /// Stream for which the request was made.
    pub stream: StreamId,
    /// Origin of the request.
    pub site: Option<Site>,
    /// Bytes live after the event.
    pub live: u64,
    /// Bytes mapped after the event.
    pub mapped: u64,
}

/// A ring buffer of the most recent events.
#[derive(Debug)]
pub(crate) struct EventRing {
    start: Instant,
    capacity: usize,
    events: VecDeque<Event>,
}

impl EventRing {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { start: Instant::now(), capacity, events: VecDeque::with_capacity(capacity) }
    }

    /// Adds an event and fills in its time; a full ring drops its oldest event.
    pub(crate) fn add(&mut self, event: Event) {
        if self.events.len() == self.capacity {
            self.events.pop_front();
        }
        let micros = u64::try_from(self.start.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.events.push_back(Event { micros, ..event });
    }

    /// Returns the events, oldest first.
    pub(crate) fn events(&self) -> Vec<Event> {
        self.events.iter().copied().collect()
    }
}
