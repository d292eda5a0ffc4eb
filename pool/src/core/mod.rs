//! The allocator's decisions, over any [`Backing`], without a lock and without a device.
//!
//! One long range of addresses is cut into blocks: holes without memory, free blocks, used blocks. A request takes the
//! best of a few fitting free blocks (two-level segregated fit) and cuts off what it does not need; a freed block is
//! merged with its free neighbours at once. Memory is mapped at the edges: what stays grows from the low end, what lives
//! for a step from the high end.
//!
//! Invariants, checked by [`Core::check`]:
//! - blocks tile the range, neighbours of one kind are merged, every free block is in one bin;
//! - the books are the sums of the blocks;
//! - mapped, registered outside and stranded bytes together never exceed the limit;
//! - a block is handed out for a stream only when that stream comes after all work on it.
//!
//! - `blocks`: headers; `bins`: free ones by size; `clock`: order of streams; `grow`: mapping and giving back;
//! - `books`: counts; `survey`: what reports show; `check`: the invariants.

mod bins;
mod blocks;
mod books;
mod check;
mod clock;
mod grow;
mod survey;

pub use bins::Place;
pub use blocks::{GRANULE, Handle, Site};
pub use books::{Books, Count};
pub use clock::{MAX_STREAMS, StreamId};
pub use survey::BlockInfo;

pub(crate) use blocks::{Arena, NONE, State};

use std::collections::BTreeMap;

use crate::backing::{Backing, DriverFailure, Purpose};
use bins::{Bins, Found};
use blocks::{Blocks, Detail};
use clock::Clocks;

/// Requests up to this many bytes are served from runs.
pub const SMALL: u64 = 64 << 10;
/// Bytes of a run.
pub const RUN: u64 = 2 << 20;

/// What is asked of the allocator.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Bytes; zero counts as one granule.
    pub bytes: u64,
    /// Whose work will use it first.
    pub stream: StreamId,
    /// Which end it goes to.
    pub place: Place,
    /// Whether it needs a segment of its own for registration.
    pub purpose: Purpose,
    /// Who asks.
    pub site: Option<Site>,
}

impl Request {
    /// A request for work of the first stream.
    pub fn new(bytes: u64) -> Self {
        Self {
            bytes,
            stream: StreamId::default(),
            place: Place::default(),
            purpose: Purpose::General,
            site: None,
        }
    }
}

/// Why a request was not served. Nothing has changed, but that unused memory may have been given back.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No address range is that long.
    #[error("{bytes} bytes are more than the address range holds")]
    TooLarge {
        /// Bytes asked for.
        bytes: u64,
    },
    /// The limit stands against it.
    #[error("the limit of {limit} bytes stands against mapping {needed} more")]
    Limit {
        /// The limit.
        limit: u64,
        /// Bytes that would have to be mapped.
        needed: u64,
    },
    /// The driver did not give the memory.
    #[error(transparent)]
    Driver(#[from] DriverFailure),
}

/// A handle that does not name a live block: freed before, or of another pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the block was freed before")]
pub struct StaleHandle;

/// The allocator.
pub struct Core {
    backing: Box<dyn Backing>,
    /// Address of offset zero where all offsets are addresses apart by it.
    base: Option<u64>,
    blocks: Blocks,
    bins: [Bins; 3],
    /// Holes by place.
    holes: BTreeMap<u32, u32>,
    /// Mapped pieces by place, with their length: what can be unmapped at once.
    chunks: BTreeMap<u32, u32>,
    clocks: Clocks,
    books: Books,
    /// Granules of the address range.
    capacity: u32,
    limit: u64,
    external: u64,
}

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Core").field("books", &self.books).field("limit", &self.limit).finish_non_exhaustive()
    }
}

impl Core {
    /// An allocator with nothing mapped.
    pub fn new(backing: Box<dyn Backing>) -> Self {
        // Places are counted in granules with 32 bits, of which one is spare, so that sums need no care: 1 TiB.
        let most = u64::from(NONE / 2) * GRANULE;
        let capacity = backing.capacity().min(most) / backing.granularity() * backing.granularity();
        let granules = (capacity / GRANULE) as u32;
        Self {
            base: backing.contiguous().then(|| backing.address(0)),
            blocks: Blocks::new(granules),
            bins: [Bins::new(), Bins::new(), Bins::new()],
            holes: BTreeMap::from([(0, 0)]),
            chunks: BTreeMap::new(),
            clocks: Clocks::new(),
            books: Books::default(),
            capacity: granules,
            limit: u64::MAX,
            external: 0,
            backing,
        }
    }

    /// A block for this request.
    pub fn alloc(&mut self, request: &Request) -> Result<Handle, Refusal> {
        self.alloc_at(request).map(|(handle, _)| handle)
    }

    /// A block for this request, and its address.
    pub fn alloc_at(&mut self, request: &Request) -> Result<(Handle, u64), Refusal> {
        let granules = self.granules(request.bytes)?;
        let arena = arena_of(request);
        let ready = self.find(arena, granules, request);
        let index = match ready {
            Found::Ready(index) => index,
            other => {
                self.make_ready(request, arena, granules, other).inspect_err(|_| self.books.refused += 1)?
            }
        };
        Ok(self.take(index, granules, request))
    }

