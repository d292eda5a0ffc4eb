//! Compares every backward of the CPU with finite differences of its forward, and checks the contract of all
//! operations.
//!
//! With `L = sum(dy y)`, the gradient of an input is compared with `(L(x + h) - L(x - h)) / 2h` for each element; the
//! measure is the norm of the difference relative to the norm. Forward is computed in f32: with h = 1e-2 its rounding
//! error contributes about 1e-7 sqrt(terms) / h = 1e-4, and the neglected third derivative about h^2 = 1e-4. The
//! tolerance is 2e-3.

#![expect(clippy::unwrap_used, reason = "a test")]

mod common;

use common::{
    ACTIVATIONS, ADAMW, Added, MuonCase, MuonUpdates, Ops, Outputs, distance, ids, muon_pieces, random,
};
use xlaunch_engine::*;

const H: f32 = 1e-2;
const TOLERANCE: f64 = 2e-3;

fn with_cpu<R>(f: impl FnOnce(&Ops<'_>) -> R) -> R {
    let backend = Backend::cpu(1, PoolMode::On);
    f(&Ops { backend: &backend, grads: DType::F32 })
}

fn get<'a>(outputs: &'a Outputs, name: &str) -> &'a [f32] {
    &outputs.iter().find(|(output, _)| *output == name).unwrap().1
}

/// Checks `gradient` against differences of `sum(dy f(x))`.
fn check(what: &str, x: &[f32], dy: &[f32], gradient: &[f32], f: impl Fn(&[f32]) -> Vec<f32>) {
    let loss =
        |x: &[f32]| -> f64 { f(x).iter().zip(dy).map(|(y, dy)| f64::from(*y) * f64::from(*dy)).sum::<f64>() };
    let numeric: Vec<f32> = (0..x.len())
        .map(|i| {
            let mut moved = x.to_vec();
            moved[i] = x[i] + H;
            let up = loss(&moved);
            moved[i] = x[i] - H;
            let step = f64::from(x[i] + H) - f64::from(moved[i]);
            ((up - loss(&moved)) / step) as f32
        })
        .collect();
    let distance = distance(gradient, &numeric);
    assert!(distance < TOLERANCE, "{what}: {distance:.2e}");
}

#[test]
fn embed_gradients() {
    let s = EmbedShape { batch: 2, seq: 5, cols: 8, vocab: 4 };
    let (tokens, wte, wpe) = (ids(1, 10, 4), random(2, 32), random(3, 40));
    let dout = random(4, 80);
    with_cpu(|ops| {
        let run = |wte: &[f32], wpe: &[f32]| ops.embed(s, &tokens, wte, Some(wpe), None, &dout);
        let outputs = run(&wte, &wpe);
        // Gradients accumulate.
        let minus_start = |name, len: usize| -> Vec<f32> {
            get(&outputs, name).iter().zip(random(77, len)).map(|(sum, start)| sum - start).collect()
        };
        check("dwte", &wte, &dout, &minus_start("dwte", 32), |wte| get(&run(wte, &wpe), "out").to_vec());
        check("dwpe", &wpe, &dout, &minus_start("dwpe", 40), |wpe| get(&run(&wte, wpe), "out").to_vec());
    });
}

#[test]
fn norm_gradients() {
    for kind in [NormKind::Layer, NormKind::Rms] {
        let s = NormShape { rows: 3, cols: 20, kind, eps: 1e-5, offset: 0.0 };
        let (x, branch, gamma, dy) = (random(5, 60), random(6, 60), random(7, 20), random(8, 60));
        let beta = (kind == NormKind::Layer).then(|| random(9, 20));
        with_cpu(|ops| {
            let run = |x: &[f32], gamma: &[f32], beta: Option<&[f32]>| {
                ops.norm(s, x, Added::Before(&branch), gamma, beta, &dy, None, true, Accumulate::Overwrite)
            };
            let outputs = run(&x, &gamma, beta.as_deref());
            let y = |outputs: Outputs| get(&outputs, "y").to_vec();
            check("dx", &x, &dy, get(&outputs, "dx"), |x| y(run(x, &gamma, beta.as_deref())));
            check("dgamma", &gamma, &dy, get(&outputs, "dgamma"), |g| y(run(&x, g, beta.as_deref())));
            if let Some(beta) = &beta {
                check("dbeta", beta, &dy, get(&outputs, "dbeta"), |beta| y(run(&x, &gamma, Some(beta))));
            }
            // The gradient of the residual path is added, and so included in the sum of the rows.
            let (beta, joining) = (beta.as_deref(), Some(&branch[..]));
            let acc = Accumulate::Add;
            let joined = ops.norm(s, &x, Added::Before(&branch), &gamma, beta, &dy, joining, true, acc);
            let expected: Vec<f32> = get(&outputs, "dx").iter().zip(&branch).map(|(a, b)| a + b).collect();
            assert!(distance(get(&joined, "dx"), &expected) < 1e-6);
            let added = |start: Vec<f32>, dx: &[f32]| -> Vec<f32> {
                start
                    .iter()
                    .enumerate()
                    .map(|(c, x)| x + dx.iter().skip(c).step_by(20).sum::<f32>())
                    .collect()
            };
            let dx = get(&outputs, "dx");
            assert!(distance(get(&outputs, "dsum"), &added(vec![0.0; 20], dx)) < 1e-5);
            assert!(distance(get(&joined, "dsum"), &added(random(77, 20), &expected)) < 1e-5);
        });
    }
}

