//! Tests of pools of a real device: memory is mapped, used by kernels and libraries, ordered between streams, and
//! freed.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::exit,
    reason = "tests that show what they measured, and that end child processes"
)]

use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::cublaslt::{CudaBlasLT, Matmul, MatmulConfig};
use cudarc::driver::{CudaContext, CudaStream, LaunchConfig, PushKernelArg, result, sys};
use cudarc::nccl::{self, Comm, Id, ReduceOp};
use xlaunch_harness::Requirement;
use xlaunch_pool::{Mode, Options, Pool, PoolBuf, PoolError, Space, StreamId};

xlaunch_harness::suite! {
    needs gpu:
        memory_is_mapped_used_and_freed,
        kernels_and_cublaslt_take_buffers_as_arguments,
        reuse_on_another_stream_waits_for_pending_work,
        recorded_use_keeps_memory_until_the_second_stream_is_done,
        full_device_is_reported_and_pool_stays_usable,
        pinned_memory_is_reused_after_its_copies,
        request_after_device_fault_is_a_typed_error,
        request_in_forked_child_is_a_typed_error;
    needs gpu_and_nccl:
        nccl_takes_buffers_as_arguments,
        nccl_registers_segment_of_registered_buffer;
}

const MIB: usize = 1 << 20;

/// Tests run one at a time, because they compare the amount of free device memory.
static EXCLUSIVE: Mutex<()> = Mutex::new(());

/// Requires a driver library, and a GPU as device 0. Creates no context, which the fork test would inherit.
fn gpu() -> Requirement {
    // SAFETY: the call opens the library, whose initialisers have no preconditions.
    if !unsafe { sys::is_culib_present() } {
        return Err("no CUDA driver library".into());
    }
    let devices = result::init().and_then(|()| result::device::get_count());
    match devices {
        Ok(1..) => Ok(()),
        Ok(_) => Err("no GPU".into()),
        Err(error) => Err(format!("no GPU: {error}")),
    }
}

fn gpu_and_nccl() -> Requirement {
    gpu()?;
    // SAFETY: as above.
    if unsafe { nccl::sys::is_culib_present() } { Ok(()) } else { Err("no NCCL library".into()) }
}

fn exclusive() -> MutexGuard<'static, ()> {
    EXCLUSIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns a context on the first GPU, for exclusive use by this test.
fn device() -> (Arc<CudaContext>, MutexGuard<'static, ()>) {
    let exclusive = exclusive();
    let context = CudaContext::new(0).unwrap();
    // SAFETY: the tests order streams themselves.
    unsafe { context.disable_event_tracking() };
    (context, exclusive)
}

fn free_memory(context: &CudaContext) -> usize {
    context.bind_to_thread().unwrap();
    result::mem_get_info().unwrap().0
}

fn pool(context: &Arc<CudaContext>, options: impl Into<Options>) -> (Pool, Arc<CudaStream>) {
    let stream = context.new_stream().unwrap();
    (Pool::cuda(&stream, options).unwrap(), stream)
}

fn memory_is_mapped_used_and_freed() {
    let (context, _exclusive) = device();
    let before = free_memory(&context);
    for mode in [Mode::On, Mode::Plan, Mode::Off] {
        let (pool, stream) = pool(&context, mode);
        assert_eq!(pool.space(), Space::Cuda);
        let mut bufs: Vec<PoolBuf<u32>> = Vec::new();
        for (value, len) in [1, 1000, 100_000, 3 * MIB, 70 * MIB].into_iter().enumerate() {
            let mut buf = pool.alloc::<u32>(len).unwrap();
            assert_eq!(buf.address() % 512, 0);
            stream.memcpy_htod(&vec![value as u32; len], &mut buf).unwrap();
            bufs.push(buf);
        }
        for (value, buf) in bufs.iter().enumerate() {
            let host = stream.clone_dtoh(buf).unwrap();
            stream.synchronize().unwrap();
            assert!(host.len() == buf.len() && host.iter().all(|word| *word == value as u32), "{mode:?}");
        }
        stream.memset_zeros(&mut bufs[3]).unwrap();
        let host = stream.clone_dtoh(&bufs[3]).unwrap();
        stream.synchronize().unwrap();
        assert!(host.iter().all(|word| *word == 0));
        // Less than the allocated amount: libraries of earlier tests may free memory in the meantime.
        assert!(before - free_memory(&context) >= 250 * MIB);
        drop(bufs);
        pool.trim().unwrap();
        let stats = pool.stats();
        assert_eq!((stats.mapped.current(), stats.live.current()), (0, 0));
    }
    // Streams and modules of other tests may hold a little.
    assert!(before.abs_diff(free_memory(&context)) <= 64 * MIB, "all memory was freed");
}

