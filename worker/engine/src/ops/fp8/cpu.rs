//! FP8 on threads: rounded as on a GPU, multiplied in F32.

use rayon::prelude::*;

use super::format::{Format, SMALLEST_MAX};
use super::{Amax, Fp8Operand, GemmFp8, QuantizeFp8};
use crate::cpu::gemm::{Mat, blocked_gemm};
use crate::cpu::{Access, Threads};
use crate::ops::experts::rows::rows_end;
use crate::ops::{Accumulate, linear};
use crate::tensor::Slice;

pub(crate) fn amax(t: &Threads, args: Amax<'_>) {
    let Amax { rows, cols, x, end, amax } = args;
    let access = Access::new("amax");
    let exist = rows_end(&access, end, rows) * cols;
    write_amax(t, &access, amax, &access.read(x, rows * cols)[..exist]);
}

/// Writes the output of an [`Amax`].
pub(crate) fn write_amax(t: &Threads, access: &Access, amax: Slice<'_>, x: &[f32]) {
    // The bits of NaN compare greater than those of every number.
    let max = t.run(|| x.par_iter().map(|x| x.abs().to_bits()).max());
    access.write(amax, 1)[0] = max.map_or(0.0, f32::from_bits);
}

pub(crate) fn quantize(t: &Threads, args: QuantizeFp8<'_>) {
    let QuantizeFp8 { rows, cols, dtype, end, .. } = args;
    let access = Access::new("quantize_fp8");
    let format = Format::of(dtype);
    let x = access.read(args.x, rows * cols);
    let exist = rows_end(&access, end, rows) * cols;
    let [q, transposed] = [args.q, args.transposed].map(|out| {
        out.map(|out| {
            assert!(out.dtype() == dtype && out.len() == x.len(), "quantize_fp8: {out:?}");
            access.write_bytes(out)
        })
    });
    let max = access.read(args.amax, 1)[0];
    let max = if max < SMALLEST_MAX { SMALLEST_MAX } else { max };
    access.write(args.scale, 1)[0] = max / format.largest;
    let inverse = format.largest / max;
    t.run(|| {
        if let Some(q) = q {
            q[exist..].fill(0);
            q.par_iter_mut().zip(&x[..exist]).for_each(|(q, x)| *q = format.encode(x * inverse));
        }
        if let Some(transposed) = transposed {
            transposed.par_chunks_mut(rows).enumerate().for_each(|(col, out)| {
                out[exist / cols..].fill(0);
                let column = x[..exist].iter().skip(col).step_by(cols);
                out.iter_mut().zip(column).for_each(|(q, x)| *q = format.encode(x * inverse));
            });
        }
    });
}

/// Returns the operand in F32.
pub(crate) fn decode(t: &Threads, access: &Access, operand: Fp8Operand<'_>, len: usize) -> Vec<f32> {
    let Fp8Operand { q, scale } = operand;
    assert!(q.len() == len, "{q:?}");
    let format = Format::of(q.dtype());
    let (q, scale) = (access.read_bytes(q), access.read(scale, 1)[0]);
    t.run(|| q.par_iter().map(|q| format.decode(*q) * scale).collect())
}

pub(crate) fn gemm(t: &Threads, args: GemmFp8<'_>) {
    let GemmFp8 { rows, cols, depth, a, b, .. } = args;
    let access = Access::new("gemm_fp8");
    let (a, b) = (decode(t, &access, a, rows * depth), decode(t, &access, b, cols * depth));
    let bias = args.bias.map(|bias| access.read(bias, cols));
    let y = access.write(args.y, rows * cols);
    let add = linear::cpu::begin_sum(y, cols, bias) || args.acc == Accumulate::Add;
    blocked_gemm(t, y, Mat::new(&a, rows, depth), Mat::new(&b, cols, depth).t(), add);
}