#[test]
fn gradients_of_a_norm_that_is_added_to_the_stream() {
    for kind in [NormKind::Layer, NormKind::Rms] {
        let s = NormShape { rows: 3, cols: 20, kind, eps: 1e-5, offset: 1.0 };
        let (x, stream, gamma, dy) = (random(5, 60), random(6, 60), random(7, 20), random(8, 60));
        let beta = (kind == NormKind::Layer).then(|| random(9, 20));
        let beta = beta.as_deref();
        with_cpu(|ops| {
            let run = |x: &[f32], gamma: &[f32], added: Added<'_>| {
                ops.norm(s, x, added, gamma, beta, &dy, None, true, Accumulate::Overwrite)
            };
            let added = Added::After(&stream);
            let outputs = run(&x, &gamma, added);
            let y = |outputs: Outputs| get(&outputs, "y").to_vec();
            check("dx", &x, &dy, get(&outputs, "dx"), |x| y(run(x, &gamma, added)));
            check("dgamma", &gamma, &dy, get(&outputs, "dgamma"), |gamma| y(run(&x, gamma, added)));
            // The norm alone, with the offset already in gamma.
            let plain = NormShape { offset: 0.0, ..s };
            let gamma: Vec<f32> = gamma.iter().map(|gamma| 1.0 + gamma).collect();
            let acc = Accumulate::Overwrite;
            let alone = y(ops.norm(plain, &x, Added::Nothing, &gamma, beta, &dy, None, true, acc));
            let sum: Vec<f32> = stream.iter().zip(alone).map(|(stream, y)| stream + y).collect();
            assert!(distance(get(&outputs, "y"), &sum) < 1e-6);
        });
    }
}

#[test]
fn qk_norm_gradients_with_and_without_rope() {
    let options = AttentionOptions::new(8);
    let s = AttentionShape { batch: 2, seq: 3, heads: 4, kv_heads: 2, width: 8, options };
    let len = 6 * s.qkv_width();
    let (qkv, dout, table) = (random(40, len), random(41, len), random(42, 24));
    for (kind, offset) in [(QkNorm::Head, 0.0), (QkNorm::Head, 1.0), (QkNorm::Full, 0.0), (QkNorm::Full, 1.0)]
    {
        let [q, k] = kind.gammas(s);
        let (q, k) = (random(43, q), random(44, k));
        with_cpu(|ops| {
            for table in [None, Some(table.as_slice())] {
                let run = |qkv: &[f32], q: &[f32], k: &[f32]| {
                    ops.qk_norm(s, kind, offset, qkv, [q, k], table, None, &dout, Accumulate::Overwrite)
                };
                let outputs = run(&qkv, &q, &k);
                let out = |outputs: Outputs| get(&outputs, "out").to_vec();
                check("dqkv", &qkv, &dout, get(&outputs, "dqkv"), |qkv| out(run(qkv, &q, &k)));
                check("dq_gamma", &q, &dout, get(&outputs, "dq_gamma"), |q| out(run(&qkv, q, &k)));
                check("dk_gamma", &k, &dout, get(&outputs, "dk_gamma"), |k| out(run(&qkv, &q, k)));
            }
        });
    }
}

/// A norm of the heads as rows, then attention, equals the norm of queries and keys before attention.
#[test]
fn qk_norm_is_the_norm_of_each_head_or_of_all_heads_before_the_rotation() {
    let options = AttentionOptions::new(8);
    let s = AttentionShape { batch: 1, seq: 5, heads: 4, kv_heads: 2, width: 8, options };
    let (row, keys, values) = (s.qkv_width(), 32, 48);
    let (qkv, dout, table) = (random(40, 5 * row), random(41, 5 * 32), random(42, 40));
    for (kind, offset) in [(QkNorm::Head, 1.0), (QkNorm::Full, 0.0)] {
        let [q_width, k_width] = kind.gammas(s);
        let gammas = [random(43, q_width), random(44, k_width)];
        with_cpu(|ops| {
            let acc = Accumulate::Overwrite;
            let normed = |x: &[f32], gamma: &[f32]| {
                let (rows, cols) = (x.len() / gamma.len(), gamma.len());
                let shape = NormShape { rows, cols, kind: NormKind::Rms, eps: 1e-5, offset };
                get(&ops.norm(shape, x, Added::Nothing, gamma, None, x, None, false, acc), "y").to_vec()
            };
            let by_rows: Vec<f32> = qkv
                .chunks(row)
                .flat_map(|x| {
                    let (q, k) = (normed(&x[..keys], &gammas[0]), normed(&x[keys..values], &gammas[1]));
                    [q, k, x[values..].to_vec()].concat()
                })
                .collect();
            let expected = ops.attention(s, &by_rows, Some(&table), None, &dout);
            let gammas = [&gammas[0][..], &gammas[1]];
            let out = ops.qk_norm(s, kind, offset, &qkv, gammas, Some(&table), None, &qkv, acc);
            let found = ops.attention(s, get(&out, "out"), None, None, &dout);
            assert!(distance(get(&found, "out"), get(&expected, "out")) < 1e-6, "{kind:?}");
        });
    }
}