fn kernels_and_cublaslt_take_buffers_as_arguments() {
    let (context, _exclusive) = device();
    let (pool, stream) = pool(&context, Mode::On);
    let source = r#"extern "C" __global__ void twice(const float* x, float* y, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) y[i] = 2.0f * x[i];
    }"#;
    let module = context.load_module(cudarc::nvrtc::compile_ptx(source).unwrap()).unwrap();
    let twice = module.load_function("twice").unwrap();
    let n = 1024;
    let mut x = pool.alloc::<f32>(n).unwrap();
    let mut y = pool.alloc::<f32>(n).unwrap();
    stream.memcpy_htod(&vec![1.5_f32; n], &mut x).unwrap();
    let (config, count) = (LaunchConfig::for_num_elems(n as u32), n as i32);
    // SAFETY: the arguments match the kernel's parameters, and it stays within n elements.
    unsafe { stream.launch_builder(&twice).arg(&x).arg(&mut y).arg(&count).launch(config) }.unwrap();

    // [32, 32] times [32, 32]: every element is 1.5 * 3 * 32 = 144.
    let blas = CudaBlasLT::new(stream.clone()).unwrap();
    let mut z = pool.alloc::<f32>(n).unwrap();
    let config = MatmulConfig {
        transa: false,
        transb: false,
        transc: false,
        m: 32,
        n: 32,
        k: 32,
        alpha: 1.0,
        lda: 32,
        ldb: 32,
        beta: 0.0,
        ldc: 32,
        stride_a: None,
        stride_b: None,
        stride_c: None,
        stride_bias: None,
        batch_size: None,
    };
    // SAFETY: the sizes are those of the buffers.
    unsafe { blas.matmul(config, &x, &y, &mut z, None, None) }.unwrap();
    expect_all(&stream, &z, 144.0);
}

fn nccl_takes_buffers_as_arguments() {
    let (context, _exclusive) = device();
    let (pool, stream) = pool(&context, Mode::On);
    let n = 1024;
    let mut x = pool.alloc::<f32>(n).unwrap();
    let mut y = pool.alloc::<f32>(n).unwrap();
    stream.memcpy_htod(&vec![1.5_f32; n], &mut x).unwrap();
    let comm = Comm::from_rank(stream.clone(), 0, 1, Id::new().unwrap()).unwrap();
    comm.all_reduce(&x, &mut y, &ReduceOp::Sum).unwrap();
    comm.all_reduce_in_place(&mut x, &ReduceOp::Sum).unwrap();
    expect_all(&stream, &x, 1.5);
    expect_all(&stream, &y, 1.5);
}

fn expect_all(stream: &Arc<CudaStream>, buf: &PoolBuf<f32>, expected: f32) {
    let host = stream.clone_dtoh(buf).unwrap();
    stream.synchronize().unwrap();
    assert!(host.iter().all(|value| (value - expected).abs() < 1e-3), "{:?}", &host[..4]);
}

fn nccl_registers_segment_of_registered_buffer() {
    let (context, _exclusive) = device();
    let (pool, stream) = pool(&context, Mode::On);
    let buf = pool.registered().alloc::<f32>(5 * MIB).unwrap();
    let (start, len) = buf.segment().unwrap();
    let (mut comm, mut handle) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the context is current; the segment is mapped and outlives its registration; each call writes one
    // pointer.
    let results = unsafe {
        [
            nccl::sys::ncclCommInitAll(&raw mut comm, 1, std::ptr::null()),
            nccl::sys::ncclCommRegister(comm, start as *mut _, len as usize, &raw mut handle),
            nccl::sys::ncclCommDeregister(comm, handle),
        ]
    };
    stream.synchronize().unwrap();
    assert!(results.iter().all(|result| *result == nccl::sys::ncclResult_t::ncclSuccess), "{results:?}");
    println!("registered {len} bytes, handle {}", if handle.is_null() { "null" } else { "given" });
}

