//! Plans: if a program makes the same requests in every step, their addresses are computed once.
//!
//! ```text
//! steps 1, 2: served by the allocator, recorded --equal--> thread: pack --> SlotTable --next step--> region, cursor
//! ```
//! A step is identified by a key, such as a batch shape; each key has its own plan. All plans share one region, a block
//! of the allocator with the size that the largest plan needs, so addresses stay the same from step to step.
//!
//! Files: `record`: the requests of a step; `pack`: computes offsets; `slots`: the finished plan; `server`: the fast
//! path; this file: selects the plan of a step, and decides when plans are made.

pub mod pack;
mod record;
mod server;
mod slots;

use server::Table;
pub(crate) use server::{PlanServer, PlannedSlot};

use std::collections::HashMap;
use std::panic::Location;
use std::thread::JoinHandle;
use std::time::Duration;

use crate::backing::{GRANULE, Purpose};
use crate::core::{Core, Handle, Place, Request, Site};
use crate::stats::Stats;
use crate::stream::StreamId;
use record::Recording;
use slots::SlotTable;

/// Maximum number of kinds of steps that are remembered.
const MAX_STEP_KINDS: usize = 8;
/// Time limit of the local search for a plan, which runs on a separate thread.
const PACK_TIMEOUT: Duration = Duration::from_millis(200);
/// Number of consecutive steps that must depart from a plan before it is replaced.
const REPLAN_AFTER_DEPARTURES: u32 = 3;

/// The plan of the current step, and knowledge about steps without a plan. Protected by the pool's lock.
#[derive(Debug)]
pub(crate) struct Planner {
    server: &'static PlanServer,
    kinds: HashMap<u64, StepKind>,
    step: Option<CurrentStep>,
    region: Option<Region>,
    /// True if captured graphs contain addresses of the region, so that it must stay.
    pinned: bool,
    /// Number of steps so far, used to find the kind that was used least recently.
    steps: u64,
}

/// Knowledge about the steps with one key.
#[derive(Debug, Default)]
struct StepKind {
    /// The last step, until two consecutive ones are equal.
    last: Option<Recording>,
    /// The thread that is making the plan.
    pending: Option<JoinHandle<Option<Table>>>,
    /// Number of the plan.
    table: Option<usize>,
    /// Number of consecutive steps that departed from the plan.
    departures: u32,
    last_used: u64,
}

#[derive(Debug)]
struct CurrentStep {
    key: u64,
    /// The requests so far, unless a plan serves the step.
    recording: Option<Recording>,
    misses_before: u64,
}

/// The block of the allocator that all plans share.
#[derive(Clone, Copy, Debug)]
struct Region {
    handle: Handle,
    granules: u32,
    base: u64,
}

impl Planner {
    pub(crate) fn new(server: &'static PlanServer) -> Self {
        Self { server, kinds: HashMap::new(), step: None, region: None, pinned: false, steps: 0 }
    }

    /// Begins a step: serves it from the plan of its key if there is one, otherwise records it. Does nothing and
    /// returns false on threads other than the first one that began a step.
    pub(crate) fn begin(&mut self, core: &mut Core, key: u64) -> bool {
        if !self.server.is_owner() {
            return false;
        }
        self.end();
        self.steps += 1;
        self.evict_least_recent(key);
        let kind = self.kinds.entry(key).or_default();
        kind.last_used = self.steps;
        if kind.pending.as_ref().is_some_and(JoinHandle::is_finished) {
            kind.take_result(self.server);
        }
        let table = kind.table.filter(|_| self.server.is_idle());
        let base = table.and_then(|table| self.region(core, self.server.granules(table)));
        let misses_before = self.server.hits_and_misses().1;
        let recording = match (table, base) {
            (Some(table), Some(base)) => {
                self.server.begin(table, base);
                None
            }
            _ => {
                self.release_region(core);
                Some(Recording::default())
            }
        };
        self.step = Some(CurrentStep { key, recording, misses_before });
        true
    }

    /// Ends the step. A recorded step that equals the last one of its kind is planned.
    pub(crate) fn end(&mut self) {
        self.server.end();
        let Some(CurrentStep { key, recording, misses_before }) = self.step.take() else { return };
        let misses = self.server.hits_and_misses().1 - misses_before;
        let Some(kind) = self.kinds.get_mut(&key) else { return };
        match recording {
            Some(recording) if kind.table.is_none() && kind.pending.is_none() => {
                kind.compare(self.server, recording)
            }
            Some(_) => {}
            None if misses == 0 => kind.departures = 0,
            None => kind.departures += 1,
        }
        if kind.departures >= REPLAN_AFTER_DEPARTURES {
            *kind = StepKind { last_used: kind.last_used, ..StepKind::default() };
        }
    }