#[test]
fn scaled_addition_works_in_place() {
    let (x, y) = (random(45, 10_000), random(46, 10_000));
    let outputs = with_cpu(|ops| ops.add_scaled(&x, &y, 0.5));
    let expect = |name: &str, f: fn(f32, f32) -> f32| {
        let expected: Vec<f32> = x.iter().zip(&y).map(|(x, y)| f(*x, *y)).collect();
        assert!(distance(get(&outputs, name), &expected) < 1e-6, "{name}");
    };
    expect("scaled", |_, y| 0.5 * y);
    expect("sum", |x, y| x + 0.5 * y);
    expect("in place of y", |x, y| x + 0.25 * (x + 0.5 * y));
    expect("in place of x", |x, y| x + 0.5 * y);
}

#[test]
fn linear_gradients() {
    let s = LinearShape { rows: 5, inputs: 7, outputs: 6 };
    let (x, w, bias, dy) = (random(10, 35), random(11, 42), random(12, 6), random(13, 30));
    with_cpu(|ops| {
        let run =
            |x: &[f32], w: &[f32], bias: &[f32]| ops.linear(s, x, w, Some(bias), &dy, Accumulate::Overwrite);
        let outputs = run(&x, &w, &bias);
        let y = |outputs: Outputs| get(&outputs, "y").to_vec();
        check("dx", &x, &dy, get(&outputs, "dx"), |x| y(run(x, &w, &bias)));
        check("dw", &w, &dy, get(&outputs, "dw"), |w| y(run(&x, w, &bias)));
        check("dbias", &bias, &dy, get(&outputs, "dbias"), |bias| y(run(&x, &w, bias)));
    });
}

#[test]
fn attention_gradients_with_and_without_rope() {
    for (seq, heads, kv_heads) in [(9, 2, 2), (70, 2, 1)] {
        let options = AttentionOptions::new(8);
        let s = AttentionShape { batch: 1, seq, heads, kv_heads, width: 8, options };
        let table = random(16, seq * 8);
        check_attention(s, None);
        check_attention(s, Some(&table));
    }
}

#[test]
fn attention_gradients_with_windows_and_caps() {
    let plain = AttentionOptions::new(8);
    for window in [1, 2, 8, 9, 20] {
        let options = AttentionOptions { window: Some(window), ..plain };
        check_attention(AttentionShape { batch: 2, seq: 9, heads: 2, kv_heads: 1, width: 8, options }, None);
    }
    // Blocks of queries that begin with a key other than the first.
    for (window, softcap) in [(Some(5), None), (Some(64), Some(0.5)), (None, Some(0.5))] {
        let options = AttentionOptions {
            scale: 0.8.into(),
            window,
            softcap: softcap.map(Scalar::from),
            documents: false,
        };
        check_attention(AttentionShape { batch: 1, seq: 70, heads: 2, kv_heads: 1, width: 8, options }, None);
    }
}

fn check_attention(s: AttentionShape, table: Option<&[f32]>) {
    check_attention_of(s, table, None);
}

fn check_attention_of(s: AttentionShape, table: Option<&[f32]>, lengths: Option<&[usize]>) {
    let rows = s.batch * s.seq;
    let (qkv, dout) = (random(14, rows * s.qkv_width()), random(15, rows * s.heads * s.width));
    with_cpu(|ops| {
        let run = |qkv: &[f32]| ops.attention(s, qkv, table, lengths, &dout);
        let (what, outputs) = (format!("{s:?}"), run(&qkv));
        check(&what, &qkv, &dout, get(&outputs, "dqkv"), |qkv| get(&run(qkv), "out").to_vec());
    });
}

#[test]
fn attention_gradients_with_sinks() {
    let (plain, window) = (AttentionOptions::new(8), Some(9));
    for (options, lengths) in [
        (plain, None),
        (AttentionOptions { window, ..plain }, None),
        (AttentionOptions { window, documents: true, ..plain }, Some(&[20, 1, 9, 30][..])),
    ] {
        let s = AttentionShape { batch: 2, seq: 30, heads: 4, kv_heads: 2, width: 8, options };
        let (qkv, dout) = (random(14, 60 * s.qkv_width()), random(15, 60 * 32));
        let sinks = [-2.0, 0.5, 1.5, 3.0];
        with_cpu(|ops| {
            let run = |qkv: &[f32], sinks: &[f32]| {
                ops.attention_with_sinks(s, qkv, sinks, lengths, &dout, Accumulate::Overwrite)
            };
            let (what, outputs) = (format!("{s:?}"), run(&qkv, &sinks));
            let out = |outputs: Outputs| get(&outputs, "out").to_vec();
            check(&what, &qkv, &dout, get(&outputs, "dqkv"), |qkv| out(run(qkv, &sinks)));
            check(&what, &sinks, &dout, get(&outputs, "dsinks"), |sinks| out(run(&qkv, sinks)));
        });
    }
}

#[test]
fn attention_gradients_with_documents() {
    let table = random(16, 70 * 8);
    for (window, softcap) in [(None, None), (Some(5), None), (None, Some(0.5)), (Some(64), Some(0.5))] {
        let softcap = softcap.map(Scalar::from);
        let options = AttentionOptions { window, softcap, documents: true, ..AttentionOptions::new(8) };
        let s = AttentionShape { batch: 1, seq: 70, heads: 2, kv_heads: 1, width: 8, options };
        check_attention_of(s, None, Some(&[1, 3, 66]));
        check_attention_of(s, Some(&table), Some(&[60, 10]));
    }
}

