//! Attention on threads, with one task per sequence, in blocks of queries of one document, each over the keys that any
//! of its queries sees.

use std::ops::Range;

use rayon::prelude::*;

use super::{AttentionBackward, AttentionForward, AttentionShape, Scalar};
use crate::cpu::gemm::{Mat, gemm};
use crate::cpu::math::{self, simd};
use crate::cpu::{Access, Threads};
use crate::ops::Documents;
use crate::ops::documents::Bounds;
use crate::ops::rope::{self, Rotation};

/// Queries in a block.
const QUERIES: usize = 64;

pub(crate) fn forward(t: &Threads, args: AttentionForward<'_>) {
    let (a, s) = (Access::new("attention_forward"), args.shape);
    let (rows, row, out_row) = (s.batch * s.seq, s.qkv_width(), s.heads * s.width);
    let (out, lse) = (a.write(args.out, rows * out_row), a.write(args.lse, rows * s.heads));
    let bounds = Documents::read(args.documents, &a, rows, s.seq);
    let qkv: &[f32] = match args.rope {
        None => a.read(args.qkv, rows * row),
        Some(table) => {
            let qkv = a.write(args.qkv, rows * row);
            rope::cpu(t, s, qkv, a.read(table, s.seq * s.width), bounds, Rotation::Forward);
            qkv
        }
    };
    t.run(|| {
        qkv.par_chunks(s.seq * row)
            .zip(out.par_chunks_mut(s.seq * out_row))
            .zip(lse.par_chunks_mut(s.heads * s.seq))
            .enumerate()
            .for_each_init(
                || vec![0.0; QUERIES * s.seq],
                |scores, (sequence, ((qkv, out), lse))| {
                    let row = Row { s, bounds, sequence };
                    for head in 0..s.heads {
                        forward_head(row, head, qkv, out, &mut lse[head * s.seq..][..s.seq], scores);
                    }
                },
            );
    });
}

/// Returns the offsets of a query head, and of its key and value heads, in a token's row of `qkv`.
fn offsets(s: AttentionShape, head: usize) -> (usize, usize, usize) {
    let kv = head / (s.heads / s.kv_heads);
    (head * s.width, (s.heads + kv) * s.width, (s.heads + s.kv_heads + kv) * s.width)
}

/// A row of the batch, and the documents in it.
#[derive(Clone, Copy)]
struct Row<'a> {
    s: AttentionShape,
    bounds: Bounds<'a>,
    sequence: usize,
}

fn forward_head(
    sequence: Row<'_>,
    head: usize,
    qkv: &[f32],
    out: &mut [f32],
    lse: &mut [f32],
    scores: &mut [f32],
) {
    let s = sequence.s;
    let (row, out_row) = (s.qkv_width(), s.heads * s.width);
    let (q, k, v) = offsets(s, head);
    for Block { first, queries, start, keys } in sequence.blocks() {
        let q = Mat::strided(&qkv[first * row + q..], queries, s.width, row);
        let k = Mat::strided(&qkv[start * row + k..], keys, s.width, row);
        let v = Mat::strided(&qkv[start * row + v..], keys, s.width, row);
        let scores = &mut scores[..queries * keys];
        // s = scale q k^T
        gemm(scores, keys, q, k.t(), s.scale(), false);
        if let Some(softcap) = s.options.softcap {
            cap(scores, softcap);
        }
        simd!({
            for (i, scores) in scores.chunks_exact_mut(keys).enumerate() {
                lse[first + i] = softmax(scores, sequence.visible(first + i, start));
            }
        });
        // out = p v
        let out = &mut out[first * out_row + head * s.width..];
        gemm(out, out_row, Mat::new(scores, queries, keys), v, 1.0, false);
    }
}

/// A block of queries, and the keys that any of them sees.
struct Block {
    /// The first query.
    first: usize,
    queries: usize,
    /// The first key.
    start: usize,
    /// Number of keys.
    keys: usize,
}

impl<'a> Row<'a> {
    /// Returns blocks of all queries. As no block has queries of two documents, hidden keys are not computed.
    fn blocks(self) -> impl Iterator<Item = Block> + use<'a> {
        let mut end = 0;
        std::iter::from_fn(move || {
            let first = end;
            if first >= self.s.seq {
                return None;
            }
            end = (first + QUERIES).min(self.bounds.last(self.sequence, first) + 1);
            let start = self.visible(first, 0).start;
            Some(Block { first, queries: end - first, start, keys: end - start })
        })
    }

    /// Returns the keys that a query sees, counted from the key `start`.
    #[inline(always)]
    fn visible(self, query: usize, start: usize) -> Range<usize> {
        let first = (query + 1).saturating_sub(self.s.window()).max(self.bounds.first(self.sequence, query));
        first - start..query + 1 - start
    }
}

/// `s = cap tanh(s / cap)`.
fn cap(scores: &mut [f32], cap: Scalar) {
    let (cap, inverse) = (cap.get(), 1.0 / cap.get());
    simd!(scores.iter_mut().for_each(|s| *s = cap * math::tanh_relative(*s * inverse)));
}

