//! Pools of a real device: memory mapped, used by kernels and libraries, ordered between streams, given back. Skipped with
//! a word where there is no GPU.

#![cfg(feature = "cuda")]
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::exit,
    reason = "a test, which says what it skips"
)]

use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard};

use cudarc::cublaslt::{CudaBlasLT, Matmul, MatmulConfig};
use cudarc::driver::{CudaContext, CudaStream, LaunchConfig, PushKernelArg, result, sys};
use cudarc::nccl::{self, Comm, Id, ReduceOp};
use xlaunch_pool::{Mode, Options, Pool, PoolBuf, PoolError, Space};

const MIB: usize = 1 << 20;

/// One test at a time: they compare what the device has free.
static ONE: Mutex<()> = Mutex::new(());

/// A context on the first GPU, as programs use it beside the pool.
fn gpu() -> Option<(Arc<CudaContext>, MutexGuard<'static, ()>)> {
    let one = ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    // SAFETY: asking opens the library, whose initialisers have no preconditions.
    if !unsafe { sys::is_culib_present() } {
        println!("skipped: no CUDA driver");
        return None;
    }
    let Ok(context) = CudaContext::new(0) else {
        println!("skipped: no GPU");
        return None;
    };
    // SAFETY: the tests order streams themselves.
    unsafe { context.disable_event_tracking() };
    Some((context, one))
}

fn free_memory(context: &CudaContext) -> usize {
    context.bind_to_thread().unwrap();
    result::mem_get_info().unwrap().0
}

fn pool(context: &Arc<CudaContext>, options: impl Into<Options>) -> (Pool, Arc<CudaStream>) {
    let stream = context.new_stream().unwrap();
    (Pool::cuda(&stream, options).unwrap(), stream)
}

#[test]
fn memory_is_mapped_used_and_given_back() {
    let Some((context, _one)) = gpu() else { return };
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
        // What libraries of other tests give back meanwhile is in the difference too.
        assert!(before - free_memory(&context) >= 250 * MIB);
        drop(bufs);
        pool.trim().unwrap();
        let stats = pool.stats();
        assert_eq!((stats.mapped.current(), stats.live.current()), (0, 0));
    }
    // Contexts of other tests' streams and modules may hold a little.
    assert!(before.abs_diff(free_memory(&context)) <= 64 * MIB, "the device has everything back");
}

#[test]
fn kernels_and_libraries_take_buffers_as_arguments() {
    let Some((context, _one)) = gpu() else { return };
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
    // SAFETY: the arguments are what the kernel takes, and it stays within n elements.
    unsafe { stream.launch_builder(&twice).arg(&x).arg(&mut y).arg(&count).launch(config) }.unwrap();

    // [32, 32] times [32, 32]: every element 1.5 * 3 * 32.
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
    let mut expected = 144.0;

    // SAFETY: asking opens the library, whose initialisers have no preconditions.
    if unsafe { nccl::sys::is_culib_present() } {
        let comm = Comm::from_rank(stream.clone(), 0, 1, Id::new().unwrap()).unwrap();
        comm.all_reduce(&x, &mut y, &ReduceOp::Sum).unwrap();
        comm.all_reduce_in_place(&mut z, &ReduceOp::Sum).unwrap();
        expected = 144.0;
    } else {
        println!("skipped for NCCL: no library");
    }
    let host = stream.clone_dtoh(&z).unwrap();
    stream.synchronize().unwrap();
    assert!(host.iter().all(|value| (value - expected).abs() < 1e-3), "{:?}", &host[..4]);
}