    /// Takes a block back. Its memory may be handed out again at once, to work that comes after its former users'.
    pub fn free(&mut self, handle: Handle) -> Result<(), StaleHandle> {
        self.blocks.live(handle).ok_or(StaleHandle)?;
        let clocks = &self.clocks;
        let block = self.blocks.get_mut(handle.index());
        clocks.stamp(&mut block.stamp, block.stream);
        block.generation = block.generation.wrapping_add(1);
        block.state = State::Free;
        let granules = block.granules;
        self.books.freed(u64::from(granules) * GRANULE, self.blocks.detail(handle.index()).bytes);
        self.insert_free(handle.index());
        Ok(())
    }

    /// Work of `stream` given until now uses the block: it is not handed out to other work before that is done.
    pub fn record_use(&mut self, handle: Handle, stream: StreamId) -> Result<(), StaleHandle> {
        self.blocks.live(handle).ok_or(StaleHandle)?;
        self.clocks.stamp(&mut self.blocks.get_mut(handle.index()).stamp, stream);
        Ok(())
    }

    /// Address of a live block.
    pub fn address(&self, handle: Handle) -> Result<u64, StaleHandle> {
        let block = self.blocks.live(handle).ok_or(StaleHandle)?;
        Ok(self.address_of(block.start))
    }

    /// Streams known.
    pub fn streams(&self) -> usize {
        self.clocks.streams().count()
    }

    /// One more stream, unless there are [`MAX_STREAMS`].
    pub fn add_stream(&mut self) -> Option<StreamId> {
        self.clocks.add()
    }

    /// The user made all further work of `to` wait for all work of `from` so far.
    pub fn joined(&mut self, from: StreamId, to: StreamId) {
        if from != to && !self.clocks.ordered(from, to) {
            self.recount();
        }
    }

    /// The host has waited for all work of `stream` so far.
    pub fn host_waited(&mut self, stream: StreamId) {
        if !self.clocks.host_waited(stream) {
            self.recount();
        }
    }

    /// The counts.
    pub fn books(&self) -> &Books {
        &self.books
    }

    /// Forgets the peaks before now.
    pub fn reset_peaks(&mut self) {
        self.books.reset_peaks();
    }

    /// Granules of a request.
    fn granules(&self, bytes: u64) -> Result<u32, Refusal> {
        let granules = bytes.max(1).div_ceil(GRANULE);
        let fits = granules <= u64::from(self.capacity);
        if fits { Ok(granules as u32) } else { Err(Refusal::TooLarge { bytes }) }
    }

    fn address_of(&self, start: u32) -> u64 {
        let offset = u64::from(start) * GRANULE;
        match self.base {
            Some(base) => base + offset,
            None => self.backing.address(offset),
        }
    }

    fn find(&self, arena: Arena, granules: u32, request: &Request) -> Found {
        let clocks = &self.clocks;
        self.bins[arena as usize]
            .find(&self.blocks, granules, request.place, |block| clocks.ready(&block.stamp, request.stream))
    }

    /// The way to a block when no free one is ready: order streams, take a run, map more, give back and map again.
    #[cold]
    fn make_ready(
        &mut self,
        request: &Request,
        arena: Arena,
        granules: u32,
        found: Found,
    ) -> Result<u32, Refusal> {
        if let Found::Unordered(index) = found {
            self.order(index, request.stream)?;
            return Ok(index);
        }
        if arena == Arena::Small {
            return self.small(request, granules);
        }
        if self.return_runs() > 0
            && let Some(index) = self.find_in_order(arena, granules, request)?
        {
            return Ok(index);
        }
        if let Err(refusal) = self.grow_or_remap(request, arena, granules) {
            // A part of a run is better than nothing.
            let small = if arena == Arena::Large { Arena::Small } else { arena };
            return self.find_in_order(small, granules, request)?.ok_or(refusal);
        }
        match self.find_in_order(arena, granules, request)? {
            Some(index) => Ok(index),
            None => unreachable!("memory for the request was mapped just now"),
        }
    }

    /// Maps what the request lacks, after giving unused memory back if there is no other way.
    fn grow_or_remap(&mut self, request: &Request, arena: Arena, granules: u32) -> Result<(), Refusal> {
        let Err(refusal) = self.grow(request, arena, granules) else { return Ok(()) };
        if self.trim()? == 0 {
            return Err(refusal);
        }
        self.books.retries += 1;
        self.grow(request, arena, granules)
    }

    /// A fitting block, with the stream made to wait for the work on it where it has to.
    fn find_in_order(
        &mut self,
        arena: Arena,
        granules: u32,
        request: &Request,
    ) -> Result<Option<u32>, Refusal> {
        match self.find(arena, granules, request) {
            Found::Ready(index) => Ok(Some(index)),
            Found::Unordered(index) => self.order(index, request.stream).map(|()| Some(index)),
            Found::Nothing => Ok(None),
        }
    }

