//! Causal attention, one task per sequence, in blocks of queries that see only the keys up to their last one.
//!
//! Forward keeps `lse[i] = log sum_j exp(s_ij)`, from which backward makes the probabilities `p_ij = exp(s_ij - lse_i)`
//! again. With `delta_i = sum_d dout_id out_id`: `dv = p^T dout`, `ds = p (dout v^T - delta) / sqrt(D)`, `dq = ds k`,
//! `dk = ds^T q`.

use rayon::prelude::*;

use super::linear::{Mat, product};
use super::math::{self, simd};
use super::threads::Threads;
use crate::shapes::AttentionShape;

/// Queries in a block.
const QUERIES: usize = 64;

/// Where the parts of one token's row of `qkv` begin.
fn offsets(s: AttentionShape, head: usize) -> (usize, usize, usize) {
    let kv = head / (s.heads / s.kv_heads);
    (head * s.width, (s.heads + kv) * s.width, (s.heads + s.kv_heads + kv) * s.width)
}

pub(super) fn fwd(t: &Threads, s: AttentionShape, qkv: &[f32], out: &mut [f32], lse: &mut [f32]) {
    let (row, out_row) = (s.qkv_width(), s.heads * s.width);
    t.run(|| {
        qkv.par_chunks(s.seq * row)
            .zip(out.par_chunks_mut(s.seq * out_row))
            .zip(lse.par_chunks_mut(s.heads * s.seq))
            .for_each_init(
                || vec![0.0; QUERIES * s.seq],
                |scores, ((qkv, out), lse)| {
                    for head in 0..s.heads {
                        head_fwd(s, head, qkv, out, &mut lse[head * s.seq..][..s.seq], scores);
                    }
                },
            );
    });
}

fn head_fwd(
    s: AttentionShape,
    head: usize,
    qkv: &[f32],
    out: &mut [f32],
    lse: &mut [f32],
    scores: &mut [f32],
) {
    let (row, out_row) = (s.qkv_width(), s.heads * s.width);
    let (q, k, v) = offsets(s, head);
    for first in (0..s.seq).step_by(QUERIES) {
        let queries = QUERIES.min(s.seq - first);
        let keys = first + queries;
        let q = Mat::strided(&qkv[first * row + q..], queries, s.width, row);
        let k = Mat::strided(&qkv[k..], keys, s.width, row);
        let v = Mat::strided(&qkv[v..], keys, s.width, row);
        let scores = &mut scores[..queries * keys];
        product(scores, keys, q, k.t(), s.scale(), false);
        simd!({
            for (i, scores) in scores.chunks_exact_mut(keys).enumerate() {
                lse[first + i] = softmax(scores, first + i + 1);
            }
        });
        let out = &mut out[first * out_row + head * s.width..];
        product(out, out_row, Mat::new(scores, queries, keys), v, 1.0, false);
    }
}

/// Softmax of the first `visible` scores, zero for the rest; returns the logarithm of the sum of exponentials.
#[inline(always)]
fn softmax(scores: &mut [f32], visible: usize) -> f32 {
    let (seen, hidden) = scores.split_at_mut(visible);
    let largest = math::max(seen);
    for score in seen.iter_mut() {
        *score = math::exp(*score - largest);
    }
    let total = math::total(seen);
    let scale = 1.0 / total;
    seen.iter_mut().for_each(|p| *p *= scale);
    hidden.fill(0.0);
    largest + total.ln()
}

/// Memory for one task of backward.
struct Scratch {
    /// `[QUERIES, T]` probabilities, then gradients of scores.
    p: Vec<f32>,
    /// `[QUERIES, T]` gradients of probabilities.
    dp: Vec<f32>,
}

pub(super) fn bwd(
    t: &Threads,
    s: AttentionShape,
    qkv: &[f32],
    out: &[f32],
    dout: &[f32],
    lse: &[f32],
    dqkv: &mut [f32],
) {
    let (row, out_row) = (s.qkv_width(), s.heads * s.width);
    t.run(|| {
        qkv.par_chunks(s.seq * row)
            .zip(dqkv.par_chunks_mut(s.seq * row))
            .zip(out.par_chunks(s.seq * out_row))
            .zip(dout.par_chunks(s.seq * out_row))
            .zip(lse.par_chunks(s.heads * s.seq))
            .for_each_init(
                || Scratch { p: vec![0.0; QUERIES * s.seq], dp: vec![0.0; QUERIES * s.seq] },
                |scratch, ((((qkv, dqkv), out), dout), lse)| {
                    // Keys and values collect from several blocks and heads; queries are written once.
                    dqkv.fill(0.0);
                    for head in 0..s.heads {
                        let lse = &lse[head * s.seq..][..s.seq];
                        head_bwd(s, head, qkv, out, dout, lse, dqkv, scratch);
                    }
                },
            );
    });
}

#[expect(clippy::too_many_arguments, reason = "a backward takes what its forward took, made and gets")]
fn head_bwd(
    s: AttentionShape,
    head: usize,
    qkv: &[f32],
    out: &[f32],
    dout: &[f32],
    lse: &[f32],
    dqkv: &mut [f32],
    scratch: &mut Scratch,
) {
    let (row, out_row, scale) = (s.qkv_width(), s.heads * s.width, s.scale());
    let (q_at, k_at, v_at) = offsets(s, head);
    for first in (0..s.seq).step_by(QUERIES) {
        let queries = QUERIES.min(s.seq - first);
        let keys = first + queries;
        let at = first * out_row + head * s.width;
        let q = Mat::strided(&qkv[first * row + q_at..], queries, s.width, row);
        let k = Mat::strided(&qkv[k_at..], keys, s.width, row);
        let v = Mat::strided(&qkv[v_at..], keys, s.width, row);
        let dout_mat = Mat::strided(&dout[at..], queries, s.width, out_row);
        let (p, dp) = (&mut scratch.p[..queries * keys], &mut scratch.dp[..queries * keys]);

        product(p, keys, q, k.t(), scale, false);
        product(dp, keys, dout_mat, v.t(), 1.0, false);
        simd!({
            for (i, (p, dp)) in p.chunks_exact_mut(keys).zip(dp.chunks_exact_mut(keys)).enumerate() {
                let range = at + i * out_row..at + i * out_row + s.width;
                let delta = math::dot(&out[range.clone()], &dout[range]);
                probabilities(p, dp, first + i + 1, lse[first + i], delta);
            }
        });
        let (p, ds) = (Mat::new(p, queries, keys), Mat::new(dp, queries, keys));
        product(&mut dqkv[first * row + q_at..], row, ds, k, scale, false);
        product(&mut dqkv[k_at..], row, ds.t(), q, scale, true);
        product(&mut dqkv[v_at..], row, p.t(), dout_mat, 1.0, true);
    }
}

/// Scores become probabilities, gradients of probabilities those of scores; hidden ones become zero.
#[inline(always)]
fn probabilities(p: &mut [f32], dp: &mut [f32], visible: usize, lse: f32, delta: f32) {
    let dp = &mut dp[..p.len()];
    for (p, dp) in p[..visible].iter_mut().zip(&mut dp[..visible]) {
        *p = math::exp(*p - lse);
        *dp = *p * (*dp - delta);
    }
    p[visible..].fill(0.0);
    dp[visible..].fill(0.0);
}
