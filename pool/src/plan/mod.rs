//! Plans: where a program asks for the same buffers in every step, their addresses are worked out once.
//!
//! ```text
//! step 1, 2: served as ever, recorded --equal--> thread: pack --> Table --next step--> region, cursor
//! ```
//! A step is named by a key (a kind of step, a batch shape); each key has its plan. All plans share one region, a block of
//! the allocator that is as large as the largest: addresses stay the same from step to step while plans follow each other.
//!
//! - `record`: what a step asked for; `pack`: offsets; `table`: the finished plan;
//! - `serve`: the fast path; this file: which plan, when.

pub mod pack;
pub(crate) mod record;
pub(crate) mod serve;
pub(crate) mod table;

use std::collections::HashMap;
use std::thread::JoinHandle;
use std::time::Duration;

use crate::backing::Purpose;
use crate::core::{Core, GRANULE, Handle, Place, Request, StreamId};
use crate::stats::Stats;
use record::Recording;
use serve::Book;
use table::Table;

/// Plans kept at a time.
const MAX_PLANS: usize = 8;
/// For the local search, in the background.
const PACK_TIME: Duration = Duration::from_millis(200);
/// A plan that this many steps in a row departed from is made anew.
const PATIENCE: u32 = 3;

/// Which plan a step follows, and what is known of steps without one. Lives under the pool's lock.
#[derive(Debug)]
pub(crate) struct Planner {
    book: &'static Book,
    stream: StreamId,
    kinds: HashMap<u64, Kind>,
    step: Option<Step>,
    region: Option<Region>,
    pinned: bool,
    /// Counts steps, to tell which kind was used last.
    now: u64,
}

/// What is known of one kind of step.
#[derive(Debug, Default)]
struct Kind {
    last: Option<Recording>,
    pending: Option<JoinHandle<Option<Table>>>,
    table: Option<usize>,
    departures: u32,
    used: u64,
}

#[derive(Debug)]
struct Step {
    key: u64,
    /// What is asked for, unless a plan serves.
    recording: Option<Recording>,
    misses_before: u64,
}

#[derive(Clone, Copy, Debug)]
struct Region {
    handle: Handle,
    granules: u32,
    base: u64,
}

impl Planner {
    pub(crate) fn new(book: &'static Book) -> Self {
        Self {
            book,
            stream: StreamId::default(),
            kinds: HashMap::new(),
            step: None,
            region: None,
            pinned: false,
            now: 0,
        }
    }

    /// Begins a step of this kind: from its plan if there is one, else on record.
    /// False, and nothing begun, on another thread than the first.
    pub(crate) fn begin(&mut self, core: &mut Core, key: u64) -> bool {
        if !self.book.own() {
            return false;
        }
        self.end();
        self.now += 1;
        self.forget_the_oldest(key);
        let kind = self.kinds.entry(key).or_default();
        kind.used = self.now;
        if kind.pending.as_ref().is_some_and(JoinHandle::is_finished) {
            kind.take_result(self.book);
        }
        let table = kind.table.filter(|_| self.book.idle());
        let base = table.and_then(|table| self.region(core, self.book.granules(table)));
        let misses_before = self.book.counts().1;
        let recording = match (table, base) {
            (Some(table), Some(base)) => {
                self.book.begin(table, base);
                None
            }
            _ => {
                self.give_region_back(core);
                Some(Recording::default())
            }
        };
        self.step = Some(Step { key, recording, misses_before });
        true
    }

    /// Ends the step: compares it with the last of its kind, and has it planned when they are equal.
    pub(crate) fn end(&mut self) {
        self.book.end();
        let Some(Step { key, recording, misses_before }) = self.step.take() else { return };
        let misses = self.book.counts().1 - misses_before;
        let Some(kind) = self.kinds.get_mut(&key) else { return };
        match recording {
            Some(recording) if kind.table.is_none() && kind.pending.is_none() => {
                kind.compare(self.book, recording)
            }
            Some(_) => {}
            None if misses == 0 => kind.departures = 0,
            None => kind.departures += 1,
        }
        if kind.departures >= PATIENCE {
            *kind = Kind { used: kind.used, ..Kind::default() };
        }
    }