/// Elements `part` of each of the rows' vectors.
fn part(x: &[f32], width: usize, part: std::ops::Range<usize>) -> Vec<f32> {
    x[part.start * width..part.end * width].to_vec()
}

#[test]
fn documents_that_share_a_row_have_the_bits_of_rows_of_their_own() {
    let lengths = [1, 66, 3, 130];
    let table = random(16, 200 * 8);
    let plain = AttentionOptions { softcap: Some(0.5.into()), window: Some(40), ..AttentionOptions::new(8) };
    let options = AttentionOptions { documents: true, ..plain };
    let s = AttentionShape { batch: 1, seq: 200, heads: 2, kv_heads: 1, width: 8, options };
    let (qkv, dout) = (random(14, 200 * 32), random(15, 200 * 16));
    with_cpu(|ops| {
        let packed = ops.attention(s, &qkv, Some(&table), Some(&lengths), &dout);
        let mut start = 0;
        for length in lengths {
            let rows = start..start + length;
            start += length;
            let s = AttentionShape { seq: length, options: plain, ..s };
            let (qkv, dout) = (part(&qkv, 32, rows.clone()), part(&dout, 16, rows.clone()));
            let alone = ops.attention(s, &qkv, Some(&table[..8 * length]), None, &dout);
            for (name, width) in [("out", 16), ("dqkv", 32)] {
                assert!(
                    part(get(&packed, name), width, rows.clone()) == get(&alone, name),
                    "{name} of {rows:?}"
                );
            }
        }
    });
}

#[test]
fn a_document_does_not_read_others_even_if_they_are_not_finite() {
    let options = AttentionOptions { documents: true, ..AttentionOptions::new(8) };
    let s = AttentionShape { batch: 1, seq: 70, heads: 2, kv_heads: 1, width: 8, options };
    let (mut qkv, dout) = (random(14, 70 * 32), random(15, 70 * 16));
    with_cpu(|ops| {
        let before = ops.attention(s, &qkv, None, Some(&[20, 30, 20]), &dout);
        qkv[20 * 32..50 * 32].fill(f32::NAN);
        let after = ops.attention(s, &qkv, None, Some(&[20, 30, 20]), &dout);
        for (name, width) in [("out", 16), ("dqkv", 32)] {
            for rows in [0..20, 50..70] {
                let [before, after] =
                    [&before, &after].map(|outputs| part(get(outputs, name), width, rows.clone()));
                assert!(before == after, "{name} of {rows:?}");
            }
        }
    });
}

#[test]
fn positions_of_embeddings_count_from_the_first_token_of_each_document() {
    let s = EmbedShape { batch: 2, seq: 5, cols: 8, vocab: 4 };
    let (tokens, wte, wpe, dout) = (ids(1, 10, 4), random(2, 32), random(3, 40), random(4, 80));
    with_cpu(|ops| {
        let run = |wpe: &[f32]| ops.embed(s, &tokens, &wte, Some(wpe), Some(&[2, 3, 1, 4]), &dout);
        let outputs = run(&wpe);
        let positions = [0, 1, 0, 1, 2, 0, 0, 1, 2, 3];
        for (n, (position, token)) in positions.into_iter().zip(&tokens).enumerate() {
            let token = &wte[usize::try_from(*token).unwrap() * 8..][..8];
            let expected: Vec<f32> = token.iter().zip(&wpe[position * 8..]).map(|(a, b)| a + b).collect();
            assert_eq!(get(&outputs, "out")[n * 8..][..8], expected);
        }
        let dwpe: Vec<f32> =
            get(&outputs, "dwpe").iter().zip(random(77, 40)).map(|(x, start)| x - start).collect();
        check("dwpe", &wpe, &dout, &dwpe, |wpe| get(&run(wpe), "out").to_vec());
    });
}

#[test]
fn ignored_targets_have_no_loss_and_no_gradient() {
    let s = ClassifierShape { rows: 3, vocab: 9, padded: 12 };
    let (logits, mut targets) = (random(21, 36), ids(22, 3, 9));
    with_cpu(|ops| {
        for softcap in [None, Some(0.8)] {
            let all = ops.classifier(s, &logits, &targets, 0.25, softcap);
            let before = std::mem::replace(&mut targets[1], IGNORED);
            let some = ops.classifier(s, &logits, &targets, 0.25, softcap);
            targets[1] = before;
            for name in ["losses", "losses with gradient", "dlogits"] {
                let width = get(&all, name).len() / 3;
                let mut expected = get(&all, name).to_vec();
                expected[width..2 * width].fill(0.0);
                assert_eq!(get(&some, name), expected, "{name}");
            }
        }
    });
}

#[test]
fn attention_is_causal() {
    let options = AttentionOptions::new(8);
    let s = AttentionShape { batch: 1, seq: 70, heads: 1, kv_heads: 1, width: 8, options };
    let (mut qkv, dout) = (random(18, 70 * 24), vec![0.0; 70 * 8]);
    with_cpu(|ops| {
        let before = ops.attention(s, &qkv, None, None, &dout);
        qkv[66 * 24..].iter_mut().for_each(|x| *x += 1.0);
        let after = ops.attention(s, &qkv, None, None, &dout);
        assert_eq!(get(&before, "out")[..66 * 8], get(&after, "out")[..66 * 8]);
        assert_ne!(get(&before, "out")[66 * 8..], get(&after, "out")[66 * 8..]);
    });
}

