//! Peak rates of a device, measured with the operations that a model uses.
//!
//! Times are measured on the host: many operations are enqueued between two waits, so that the host's share is small.
//! Matrices are random, because zeros draw less power and so allow higher clocks.

use std::time::Instant;

use xlaunch_pool::DType;

use crate::backend::Backend;
use crate::error::Result;
use crate::ops::{Activation, Cast, GluForward, GluInputs, LinearForward, LinearShape};
use crate::tensor::Tensor;

/// Rounds per rate; the best one counts.
const ROUNDS: usize = 5;
/// Target duration of a round, in seconds.
const ROUND_SECONDS: f64 = 0.1;
/// Maximum number of operations in a round.
const MAX_OPERATIONS: f64 = 1000.0;
/// Elements copied to the device in one call.
const CHUNK: usize = 1 << 20;
/// Elements that the operation for measuring latencies writes.
const SMALL: usize = 32;
/// Launches that are timed together; fewer than fit into a stream's queue.
const LAUNCHES: usize = 200;

/// Returns the floating-point operations per second of a large square GEMM in the back end's precision, counting
/// multiplications and additions.
///
/// # Errors
/// If an operation fails, or three matrices of 8192 x 8192 (1024 x 1024 on the CPU) do not fit in memory.
pub fn gemm(backend: &Backend) -> Result<f64> {
    let size = if backend.is_asynchronous() { 8192 } else { 1024 };
    let (x, w) = (random(backend, size * size)?, random(backend, size * size)?);
    let y = backend.alloc(backend.activation_dtype(), size * size)?;
    let shape = LinearShape { rows: size, inputs: size, outputs: size };
    let args = LinearForward { shape, x: x.all(), w: w.all(), bias: None, y: y.all() };
    let seconds = best(backend, || backend.run(args))?;
    #[expect(clippy::cast_precision_loss, reason = "a rate")]
    Ok(2.0 * (size as f64).powi(3) / seconds)
}

/// Returns the number of wrong elements of a GEMM in the back end's precision. All numbers and results are small
/// integers, which every precision represents exactly: each row of the weights adds two elements of the input.
///
/// # Errors
/// If an operation fails, or there is not enough memory.
#[expect(clippy::cast_precision_loss, reason = "small integers")]
#[expect(clippy::float_cmp, reason = "the results are exact")]
pub fn wrong_gemm_elements(backend: &Backend) -> Result<u64> {
    let size = if backend.is_asynchronous() { 2048 } else { 128 };
    let input = |row: usize, column: usize| ((7 * row + 3 * column) % 61) as f32 - 30.0;
    let terms = |output: usize| [(5 * output + 1) % size, (11 * output + size / 2) % size];
    let count =
        |output: usize, column: usize| terms(output).into_iter().filter(|term| *term == column).count();
    let x = filled(backend, size * size, |at| input(at / size, at % size))?;
    let w = filled(backend, size * size, |at| count(at / size, at % size) as f32)?;
    let y = backend.alloc(backend.activation_dtype(), size * size)?;
    let shape = LinearShape { rows: size, inputs: size, outputs: size };
    backend.run(LinearForward { shape, x: x.all(), w: w.all(), bias: None, y: y.all() })?;
    let (wide, mut results) = (backend.alloc(DType::F32, size * size)?, vec![0.0; size * size]);
    backend.run(Cast { x: y.all(), y: wide.all() })?;
    backend.read_f32(wide.all(), &mut results)?;
    let expected = |at: usize| terms(at % size).into_iter().map(|term| input(at / size, term)).sum::<f32>();
    Ok(results.iter().enumerate().filter(|(at, result)| **result != expected(*at)).count() as u64)
}

/// Returns the bytes read plus bytes written per second by a copy that exceeds all caches: 256 MiB, or 64 MiB on the
/// CPU, where one thread copies.
///
/// # Errors
/// If an operation fails, or there is not enough memory.
pub fn copy(backend: &Backend) -> Result<f64> {
    let len = if backend.is_asynchronous() { 64 << 20 } else { 16 << 20 };
    let (x, y) = (backend.alloc(DType::F32, len)?, backend.alloc(DType::F32, len)?);
    backend.zero(x.all())?;
    let seconds = best(backend, || backend.run(Cast { x: x.all(), y: y.all() }))?;
    #[expect(clippy::cast_precision_loss, reason = "a rate")]
    Ok((2 * len * DType::F32.size()) as f64 / seconds)
}

