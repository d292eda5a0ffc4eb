//! Marks on a GPU: a kernel with one thread that writes its number to host memory.

use std::cell::RefCell;
use std::sync::atomic::AtomicU64;

use cudarc::driver::sys;
use xlaunch_pool::DType;

use super::{Mark, Marks};
use crate::cuda::{Arg, Gpu, KernelFile, Launch, args, driver_error, expect, source};
use crate::error::Result;
use crate::tensor::Tensor;

/// Size of the count and the time on the device, in bytes.
const STATE_BYTES: usize = 16;
/// Page-aligned: registered memory should not share its page with other data.
#[repr(align(4096))]
struct Page(AtomicU64);

pub(crate) const KERNELS: KernelFile =
    KernelFile { source: source!("mark/kernel.cu"), kernels: &["mark"], macros: &[], dynamic_shared: &[] };

/// The counter of a GPU, which exists from its first use.
#[derive(Debug, Default)]
pub(crate) struct Counter(RefCell<Option<Counting>>);

#[derive(Debug)]
struct Counting {
    marks: Marks,
    /// Address of the count in host memory, as seen by the device.
    address: u64,
    /// The count, and the time of the last `Begin` in nanoseconds.
    state: Tensor,
}

impl Counter {
    /// Registers the counter with the device, if that was not done yet.
    pub(crate) fn open(&self, gpu: &Gpu) -> Result<Marks> {
        let mut counting = self.0.borrow_mut();
        if let Some(Counting { marks, .. }) = &*counting {
            return Ok(*marks);
        }
        let failed = |error| driver_error("failed to register the counter of marks", error);
        // Never freed: another thread may read it after the device is closed. A process opens only one device.
        let page: &'static Page = Box::leak(Box::new(Page(AtomicU64::new(0))));
        let (host, mut address) = (std::ptr::from_ref(page).cast_mut().cast(), 0);
        // SAFETY: the page is never freed, and belongs to this counter. Only the device writes to it, atomically.
        unsafe {
            sys::cuMemHostRegister_v2(host, size_of::<Page>(), sys::CU_MEMHOSTREGISTER_DEVICEMAP)
                .result()
                .and_then(|()| sys::cuMemHostGetDevicePointer_v2(&raw mut address, host, 0).result())
        }
        .map_err(failed)?;
        let state = Tensor::new(&gpu.pool.persistent(), DType::U8, STATE_BYTES)?;
        gpu.zero(state.all())?;
        let marks = Marks(&page.0);
        *counting = Some(Counting { marks, address, state });
        Ok(marks)
    }

    /// Enqueues a mark. Does nothing before the counter is [opened](Self::open).
    pub(crate) fn mark(&self, gpu: &Gpu, mark: Mark<'_>) -> Result<()> {
        let Some(Counting { address, state, .. }) = &*self.0.borrow() else { return Ok(()) };
        let seconds = match mark {
            Mark::Begin => None,
            Mark::End(seconds) => {
                expect(seconds, DType::F32, 1);
                Some(seconds)
            }
        };
        // SAFETY: the state holds both values; the counter is registered memory; `seconds` was checked.
        unsafe { gpu.launch("mark", Launch::blocks(1, 1), args![state.all(), Arg::Word(*address), seconds]) }
    }
}
