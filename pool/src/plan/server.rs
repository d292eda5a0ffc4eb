//! The plan server: serves the requests of a planned step with a cursor, a comparison and a store, without a lock.
//!
//! Only one thread is served, the first one that began a step. It alone moves the cursor and marks slots, by plain
//! loads and stores: the values are atomics because other threads read some of them, but no locked instructions are
//! needed. Buffers that other threads drop are queued in [`DeferredFrees`].
//!
//! A slot is handed out only if every slot whose memory it reuses was handed out and freed in the same step, and a step
//! starts only when no slot is in use. By induction over the step, the memory of the slot is then free: a request that
//! departs from the plan can cost other requests their slots, but never corrupts their data.
//!
//! The server of a pool is never freed: buffers refer to it without a reference count, which would cost more than the
//! rest of the path.

use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize};

use super::slots::{Slot, SlotTable};
use crate::backing::GRANULE;
use crate::deferred::DeferredFrees;
use crate::leases::Leases;
use crate::options::Space;

/// Maximum number of plans that one pool makes in its lifetime. Later kinds of steps are served by the allocator: a
/// program with that many kinds does not repeat its steps.
pub(crate) const MAX_TABLES: usize = 64;
/// Number of slots to search for a request that is not the next one of the plan.
const RESYNC_WINDOW: usize = 8;

/// A plan of this server.
pub(super) type Table = SlotTable<PlanServer>;

/// The plans of one pool, and the state of the current step.
#[derive(Debug)]
pub(crate) struct PlanServer {
    pub(crate) space: Space,
    pub(crate) leases: Leases,
    /// The pool's first stream, to which all planned buffers belong.
    #[cfg(feature = "cuda")]
    pub(crate) stream: OnceLock<std::sync::Arc<cudarc::driver::CudaStream>>,
    /// Token of the thread that is served; 0 before the first step.
    owner: AtomicUsize,
    /// Plans, which are never freed either: buffers refer to them.
    tables: Box<[OnceLock<&'static Table>]>,
    base: AtomicU64,
    cursor: AtomicUsize,
    step: AtomicU32,
    /// Number of planned slots of the current step that the cursor passed without handing them out.
    skipped: AtomicU64,
    /// Number of slots handed out in completed steps; equal to `freed` when no slot is in use.
    hits: AtomicU64,
    freed: AtomicU64,
    misses: AtomicU64,
    deferred: DeferredFrees<PlannedSlot>,
}

thread_local! {
    /// The planned step in which this thread is.
    static ACTIVE: Cell<Option<(&'static PlanServer, &'static Table)>> = const { Cell::new(None) };
}

/// A slot that was handed out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlannedSlot {
    table: &'static Table,
    /// The number of the slot and, in the upper half, that of the step. It is one word rather than two fields: moving
    /// two fields that were written separately stalls store forwarding, which costs as much as the rest of the path.
    slot_and_step: u64,
}

impl PlannedSlot {
    #[inline]
    pub(crate) fn server(self) -> &'static PlanServer {
        self.table.server
    }

    /// Frees the slot.
    #[inline]
    pub(crate) fn free(self) {
        let server = self.server();
        if server.owner.load(Relaxed) == thread_token() {
            PlanServer::mark_free(self);
        } else {
            server.deferred.push(self);
        }
    }
}

/// Changes a number that only this thread changes.
fn update(number: &AtomicU64, change: impl Fn(u64) -> u64) {
    number.store(change(number.load(Relaxed)), Relaxed);
}

/// Returns a number that differs between living threads: the address of a thread-local variable.
#[inline]
fn thread_token() -> usize {
    thread_local!(static TOKEN: u8 = const { 0 });
    TOKEN.with(|token| std::ptr::from_ref(token).addr())
}