#[test]
fn nccl_registers_a_registered_buffer() {
    let Some((context, _one)) = gpu() else { return };
    // SAFETY: asking opens the library, whose initialisers have no preconditions.
    if !unsafe { nccl::sys::is_culib_present() } {
        println!("skipped: no NCCL");
        return;
    }
    let (pool, stream) = pool(&context, Mode::On);
    let buf = pool.registered().alloc::<f32>(5 * MIB).unwrap();
    let (start, len) = buf.segment().unwrap();
    let (mut comm, mut handle) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the context is current; the segment is mapped and outlives its registration; each call writes one pointer.
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

/// Long work on one stream, whose memory another stream gets: without the order it would be overwritten while it is read.
#[test]
fn memory_in_use_on_one_stream_waits_before_it_serves_another() {
    let Some((context, _one)) = gpu() else { return };
    let len = 256 * MIB;
    // No room for a second buffer: what the first stream uses must be handed on.
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

#[test]
fn a_buffer_used_on_a_second_stream_is_kept_for_it() {
    let Some((context, _one)) = gpu() else { return };
    let (pool, first) = pool(&context, Mode::On);
    let second = context.new_stream().unwrap();
    let other = pool.add_cuda_stream(&second).unwrap();
    let mut buf = pool.alloc::<u8>(64 * MIB).unwrap();
    let mut out = pool.alloc::<u8>(64 * MIB).unwrap();
    first.memset_zeros(&mut buf).unwrap();
    first.synchronize().unwrap();
    pool.host_waited(xlaunch_pool::StreamId::default());
    second.memcpy_dtod(&buf, &mut out).unwrap();
    buf.record_use(other).unwrap();
    let address = buf.address();
    drop(buf);
    let again = pool.alloc::<u8>(64 * MIB).unwrap();
    let waited = pool.stats().waits_inserted;
    assert_eq!(waited == 1, again.address() == address, "the same memory only after a wait");
    drop(again);
    second.synchronize().unwrap();
    pool.host_waited(other);
    let _free = pool.alloc::<u8>(64 * MIB).unwrap();
    assert_eq!(pool.stats().waits_inserted, waited, "the host's wait orders all");
}

#[test]
fn a_full_device_is_an_error_with_the_figures_and_the_pool_lives_on() {
    let Some((context, _one)) = gpu() else { return };
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

    // To the brim, in pieces; then the whole again in one piece, which takes remapping.
    drop((buf, pool.trim().unwrap()));
    pool.set_limit(2048 * MIB as u64).unwrap();
    let mut pieces: Vec<_> = (0..15).map(|_| pool.alloc::<u8>(128 * MIB).unwrap()).collect();
    let mut index = 0;
    pieces.retain(|_| (index % 2 == 0, index += 1).0);
    let large = pool.alloc::<u8>(800 * MIB).unwrap();
    assert!(pool.stats().retries == 1 && pool.stats().mapped.current() <= 2048 * MIB as u64);
    drop(large);
}

#[test]
fn pinned_memory_comes_back_when_its_copies_are_done() {
    let Some((context, _one)) = gpu() else { return };
    let (device, stream) = pool(&context, Mode::On);
    let pinned = Pool::pinned(&stream, Mode::On).unwrap();
    let lane = pinned.add_cuda_stream(&stream).unwrap();
    assert_eq!(pinned.space(), Space::Pinned);
    let targets: Vec<PoolBuf<u8>> = (0..20).map(|_| device.alloc(MIB).unwrap()).collect();
    for (value, target) in targets.iter().enumerate() {
        let staging = pinned.alloc::<u8>(MIB).unwrap();
        // SAFETY: the memory is this buffer's, and no copy reads it any more; the device's is allocated.
        unsafe {
            let host = std::slice::from_raw_parts_mut(staging.address() as *mut u8, MIB);
            host.fill(value as u8);
            result::memcpy_htod_async(target.address(), host, stream.cu_stream()).unwrap();
        }
        staging.record_use(lane).unwrap();
    }
    for (value, target) in targets.iter().enumerate() {
        let host = stream.clone_dtoh(target).unwrap();
        stream.synchronize().unwrap();
        assert!(host.iter().all(|byte| *byte == value as u8));
    }
    let stats = pinned.stats();
    assert!(stats.mapped.peak < 20 * MIB as u64 && stats.waits_inserted > 0, "{stats:?}");
    pinned.host_waited(lane);
    pinned.trim().unwrap();
    assert_eq!(pinned.stats().mapped.current(), 0);
}

const CHILD: &str = "XLAUNCH_POOL_TEST_CHILD";

/// Runs this test again in a process of its own, as what it does cannot be undone.
fn in_a_child(name: &str) {
    let program = std::env::current_exe().unwrap();
    let output =
        Command::new(program).args([name, "--exact", "--nocapture"]).env(CHILD, "1").output().unwrap();
    let text =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    assert!(output.status.success() && text.contains("typed error:"), "{text}");
}

#[test]
fn a_context_lost_to_a_fault_is_a_typed_error() {
    if std::env::var_os(CHILD).is_none() {
        if gpu().is_some() {
            in_a_child("a_context_lost_to_a_fault_is_a_typed_error");
        }
        return;
    }
    let (context, _one) = gpu().unwrap();
    let (pool, stream) = pool(&context, Mode::On);
    let kept = pool.alloc::<u8>(MIB).unwrap();
    let freed = pool.alloc::<u8>(64 * MIB).unwrap().address();
    let source = r#"extern "C" __global__ void fault(int* p) { *p = 1; }"#;
    let module = context.load_module(cudarc::nvrtc::compile_ptx(source).unwrap()).unwrap();
    let (fault, nowhere) = (module.load_function("fault").unwrap(), 8_u64);
    // SAFETY: the fault, which makes the context unusable, is the point; this process ends with it.
    unsafe { stream.launch_builder(&fault).arg(&nowhere).launch(LaunchConfig::for_num_elems(1)) }.unwrap();
    stream.synchronize().unwrap_err();
    println!("typed error: {}", pool.trim().unwrap_err());
    // Whether the driver still maps memory is its own affair.
    println!("a larger request: {:?}", pool.alloc::<u8>(500 * MIB).map_err(|error| error.to_string()));
    // What needs no driver goes on, and drops do.
    assert_eq!(pool.alloc::<u8>(64 * MIB).unwrap().address(), freed);
    drop((kept, pool));
    // The destructors of cudarc's objects would report the same fault.
    std::process::exit(0);
}

#[test]
fn a_forked_child_gets_a_typed_error() {
    if std::env::var_os(CHILD).is_none() {
        if gpu().is_some() {
            in_a_child("a_forked_child_gets_a_typed_error");
        }
        return;
    }
    let (context, _one) = gpu().unwrap();
    let (pool, _stream) = pool(&context, Mode::On);
    drop(pool.alloc::<u8>(MIB).unwrap());
    // SAFETY: the child makes a request of the pool, prints and ends without running anything of its parent's.
    match unsafe { libc::fork() } {
        0 => {
            let refused = pool.alloc::<u8>(500 * MIB);
            let Err(error) = refused else { std::process::abort() };
            println!("typed error: {error}");
            // SAFETY: ends the child without destructors, which belong to the parent.
            unsafe { libc::_exit(if error.to_string().contains("fork") { 0 } else { 1 }) }
        }
        child => {
            let mut status = 0;
            // SAFETY: waits for the child made above and writes one integer.
            unsafe { libc::waitpid(child, &raw mut status, 0) };
            assert_eq!(status, 0);
            assert!(pool.alloc::<u8>(500 * MIB).is_ok(), "the parent's pool lives on");
        }
    }
}
