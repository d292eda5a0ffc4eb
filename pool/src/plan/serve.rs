//! Serving a step from its plan: a cursor, a comparison and a store, without a lock.
//!
//! One thread, the first that began a step, is served; it alone moves the cursor and marks slots, with plain loads and
//! stores (atomics without a locked instruction, as the numbers are also read by others). Buffers that other threads drop
//! come back through a queue.
//!
//! A slot is handed out only if every slot whose memory it takes over was handed out and freed in this step. By induction
//! over the step, what a slot covers is then free: a request that departs from the plan can cost others their slot, never
//! their data. Steps begin only when no slot is in use.
//!
//! The book of a pool's plans is never freed: buffers point to it without a count, which would cost more than the rest.

use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize};

use super::table::{Slot, Table};
use crate::core::GRANULE;
use crate::loans::Loans;
use crate::pool::Space;
use crate::returns::Returns;

/// Plans that one pool makes in its life; a program whose steps keep changing is served without a plan after these.
pub(crate) const MAX_TABLES: usize = 64;
/// How far a request is looked for when it is not the next one of the plan.
const LOOK_AHEAD: usize = 8;

/// The plans of one pool, and where the present step is.
#[derive(Debug)]
pub(crate) struct Book {
    pub(crate) space: Space,
    pub(crate) loans: Loans,
    #[cfg(feature = "cuda")]
    pub(crate) lane: OnceLock<std::sync::Arc<cudarc::driver::CudaStream>>,
    owner: AtomicUsize,
    /// Never freed either, as buffers point to theirs.
    tables: Box<[OnceLock<&'static Table>]>,
    base: AtomicU64,
    cursor: AtomicUsize,
    step: AtomicU32,
    /// Of the present step: slots passed over that the plan would have served.
    unserved: AtomicU64,
    /// Slots handed out in steps that are over, and slots freed: outside a step the difference is in use.
    hits: AtomicU64,
    freed: AtomicU64,
    misses: AtomicU64,
    returns: Returns<Ticket>,
}

thread_local! {
    /// The planned step that this thread is in.
    static ACTIVE: Cell<Option<(&'static Book, &'static Table)>> = const { Cell::new(None) };
}

/// A slot handed out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ticket {
    table: &'static Table,
    /// Its number, and the step's in the upper half. One word, as it is moved about: two halves, written apart and read
    /// together, would cost as much as the rest.
    slot_and_step: u64,
}

impl Ticket {
    #[inline]
    pub(crate) fn book(self) -> &'static Book {
        self.table.book
    }

    /// Gives the slot back.
    #[inline]
    pub(crate) fn free(self) {
        let book = self.book();
        if book.owner.load(Relaxed) == thread_token() {
            Book::mark_free(self);
        } else {
            book.returns.push(self);
        }
    }
}

/// Changes a number that this thread alone changes.
fn update(number: &AtomicU64, change: impl Fn(u64) -> u64) {
    number.store(change(number.load(Relaxed)), Relaxed);
}

/// A number that no other living thread has.
#[inline]
fn thread_token() -> usize {
    thread_local!(static TOKEN: u8 = const { 0 });
    TOKEN.with(|token| std::ptr::from_ref(token).addr())
}