    /// Free runs go back to large requests, which need them; they stay where they are otherwise, so that steps that are
    /// alike find memory alike. Returns how many blocks went back.
    fn return_runs(&mut self) -> usize {
        let small = |index: u32| index != NONE && self.blocks.get(index).arena == Arena::Small;
        let whole = |index: &u32| {
            let block = self.blocks.get(*index);
            // As large as a run; or all that is left of one, when the rest went back before.
            let all =
                u64::from(block.granules) * GRANULE >= RUN || !(small(block.before) || small(block.after));
            block.state == State::Free && block.arena == Arena::Small && all
        };
        let runs: Vec<u32> = self.blocks.in_order().filter(whole).collect();
        for index in &runs {
            self.bins[Arena::Small as usize].remove(&mut self.blocks, *index);
            self.blocks.get_mut(*index).arena = Arena::Large;
            self.insert_free(*index);
        }
        runs.len()
    }

    /// A block of a new run; or one of its own, when there is no memory for a whole run.
    fn small(&mut self, request: &Request, granules: u32) -> Result<u32, Refusal> {
        let run = (RUN / GRANULE) as u32;
        let ready = |core: &mut Self, granules| match core.find(Arena::Large, granules, request) {
            Found::Ready(index) => Ok(index),
            other => core.make_ready(request, Arena::Large, granules, other),
        };
        match ready(self, run) {
            Ok(index) => {
                let arena = self.blocks.get(index).arena;
                self.bins[arena as usize].remove(&mut self.blocks, index);
                let index = self.cut(index, run, request.place);
                self.blocks.get_mut(index).arena = Arena::Small;
                let index = self.insert_free(index);
                // It may have been merged with a part that another stream's work may still use.
                self.order(index, request.stream)?;
                Ok(index)
            }
            Err(Refusal::Limit { .. } | Refusal::Driver(_)) => ready(self, granules),
            Err(other) => Err(other),
        }
    }

    /// Hands a free block out, after cutting off what is not needed.
    fn take(&mut self, index: u32, granules: u32, request: &Request) -> (Handle, u64) {
        let arena = self.blocks.get(index).arena;
        self.bins[arena as usize].remove(&mut self.blocks, index);
        let index = self.cut(index, granules, request.place);
        let block = self.blocks.get_mut(index);
        block.state = State::Used;
        block.stream = request.stream;
        // The stream comes after all of it: whoever comes after this user's work does too.
        block.stamp = clock::Stamp::default();
        let (handle, start) = (Handle::new(index, block.generation), block.start);
        *self.blocks.detail_mut(index) = Detail { bytes: request.bytes, site: request.site, ordinal: NONE };
        self.books.allocated(u64::from(granules) * GRANULE, request.bytes);
        (handle, self.address_of(start))
    }

    /// Cuts `granules` off a block that is in no bin, puts the rest into its bin, and returns the part that was asked for.
    fn cut(&mut self, index: u32, granules: u32, place: Place) -> u32 {
        let Some(rest) = self.blocks.get(index).granules.checked_sub(granules).filter(|rest| *rest > 0)
        else {
            return index;
        };
        let arena = self.blocks.get(index).arena;
        let (wanted, rest) = match place {
            Place::Low => (index, self.blocks.split(index, granules)),
            Place::High => (self.blocks.split(index, rest), index),
        };
        self.bins[arena as usize].insert(&mut self.blocks, rest);
        wanted
    }

    /// Merges a free block that is in no bin with its free neighbours, and puts the whole into its bin.
    fn insert_free(&mut self, mut index: u32) -> u32 {
        let block = self.blocks.get(index);
        let (before, after, arena) = (block.before, block.after, block.arena);
        let joins = |other: u32| {
            other != NONE && {
                let other = self.blocks.get(other);
                other.state == State::Free && other.arena == arena
            }
        };
        let (with_before, with_after) = (joins(before), joins(after));
        let bins = &mut self.bins[arena as usize];
        if with_after {
            bins.remove(&mut self.blocks, after);
            self.blocks.merge_with_next(index);
        }
        if with_before {
            bins.remove(&mut self.blocks, before);
            self.blocks.merge_with_next(before);
            index = before;
        }
        bins.insert(&mut self.blocks, index);
        index
    }

    /// Makes `stream` wait for the work that stands against its use of a free block.
    fn order(&mut self, index: u32, stream: StreamId) -> Result<(), Refusal> {
        let stamp = self.blocks.get(index).stamp;
        for from in self.clocks.missing(&stamp, stream) {
            self.backing.order(from, stream)?;
            self.books.waits_inserted += 1;
            self.joined(from, stream);
        }
        Ok(())
    }

    /// A stream's count is at its end, after four thousand million waits: lets the device finish and counts anew.
    #[cold]
    fn recount(&mut self) {
        // Should the wait fail, nothing was learned: the next use waits again.
        if self.backing.synchronize().is_ok() {
            self.all_done();
        }
    }
}

fn arena_of(request: &Request) -> Arena {
    match request.purpose {
        Purpose::Registered => Arena::Registered,
        Purpose::General if request.bytes <= SMALL => Arena::Small,
        Purpose::General => Arena::Large,
    }
}
