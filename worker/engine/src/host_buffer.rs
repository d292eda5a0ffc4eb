//! Host memory for large copies from the device. If there is a GPU, the memory is pinned: copies to memory that cannot
//! be paged out are several times faster.
//!
//! A buffer is either memory of this process, or a part of a memory file (`memfd_create`) that another process holds
//! open, so that its contents outlive this process.
//!
//! While the driver pins memory, which takes a second for a few gigabytes, it accepts no other call, and thus no
//! launch. Buffers are therefore pinned piece by piece, with pauses, while the device is busy with other work. A copy
//! to the host must not touch two pieces: see [`HostBuffer::pieces`].

use std::fmt;
use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::{CudaContext, sys};
use rustix::fs::SealFlags;
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Bytes that are pinned at once, which takes some milliseconds. A multiple of every page size.
const PIECE: usize = 64 << 20;
/// Number of values in a piece.
const PIECE_LEN: usize = PIECE / size_of::<f32>();

/// Allocates [`HostBuffer`]s on any thread: pinning gigabytes takes a while.
#[derive(Clone, Debug, Default)]
pub struct HostAllocator {
    /// The context to pin memory in; `None` on the CPU.
    context: Option<Arc<CudaContext>>,
}

/// Host values, initially zero.
pub struct HostBuffer(Memory);

enum Memory {
    Ordinary(Vec<f32>),
    Mapped(Mapped),
}

/// Private pages of this process, or a part of a memory file.
struct Mapped {
    address: NonNull<f32>,
    len: usize,
    /// The context in which the first pieces are pinned, and their number; `None` on the CPU.
    pinned: Option<(Arc<CudaContext>, usize)>,
}

// SAFETY: the mapping belongs to this value alone, and the system and the driver let any thread use and release it.
unsafe impl Send for Mapped {}

impl HostAllocator {
    pub(crate) fn pinned(context: Arc<CudaContext>) -> Self {
        Self { context: Some(context) }
    }

    /// Allocates a buffer of `len` values. Copies to memory that the driver cannot pin are slower.
    pub fn alloc(&self, len: usize) -> HostBuffer {
        let mapped = self.context.as_ref().filter(|_| len > 0).and_then(|context| {
            let mut mapped = Mapped::anonymous(len).ok()?;
            mapped.pin(context);
            Some(HostBuffer(Memory::Mapped(mapped)))
        });
        mapped.unwrap_or_else(|| HostBuffer::from(vec![0.0; len]))
    }

    /// Maps `len` values of a memory file from byte `offset`, a multiple of the page size. The file's memory must have
    /// been allocated up to the end of the range; afterwards the file can no longer be truncated. Other processes may
    /// read the range, but must not write to it while the buffer exists. Copies to memory that the driver cannot pin
    /// are slower.
    ///
    /// # Errors
    /// If the file is not a memory file or is too short, or the system cannot map it.
    pub fn map(&self, file: &File, offset: u64, len: usize) -> io::Result<HostBuffer> {
        if len == 0 {
            return Ok(HostBuffer::default());
        }
        let bytes = len.checked_mul(size_of::<f32>()).ok_or(io::ErrorKind::InvalidInput)?;
        // Only memory files can be sealed. Without the seal, an access past a truncated end would raise SIGBUS.
        rustix::fs::fcntl_add_seals(file, SealFlags::SHRINK)?;
        if offset.checked_add(bytes as u64).is_none_or(|end| end > file.metadata().map_or(0, |it| it.len())) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut mapped = Mapped::of_file(file, offset, len)?;
        match &self.context {
            Some(context) => mapped.pin(context),
            None => (0..mapped.pieces()).for_each(|piece| mapped.touch(piece)),
        }
        Ok(HostBuffer(Memory::Mapped(mapped)))
    }
}

const READ_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

