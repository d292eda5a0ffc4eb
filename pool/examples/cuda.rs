//! A pool of device memory shared by two streams: `cargo run -p xlaunch-pool --example cuda`. Needs an NVIDIA GPU;
//! without one, prints a message and exits.

#![expect(clippy::print_stdout, reason = "the output of the example")]

use std::error::Error;

use cudarc::driver::{CudaContext, sys};
use xlaunch_pool::{Mode, Pool};

fn main() -> Result<(), Box<dyn Error>> {
    // cudarc panics at the first use of a missing library, so check for the library first.
    // SAFETY: the call opens the library, whose initialisers have no preconditions.
    if !unsafe { sys::is_culib_present() } {
        println!("no CUDA driver library (libcuda.so): this example needs an NVIDIA GPU");
        return Ok(());
    }
    let context = match CudaContext::new(0) {
        Ok(context) => context,
        Err(error) => {
            println!("no usable GPU: {error}");
            return Ok(());
        }
    };
    // SAFETY: all memory comes from the pool, which orders the streams itself.
    unsafe { context.disable_event_tracking() };
    let compute = context.new_stream()?;
    let copies = context.new_stream()?;

    // `compute` becomes the pool's stream 0.
    let pool = Pool::cuda(&compute, Mode::On)?;
    let copies_id = pool.add_cuda_stream(&copies)?;

    // cudarc's copies, launches, cuBLASLt and NCCL calls take buffers as arguments.
    let mut x = pool.alloc::<f32>(1 << 20)?;
    compute.memcpy_htod(&vec![1.5; x.len()], &mut x)?;

    // `copies` waits for `compute`, reads `x`, and the pool learns of both.
    copies.join(&compute)?;
    pool.record_wait(Default::default(), copies_id);
    let mut host = vec![0.0; x.len()];
    copies.memcpy_dtoh(&x, &mut host)?;
    x.record_use(copies_id)?;

    // This makes no driver call. The memory is reused only by work that runs after the copy.
    drop(x);

    copies.synchronize()?;
    pool.record_synchronize(copies_id);
    println!("read back {} elements, the first is {}", host.len(), host[0]);
    println!("{:#?}", pool.stats());
    Ok(())
}