    /// Whether the present step is served from a plan.
    pub(crate) fn is_serving(&self) -> bool {
        self.step.as_ref().is_some_and(|step| step.recording.is_none())
    }

    /// The recording of the present step, if it is on record.
    pub(crate) fn recording(&mut self) -> Option<&mut Recording> {
        self.step.as_mut()?.recording.as_mut()
    }

    /// Notes a block that was handed out, if the step is on record.
    pub(crate) fn note(&mut self, core: &mut Core, request: &Request, handle: Handle) {
        let plain = request.stream == self.stream && request.purpose == Purpose::General;
        let granules = request.bytes.max(1).div_ceil(GRANULE);
        if let Some(recording) = self.recording()
            && let Ok(granules) = u32::try_from(granules)
        {
            let ordinal = recording.alloc(granules, plain);
            core.set_ordinal(handle, ordinal);
        }
    }

    /// Puts what buffers in the region come to in the place of the region.
    pub(crate) fn count(&self, stats: &mut Stats) {
        (stats.plan_hits, stats.plan_misses) = self.book.counts();
        stats.plan_region = self.region.map_or(0, |region| u64::from(region.granules) * GRANULE);
        // Another thread than the plans' own may see some slots late.
        stats.live.removed += stats.plan_region.saturating_sub(self.book.live_bytes());
    }

    /// Waits for plans in the making.
    pub(crate) fn finish(&mut self) {
        for kind in self.kinds.values_mut() {
            kind.take_result(self.book);
        }
    }

    /// From now on the region stays where it is.
    pub(crate) fn pin(&mut self) {
        self.pinned = true;
    }

    /// The region may move again.
    pub(crate) fn unpin(&mut self) {
        self.pinned = false;
    }

    /// Gives the region back to the allocator, if no buffer lies in it and nobody relies on its place: no captured graph,
    /// and no planned step, which hands parts of it out without asking here.
    pub(crate) fn give_region_back(&mut self, core: &mut Core) -> bool {
        if self.pinned || self.is_serving() || self.book.in_use() {
            return false;
        }
        self.region.take().is_some_and(|region| core.free(region.handle).is_ok())
    }

    /// Address of a region of at least this many granules.
    fn region(&mut self, core: &mut Core, granules: u32) -> Option<u64> {
        if let Some(region) = self.region.filter(|region| region.granules >= granules) {
            return Some(region.base);
        }
        if self.region.is_some() && !self.give_region_back(core) {
            return None;
        }
        let bytes = u64::from(granules) * GRANULE;
        let request = Request { stream: self.stream, place: Place::High, ..Request::new(bytes) };
        let handle = core.alloc(&request).ok()?;
        let base = core.address(handle).ok()?;
        self.region = Some(Region { handle, granules, base });
        Some(base)
    }

    /// Makes room for a new kind of step.
    fn forget_the_oldest(&mut self, key: u64) {
        if self.kinds.len() < MAX_PLANS || self.kinds.contains_key(&key) {
            return;
        }
        let oldest = self.kinds.iter().min_by_key(|(_, kind)| kind.used).map(|(key, _)| *key);
        if let Some(oldest) = oldest {
            self.kinds.remove(&oldest);
        }
    }
}

impl Kind {
    fn compare(&mut self, book: &'static Book, recording: Recording) {
        if self.last.as_ref() != Some(&recording) {
            self.last = Some(recording);
            return;
        }
        self.last = None;
        // Without a thread the program goes on without a plan, and tries again two steps later.
        let thread = std::thread::Builder::new().name("pool-planner".into());
        self.pending = thread.spawn(move || Table::new(book, &recording, PACK_TIME)).ok();
    }

    fn take_result(&mut self, book: &Book) {
        if let Some(thread) = self.pending.take() {
            self.table = thread.join().ok().flatten().and_then(|table| book.add(table));
        }
    }
}