/// Returns the time to enqueue one of many small kernels, and the time from the launch of one to its result on the
/// host, both in seconds.
///
/// # Errors
/// If an operation fails.
pub fn latencies(backend: &Backend) -> Result<(f64, f64)> {
    let (x, y) = (random(backend, 2 * SMALL)?, backend.alloc(backend.activation_dtype(), SMALL)?);
    let (activation, rows, h, a) = (Activation::Silu, 1, x.all(), y.all());
    let inputs = GluInputs::PLAIN;
    let launch =
        || backend.run(GluForward { activation, inputs, rows, ffn: SMALL, h, a, end: None, amax: None });
    let mut host = [0.0; SMALL];
    let (mut enqueue, mut round_trip) = (f64::INFINITY, f64::INFINITY);
    launch()?;
    for _ in 0..ROUNDS {
        wait(backend, &y)?;
        let start = Instant::now();
        (0..LAUNCHES).try_for_each(|_| launch())?;
        enqueue = enqueue.min(start.elapsed().as_secs_f64());
        wait(backend, &y)?;
        let start = Instant::now();
        for _ in 0..LAUNCHES {
            launch()?;
            backend.read_f32(y.all(), &mut host)?;
        }
        round_trip = round_trip.min(start.elapsed().as_secs_f64());
    }
    #[expect(clippy::cast_precision_loss, reason = "a few hundred")]
    let each = LAUNCHES as f64;
    Ok((enqueue / each, round_trip / each))
}

/// Returns the seconds per operation in the best of several rounds.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "a count between 1 and MAX_OPERATIONS"
)]
fn best(backend: &Backend, operation: impl Fn() -> Result<()>) -> Result<f64> {
    let probe = backend.alloc(DType::F32, 1)?;
    let round = |count: usize| -> Result<f64> {
        wait(backend, &probe)?;
        let start = Instant::now();
        (0..count).try_for_each(|_| operation())?;
        wait(backend, &probe)?;
        Ok(start.elapsed().as_secs_f64() / count as f64)
    };
    // The first call selects an algorithm and touches the memory.
    round(1)?;
    let count = (ROUND_SECONDS / round(1)?).clamp(1.0, MAX_OPERATIONS) as usize;
    (0..ROUNDS).try_fold(f64::INFINITY, |best, _| Ok(best.min(round(count)?)))
}

/// Waits for all work enqueued so far.
fn wait(backend: &Backend, probe: &Tensor) -> Result<()> {
    backend.zero(probe.slice(0..1))?;
    backend.read_f32(probe.slice(0..1), &mut [0.0])
}

/// Allocates random numbers between -1 and 1 in the activations' element type.
fn random(backend: &Backend, len: usize) -> Result<Tensor> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        #[expect(clippy::cast_precision_loss, reason = "24 bits")]
        let share = (state >> 40) as f32 / (1 << 23) as f32;
        share - 1.0
    };
    filled(backend, len, |_| next())
}

/// Allocates these numbers in the activations' element type.
fn filled(backend: &Backend, len: usize, mut number: impl FnMut(usize) -> f32) -> Result<Tensor> {
    let tensor = backend.alloc(backend.activation_dtype(), len)?;
    let staged = backend.alloc(DType::F32, len.min(CHUNK))?;
    for first in (0..len).step_by(CHUNK) {
        let count = CHUNK.min(len - first);
        let values: Vec<f32> = (first..first + count).map(&mut number).collect();
        backend.write_f32(staged.slice(0..count), &values)?;
        backend.run(Cast { x: staged.slice(0..count), y: tensor.slice(first..first + count) })?;
    }
    Ok(tensor)
}

#[cfg(test)]
mod tests {
    use super::*;
    use xlaunch_pool::Mode;

    #[test]
    fn cpu_multiplies_right() {
        assert_eq!(wrong_gemm_elements(&Backend::cpu(1, Mode::On)).unwrap(), 0);
    }

    #[test]
    fn cpu_rates_are_plausible() {
        let backend = Backend::cpu(1, Mode::On);
        let gemm = gemm(&backend).unwrap();
        assert!((1e8..1e13).contains(&gemm), "{gemm}");
        let copy = copy(&backend).unwrap();
        assert!((1e8..1e12).contains(&copy), "{copy}");
        let (launch, round_trip) = latencies(&backend).unwrap();
        assert!(launch > 0.0 && launch <= 2.0 * round_trip && round_trip < 1e-2, "{launch} {round_trip}");
    }
}
