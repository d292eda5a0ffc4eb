//! The operations of decoding on the CPU against plain implementations.

#![expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "small numbers")]

mod common;

use common::decoding::{plain, plain_attention, ragged};
use common::{Ops, distance};
use xlaunch_engine::*;

#[test]
fn gemv_matches_a_plain_sum_and_rows_do_not_depend_on_each_other() {
    let backend = Backend::cpu(2, PoolMode::On);
    let ops = Ops { backend: &backend, grads: DType::F32 };
    for (rows, inputs, outputs) in [(1, 8, 3), (7, 100, 41), (32, 353, 66)] {
        let s = LinearShape { rows, inputs, outputs };
        let (x, w, bias) = (plain(1, rows * inputs), plain(2, outputs * inputs), plain(3, outputs));
        let y = ops.gemv(s, &x, &w, Some(&bias), None);
        let expected: Vec<f32> = (0..rows * outputs)
            .map(|i| {
                let (x, w) = (&x[i / outputs * inputs..][..inputs], &w[i % outputs * inputs..][..inputs]);
                let sum: f64 = x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
                (sum + f64::from(bias[i % outputs])) as f32
            })
            .collect();
        assert!(distance(&y, &expected) < 1e-6, "{s:?}: {:.2e}", distance(&y, &expected));
        for row in 0..rows {
            let alone = LinearShape { rows: 1, ..s };
            let y1 = ops.gemv(alone, &x[row * inputs..][..inputs], &w, Some(&bias), None);
            assert_eq!(y1, y[row * outputs..][..outputs], "row {row} of {s:?}");
        }
        let gelu = |x: &f32| 0.5 * x * (1.0 + (0.797_884_6 * (x + 0.044_715 * x * x * x)).tanh());
        let expected: Vec<f32> = expected.iter().map(gelu).collect();
        assert!(distance(&ops.gemv(s, &x, &w, Some(&bias), Some(Activation::GeluTanh)), &expected) < 1e-6);
    }
}

#[test]
fn cached_attention_matches_a_plain_one_for_ragged_sequences() {
    let backend = Backend::cpu(2, PoolMode::On);
    let ops = Ops { backend: &backend, grads: DType::F32 };
    for (heads, kv_heads, width, lengths) in
        [(2, 2, 8, vec![1]), (6, 2, 24, vec![9, 1, 70]), (4, 1, 64, vec![3, 5])]
    {
        for (window, softcap) in
            [(None, None), (Some(1), None), (Some(9), None), (Some(71), Some(0.5)), (None, Some(2.0))]
        {
            let (slots, softcap) = (lengths.len(), softcap.map(Scalar::from));
            let options = AttentionOptions { window, softcap, ..AttentionOptions::new(width) };
            let s = CachedAttentionShape { rows: 0, heads, kv_heads, width, slots, capacity: 80, options };
            let (places, chunks) = ragged(&lengths, 4);
            let qkv = plain(4, places.len() * s.qkv_width());
            let table: Vec<f32> = (0..80 * width)
                .map(|i| {
                    let (t, c) = ((i / width) as f32, i % width);
                    let angle = |pair: usize| t / 10_f32.powi(pair as i32);
                    if c < width / 2 { angle(c).cos() } else { angle(c - width / 2).sin() }
                })
                .collect();
            let sinks: Vec<f32> = plain(5, heads).iter().map(|x| 3.0 * x).collect();
            for (table, sinks) in [(None, None), (Some(&table[..]), None), (None, Some(&sinks[..]))] {
                let outputs = ops.cached_attention(s, &qkv, table, sinks, &places, &chunks);
                let expected = plain_attention(s, &qkv, table, sinks, &places);
                let distance = distance(&outputs[0].1, &expected);
                assert!(distance < 1e-6, "{s:?}: {distance:.2e}");
            }
        }
    }
}

/// Attention of training is that of generation over a whole sequence.
#[test]
fn attention_with_options_matches_a_plain_one() {
    let backend = Backend::cpu(2, PoolMode::On);
    let ops = Ops { backend: &backend, grads: DType::F32 };
    let (seq, heads, kv_heads, width) = (150, 4, 2, 16);
    for window in [None, Some(1), Some(2), Some(64), Some(65), Some(149), Some(150), Some(200)] {
        for softcap in [None, Some(0.5), Some(20.0)] {
            let options = AttentionOptions {
                scale: 0.4.into(),
                window,
                softcap: softcap.map(Scalar::from),
                documents: false,
            };
            let s = AttentionShape { batch: 1, seq, heads, kv_heads, width, options };
            let (qkv, dout) = (plain(4, seq * s.qkv_width()), vec![0.0; seq * heads * width]);
            let sinks = [-2.0, 0.5, 3.0, 9.0];
            let plain = ops.attention(s, &qkv, None, None, &dout);
            let with_sinks = ops.attention_with_sinks(s, &qkv, &sinks, None, &dout, Accumulate::Overwrite);
            let cached =
                CachedAttentionShape { rows: 0, heads, kv_heads, width, slots: 1, capacity: seq, options };
            for (outputs, sinks) in [(plain, None), (with_sinks, Some(&sinks[..]))] {
                let expected = plain_attention(cached, &qkv, None, sinks, &ragged(&[seq], 0).0);
                let distance = distance(&outputs[0].1, &expected);
                assert!(distance < 1e-6, "{s:?}, sinks {sinks:?}: {distance:.2e}");
            }
        }
    }
}

#[test]
fn greedy_takes_the_first_largest_logit_and_never_nan() {
    let backend = Backend::cpu(1, PoolMode::On);
    let ops = Ops { backend: &backend, grads: DType::F32 };
    let nan = f32::NAN;
    let logits = [1.0, 5.0, nan, 5.0, 9.0, nan, nan, nan, nan, nan, f32::NEG_INFINITY, -3.0, -7.0, -3.0, 9.0];
    // The fifth logit is padding.
    assert_eq!(ops.greedy(3, 4, &logits), [1.0, -1.0, 1.0]);
}