/// Another stream gets memory that long work of the first stream still reads: without a wait, it would overwrite that
/// memory.
fn reuse_on_another_stream_waits_for_pending_work() {
    let (context, _exclusive) = device();
    let len = 256 * MIB;
    // The limit leaves no room for another buffer, so the pool must reuse memory that the first stream uses.
    let (pool, first) = pool(&context, Options { limit: 3 * len as u64, ..Options::default() });
    let second = context.new_stream().unwrap();
    let other = pool.add_cuda_stream(&second).unwrap();
    let mut out = pool.persistent().alloc::<u8>(len).unwrap();
    let mut out_2 = pool.persistent().alloc::<u8>(len).unwrap();
    let mut source = pool.alloc::<u8>(len).unwrap();
    first.memset_zeros(&mut source).unwrap();
    first.synchronize().unwrap();
    let address = source.address();
    for _ in 0..50 {
        first.memcpy_dtod(&source, &mut out_2).unwrap();
    }
    first.memcpy_dtod(&source, &mut out).unwrap();
    drop(source);
    let mut reused = pool.on_stream(other).alloc::<u8>(len).unwrap();
    assert_eq!((reused.address(), pool.stats().waits_inserted), (address, 1));
    second.memcpy_htod(&vec![1_u8; len], &mut reused).unwrap();
    second.synchronize().unwrap();
    first.synchronize().unwrap();
    assert!(first.clone_dtoh(&out).unwrap().iter().all(|byte| *byte == 0));
}

fn recorded_use_keeps_memory_until_the_second_stream_is_done() {
    let (context, _exclusive) = device();
    let (pool, first) = pool(&context, Mode::On);
    let second = context.new_stream().unwrap();
    let other = pool.add_cuda_stream(&second).unwrap();
    let mut buf = pool.alloc::<u8>(64 * MIB).unwrap();
    let mut out = pool.alloc::<u8>(64 * MIB).unwrap();
    first.memset_zeros(&mut buf).unwrap();
    first.synchronize().unwrap();
    pool.record_synchronize(StreamId::default());
    second.memcpy_dtod(&buf, &mut out).unwrap();
    buf.record_use(other).unwrap();
    let address = buf.address();
    drop(buf);
    let again = pool.alloc::<u8>(64 * MIB).unwrap();
    let waited = pool.stats().waits_inserted;
    assert_eq!(waited == 1, again.address() == address, "memory is reused only after a wait");
    drop(again);
    second.synchronize().unwrap();
    pool.record_synchronize(other);
    let _free = pool.alloc::<u8>(64 * MIB).unwrap();
    assert_eq!(pool.stats().waits_inserted, waited, "after the host has waited, no wait is inserted");
}

fn full_device_is_reported_and_pool_stays_usable() {
    let (context, _exclusive) = device();
    let (pool, stream) = pool(&context, Mode::On);
    let (free, total) = (free_memory(&context), result::mem_get_info().unwrap().1);
    let _kept = pool.alloc::<u8>(100 * MIB).unwrap();
    let error = pool.alloc::<u8>(free + 200 * MIB).unwrap_err();
    let PoolError::OutOfMemory(report) = &error else { panic!("{error}") };
    assert_eq!(report.device.map(|(_, total)| total), Some(total as u64));
    println!("{error}");
    let mut buf = pool.alloc::<u8>(10 * MIB).unwrap();
    stream.memset_zeros(&mut buf).unwrap();
    stream.synchronize().unwrap();
    assert!(matches!(pool.alloc::<u8>(1 << 50), Err(PoolError::TooLarge { .. })));

    // Fill the limit with pieces, free every second one, then request a block that needs remapping.
    drop((buf, pool.trim().unwrap()));
    pool.set_limit(2048 * MIB as u64).unwrap();
    let mut pieces: Vec<_> = (0..15).map(|_| pool.alloc::<u8>(128 * MIB).unwrap()).collect();
    let mut index = 0;
    pieces.retain(|_| (index % 2 == 0, index += 1).0);
    let large = pool.alloc::<u8>(800 * MIB).unwrap();
    assert!(pool.stats().retries == 1 && pool.stats().mapped.current() <= 2048 * MIB as u64);
    drop(large);
}

