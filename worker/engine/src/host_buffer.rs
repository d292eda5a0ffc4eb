//! Host memory for large copies from the device: pinned where there is a GPU, as it copies several times faster to
//! memory that cannot be paged out.
//!
//! A buffer is either memory of this process, or a part of a memory file (`memfd_create`) that another process keeps:
//! its contents outlive this process.

use std::fmt;
use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::{CudaContext, result, sys};
use rustix::fs::SealFlags;
use rustix::mm::{MapFlags, ProtFlags};

use crate::cuda::driver_error;
use crate::error::Result;

/// Allocates [`HostBuffer`]s on any thread: pinning gigabytes takes a while.
#[derive(Clone, Debug, Default)]
pub struct HostAllocator {
    /// `None` on the CPU.
    context: Option<Arc<CudaContext>>,
}

/// Host values, all zero at first.
pub struct HostBuffer(Memory);

enum Memory {
    Ordinary(Vec<f32>),
    Pinned(Pinned),
    Mapped(Mapped),
}

struct Pinned {
    address: NonNull<f32>,
    len: usize,
    context: Arc<CudaContext>,
}

// SAFETY: the memory belongs to this value alone, and the driver lets any thread use and free it.
unsafe impl Send for Pinned {}

/// A part of a memory file.
struct Mapped {
    address: NonNull<f32>,
    len: usize,
    /// The context in which the mapping is pinned; `None` if it is pageable.
    pinned: Option<Arc<CudaContext>>,
}

// SAFETY: the mapping belongs to this value alone, and system and driver let any thread use and release it.
unsafe impl Send for Mapped {}

impl HostAllocator {
    pub(crate) fn pinned(context: Arc<CudaContext>) -> Self {
        Self { context: Some(context) }
    }

    /// A buffer of `len` values.
    ///
    /// # Errors
    /// The driver cannot pin that much memory.
    pub fn alloc(&self, len: usize) -> Result<HostBuffer> {
        match &self.context {
            Some(context) if len > 0 => {
                Pinned::new(context, len).map(|pinned| HostBuffer(Memory::Pinned(pinned)))
            }
            _ => Ok(HostBuffer::from(vec![0.0; len])),
        }
    }

    /// `len` values of a memory file, from byte `offset` on, a multiple of the page size. The file's memory must have
    /// been allocated that far; it cannot be truncated any more. Other processes may read it, but must not write while
    /// the buffer exists. Copies are slower where the driver cannot pin that much memory.
    ///
    /// # Errors
    /// It is not a memory file, or too short, or the system cannot map it.
    pub fn map(&self, file: &File, offset: u64, len: usize) -> io::Result<HostBuffer> {
        if len == 0 {
            return Ok(HostBuffer::default());
        }
        let bytes = len.checked_mul(size_of::<f32>()).ok_or(io::ErrorKind::InvalidInput)?;
        // Only memory files can be sealed. Without the seal, an access beyond a truncation would be SIGBUS.
        rustix::fs::fcntl_add_seals(file, SealFlags::SHRINK)?;
        if offset.checked_add(bytes as u64).is_none_or(|end| end > file.metadata().map_or(0, |it| it.len())) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut mapped = Mapped::new(file, offset, bytes)?;
        if let Some(context) = &self.context {
            mapped.pin(context);
        }
        Ok(HostBuffer(Memory::Mapped(mapped)))
    }
}

impl Mapped {
    fn new(file: &File, offset: u64, bytes: usize) -> io::Result<Self> {
        let (read_write, shared) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::POPULATE);
        // SAFETY: the kernel chooses an address that is free. The file is at least as long as the mapping, and sealed
        // against becoming shorter.
        let address =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, read_write, shared, file, offset) }?;
        let address = NonNull::new(address.cast::<f32>()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { address, len: bytes / size_of::<f32>(), pinned: None })
    }

    fn bytes(&self) -> usize {
        self.len * size_of::<f32>()
    }

    fn pin(&mut self, context: &Arc<CudaContext>) {
        let pin = || -> std::result::Result<(), result::DriverError> {
            context.bind_to_thread()?;
            // SAFETY: the mapping is that long, and is unregistered before it is unmapped.
            unsafe { sys::cuMemHostRegister_v2(self.address.as_ptr().cast(), self.bytes(), 0) }.result()
        };
        if pin().is_ok() {
            self.pinned = Some(context.clone());
        }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // If the context is gone, so is the registration.
        if self.pinned.take().is_some_and(|context| context.bind_to_thread().is_ok()) {
            // SAFETY: registered by `pin`. Copies to it were waited for by those who began them.
            let _ = unsafe { sys::cuMemHostUnregister(self.address.as_ptr().cast()) };
        }
        // SAFETY: mapped by `new`, and unmapped once. Fails only for an address that is not a mapping's.
        let _ = unsafe { rustix::mm::munmap(self.address.as_ptr().cast(), self.bytes()) };
    }
}

impl Pinned {
    fn new(context: &Arc<CudaContext>, len: usize) -> Result<Self> {
        let failed = |error| driver_error("failed to pin host memory", error);
        context.bind_to_thread().map_err(failed)?;
        // SAFETY: the memory is initialised below, before anything reads it.
        let address = unsafe { result::malloc_host(len * size_of::<f32>(), 0) }.map_err(failed)?;
        let address = NonNull::new(address.cast::<f32>());
        let address = address.ok_or_else(|| failed(result::DriverError(OUT_OF_MEMORY)))?;
        // SAFETY: the allocation has room for `len` values, of which zero bytes are valid ones.
        unsafe { address.write_bytes(0, len) };
        Ok(Self { address, len, context: context.clone() })
    }
}

const OUT_OF_MEMORY: cudarc::driver::sys::CUresult = cudarc::driver::sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY;

impl Drop for Pinned {
    fn drop(&mut self) {
        // If the context is gone, so is the memory.
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: allocated by `malloc_host`, and freed once. Copies to it were waited for by those who began them.
            let _ = unsafe { result::free_host(self.address.as_ptr().cast()) };
        }
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
            // SAFETY: `len` initialised values that belong to this buffer.
            Memory::Pinned(Pinned { address, len, .. }) => unsafe {
                std::slice::from_raw_parts(address.as_ptr(), *len)
            },
            // SAFETY: `len` values of a mapping that this buffer owns, of which any bytes are valid; see `map` for
            // other processes.
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
            Memory::Pinned(Pinned { address, len, .. }) => unsafe {
                std::slice::from_raw_parts_mut(address.as_ptr(), *len)
            },
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
            Memory::Pinned(_) => "pinned",
            Memory::Mapped(_) => "of a memory file",
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