impl Mapped {
    fn anonymous(len: usize) -> io::Result<Self> {
        let bytes = len * size_of::<f32>();
        // SAFETY: the kernel chooses an address that is free.
        let address = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, READ_WRITE, MapFlags::PRIVATE)
        }?;
        Self::at(address.cast(), len)
    }

    fn of_file(file: &File, offset: u64, len: usize) -> io::Result<Self> {
        let bytes = len * size_of::<f32>();
        // SAFETY: the kernel chooses an address that is free. The file is at least as long as the mapping, and sealed
        // against becoming shorter.
        let address = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), bytes, READ_WRITE, MapFlags::SHARED, file, offset)
        }?;
        Self::at(address.cast(), len)
    }

    fn at(address: *mut f32, len: usize) -> io::Result<Self> {
        let address = NonNull::new(address).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { address, len, pinned: None })
    }

    fn pieces(&self) -> usize {
        self.len.div_ceil(PIECE_LEN)
    }

    /// Returns address and size in bytes of a piece.
    fn piece(&self, index: usize) -> (*mut std::ffi::c_void, usize) {
        let (start, bytes) = (index * PIECE_LEN, self.len.min((index + 1) * PIECE_LEN) - index * PIECE_LEN);
        (self.address.as_ptr().wrapping_add(start).cast(), bytes * size_of::<f32>())
    }

    /// Populates the pages of a piece. If the kernel does not know this advice (before Linux 5.14), they are populated
    /// when they are pinned or written.
    fn touch(&self, piece: usize) {
        let (address, bytes) = self.piece(piece);
        // SAFETY: a part of the mapping that starts at a page boundary. The advice does not change contents.
        let _ = unsafe { rustix::mm::madvise(address, bytes, Advice::LinuxPopulateWrite) };
    }

    /// Pins as many pieces as the driver permits.
    fn pin(&mut self, context: &Arc<CudaContext>) {
        if context.bind_to_thread().is_err() {
            return;
        }
        for piece in 0..self.pieces() {
            // Populate first, so that the driver does not have to.
            self.touch(piece);
            let ((address, bytes), begin) = (self.piece(piece), Instant::now());
            // SAFETY: the mapping contains the piece, and is unmapped only after the piece is unregistered.
            if unsafe { sys::cuMemHostRegister_v2(address, bytes, 0) }.result().is_err() {
                break;
            }
            self.pinned = Some((context.clone(), piece + 1));
            // The driver's locks are not fair: without a pause, other threads would have to wait for all pieces.
            std::thread::sleep(begin.elapsed());
        }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // If the context is gone, so are the registrations.
        if let Some((context, count)) = self.pinned.take()
            && context.bind_to_thread().is_ok()
        {
            for piece in 0..count {
                // SAFETY: registered by `pin`. The callers that started copies to it have waited for them.
                let _ = unsafe { sys::cuMemHostUnregister(self.piece(piece).0) };
            }
        }
        let bytes = self.len * size_of::<f32>();
        // SAFETY: mapped by a constructor, and unmapped once. Fails only for an address that is not a mapping's.
        let _ = unsafe { rustix::mm::munmap(self.address.as_ptr().cast(), bytes) };
    }
}

impl HostBuffer {
    /// Splits these values into parts that a single copy from the device may write: each part lies within one piece,
    /// which was pinned separately.
    pub fn pieces(&self, values: Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let len = match &self.0 {
            Memory::Ordinary(_) => usize::MAX,
            Memory::Mapped(_) => PIECE_LEN,
        };
        let end = values.end;
        let next = move |start: usize| (start / len + 1).saturating_mul(len).min(end);
        let starts = std::iter::successors((!values.is_empty()).then_some(values.start), move |start| {
            Some(next(*start)).filter(|start| *start < end)
        });
        starts.map(move |start| start..next(start))
    }
}

impl From<Vec<f32>> for HostBuffer {
    fn from(values: Vec<f32>) -> Self {
        Self(Memory::Ordinary(values))
    }
}

impl Deref for HostBuffer {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match &self.0 {
            Memory::Ordinary(values) => values,
            // SAFETY: `len` values of a mapping that this buffer owns. Any bytes are valid values, including the zeros
            // of pages that were never written; for other processes, see `map`.
            Memory::Mapped(Mapped { address, len, .. }) => unsafe {
                std::slice::from_raw_parts(address.as_ptr(), *len)
            },
        }
    }
}