#[test]
fn glu_gradients() {
    const LIMIT: f32 = 1.25;
    // Differences must not cross the limit, where the slope changes.
    let apart = |x: f32| if (x.abs() - LIMIT).abs() < 2.0 * H { 2.0 * x } else { x };
    let h: Vec<f32> = random(19, 50).iter().map(|x| apart(3.0 * x)).collect();
    let da = random(20, 25);
    with_cpu(|ops| {
        for activation in ACTIVATIONS {
            // Some of the inputs are beyond the limit.
            for inputs in [GluInputs::PLAIN, GluInputs { limit: LIMIT, offset: 1.0 }] {
                let run = |h: &[f32]| ops.glu(activation, inputs, [5, 5], h, &da);
                let what = format!("{activation:?}, {inputs:?}");
                check(&what, &h, &da, get(&run(&h), "dh"), |h| get(&run(h), "a").to_vec());
            }
        }
    });
}

#[test]
fn glu_gradients_between_two_linear_layers() {
    let s = LinearShape { rows: 10, inputs: 6, outputs: 10 };
    let next_shape = LinearShape { rows: 10, inputs: 5, outputs: 4 };
    let (x, w, bias) = (random(32, 60), random(33, 60), random(34, 10));
    let (next, dy) = (random(35, 20), random(36, 40));
    with_cpu(|ops| {
        for activation in ACTIVATIONS {
            let run = |x: &[f32], bias: &[f32]| ops.linear_glu(activation, s, x, &w, Some(bias), &next, &dy);
            let y = |outputs: Outputs| {
                let y = ops.linear(next_shape, get(&outputs, "a"), &next, None, &dy, Accumulate::Overwrite);
                get(&y, "y").to_vec()
            };
            let dh = run(&x, &bias).pop().unwrap().1;
            // The gradient of h reaches x through the first layer's weights.
            let first = ops.linear(s, &x, &w, Some(&bias), &dh, Accumulate::Overwrite);
            check(&format!("dx, {activation:?}"), &x, &dy, get(&first, "dx"), |x| y(run(x, &bias)));
            check(&format!("dbias, {activation:?}"), &bias, &dy, get(&first, "dbias"), |b| y(run(&x, b)));
        }
    });
}

#[test]
fn activation_gradients_between_two_linear_layers() {
    let s = LinearShape { rows: 10, inputs: 6, outputs: 5 };
    let next_shape = LinearShape { rows: 10, inputs: 5, outputs: 4 };
    let (x, w, bias) = (random(32, 60), random(33, 30), random(34, 5));
    let (next, dy) = (random(35, 20), random(36, 40));
    with_cpu(|ops| {
        for activation in ACTIVATIONS {
            let run = |x: &[f32], bias: Option<&[f32]>| {
                ops.activation(activation, s, x, &w, bias, &next, &dy, Accumulate::Overwrite)
            };
            let y = |outputs: Outputs| {
                let y = ops.linear(next_shape, get(&outputs, "a"), &next, None, &dy, Accumulate::Overwrite);
                get(&y, "y").to_vec()
            };
            let outputs = run(&x, Some(&bias));
            let what = format!("{activation:?}");
            check(&what, &bias, &dy, get(&outputs, "dbias"), |bias| y(run(&x, Some(bias))));
            // The gradient of h reaches x through the first layer's weights.
            let dx = ops.linear(s, &x, &w, Some(&bias), get(&outputs, "dh"), Accumulate::Overwrite);
            check(&what, &x, &dy, get(&dx, "dx"), |x| y(run(x, Some(&bias))));
            let outputs = run(&x, None);
            let dx = ops.linear(s, &x, &w, None, get(&outputs, "dh"), Accumulate::Overwrite);
            check(&format!("{what} without bias"), &x, &dy, get(&dx, "dx"), |x| y(run(x, None)));
        }
    });
}

/// Values computed in double precision with Python's `math.erf`, `math.tanh` and `math.exp`.
#[test]
#[expect(clippy::excessive_precision, reason = "the values have the digits that were computed")]
fn activation_functions_have_their_published_values() {
    let x = [-6.0, -2.5, -1.0, -0.1, 0.0, 0.3, 1.0, 4.0];
    let expected = [
        [
            -1.4835739e-2,
            -1.8964545e-1,
            -2.6894142e-1,
            -4.7502081e-2,
            0.0,
            1.7233276e-1,
            7.3105858e-1,
            3.9280552e0,
        ],
        [
            -5.9195259e-9,
            -1.5524163e-2,
            -1.5865525e-1,
            -4.6017216e-2,
            0.0,
            1.8537343e-1,
            8.4134475e-1,
            3.9998733e0,
        ],
        [
            -8.4396490e-11,
            -1.5084266e-2,
            -1.5880801e-1,
            -4.6017249e-2,
            0.0,
            1.8537092e-1,
            8.4119199e-1,
            3.9999298e0,
        ],
        [0.0, 0.0, 0.0, 0.0, 0.0, 9.0000000e-2, 1.0000000e0, 1.6000000e1],
        [
            -2.2035355e-4,
            -3.4986165e-2,
            -1.5420423e-1,
            -4.5755242e-2,
            0.0,
            1.8748414e-1,
            8.4579577e-1,
            3.9955853e0,
        ],
    ];
    with_cpu(|ops| {
        for (activation, expected) in ACTIVATIONS.into_iter().zip(expected) {
            let gates: Vec<f32> = x.iter().flat_map(|x| [*x, 1.0]).collect();
            let a =
                get(&ops.glu(activation, GluInputs::PLAIN, [x.len(), 1], &gates, &[0.0; 8]), "a").to_vec();
            for ((x, a), expected) in x.iter().zip(a).zip(expected) {
                let error = (a - expected).abs();
                assert!(error <= 1e-6 * x.abs().max(1.0), "{activation:?}({x}) = {a:e}");
            }
        }
    });
}