/// Computes the softmax of the `visible` scores and sets the rest to zero. Returns the logarithm of the sum of
/// exponentials.
#[inline(always)]
fn softmax(scores: &mut [f32], visible: Range<usize>) -> f32 {
    scores[..visible.start].fill(0.0);
    let (seen, hidden) = scores[visible.start..].split_at_mut(visible.len());
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

pub(crate) fn backward(t: &Threads, args: AttentionBackward<'_>) {
    let (a, s) = (Access::new("attention_backward"), args.shape);
    let (rows, row, out_row) = (s.batch * s.seq, s.qkv_width(), s.heads * s.width);
    let len = rows * out_row;
    let (out, dout, lse) = (a.read(args.out, len), a.read(args.dout, len), a.read(args.lse, rows * s.heads));
    let (qkv, dqkv) = (a.read(args.qkv, rows * row), a.write(args.dqkv, rows * row));
    let bounds = Documents::read(args.documents, &a, rows, s.seq);
    t.run(|| {
        qkv.par_chunks(s.seq * row)
            .zip(dqkv.par_chunks_mut(s.seq * row))
            .zip(out.par_chunks(s.seq * out_row))
            .zip(dout.par_chunks(s.seq * out_row))
            .zip(lse.par_chunks(s.heads * s.seq))
            .enumerate()
            .for_each_init(
                || Scratch { p: vec![0.0; QUERIES * s.seq], dp: vec![0.0; QUERIES * s.seq] },
                |scratch, (sequence, ((((qkv, dqkv), out), dout), lse))| {
                    let row = Row { s, bounds, sequence };
                    // Gradients of keys and values accumulate over blocks and heads; those of queries are written once.
                    dqkv.fill(0.0);
                    for head in 0..s.heads {
                        let lse = &lse[head * s.seq..][..s.seq];
                        backward_head(row, head, Sequence { qkv, out, dout, lse }, dqkv, scratch);
                    }
                },
            );
    });
    if let Some(table) = args.rope {
        rope::cpu(t, s, dqkv, a.read(table, s.seq * s.width), bounds, Rotation::Back);
    }
}

/// Inputs of backward for one sequence; `lse` is that of one head.
#[derive(Clone, Copy)]
struct Sequence<'a> {
    qkv: &'a [f32],
    out: &'a [f32],
    dout: &'a [f32],
    lse: &'a [f32],
}

/// Memory for one task of backward.
struct Scratch {
    /// (QUERIES, T) probabilities.
    p: Vec<f32>,
    /// (QUERIES, T) gradients of probabilities, then of scores.
    dp: Vec<f32>,
}

fn backward_head(
    sequence: Row<'_>,
    head: usize,
    Sequence { qkv, out, dout, lse }: Sequence<'_>,
    dqkv: &mut [f32],
    scratch: &mut Scratch,
) {
    let s = sequence.s;
    let (row, out_row, scale) = (s.qkv_width(), s.heads * s.width, s.scale());
    let (q_at, k_at, v_at) = offsets(s, head);
    for Block { first, queries, start, keys } in sequence.blocks() {
        let (k_at, v_at) = (start * row + k_at, start * row + v_at);
        let at = first * out_row + head * s.width;
        let q = Mat::strided(&qkv[first * row + q_at..], queries, s.width, row);
        let k = Mat::strided(&qkv[k_at..], keys, s.width, row);
        let v = Mat::strided(&qkv[v_at..], keys, s.width, row);
        let dout_mat = Mat::strided(&dout[at..], queries, s.width, out_row);
        let (p, dp) = (&mut scratch.p[..queries * keys], &mut scratch.dp[..queries * keys]);

        gemm(p, keys, q, k.t(), scale, false);
        gemm(dp, keys, dout_mat, v.t(), 1.0, false);
        if let Some(softcap) = s.options.softcap {
            cap(p, softcap);
        }
        // Factor of s^2 in the derivative 1 - (s / cap)^2 of a capped score.
        let curvature = s.options.softcap.map_or(0.0, |cap| 1.0 / (cap.get() * cap.get()));
        simd!({
            for (i, (p, dp)) in p.chunks_exact_mut(keys).zip(dp.chunks_exact_mut(keys)).enumerate() {
                let range = at + i * out_row..at + i * out_row + s.width;
                let delta = math::dot(&out[range.clone()], &dout[range]);
                let visible = sequence.visible(first + i, start);
                probabilities(p, dp, visible, lse[first + i], delta, curvature);
            }
        });
        let (p, ds) = (Mat::new(p, queries, keys), Mat::new(dp, queries, keys));
        // dq = scale ds k, dk += scale ds^T q, dv += p^T dout
        gemm(&mut dqkv[first * row + q_at..], row, ds, k, scale, false);
        gemm(&mut dqkv[k_at..], row, ds.t(), q, scale, true);
        gemm(&mut dqkv[v_at..], row, p.t(), dout_mat, 1.0, true);
    }
}

/// Turns scores into probabilities `p = exp(s - lse)`, and gradients of probabilities into gradients of scores before
/// the cap `ds = p (dp - delta) (1 - curvature s^2)`; hidden ones become zero.
#[inline(always)]
fn probabilities(p: &mut [f32], dp: &mut [f32], visible: Range<usize>, lse: f32, delta: f32, curvature: f32) {
    let dp = &mut dp[..p.len()];
    for (p, dp) in p[visible.clone()].iter_mut().zip(&mut dp[visible.clone()]) {
        let score = *p;
        *p = math::exp(score - lse);
        *dp = *p * (*dp - delta) * (1.0 - curvature * score * score);
    }
    for x in [p, dp] {
        x[..visible.start].fill(0.0);
        x[visible.end..].fill(0.0);
    }
}
