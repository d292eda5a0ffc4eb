//! A back end with one reserved address range, into which memory is mapped where it is needed.
//!
//! Mapping is a transaction: create all pieces, map all of them, set access once. If a call fails, the earlier calls
//! are undone. If undoing fails as well, the memory is stranded: it is counted, and freed before anything else is
//! mapped.

use std::collections::HashMap;

use super::{Backing, Purpose, Result, VirtualDriver};
use crate::stream::StreamId;

/// Memory of a [`VirtualDriver`].
#[derive(Debug)]
pub struct VirtualMemory<D: VirtualDriver> {
    driver: D,
    base: u64,
    capacity: u64,
    /// Mapped pieces by offset.
    mapped: HashMap<u64, Piece<D::Memory>>,
    stranded: Vec<Stranded<D::Memory>>,
}

#[derive(Clone, Copy, Debug)]
struct Piece<M> {
    memory: M,
    bytes: u64,
}

/// Memory that could not be freed, and the address at which it may still be mapped.
#[derive(Clone, Copy, Debug)]
struct Stranded<M> {
    piece: Piece<M>,
    mapped_at: Option<u64>,
}

impl<D: VirtualDriver> VirtualMemory<D> {
    /// Reserves `capacity` bytes of addresses, rounded up to the driver's granularity.
    ///
    /// # Errors
    /// If the driver cannot reserve a range of that length.
    pub fn new(mut driver: D, capacity: u64) -> Result<Self> {
        let capacity = capacity.next_multiple_of(driver.granularity());
        let base = driver.reserve(capacity)?;
        Ok(Self { driver, base, capacity, mapped: HashMap::new(), stranded: Vec::new() })
    }

    /// Makes the calls of a mapping. After a failure, `done` contains what must be undone.
    fn try_map(
        &mut self,
        offset: u64,
        pieces: &[u64],
        purpose: Purpose,
        done: &mut Vec<Stranded<D::Memory>>,
    ) -> Result<()> {
        for bytes in pieces.iter().copied() {
            let memory = self.driver.create(bytes, purpose)?;
            done.push(Stranded { piece: Piece { memory, bytes }, mapped_at: None });
        }
        let mut address = self.base + offset;
        for Stranded { piece, mapped_at } in done {
            self.driver.map(address, piece.bytes, piece.memory)?;
            *mapped_at = Some(address);
            address += piece.bytes;
        }
        self.driver.set_access(self.base + offset, pieces.iter().sum())
    }
}

impl<D: VirtualDriver> Backing for VirtualMemory<D> {
    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn granularity(&self) -> u64 {
        self.driver.granularity()
    }

    fn is_contiguous(&self) -> bool {
        true
    }

    fn address(&self, offset: u64) -> u64 {
        self.base + offset
    }

    fn map(&mut self, offset: u64, pieces: &[u64], purpose: Purpose) -> Result<()> {
        self.reclaim()?;
        let mut done = Vec::with_capacity(pieces.len());
        if let Err(failure) = self.try_map(offset, pieces, purpose, &mut done) {
            self.stranded = done;
            // Memory that cannot be freed now is tried again before the next mapping.
            let _ = self.reclaim();
            return Err(failure);
        }
        self.mapped.extend(done.iter().filter_map(|done| Some((done.mapped_at? - self.base, done.piece))));
        Ok(())
    }

    fn unmap(&mut self, offset: u64, bytes: u64) -> Result<()> {
        let Some(piece) = self.mapped.get(&offset).copied().filter(|piece| piece.bytes == bytes) else {
            unreachable!("the allocator unmaps what it mapped: {bytes} bytes at offset {offset}");
        };
        self.driver.unmap(self.base + offset, bytes)?;
        self.mapped.remove(&offset);
        if self.driver.release(piece.memory, bytes).is_err() {
            self.stranded.push(Stranded { piece, mapped_at: None });
        }
        Ok(())
    }

    fn stranded(&self) -> u64 {
        self.stranded.iter().map(|stranded| stranded.piece.bytes).sum()
    }

    fn reclaim(&mut self) -> Result<()> {
        while let Some(Stranded { piece, mapped_at }) = self.stranded.last_mut() {
            if let Some(address) = *mapped_at {
                self.driver.unmap(address, piece.bytes)?;
                *mapped_at = None;
            }
            self.driver.release(piece.memory, piece.bytes)?;
            self.stranded.pop();
        }
        Ok(())
    }

    fn synchronize(&mut self) -> Result<()> {
        self.driver.synchronize()
    }

    fn insert_wait(&mut self, from: StreamId, to: StreamId) -> Result<()> {
        self.driver.insert_wait(from, to)
    }

    fn memory_info(&self) -> Option<(u64, u64)> {
        self.driver.memory_info()
    }
}

impl<D: VirtualDriver> Drop for VirtualMemory<D> {
    fn drop(&mut self) {
        if self.mapped.is_empty() && self.stranded.is_empty() {
            self.driver.unreserve(self.base, self.capacity);
        }
    }
}