#[test]
fn classifier_gradients() {
    let s = ClassifierShape { rows: 4, vocab: 9, padded: 12 };
    let (logits, targets) = (random(21, 48), ids(22, 4, 9));
    for softcap in [None, Some(0.8)] {
        with_cpu(|ops| {
            let run = |logits: &[f32]| ops.classifier(s, logits, &targets, 0.25, softcap);
            let outputs = run(&logits);
            let dlogits = get(&outputs, "dlogits");
            check("dlogits", &logits, &[0.25; 4], dlogits, |l| get(&run(l), "losses").to_vec());
            assert_eq!(get(&outputs, "losses"), get(&outputs, "losses with gradient"));
            let padding = dlogits.chunks(12).flat_map(|row| &row[9..]);
            assert!(padding.into_iter().all(|x| *x == 0.0));
        });
    }
}

#[test]
fn preference_gradients() {
    let s = ClassifierShape { rows: 22, vocab: 9, padded: 12 };
    let (logits, targets) = (random(21, 22 * 12), ids(22, 22, 9));
    let (reference, losses) = (random(23, 22), random(24, 22));
    with_cpu(|ops| {
        // Two pairs, and one with padding after it.
        let lengths = [2, 3, 4, 2, 3, 6, 2];
        let run =
            |losses: &[f32]| ops.preference(s, [2, 11], &lengths, &logits, &targets, [&reference, losses]);
        let outputs = run(&losses);
        let (weights, sums) = (get(&outputs, "weights"), get(&outputs, "sums"));
        check("weights", &losses, &[1.0, 1.0, 0.0, 0.0, 0.0, 0.0], weights, |l| {
            get(&run(l), "sums").to_vec()
        });
        let gain = |tokens: std::ops::Range<usize>| -> f32 { tokens.map(|t| reference[t] - losses[t]).sum() };
        let margins = [[0..2, 2..5], [5..9, 9..11], [11..14, 14..20]]
            .map(|[better, worse]| 0.3 * (gain(better) - gain(worse)));
        let (loss, one) = (|margin: f32| (1.0 + (-margin).exp()).ln(), |margin: f32| f32::from(margin > 0.0));
        let rows = |f: &dyn Fn(f32) -> f32| [f(margins[0]) + f(margins[1]), f(margins[2])];
        let expected = [rows(&loss), rows(&one), rows(&|margin| margin)].concat();
        assert!(distance(sums, &expected) < 1e-6, "{sums:?} {expected:?}");
        assert_eq!(weights[20..], [0.0; 2]);
        // The gradient of each row's logits is that of its loss, times the weight.
        let plain = ops.classifier(s, &logits, &targets, 0.5, None);
        let plain = get(&plain, "dlogits").chunks(12).zip(weights);
        let expected: Vec<f32> =
            plain.flat_map(|(row, weight)| row.iter().map(move |d| d * weight)).collect();
        assert!(distance(get(&outputs, "dlogits"), &expected) < 1e-6);
    });
}

#[test]
fn capped_logits_have_the_losses_of_the_classifier_with_a_cap() {
    let s = ClassifierShape { rows: 4, vocab: 9, padded: 12 };
    let (logits, targets): (Vec<f32>, _) = (random(21, 48).iter().map(|x| 9.0 * x).collect(), ids(22, 4, 9));
    with_cpu(|ops| {
        let capped = ops.softcap(&logits, 3.0);
        let exact: Vec<f32> = logits.iter().map(|x| 3.0 * (x / 3.0).tanh()).collect();
        assert!(distance(get(&capped, "f32"), &exact) < 1e-6);
        let expected = ops.classifier(s, &exact, &targets, 0.25, None);
        let found = ops.classifier(s, &logits, &targets, 0.25, Some(3.0));
        assert!(distance(get(&found, "losses"), get(&expected, "losses")) < 1e-6);
    });
}

/// With `X = U S V^T`, the result is `U f(S) V^T`: it has the singular vectors of X, and singular values of about 1. So
/// its product with `X^T` is symmetric and positive, and its own Gram matrix is about the identity.
#[test]
fn orthogonalized_matrices_keep_their_singular_vectors() {
    for (rows, cols) in [(5, 40), (40, 5), (16, 16), (1, 7)] {
        // Columns of very different sizes.
        let x: Vec<f32> =
            random(3, rows * cols).iter().enumerate().map(|(i, x)| x * (1 + i % 9) as f32).collect();
        let outputs = with_cpu(|ops| ops.orthogonalize((rows, cols), &x));
        let found = get(&outputs, "orthogonal");
        let side = rows.min(cols);
        let at = |m: &[f32], i: usize, j: usize| {
            f64::from(if rows <= cols { m[i * cols + j] } else { m[j * cols + i] })
        };
        let product =
            |a: &[f32], b: &[f32], i, j| (0..rows.max(cols)).map(|k| at(a, i, k) * at(b, j, k)).sum::<f64>();
        let size = (0..side).map(|i| product(found, &x, i, i)).sum::<f64>();
        for (i, j) in (0..side).flat_map(|i| (0..side).map(move |j| (i, j))) {
            let gram = product(found, found, i, j);
            let expected = f64::from(u8::from(i == j));
            assert!((gram - expected).abs() < 0.35, "{rows} x {cols}: {gram} at {i}, {j}");
            let (there, back) = (product(found, &x, i, j), product(found, &x, j, i));
            assert!((there - back).abs() < 1e-4 * size, "{rows} x {cols}: {there} and {back} at {i}, {j}");
        }
    }
}

