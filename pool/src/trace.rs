//! The last requests and returns, kept for snapshots.

use std::collections::VecDeque;
use std::time::Instant;

use crate::core::{Site, StreamId};

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// A buffer was handed out.
    Alloc,
    /// A buffer came back.
    Free,
    /// A request was refused for want of memory.
    OutOfMemory,
}

/// One entry of the trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// What happened.
    pub action: Action,
    /// Microseconds since the pool was made.
    pub micros: u64,
    /// The buffer; zero for a refused request.
    pub address: u64,
    /// Its length, rounded up.
    pub bytes: u64,
    /// Whose work it serves.
    pub stream: StreamId,
    /// Who asked.
    pub site: Option<Site>,
    /// Bytes live after it.
    pub live: u64,
    /// Bytes mapped after it.
    pub mapped: u64,
}

/// A ring of the last events.
#[derive(Debug)]
pub(crate) struct Trace {
    start: Instant,
    room: usize,
    events: VecDeque<Event>,
}

impl Trace {
    pub(crate) fn new(room: usize) -> Self {
        Self { start: Instant::now(), room, events: VecDeque::with_capacity(room) }
    }

    /// Adds an event, with the time filled in; the oldest leaves when there is no room.
    pub(crate) fn add(&mut self, event: Event) {
        if self.events.len() == self.room {
            self.events.pop_front();
        }
        let micros = u64::try_from(self.start.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.events.push_back(Event { micros, ..event });
    }

    pub(crate) fn events(&self) -> Vec<Event> {
        self.events.iter().copied().collect()
    }
}