impl Book {
    pub(crate) fn new(space: Space) -> &'static Self {
        Box::leak(Box::new(Self {
            space,
            loans: Loans::default(),
            #[cfg(feature = "cuda")]
            lane: OnceLock::new(),
            owner: AtomicUsize::new(0),
            tables: (0..MAX_TABLES).map(|_| OnceLock::new()).collect(),
            base: AtomicU64::new(0),
            cursor: AtomicUsize::new(0),
            step: AtomicU32::new(0),
            unserved: AtomicU64::new(0),
            hits: AtomicU64::new(0),
            freed: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            returns: Returns::new(),
        }))
    }

    /// Whether this thread is the one that is served; the first to ask becomes it.
    pub(crate) fn own(&self) -> bool {
        let token = thread_token();
        self.owner.compare_exchange(0, token, Relaxed, Relaxed).is_ok() || self.owner.load(Relaxed) == token
    }

    /// Keeps a plan; its number, or nothing when there is no room.
    pub(crate) fn add(&self, table: Table) -> Option<usize> {
        let number = self.tables.iter().position(|slot| slot.get().is_none())?;
        self.tables[number].set(Box::leak(Box::new(table))).ok().map(|()| number)
    }

    /// Granules of a plan's region.
    pub(crate) fn granules(&self, number: usize) -> u32 {
        self.tables[number].get().map_or(0, |table| table.granules)
    }

    /// Begins a step in the region at `base`. Only on the owning thread, when [`idle`](Self::idle).
    pub(crate) fn begin(&'static self, number: usize, base: u64) {
        self.base.store(base, Relaxed);
        self.cursor.store(0, Relaxed);
        self.unserved.store(0, Relaxed);
        // The low bit of a slot's state is taken, so steps count to 2^31 and begin anew; zero is no step.
        let step = self.step.load(Relaxed) % (u32::MAX >> 1) + 1;
        self.step.store(step, Relaxed);
        ACTIVE.set(self.tables[number].get().map(|table| (self, *table)));
    }

    /// Ends the step. Slots still in use stay so.
    pub(crate) fn end(&self) {
        if let Some((book, table)) = ACTIVE.get()
            && std::ptr::eq(book, self)
        {
            ACTIVE.set(None);
            let served = table.served_before(self.cursor.load(Relaxed)) - self.unserved.load(Relaxed);
            update(&self.hits, |hits| hits + served);
        }
    }

    /// Whether no slot is in use. On the owning thread.
    pub(crate) fn idle(&self) -> bool {
        self.take_returns();
        !self.in_use()
    }

    /// Whether a slot may still be in use: outside a step, from any thread that took the pool's lock.
    pub(crate) fn in_use(&self) -> bool {
        // What the owner has freed may be seen late, which errs to the safe side.
        self.hits.load(Relaxed) != self.freed.load(Relaxed)
    }

    /// Bytes in use.
    pub(crate) fn live_bytes(&self) -> u64 {
        let tables = self.tables.iter().map_while(OnceLock::get);
        tables.flat_map(|table| table.live()).map(|slot| u64::from(slot.granules) * GRANULE).sum()
    }

    /// Requests served from plans in steps that are over, and requests of planned steps that departed from them.
    pub(crate) fn counts(&self) -> (u64, u64) {
        (self.hits.load(Relaxed), self.misses.load(Relaxed))
    }

    /// As [`serve`](Self::serve), of so many bytes.
    #[inline(always)]
    pub(crate) fn serve_bytes(&'static self, bytes: usize) -> Option<(u64, Ticket)> {
        self.serve(u32::try_from(bytes.max(1).div_ceil(GRANULE as usize)).ok()?)
    }

    /// The address for the step's next request, if the plan has one for it.
    #[inline(always)]
    fn serve(&'static self, granules: u32) -> Option<(u64, Ticket)> {
        let (book, table) = ACTIVE.get()?;
        if !std::ptr::eq(book, self) {
            return None;
        }
        let cursor = self.cursor.load(Relaxed);
        match table.slots.get(cursor) {
            Some(slot) if slot.granules == granules => self.hand_out(table, cursor, slot),
            _ => self.look_ahead(table, cursor, granules),
        }
    }

    #[inline(always)]
    fn hand_out(
        &'static self,
        table: &'static Table,
        number: usize,
        slot: &'static Slot,
    ) -> Option<(u64, Ticket)> {
        self.cursor.store(number + 1, Relaxed);
        let offset = slot.offset()?;
        let step = self.step.load(Relaxed);
        if !table.all_before(slot, step * 2 + 1) && !self.all_before_after_returns(table, slot, step) {
            return None;
        }
        slot.state.store(step * 2, Relaxed);
        let address = self.base.load(Relaxed) + u64::from(offset) * GRANULE;
        Some((address, Ticket { table, slot_and_step: number as u64 | u64::from(step) << 32 }))
    }

    /// As [`Table::all_before`], with what other threads dropped taken back first.
    #[cold]
    fn all_before_after_returns(&self, table: &Table, slot: &Slot, step: u32) -> bool {
        self.take_returns();
        let free = table.all_before(slot, step * 2 + 1);
        if !free {
            update(&self.misses, |misses| misses + 1);
            update(&self.unserved, |unserved| unserved + 1);
        }
        free
    }

    /// A request that is not the next one: the plan goes on where it fits, or waits for the next request.
    #[cold]
    fn look_ahead(
        &'static self,
        table: &'static Table,
        cursor: usize,
        granules: u32,
    ) -> Option<(u64, Ticket)> {
        let ahead = table.slots.iter().skip(cursor).take(LOOK_AHEAD);
        match ahead.zip(cursor..).find(|(slot, _)| slot.granules == granules) {
            Some((slot, number)) => {
                update(&self.misses, |misses| misses + (number - cursor) as u64);
                let skipped = table.served_before(number) - table.served_before(cursor);
                update(&self.unserved, |unserved| unserved + skipped);
                self.hand_out(table, number, slot)
            }
            None => {
                update(&self.misses, |misses| misses + 1);
                None
            }
        }
    }

    #[inline]
    fn mark_free(Ticket { table, slot_and_step }: Ticket) {
        let (slot, step) = (slot_and_step as u32, (slot_and_step >> 32) as u32);
        table.slots[slot as usize].state.store(step * 2 + 1, Relaxed);
        update(&table.book.freed, |freed| freed + 1);
    }

    fn take_returns(&self) {
        if !self.returns.is_empty() {
            self.returns.take().for_each(Self::mark_free);
        }
    }
}