fn pinned_memory_is_reused_after_its_copies() {
    let (context, _exclusive) = device();
    let (device, stream) = pool(&context, Mode::On);
    let pinned = Pool::pinned(&stream, Mode::On).unwrap();
    let copies = pinned.add_cuda_stream(&stream).unwrap();
    assert_eq!(pinned.space(), Space::Pinned);
    let targets: Vec<PoolBuf<u8>> = (0..20).map(|_| device.alloc(MIB).unwrap()).collect();
    for (value, target) in targets.iter().enumerate() {
        let staging = pinned.alloc::<u8>(MIB).unwrap();
        // SAFETY: both ranges are allocated, and no earlier copy still reads this memory: the pool waited for it.
        unsafe {
            let host = std::slice::from_raw_parts_mut(staging.address() as *mut u8, MIB);
            host.fill(value as u8);
            result::memcpy_htod_async(target.address(), host, stream.cu_stream()).unwrap();
        }
        staging.record_use(copies).unwrap();
    }
    for (value, target) in targets.iter().enumerate() {
        let host = stream.clone_dtoh(target).unwrap();
        stream.synchronize().unwrap();
        assert!(host.iter().all(|byte| *byte == value as u8));
    }
    let stats = pinned.stats();
    assert!(stats.mapped.peak < 20 * MIB as u64 && stats.waits_inserted > 0, "{stats:?}");
    pinned.record_synchronize(copies);
    pinned.trim().unwrap();
    assert_eq!(pinned.stats().mapped.current(), 0);
}

const CHILD: &str = "XLAUNCH_POOL_TEST_CHILD";

/// Runs the test again in a child process, because its effects on the process cannot be undone.
fn run_in_child(name: &str) {
    let _exclusive = exclusive();
    let program = std::env::current_exe().unwrap();
    let output =
        Command::new(program).args([name, "--exact", "--nocapture"]).env(CHILD, "1").output().unwrap();
    let text =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    assert!(output.status.success() && text.contains("typed error:"), "{text}");
}

fn request_after_device_fault_is_a_typed_error() {
    if std::env::var_os(CHILD).is_none() {
        return run_in_child("request_after_device_fault_is_a_typed_error");
    }
    let (context, _exclusive) = device();
    let (pool, stream) = pool(&context, Mode::On);
    let kept = pool.alloc::<u8>(MIB).unwrap();
    let freed = pool.alloc::<u8>(64 * MIB).unwrap().address();
    let source = r#"extern "C" __global__ void fault(int* p) { *p = 1; }"#;
    let module = context.load_module(cudarc::nvrtc::compile_ptx(source).unwrap()).unwrap();
    let (fault, nowhere) = (module.load_function("fault").unwrap(), 8_u64);
    // SAFETY: causing a fault, which makes the context unusable, is the point of the test; this process ends after it.
    unsafe { stream.launch_builder(&fault).arg(&nowhere).launch(LaunchConfig::for_num_elems(1)) }.unwrap();
    stream.synchronize().unwrap_err();
    println!("typed error: {}", pool.trim().unwrap_err());
    // It is unspecified whether the driver still maps memory.
    println!("a larger request: {:?}", pool.alloc::<u8>(500 * MIB).map_err(|error| error.to_string()));
    // Requests that need no driver call still work, and so do drops.
    assert_eq!(pool.alloc::<u8>(64 * MIB).unwrap().address(), freed);
    drop((kept, pool));
    // Skips the destructors of cudarc's objects, which would report the same fault.
    std::process::exit(0);
}

fn request_in_forked_child_is_a_typed_error() {
    if std::env::var_os(CHILD).is_none() {
        return run_in_child("request_in_forked_child_is_a_typed_error");
    }
    let (context, _exclusive) = device();
    let (pool, _stream) = pool(&context, Mode::On);
    drop(pool.alloc::<u8>(MIB).unwrap());
    // SAFETY: the child makes a request, prints and exits; it runs no destructors and takes no locks of its parent.
    match unsafe { libc::fork() } {
        0 => {
            let refused = pool.alloc::<u8>(500 * MIB);
            let Err(error) = refused else { std::process::abort() };
            println!("typed error: {error}");
            // SAFETY: exits without running destructors, whose objects belong to the parent.
            unsafe { libc::_exit(if error.to_string().contains("fork") { 0 } else { 1 }) }
        }
        child => {
            let mut status = 0;
            // SAFETY: waits for the child forked above; the call writes one integer.
            unsafe { libc::waitpid(child, &raw mut status, 0) };
            assert_eq!(status, 0);
            assert!(pool.alloc::<u8>(500 * MIB).is_ok(), "the pool of the parent stays usable");
        }
    }
}