#[test]
fn muon_matches_reference_formula() {
    let steps = [(0.04, 3.0), (9.0, 3.0), (0.04, f32::INFINITY)];
    for (cautious, weight) in [(true, 2.0), (true, -2.0), (false, -2.0)] {
        for updates in [MuonUpdates::Packed, MuonUpdates::Scattered] {
            let case = MuonCase { cautious, normuon: false, updates };
            let outputs = with_cpu(|ops| ops.muon(case, &[weight; 192], &[0.5; 192], &steps));
            let (mut p, mut m, mut u) = (f64::from(weight), 0.0, 0.0);
            for norm in [0.2_f64, 3.0] {
                let g = 0.5 * (1.0 / norm).min(1.0);
                m = 0.95 * m + 0.05 * g;
                u = 0.05 * g + 0.95 * m;
                let decay = if cautious && p < 0.0 { 0.0 } else { 0.5 };
                p -= 2e-2 * (3.0 * u + decay * p);
            }
            let packed = muon_pieces(192)[0][0].packed;
            for (name, at, expected) in [("params", 0, p), ("m", 0, m), ("update", packed, u)] {
                let value = f64::from(get(&outputs, name)[at]);
                assert!((value - expected).abs() < 1e-6, "{name}: {value} instead of {expected}");
            }
            assert_eq!(
                (get(&outputs, "m")[128], get(&outputs, "params")[128]),
                (0.0, weight),
                "AdamW's elements"
            );
        }
    }
}

/// In the first step, rows have no history but their own size.
#[test]
fn normuon_makes_rows_equally_large_and_keeps_the_norm() {
    let len = 64 * 30;
    let [pieces, matrices] = muon_pieces(len);
    // Rows of the first matrix differ in size.
    let mut grads = random(5, len);
    for piece in pieces.iter().filter(|piece| piece.row == 0) {
        for (i, grad) in grads[piece.at..piece.at + piece.len].iter_mut().enumerate() {
            *grad *= (1 + (piece.first + i) / piece.cols) as f32;
        }
    }
    let steps = [(0.04, 3.0)];
    let moved = |normuon| {
        let case = MuonCase { cautious: false, normuon, updates: MuonUpdates::Scattered };
        let outputs = with_cpu(|ops| ops.muon(case, &vec![0.0; len], &grads, &steps));
        let params = get(&outputs, "params");
        let own = pieces.iter().filter(|piece| piece.row == 0);
        own.flat_map(|piece| params[piece.at..piece.at + piece.len].to_vec()).collect::<Vec<f32>>()
    };
    let [plain, normuon] = [false, true].map(moved);
    let norm = |x: &[f32]| x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    assert!((norm(&plain) - norm(&normuon)).abs() < 1e-5 * norm(&plain));
    let rows = |x: &[f32]| x.chunks_exact(matrices[0].cols).map(norm).collect::<Vec<_>>();
    let (before, after) = (rows(&plain), rows(&normuon));
    assert!(before[before.len() - 1] > 5.0 * before[0], "{before:?}");
    assert!(after.iter().all(|row| (row - after[0]).abs() < 1e-5 * after[0]), "{after:?}");
}

#[test]
fn adamw_matches_reference_formula() {
    let steps = [(0.04, 3.0), (9.0, 3.0)];
    let outputs = with_cpu(|ops| ops.adamw(ADAMW, &[2.0; 192], &[0.5; 192], &[1, 0, MUON_GROUP], &steps));
    // Group 1 has half the learning rate and decays, group 0 does not; see `adamw_scalars`.
    let expected = |scale: f64, decay: f64| {
        let (mut p, mut m, mut v) = (2.0, 0.0, 0.0);
        for (rate, c1, c2, norm) in [(1e-2, 10.0, 20.0, 0.2_f64), (2e-2, 5.3, 10.3, 3.0)] {
            let g = 0.5 * (1.0 / norm).min(1.0);
            m = 0.9 * m + 0.1 * g;
            v = 0.95 * v + 0.05 * g * g;
            p -= rate * (scale * m * c1 / (f64::sqrt(v * c2) + 1e-8) + decay * p);
        }
        p as f32
    };
    let params = get(&outputs, "params");
    assert!((params[0] - expected(0.5, 0.1)).abs() < 1e-6 && (params[127] - expected(1.0, 0.0)).abs() < 1e-6);
    assert_eq!((params[128], get(&outputs, "m")[191]), (2.0, 0.0), "Muon's elements");
}

/// Returns the bits of the weights and moments after steps with these squared norms and losses, and the number of
/// consecutive skipped steps.
fn adamw_state(config: AdamWConfig, steps: &[(f32, f32)]) -> (Vec<u32>, f32) {
    let outputs = with_cpu(|ops| ops.adamw(config, &random(1, 128), &random(2, 128), &[1, 0], steps));
    let state = ["params", "m", "v"].map(|name| get(&outputs, name)).concat();
    (state.into_iter().map(f32::to_bits).collect(), get(&outputs, "skipped")[0])
}

