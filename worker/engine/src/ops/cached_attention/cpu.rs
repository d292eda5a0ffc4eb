//! Attention over the cache on threads, with one task per row and key head.

use rayon::prelude::*;

use super::{CachedAttention, CachedAttentionShape};
use crate::cpu::math::{self, simd};
use crate::cpu::{Access, Threads};
use crate::ops::Scalar;

pub(crate) fn run(t: &Threads, args: CachedAttention<'_>) {
    let (a, s) = (Access::new("cached_attention"), args.shape);
    let qkv = a.read(args.qkv, s.rows * s.qkv_width());
    let table = args.rope.map(|table| a.read(table, table.len()));
    let (slots, positions) = (a.read_i32(args.slots, s.rows), a.read_i32(args.positions, s.rows));
    let (keys, values) = (a.write(args.keys, s.cache()), a.write(args.values, s.cache()));
    let sinks = args.sinks.map(|sinks| a.read(sinks, s.heads));
    let out = a.write(args.out, s.rows * s.heads * s.width);
    let rows: Vec<Row<'_>> = (0..s.rows)
        .map(|n| {
            let position = usize::try_from(positions[n]).unwrap_or(usize::MAX);
            let angles = table.map(|table| &table[position * s.width..][..s.width]);
            let slot = usize::try_from(slots[n]).unwrap_or(usize::MAX);
            Row { qkv: &qkv[n * s.qkv_width()..][..s.qkv_width()], slot, position, angles }
        })
        .collect();
    rows.iter().for_each(|row| store(s, row, keys, values));
    let group = s.heads / s.kv_heads * s.width;
    let (keys, values) = (&*keys, &*values);
    t.run(|| {
        out.par_chunks_mut(group).enumerate().for_each_init(Vec::new, |scratch, (task, out)| {
            let (row, head) = (&rows[task / s.kv_heads], task % s.kv_heads);
            let start = (row.slot * s.kv_heads + head) * s.capacity * s.width;
            let first = (row.position + 1).saturating_sub(s.window());
            let seen = start + first * s.width..start + (row.position + 1) * s.width;
            let queries = &row.qkv[head * group..][..group];
            let sinks = sinks.map(|sinks| &sinks[head * s.heads / s.kv_heads..]);
            let cache = [&keys[seen.clone()], &values[seen]];
            simd!(attend(s, row, (queries, sinks), cache, scratch, out));
        });
    });
}

/// One new token.
struct Row<'a> {
    qkv: &'a [f32],
    slot: usize,
    position: usize,
    /// D/2 cosines and D/2 sines of the token's position.
    angles: Option<&'a [f32]>,
}

/// Stores the key and value of a row.
fn store(s: CachedAttentionShape, row: &Row<'_>, keys: &mut [f32], values: &mut [f32]) {
    let (new_keys, new_values) = row.qkv[s.heads * s.width..].split_at(s.kv_heads * s.width);
    for head in 0..s.kv_heads {
        let at = ((row.slot * s.kv_heads + head) * s.capacity + row.position) * s.width;
        let range = head * s.width..(head + 1) * s.width;
        rotate(&new_keys[range.clone()], row.angles, &mut keys[at..at + s.width]);
        values[at..at + s.width].copy_from_slice(&new_values[range]);
    }
}

/// `x' = x cos - y sin`, `y' = y cos + x sin` for the pairs (x_i, x_{i+D/2}) of a head.
fn rotate(head: &[f32], angles: Option<&[f32]>, out: &mut [f32]) {
    let Some(angles) = angles else { return out.copy_from_slice(head) };
    let half = head.len() / 2;
    let (cos, sin) = angles.split_at(half);
    for i in 0..half {
        let (x, y) = (head[i], head[i + half]);
        out[i] = x * cos[i] - y * sin[i];
        out[i + half] = y * cos[i] + x * sin[i];
    }
}

/// Attention of the query heads of one key head, with their sinks, over the keys and values that the row sees.
#[inline(always)]
fn attend(
    s: CachedAttentionShape,
    row: &Row<'_>,
    (queries, sinks): (&[f32], Option<&[f32]>),
    [keys, values]: [&[f32]; 2],
    scratch: &mut Vec<f32>,
    out: &mut [f32],
) {
    let seen = keys.len() / s.width;
    scratch.resize(s.width + seen, 0.0);
    let (q, scores) = scratch.split_at_mut(s.width);
    let heads = queries.chunks_exact(s.width).zip(out.chunks_exact_mut(s.width));
    for (head, (query, out)) in heads.enumerate() {
        rotate(query, row.angles, q);
        q.iter_mut().for_each(|q| *q *= s.scale());
        for (score, key) in scores[..seen].iter_mut().zip(keys.chunks_exact(s.width)) {
            *score = math::dot(q, key);
        }
        let scores = &mut scores[..seen];
        if let Some(cap) = s.options.softcap.map(Scalar::get) {
            scores.iter_mut().for_each(|s| *s = cap * math::tanh_relative(*s / cap));
        }
        let largest = math::max(scores);
        scores.iter_mut().for_each(|score| *score = math::exp(*score - largest));
        let sink = sinks.map_or(0.0, |sinks| (sinks[head] - largest).exp());
        let scale = 1.0 / (math::total(scores) + sink);
        out.fill(0.0);
        for (p, value) in scores.iter().zip(values.chunks_exact(s.width)) {
            for (out, value) in out.iter_mut().zip(value) {
                *out = p.mul_add(*value, *out);
            }
        }
        out.iter_mut().for_each(|out| *out *= scale);
    }
}
