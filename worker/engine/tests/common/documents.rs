//! Operations over rows that hold several documents, and classifiers with ignored rows.

use xlaunch_engine::*;

use super::cases::{Case, rope_table};
use super::{Ops, Values, ids};

/// Lengths of documents in rows of 200 tokens: single tokens, boundaries at and next to those of tiles, a whole row.
const ROWS_OF_200: [usize; 12] = [1, 62, 1, 1, 70, 65, 64, 64, 71, 1, 199, 1];

/// Returns the cases. `round` is applied to every input.
pub(super) fn cases(values: impl Fn(u64, usize) -> Values + Copy, round: fn(f32) -> f32) -> Vec<Case> {
    let mut cases: Vec<Case> = Vec::new();
    // Of the shape, and of a window.
    for (sizes, window, lengths, with_rope) in [
        ([3, 200, 2, 1, 64], 33, &ROWS_OF_200[..], true),
        ([2, 70, 2, 2, 24], 5, &[1, 36, 33, 64, 6], true),
        ([1, 40, 2, 2, 16], 39, &[7, 33], true),
        ([1, 150, 3, 3, 32], 64, &[129, 21], false),
        ([1, 193, 4, 1, 128], 65, &[100, 29, 64], false),
        ([1, 130, 2, 1, 80], 64, &[65, 65], false),
        ([1, 75, 2, 1, 256], 9, &[31, 33, 11], false),
        ([1, 70, 2, 2, 144], 17, &[69, 1], false),
    ] {
        let [batch, seq, heads, kv_heads, width] = sizes;
        let plain = AttentionOptions { documents: true, ..AttentionOptions::new(width) };
        let windowed = AttentionOptions { window: Some(window), ..plain };
        let capped = AttentionOptions { softcap: Some(5.0.into()), ..plain };
        let both = AttentionOptions { softcap: capped.softcap, ..windowed };
        // Kernels are compiled for each combination, so only some widths have all of them.
        let options =
            if width <= 64 && width != 32 { &[plain, windowed, capped, both][..] } else { &[plain, both] };
        for options in options.iter().copied() {
            let s = AttentionShape { batch, seq, heads, kv_heads, width, options };
            let qkv = values(18, batch * seq * s.qkv_width()).map(move |x| round(3.0 * x));
            let dout = values(19, batch * seq * heads * width);
            // Scores depend on differences of positions only if all angles belong to the same rotation.
            let rotation = || Values::new(move || rope_table(seq, width));
            let numbers = || if width == 24 { values(50, seq * width) } else { rotation() };
            let table = with_rope.then(numbers);
            let rope = if with_rope { ", rope" } else { "" };
            let case = move |ops: &Ops<'_>| ops.attention(s, &qkv, table.as_deref(), Some(lengths), &dout);
            cases.push((format!("attention {s:?}{rope}"), Box::new(case)));
        }
    }
    let options = AttentionOptions::new(24);
    let s = AttentionShape { batch: 2, seq: 35, heads: 3, kv_heads: 1, width: 24, options };
    for kind in [QkNorm::Head, QkNorm::Full] {
        let (qkv, dout) = (values(46, 70 * s.qkv_width()), values(47, 70 * s.qkv_width()));
        let ([q, k], table) = (kind.gammas(s), rope_table(35, 24));
        let (q, k) = (values(48, q), values(49, k));
        let case = move |ops: &Ops<'_>| {
            let (gammas, lengths, acc) = ([&q[..], &k], Some(&[9, 1, 25, 35][..]), Accumulate::Overwrite);
            ops.qk_norm(s, kind, 0.0, &qkv, gammas, Some(&table), lengths, &dout, acc)
        };
        cases.push((format!("qk norm of documents {kind:?} {s:?}"), Box::new(case)));
    }
    let s = EmbedShape { batch: 3, seq: 37, cols: 36, vocab: 11 };
    let (tokens, wte, wpe, dout) =
        (ids(1, 111, 11), values(2, 11 * 36), values(3, 37 * 36), values(4, 111 * 36));
    let lengths = [1, 20, 16, 37, 30, 1, 6];
    let case = move |ops: &Ops<'_>| ops.embed(s, &tokens, &wte, Some(&wpe), Some(&lengths), &dout);
    cases.push((format!("embed documents {s:?}"), Box::new(case)));
    for (rows, vocab, padded) in [(67, 50, 50), (9, 1999, 2048)] {
        let s = ClassifierShape { rows, vocab, padded };
        let logits = values(25, rows * padded);
        let mut targets = ids(26, rows, vocab);
        targets.iter_mut().step_by(3).for_each(|target| *target = IGNORED);
        for softcap in [None, Some(4.0)] {
            let (logits, targets) = (logits.clone(), targets.clone());
            let cap = if softcap.is_some() { ", cap" } else { "" };
            let case = move |ops: &Ops<'_>| ops.classifier(s, &logits, &targets, 0.25, softcap);
            cases.push((format!("classifier {s:?}{cap}, ignored rows"), Box::new(case)));
        }
    }
    // Pairs up to the end of a row, and with padding after them; longer than a block's threads; far apart.
    for (sizes, lengths, apart) in [
        ([3, 37], &[5, 7, 9, 16, 1, 30, 6, 37][..], 1.0),
        ([2, 1400], &[700, 700, 2, 520, 600, 278], 1.0),
        ([1, 40], &[20, 20], 90.0),
    ] {
        let rows = sizes[0] * sizes[1];
        let s = ClassifierShape { rows, vocab: 30, padded: 32 };
        let (logits, targets) = (values(51, rows * 32).map(round), ids(52, rows, 30));
        let (reference, losses) = (values(53, rows), values(54, rows).map(move |x| apart * x));
        let case =
            move |ops: &Ops<'_>| ops.preference(s, sizes, lengths, &logits, &targets, [&reference, &losses]);
        cases.push((format!("preference of {lengths:?}"), Box::new(case)));
    }
    cases
}