impl PlanServer {
    pub(crate) fn new(space: Space) -> &'static Self {
        Box::leak(Box::new(Self {
            space,
            leases: Leases::default(),
            #[cfg(feature = "cuda")]
            stream: OnceLock::new(),
            owner: AtomicUsize::new(0),
            tables: (0..MAX_TABLES).map(|_| OnceLock::new()).collect(),
            base: AtomicU64::new(0),
            cursor: AtomicUsize::new(0),
            step: AtomicU32::new(0),
            skipped: AtomicU64::new(0),
            hits: AtomicU64::new(0),
            freed: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            deferred: DeferredFrees::new(),
        }))
    }

    /// Returns whether this thread is the one that is served. The first thread to ask becomes it.
    pub(crate) fn is_owner(&self) -> bool {
        let token = thread_token();
        self.owner.compare_exchange(0, token, Relaxed, Relaxed).is_ok() || self.owner.load(Relaxed) == token
    }

    /// Stores a plan for the rest of the process. Returns its number, or `None` if there are [`MAX_TABLES`] already.
    pub(crate) fn add(&self, table: Table) -> Option<usize> {
        let number = self.tables.iter().position(|slot| slot.get().is_none())?;
        self.tables[number].set(Box::leak(Box::new(table))).ok().map(|()| number)
    }

    /// Returns the length of the region of a plan in granules.
    pub(crate) fn granules(&self, number: usize) -> u32 {
        self.tables[number].get().map_or(0, |table| table.granules)
    }

    /// Begins a step in the region at `base`. Call it only on the owning thread, and only if
    /// [`is_idle`](Self::is_idle).
    pub(crate) fn begin(&'static self, number: usize, base: u64) {
        self.base.store(base, Relaxed);
        self.cursor.store(0, Relaxed);
        self.skipped.store(0, Relaxed);
        // The lowest bit of a slot's state marks a free, so steps count up to 2^31 and wrap to 1; 0 means never used.
        let step = self.step.load(Relaxed) % (u32::MAX >> 1) + 1;
        self.step.store(step, Relaxed);
        ACTIVE.set(self.tables[number].get().map(|table| (self, *table)));
    }

    /// Ends the step. Slots in use stay in use.
    pub(crate) fn end(&self) {
        if let Some((server, table)) = ACTIVE.get()
            && std::ptr::eq(server, self)
        {
            ACTIVE.set(None);
            let served = table.served_before(self.cursor.load(Relaxed)) - self.skipped.load(Relaxed);
            update(&self.hits, |hits| hits + served);
        }
    }

    /// Returns whether no slot is in use, after taking deferred frees. Call it only on the owning thread.
    pub(crate) fn is_idle(&self) -> bool {
        self.take_deferred();
        !self.may_be_in_use()
    }

    /// Returns whether a slot may be in use. Outside of a step, any thread that has taken the pool's lock may call it.
    pub(crate) fn may_be_in_use(&self) -> bool {
        // The owner's frees may become visible late, which errs on the safe side. Once visible, so is every use of the
        // memory before them.
        self.hits.load(Relaxed) != self.freed.load(Acquire)
    }

    /// Returns the bytes of the slots in use.
    pub(crate) fn live_bytes(&self) -> u64 {
        let tables = self.tables.iter().map_while(OnceLock::get);
        tables.flat_map(|table| table.live()).map(|slot| u64::from(slot.granules) * GRANULE).sum()
    }

    /// Returns the number of hits in completed steps, and of misses.
    pub(crate) fn hits_and_misses(&self) -> (u64, u64) {
        (self.hits.load(Relaxed), self.misses.load(Relaxed))
    }

    /// Returns the address for the next request of the step, if the plan has a request of this size.
    #[inline(always)]
    pub(crate) fn serve_bytes(&'static self, bytes: usize) -> Option<(u64, PlannedSlot)> {
        self.serve(u32::try_from(bytes.max(1).div_ceil(GRANULE as usize)).ok()?)
    }

    #[inline(always)]
    fn serve(&'static self, granules: u32) -> Option<(u64, PlannedSlot)> {
        let (server, table) = ACTIVE.get()?;
        if !std::ptr::eq(server, self) {
            return None;
        }
        let cursor = self.cursor.load(Relaxed);
        match table.slots.get(cursor) {
            Some(slot) if slot.granules == granules => self.hand_out(table, cursor, slot),
            _ => self.resynchronize(table, cursor, granules),
        }
    }

    #[inline(always)]
    fn hand_out(
        &'static self,
        table: &'static Table,
        number: usize,
        slot: &'static Slot,
    ) -> Option<(u64, PlannedSlot)> {
        self.cursor.store(number + 1, Relaxed);
        let offset = slot.offset()?;
        let step = self.step.load(Relaxed);
        let freed = step * 2 + 1;
        if !table.predecessors_are(slot, freed) && !self.predecessors_are_after_deferred(table, slot, freed) {
            return None;
        }
        slot.state.store(step * 2, Relaxed);
        let address = self.base.load(Relaxed) + u64::from(offset) * GRANULE;
        Some((address, PlannedSlot { table, slot_and_step: number as u64 | u64::from(step) << 32 }))
    }

    /// Same as [`Table::predecessors_are`], after taking deferred frees. Counts a miss if it is false.
    #[cold]
    fn predecessors_are_after_deferred(&self, table: &Table, slot: &Slot, state: u32) -> bool {
        self.take_deferred();
        let free = table.predecessors_are(slot, state);
        if !free {
            update(&self.misses, |misses| misses + 1);
            update(&self.skipped, |skipped| skipped + 1);
        }
        free
    }

    /// Handles a request that is not the next one of the plan: if it is one of the following requests, the cursor moves
    /// there; otherwise the cursor stays, and the allocator serves the request.
    #[cold]
    fn resynchronize(
        &'static self,
        table: &'static Table,
        cursor: usize,
        granules: u32,
    ) -> Option<(u64, PlannedSlot)> {
        let following = table.slots.iter().skip(cursor).take(RESYNC_WINDOW);
        match following.zip(cursor..).find(|(slot, _)| slot.granules == granules) {
            Some((slot, number)) => {
                update(&self.misses, |misses| misses + (number - cursor) as u64);
                let skipped = table.served_before(number) - table.served_before(cursor);
                update(&self.skipped, |total| total + skipped);
                self.hand_out(table, number, slot)
            }
            None => {
                update(&self.misses, |misses| misses + 1);
                None
            }
        }
    }

    #[inline]
    fn mark_free(PlannedSlot { table, slot_and_step }: PlannedSlot) {
        let (slot, step) = (slot_and_step as u32, (slot_and_step >> 32) as u32);
        table.slots[slot as usize].state.store(step * 2 + 1, Relaxed);
        let freed = &table.server.freed;
        freed.store(freed.load(Relaxed) + 1, Release);
    }

    fn take_deferred(&self) {
        if !self.deferred.is_empty() {
            self.deferred.take().for_each(Self::mark_free);
        }
    }
}