impl DerefMut for HostBuffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        match &mut self.0 {
            Memory::Ordinary(values) => values,
            // SAFETY: as in `deref`; the borrow is unique.
            Memory::Mapped(Mapped { address, len, .. }) => unsafe {
                std::slice::from_raw_parts_mut(address.as_ptr(), *len)
            },
        }
    }
}

impl Default for HostBuffer {
    fn default() -> Self {
        Self::from(Vec::new())
    }
}

impl fmt::Debug for HostBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match &self.0 {
            Memory::Ordinary(_) => "ordinary",
            Memory::Mapped(Mapped { pinned: Some((_, pieces)), .. }) => {
                return write!(f, "HostBuffer({} values, {pieces} pinned pieces)", self.len());
            }
            Memory::Mapped(_) => "mapped",
        };
        write!(f, "HostBuffer({} values, {kind})", self.len())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use rustix::fs::MemfdFlags;

    use super::*;

    fn memory_file(bytes: u64) -> File {
        let file = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        let file = File::from(file);
        file.set_len(bytes).unwrap();
        file
    }

    #[test]
    fn mapped_values_are_those_of_the_file_and_stay_there() {
        let file = memory_file(3 << 16);
        file.write_all_at(&1.5_f32.to_le_bytes(), 1 << 16).unwrap();
        let mut buffer = HostAllocator::default().map(&file, 1 << 16, 1000).unwrap();
        assert_eq!(buffer[..2], [1.5, 0.0]);
        buffer[999] = 2.5;
        drop(buffer);
        let mut bytes = [0; 4];
        file.read_exact_at(&mut bytes, (1 << 16) + 999 * 4).unwrap();
        assert_eq!(f32::from_le_bytes(bytes), 2.5);
    }

    #[test]
    fn pieces_cover_the_values_and_end_where_pinned_pieces_end() {
        let of = |buffer: &HostBuffer, values| -> Vec<_> {
            buffer.pieces(values).map(|piece| (piece.start, piece.end)).collect()
        };
        let (one, two, len) = (PIECE_LEN, 2 * PIECE_LEN, 2 * PIECE_LEN + 10);
        let mapped = Mapped::anonymous(len).unwrap();
        assert_eq!((mapped.pieces(), mapped.piece(0).1, mapped.piece(2).1), (3, PIECE, 40));
        let mapped = HostBuffer(Memory::Mapped(mapped));
        assert_eq!(of(&mapped, 0..len), [(0, one), (one, two), (two, len)]);
        assert_eq!(of(&mapped, one - 1..one + 1), [(one - 1, one), (one, one + 1)]);
        assert_eq!(of(&mapped, one..two), [(one, two)]);
        assert_eq!(of(&mapped, 5..5), []);
        assert_eq!(of(&HostBuffer::from(vec![0.0; 8]), 1..8), [(1, 8)]);
    }

    #[test]
    fn mapped_file_cannot_be_truncated() {
        let file = memory_file(1 << 16);
        let _buffer = HostAllocator::default().map(&file, 0, 1 << 14).unwrap();
        assert!(file.set_len(0).is_err());
    }

    #[test]
    fn part_beyond_the_end_and_file_on_disk_are_refused() {
        let map = |file: &File, offset, len| HostAllocator::default().map(file, offset, len).map(|_| ());
        assert!(map(&memory_file(1 << 16), 1 << 16, 1).is_err());
        assert!(map(&memory_file(1 << 16), 0, usize::MAX).is_err());
        assert!(map(&memory_file(1 << 16), u64::MAX - 65_535, 1 << 14).is_err());
        let path = std::env::temp_dir().join(format!("xlaunch-map-{}", std::process::id()));
        let disk = File::create_new(&path).unwrap();
        disk.set_len(1 << 16).unwrap();
        std::fs::remove_file(path).unwrap();
        assert!(map(&disk, 0, 1).is_err());
    }
}