#[test]
fn adamw_step_with_a_loss_or_norm_that_is_not_finite_changes_nothing() {
    let good = (0.04, 3.0);
    let bad = [(f32::NAN, 3.0), (f32::INFINITY, 3.0), (0.04, f32::NAN), (0.04, f32::NEG_INFINITY)];
    for clip in [1.0, 0.0] {
        let config = AdamWConfig { clip, ..ADAMW };
        let state = |steps: &[(f32, f32)]| adamw_state(config, steps);
        assert_eq!(state(&[good]).1, 0.0);
        for bad in bad {
            assert_eq!(state(&[bad]), (state(&[]).0, 1.0), "{bad:?} at the first step");
            assert_eq!(state(&[good, bad]), (state(&[good]).0, 1.0), "{bad:?} at the last step");
            // One skipped step is below the limit of two: the following step updates again.
            let (resumed, skipped) = state(&[good, bad, good]);
            assert_eq!((resumed, skipped), (state(&[good, good]).0, 0.0), "{bad:?} at the middle step");
        }
    }
}

#[test]
fn adamw_stops_updating_after_as_many_skipped_steps_in_a_row_as_its_limit() {
    let (good, bad) = ((0.04, 3.0), (f32::NAN, 3.0));
    let once = adamw_state(ADAMW, &[good]).0;
    assert_eq!(adamw_state(ADAMW, &[good, bad, bad, good, good]), (once.clone(), 2.0));
    assert_ne!(adamw_state(ADAMW, &[good, bad, good, bad, good]).0, once);
    let first = AdamWConfig { skip_limit: 1.0, ..ADAMW };
    assert_eq!(adamw_state(first, &[good, bad, good]), (once, 1.0));
}

#[test]
fn checksum_depends_on_every_bit_and_on_the_order() {
    let x = random(3, 40_000);
    let checksum = |x: &[f32]| with_cpu(|ops| ops.checksum(x).remove(0).1);
    let expected = checksum(&x);
    assert!(expected.iter().all(|digit| (0.0..65_536.0).contains(digit)), "{expected:?}");
    for index in [0, 1, 16_383, 16_384, 39_999] {
        for bit in [0, 22, 31] {
            let mut flipped = x.clone();
            flipped[index] = f32::from_bits(x[index].to_bits() ^ 1 << bit);
            assert_ne!(checksum(&flipped), expected, "bit {bit} of element {index}");
        }
    }
    let mut swapped = x.clone();
    swapped.swap(7, 20_000);
    assert_ne!(checksum(&swapped), expected);
    assert_ne!(checksum(&x[..39_999]), expected);
}

#[test]
fn accumulation_adds_and_results_do_not_depend_on_thread_count() {
    let (one, three) = (Backend::cpu(1, PoolMode::On), Backend::cpu(3, PoolMode::Off));
    let (one, three) = (Ops { backend: &one, grads: DType::F32 }, Ops { backend: &three, grads: DType::F32 });
    for (name, case) in common::cases::cases(|x| x) {
        for ((output, a), (_, b)) in case(&one).iter().zip(&case(&three)) {
            assert!(a.iter().all(|x| x.is_finite()), "{output} of {name} is not written completely");
            let same = a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{output} of {name} depends on the number of threads");
        }
    }
    let s = LinearShape { rows: 33, inputs: 8, outputs: 16 };
    let (x, w, bias, dy) = (random(1, 33 * 8), random(2, 128), random(3, 16), random(4, 33 * 16));
    let run = |acc| one.linear(s, &x, &w, Some(&bias), &dy, acc);
    let (replaced, added) = (run(Accumulate::Overwrite), run(Accumulate::Add));
    for name in ["dw", "dbias"] {
        let start = random(77, get(&replaced, name).len());
        let expected: Vec<f32> = get(&replaced, name).iter().zip(start).map(|(a, b)| a + b).collect();
        assert!(distance(get(&added, name), &expected) < 1e-6, "{name}");
    }
}

#[test]
#[should_panic(expected = "glu_forward")]
fn overlapping_output_panics() {
    let backend = Backend::cpu(1, PoolMode::On);
    let x = backend.alloc(DType::F32, 100).unwrap();
    let _ = backend.run(GluForward {
        activation: Activation::Silu,
        inputs: GluInputs::PLAIN,
        rows: 1,
        ffn: 30,
        h: x.slice(0..60),
        a: x.slice(40..70),
        end: None,
        amax: None,
    });
}

#[test]
#[should_panic(expected = "zero")]
fn lent_memory_panics() {
    let backend = Backend::cpu(1, PoolMode::On);
    let x = backend.alloc(DType::F32, 100).unwrap();
    let _loan = x.lend(50..100);
    let _ = backend.zero(x.slice(0..60));
}

#[test]
#[should_panic(expected = "glu_forward")]
fn slice_of_wrong_length_panics() {
    let backend = Backend::cpu(1, PoolMode::On);
    let (x, y) = (backend.alloc(DType::F32, 100).unwrap(), backend.alloc(DType::F32, 99).unwrap());
    let _ = backend.run(GluForward {
        activation: Activation::Silu,
        inputs: GluInputs::PLAIN,
        rows: 1,
        ffn: 50,
        h: x.all(),
        a: y.all(),
        end: None,
        amax: None,
    });
}