    /// Returns whether a plan serves the current step.
    pub(crate) fn is_serving(&self) -> bool {
        self.step.as_ref().is_some_and(|step| step.recording.is_none())
    }

    /// Returns the recording of the current step, if it is being recorded.
    pub(crate) fn recording(&mut self) -> Option<&mut Recording> {
        self.step.as_mut()?.recording.as_mut()
    }

    /// Records an allocated block, if the current step is being recorded.
    pub(crate) fn record_alloc(&mut self, core: &mut Core, request: &Request, handle: Handle) {
        let plannable = request.stream == StreamId::default() && request.purpose == Purpose::General;
        let granules = request.bytes.max(1).div_ceil(GRANULE);
        if let Some(recording) = self.recording()
            && let Ok(granules) = u32::try_from(granules)
        {
            let ordinal = recording.alloc(granules, plannable);
            core.set_ordinal(handle, ordinal);
        }
    }

    /// Fills in the statistics of plans. On entry, `live` counts the region as one buffer; that is replaced by the
    /// buffers in it.
    pub(crate) fn fill_stats(&self, stats: &mut Stats) {
        (stats.plan_hits, stats.plan_misses) = self.server.hits_and_misses();
        stats.plan_region = self.region.map_or(0, |region| u64::from(region.granules) * GRANULE);
        // Threads other than the owner may see some frees late, so the difference may be inexact for a moment.
        stats.live.removed += stats.plan_region.saturating_sub(self.server.live_bytes());
    }

    /// Waits for plans that are being made.
    pub(crate) fn finish(&mut self) {
        for kind in self.kinds.values_mut() {
            kind.take_result(self.server);
        }
    }

    /// Pins the region at its address.
    pub(crate) fn pin(&mut self) {
        self.pinned = true;
    }

    /// Allows the region to move again.
    pub(crate) fn unpin(&mut self) {
        self.pinned = false;
    }

    /// Frees the region, unless a buffer is in it or its address is relied on: by a captured graph, or by a planned
    /// step, which hands out parts of the region without taking the lock.
    pub(crate) fn release_region(&mut self, core: &mut Core) -> bool {
        if self.pinned || self.is_serving() || self.server.may_be_in_use() {
            return false;
        }
        self.region.take().is_some_and(|region| core.free(region.handle).is_ok())
    }

    /// Returns the address of a region of at least this many granules; `None` if there is no memory, or the region
    /// cannot move.
    fn region(&mut self, core: &mut Core, granules: u32) -> Option<u64> {
        if let Some(region) = self.region.filter(|region| region.granules >= granules) {
            return Some(region.base);
        }
        if self.region.is_some() && !self.release_region(core) {
            return None;
        }
        let bytes = u64::from(granules) * GRANULE;
        let site = Some(Site { location: Location::caller(), tag: "plans of repeated steps" });
        let request = Request { place: Place::High, site, ..Request::new(bytes) };
        let handle = core.alloc(&request).ok()?;
        let base = core.address(handle).ok()?;
        self.region = Some(Region { handle, granules, base });
        Some(base)
    }

    /// Forgets the least recently used kind of step if there is no room for a new one.
    fn evict_least_recent(&mut self, key: u64) {
        if self.kinds.len() < MAX_STEP_KINDS || self.kinds.contains_key(&key) {
            return;
        }
        let oldest = self.kinds.iter().min_by_key(|(_, kind)| kind.last_used).map(|(key, _)| *key);
        if let Some(oldest) = oldest {
            self.kinds.remove(&oldest);
        }
    }
}

impl StepKind {
    /// Starts to plan a step that equals the last one.
    fn compare(&mut self, server: &'static PlanServer, recording: Recording) {
        if self.last.as_ref() != Some(&recording) {
            self.last = Some(recording);
            return;
        }
        self.last = None;
        // If no thread can be started, the program continues without a plan, and tries again two steps later.
        let thread = std::thread::Builder::new().name("pool-planner".into());
        self.pending = thread.spawn(move || SlotTable::new(server, &recording, PACK_TIMEOUT)).ok();
    }

    fn take_result(&mut self, server: &PlanServer) {
        if let Some(thread) = self.pending.take() {
            self.table = thread.join().ok().flatten().and_then(|table| server.add(table));
        }
    }
}
