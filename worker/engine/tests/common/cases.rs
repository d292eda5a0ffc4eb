//! Every operation on sizes that are not multiples of tiles, warps or vectors.

use xlaunch_engine::*;

use super::{
    ACTIVATIONS, ADAMW, Added, MuonCase, MuonUpdates, Ops, Outputs, Values, decoding, documents, experts,
    ids, random,
};

/// One operation with one set of sizes, as a function of a back end.
pub(crate) type Case = (String, Box<dyn Fn(&Ops<'_>) -> Outputs>);

/// Returns a rotary table: cosines and sines of angles that grow with the position, more slowly from pair to pair.
pub(super) fn rope_table(seq: usize, width: usize) -> Vec<f32> {
    let angle = |t: usize, i: usize| t as f32 / 10_f32.powi(i as i32);
    let row = |t| {
        (0..width).map(move |c| if c < width / 2 { angle(t, c).cos() } else { angle(t, c - width / 2).sin() })
    };
    (0..seq).flat_map(row).collect()
}

/// Returns norms of queries and keys: heads of all widths, of widths that are not vectorizable, and rows of more
/// vectors than threads.
fn qk_norm_cases(values: impl Fn(u64, usize) -> Values) -> Vec<Case> {
    let mut cases: Vec<Case> = Vec::new();
    for (batch, seq, heads, kv_heads, width) in [
        (1, 1, 2, 1, 8),
        (2, 35, 3, 1, 24),
        (1, 67, 4, 2, 64),
        (3, 5, 5, 1, 80),
        (2, 19, 3, 3, 96),
        (1, 130, 4, 1, 128),
        (2, 9, 2, 1, 256),
        (1, 3, 2, 2, 512),
        (1, 5, 40, 8, 320),
        (2, 700, 6, 2, 16),
    ] {
        let options = AttentionOptions::new(width);
        let s = AttentionShape { batch, seq, heads, kv_heads, width, options };
        let len = batch * seq * s.qkv_width();
        for (kind, offset, table, acc) in [
            (QkNorm::Head, 0.0, Some(rope_table(seq, width)), Accumulate::Overwrite),
            (QkNorm::Head, 1.0, None, Accumulate::Add),
            (QkNorm::Full, 0.0, Some(rope_table(seq, width)), Accumulate::Add),
            (QkNorm::Full, 1.0, None, Accumulate::Overwrite),
        ] {
            let (qkv, dout, [q, k]) = (values(46, len), values(47, len), kind.gammas(s));
            let (q, k) = (values(48, q), values(49, k));
            let rope = if table.is_some() { ", rope" } else { "" };
            let case = move |ops: &Ops<'_>| {
                ops.qk_norm(s, kind, offset, &qkv, [&q, &k], table.as_deref(), None, &dout, acc)
            };
            cases.push((format!("qk norm {kind:?} {s:?}{rope}"), Box::new(case)));
        }
    }
    cases
}

/// Returns every operation on sizes that are not multiples of tiles, warps or vectors. `round` is applied to every
/// input.
#[expect(clippy::too_many_lines, reason = "a list")]
pub(crate) fn cases(round: fn(f32) -> f32) -> Vec<Case> {
    let mut cases: Vec<Case> = Vec::new();
    let values = move |seed: u64, len: usize| Values::random(seed, len).map(round);
    // In the last two, every token has more rows than are sorted by rank, and is summed by more than one block. The
    // last one has more rows than a bitmap.
    for (batch, seq, cols, vocab) in [
        (1, 1, 8, 3),
        (3, 37, 36, 11),
        (19, 30, 264, 700),
        (2, 300, 40, 9000),
        (4, 901, 2056, 5),
        (1, 140_000, 8, 200),
    ] {
        let s = EmbedShape { batch, seq, cols, vocab };
        let tokens = ids(1, batch * seq, vocab);
        let (wte, wpe, dout) =
            (values(2, vocab * cols), values(3, (seq + 2) * cols), values(4, batch * seq * cols));
        let with = wpe.clone();
        let (t, w, d) = (tokens.clone(), wte.clone(), dout.clone());
        cases.push((
            format!("embed {s:?}"),
            Box::new(move |ops| ops.embed(s, &tokens, &wte, None, None, &dout)),
        ));
        cases.push((
            format!("embed wpe {s:?}"),
            Box::new(move |ops| ops.embed(s, &t, &w, Some(&with), None, &d)),
        ));
    }
    // Adapters: few columns or few products, and widths that are not vectorizable.
    for sizes in [[67, 4, 100], [33, 100, 3], [5, 1, 1], [16, 64, 130]] {
        let [rows, cols, depth] = sizes;
        let len = (rows.max(depth) + 3) * (cols.max(depth).max(rows) + 3) + 8;
        for acc in [Accumulate::Overwrite, Accumulate::Add] {
            let x = values(60, len.max((cols + 3) * (depth + 3) + 8));
            cases.push((format!("parts {sizes:?} {acc:?}"), Box::new(move |ops| ops.parts(sizes, &x, acc))));
        }
    }
    // Rows that fit into the registers of a part of a block, or of a whole block, and wider ones; rows that are not
    // vectorizable; more rows than run at once.
    for (rows, cols) in
        [(1, 8), (67, 100), (130, 384), (9, 1536), (15, 1544), (5, 8192), (137, 8192), (3, 8200), (1999, 768)]
    {
        for kind in [NormKind::Layer, NormKind::Rms] {
            for acc in [Accumulate::Overwrite, Accumulate::Add] {
                let s = NormShape { rows, cols, kind, eps: 1e-5, offset: 0.0 };
                let (x, branch, dy) =
                    (values(5, rows * cols), values(6, rows * cols), values(7, rows * cols));
                let (gamma, residual) = (values(8, cols), values(9, rows * cols));
                let beta = (kind == NormKind::Layer).then(|| values(10, cols));
                cases.push((
                    format!("norm {s:?} {acc:?}"),
                    Box::new(move |ops| {
                        let fused = acc == Accumulate::Add;
                        let branch = if fused { Added::Before(&branch) } else { Added::Nothing };
                        let residual = fused.then_some(&residual[..]);
                        ops.norm(s, &x, branch, &gamma, beta.as_deref(), &dy, residual, fused, acc)
                    }),
                ));
            }
            // The norm of a branch, which is added to the stream.
            let s = NormShape { rows, cols, kind, eps: 1e-5, offset: 1.0 };
            let (x, stream, dy) = (values(5, rows * cols), values(6, rows * cols), values(7, rows * cols));
            let (gamma, beta) = (values(8, cols), (kind == NormKind::Layer).then(|| values(10, cols)));
            let case = move |ops: &Ops<'_>| {
                let (added, acc) = (Added::After(&stream), Accumulate::Overwrite);
                ops.norm(s, &x, added, &gamma, beta.as_deref(), &dy, None, false, acc)
            };
            cases.push((format!("norm {s:?} of a branch"), Box::new(case)));
        }
    }
    for (rows, inputs, outputs) in
        [(1, 8, 16), (67, 40, 24), (130, 256, 72), (300, 136, 520), (1999, 8, 264), (2100, 72, 3000)]
    {
        for (with_bias, acc) in
            [(false, Accumulate::Overwrite), (true, Accumulate::Overwrite), (true, Accumulate::Add)]
        {
            let s = LinearShape { rows, inputs, outputs };
            let (x, w, dy) =
                (values(11, rows * inputs), values(12, outputs * inputs), values(13, rows * outputs));
            let bias = with_bias.then(|| values(14, outputs));
            let case = move |ops: &Ops<'_>| ops.linear(s, &x, &w, bias.as_deref(), &dy, acc);
            cases.push((format!("linear {s:?} bias {with_bias} {acc:?}"), Box::new(case)));
        }
    }
    for (rows, inputs, outputs) in [(16, 16, 16), (144, 272, 48), (80, 400, 528), (96, 16, 1200)] {
        for (with_bias, acc) in [(false, Accumulate::Overwrite), (true, Accumulate::Add)] {
            let s = LinearShape { rows, inputs, outputs };
            // Values down to the smallest numbers of both formats.
            let wide = |seed, len, scale: f32| {
                values(seed, len).map(move |x| round(scale * x * x.powi(8).max(1e-6)))
            };
            let (x, w) = (wide(39, rows * inputs, 3.0), wide(40, outputs * inputs, 0.1));
            let (dy, bias) = (wide(41, rows * outputs, 1e-4), with_bias.then(|| values(42, outputs)));
            let case = move |ops: &Ops<'_>| ops.fp8(s, &x, &w, bias.as_deref(), &dy, acc);
            cases.push((format!("fp8 {s:?} bias {with_bias} {acc:?}"), Box::new(case)));
        }
    }
    for (batch, seq, heads, kv_heads, width) in [
        (1, 1, 1, 1, 8),
        (2, 37, 2, 2, 24),
        (2, 70, 2, 1, 16),
        (1, 130, 6, 2, 32),
        (2, 256, 3, 3, 32),
        (2, 203, 2, 2, 32),
        (1, 300, 2, 2, 32),
        (1, 17, 3, 3, 16),
        (1, 530, 2, 2, 16),
        (1, 1, 2, 2, 64),
        (2, 65, 2, 1, 64),
        (1, 321, 2, 2, 64),
        (1, 100, 3, 3, 128),
        (1, 193, 4, 1, 128),
        (1, 300, 4, 2, 128),
        (1, 75, 2, 1, 144),
        (1, 150, 2, 2, 256),
        (3, 384, 2, 2, 64),
        (2, 128, 4, 1, 128),
        (1, 256, 2, 1, 128),
        (1, 256, 2, 2, 96),
        (2, 130, 2, 1, 192),
    ] {
        let options = AttentionOptions::new(width);
        let s = AttentionShape { batch, seq, heads, kv_heads, width, options };
        let len = batch * seq * s.qkv_width();
        // Scores are larger than unit ones, so that the softmax is not flat.
        let qkv = values(18, len).map(move |x| round(3.0 * x));
        let dout = values(19, batch * seq * heads * width);
        for table in [None, Some(rope_table(seq, width))] {
            let (qkv, dout, rope) = (qkv.clone(), dout.clone(), if table.is_some() { ", rope" } else { "" });
            let case = move |ops: &Ops<'_>| ops.attention(s, &qkv, table.as_deref(), None, &dout);
            cases.push((format!("attention {s:?}{rope}"), Box::new(case)));
        }
    }
    attention_options(&mut cases, values, round);
    sinks(&mut cases, values, round);
    cases.extend(qk_norm_cases(values));
    // The second is not vectorizable, and the last ones take several blocks.
    for len in [8, 31, 4096, 10_008, 10_007] {
        let (x, y) = (values(43, len), values(44, len));
        let case = move |ops: &Ops<'_>| ops.add_scaled(&x, &y, 0.375);
        cases.push((format!("add scaled {len}"), Box::new(case)));
        let x = values(45, len).map(move |x| round(40.0 * x));
        cases.push((format!("softcap {len}"), Box::new(move |ops| ops.softcap(&x, 15.0))));
    }
    for len in [1, 31, 10_007] {
        let x = random(22, len);
        cases.push((
            format!("reductions {len}"),
            Box::new(move |ops| ops.reductions(&x.iter().map(|x| round(x + 1.5)).collect::<Vec<_>>())),
        ));
    }
    for len in [1, 31, 100_003] {
        let x = random(32, len);
        cases.push((format!("checksum {len}"), Box::new(move |ops| ops.checksum(&x))));
    }
    activations(&mut cases, values);
    for (rows, [first, second], acc) in [
        (1, [(8, 8), (16, 8)], Accumulate::Overwrite),
        // Not vectorizable.
        (67, [(44, 40), (24, 12)], Accumulate::Overwrite),
        (130, [(264, 136), (40, 200)], Accumulate::Overwrite),
        (130, [(264, 136), (40, 200)], Accumulate::Add),
        (1500, [(72, 136), (136, 24)], Accumulate::Overwrite),
    ] {
        let shapes = [first, second].map(|(outputs, inputs)| LinearShape { rows, inputs, outputs });
        let (x, dy) = (values(37, rows * 300), values(38, rows * 300));
        let case = move |ops: &Ops<'_>| ops.two_layers(shapes, &x, &dy, acc);
        cases.push((
            format!("weights of two layers, {rows} x {first:?} and {second:?} {acc:?}"),
            Box::new(case),
        ));
    }
    // The third from the end is longer than 512 threads read at once, and has 1024 threads in float; the last one has
    // them in bf16, too.
    for (rows, vocab, padded) in [
        (1, 2, 2),
        (67, 50, 50),
        (9, 1999, 2048),
        (3, 50_257, 50_304),
        (1, 59_995, 60_000),
        (2, 128_250, 128_256),
    ] {
        let s = ClassifierShape { rows, vocab, padded };
        let logits = values(25, rows * padded).map(move |x| round(6.0 * x));
        let targets = ids(26, rows, vocab);
        for softcap in [None, Some(4.0)] {
            let (logits, targets, cap) =
                (logits.clone(), targets.clone(), if softcap.is_some() { ", cap" } else { "" });
            let case = move |ops: &Ops<'_>| ops.classifier(s, &logits, &targets, 0.25, softcap);
            cases.push((format!("classifier {s:?}{cap}"), Box::new(case)));
        }
    }
    for len in [64, 64 * 157 + 17] {
        let (params, grads) = (random(27, len), values(28, len));
        // One of four chunks is Muon's.
        let groups: Vec<u8> =
            [0, 1, MUON_GROUP, 4].into_iter().cycle().take(len.div_ceil(GROUP_CHUNK)).collect();
        // The second step is clipped and the next ones are skipped. After two skipped steps, the last one is skipped as
        // well.
        let steps = [(0.04, 3.0), (9.0, 3.0), (f32::NAN, 3.0), (0.04, f32::INFINITY), (0.04, 3.0)];
        cases.push((
            format!("adamw {len}"),
            Box::new(move |ops| ops.adamw(ADAMW, &params, &grads, &groups, &steps)),
        ));
    }
    // The last but two has more matrices than one GEMM multiplies; the last two have several tiles.
    for (shape, count) in [
        ((24, 200), 1),
        ((200, 24), 2),
        ((9, 33), 3),
        ((40, 40), 1),
        ((8, 24), 66),
        ((328, 336), 2),
        ((600, 296), 2),
    ] {
        let x = values(29, count * shape.0 * shape.1);
        let case = move |ops: &Ops<'_>| ops.orthogonalize(shape, &x);
        cases.push((format!("orthogonalize {} x {}, {count} matrices", shape.0, shape.1), Box::new(case)));
    }
    for (len, cautious, normuon, updates) in [
        (64 * 75, true, false, MuonUpdates::Packed),
        (64 * 75, true, true, MuonUpdates::Scattered),
        (64 * 157 + 17, false, false, MuonUpdates::Part),
        (64 * 157 + 17, false, true, MuonUpdates::Packed),
    ] {
        let (params, grads) = (random(30, len), values(31, len));
        // The second step is clipped, and the last one is not applied.
        let steps = [(0.04, 3.0), (9.0, 3.0), (0.04, f32::NAN)];
        let variant = MuonCase { cautious, normuon, updates };
        let case = move |ops: &Ops<'_>| ops.muon(variant, &params, &grads, &steps);
        cases.push((format!("muon {len} {variant:?}"), Box::new(case)));
    }
    cases.extend(decoding::cases(values));
    cases.extend(documents::cases(values, round));
    cases.extend(experts::cases(values));
    cases
}

/// Adds attention with scales, sliding windows and soft caps. Windows are next to the tile sizes of the kernels (16 to
/// 128) and to the sequence's length.
fn attention_options(
    cases: &mut Vec<Case>,
    values: impl Fn(u64, usize) -> Values + Copy,
    round: fn(f32) -> f32,
) {
    let all = [1, 31, 33, 63, 64, 65, 128, 199, 300];
    let shapes: [([usize; 5], &[usize]); 9] = [
        ([1, 200, 2, 1, 64], &all),
        ([2, 70, 2, 2, 24], &[1, 31, 64, 65]),
        ([1, 150, 3, 3, 32], &[1, 64, 65, 130]),
        ([1, 40, 2, 2, 16], &[7, 39]),
        ([1, 130, 2, 1, 80], &[33, 64]),
        ([1, 140, 2, 1, 96], &[65]),
        ([1, 100, 4, 1, 128], &[1, 32, 65]),
        ([1, 75, 2, 1, 256], &[9, 33]),
        ([1, 70, 2, 2, 144], &[17]),
    ];
    for (sizes, windows) in shapes {
        let plain = AttentionOptions::new(sizes[4]);
        let windowed = |window: usize| AttentionOptions { window: Some(window), ..plain };
        let scaled = |factor: f32| AttentionOptions { scale: (factor * plain.scale.get()).into(), ..plain };
        // Scores up to several times the cap.
        let capped = AttentionOptions { softcap: Some(5.0.into()), ..scaled(3.0) };
        let both = AttentionOptions { window: windows.iter().find(|w| **w > 1).copied(), ..capped };
        let options = windows.iter().map(|window| windowed(*window)).chain([capped, both]);
        // A scale alone is a constant of the kernels, which are compiled for it.
        for options in options.chain((sizes[4] <= 64 && sizes[1] == 200).then(|| scaled(0.7))) {
            let [batch, seq, heads, kv_heads, width] = sizes;
            let s = AttentionShape { batch, seq, heads, kv_heads, width, options };
            let qkv = values(18, batch * seq * s.qkv_width()).map(move |x| round(3.0 * x));
            let dout = values(19, batch * seq * heads * width);
            let table = (options == both).then(|| rope_table(seq, width));
            let rope = if table.is_some() { ", rope" } else { "" };
            let case = move |ops: &Ops<'_>| ops.attention(s, &qkv, table.as_deref(), None, &dout);
            cases.push((format!("attention {s:?}{rope}"), Box::new(case)));
        }
    }
}

/// Adds attention with sinks: heads of all numbers of threads, windows, and documents.
fn sinks(cases: &mut Vec<Case>, values: impl Fn(u64, usize) -> Values + Copy, round: fn(f32) -> f32) {
    for (sizes, window, lengths, acc) in [
        ([1, 1, 1, 1, 8], None, None, Accumulate::Overwrite),
        ([2, 37, 3, 1, 24], None, None, Accumulate::Add),
        ([1, 130, 8, 1, 64], Some(65), None, Accumulate::Overwrite),
        ([2, 128, 4, 2, 64], None, None, Accumulate::Overwrite),
        ([2, 70, 4, 2, 64], Some(33), Some(&[70, 9, 1, 60][..]), Accumulate::Add),
        ([1, 75, 2, 1, 256], None, None, Accumulate::Overwrite),
    ] {
        let [batch, seq, heads, kv_heads, width] = sizes;
        let options =
            AttentionOptions { window, documents: lengths.is_some(), ..AttentionOptions::new(width) };
        let s = AttentionShape { batch, seq, heads, kv_heads, width, options };
        let qkv = values(18, batch * seq * s.qkv_width()).map(move |x| round(3.0 * x));
        let dout = values(19, batch * seq * heads * width);
        let sinks = values(59, heads).map(move |x| round(4.0 * x));
        let case = move |ops: &Ops<'_>| ops.attention_with_sinks(s, &qkv, &sinks, lengths, &dout, acc);
        cases.push((format!("sinks of {s:?} {acc:?}"), Box::new(case)));
    }
}

/// Adds activation functions, plain and gated, alone and after linear layers.
fn activations(cases: &mut Vec<Case>, values: impl Fn(u64, usize) -> Values + Copy) {
    // The second is not vectorizable.
    for (size, (rows, inputs, ffn, outputs)) in
        [(1, 8, 16, 8), (67, 40, 44, 24), (130, 72, 1536, 40), (1999, 24, 264, 16)].into_iter().enumerate()
    {
        for activation in ACTIVATIONS {
            for (with_bias, acc) in
                [(true, Accumulate::Overwrite), (true, Accumulate::Add), (false, Accumulate::Overwrite)]
            {
                // All sizes of the function that has epilogues; two of the others.
                if (activation != Activation::GeluTanh || !with_bias)
                    && !(size == 1 || size == 2 && !with_bias)
                {
                    continue;
                }
                let s = LinearShape { rows, inputs, outputs: ffn };
                let (x, w) = (values(20, rows * inputs), values(21, ffn * inputs));
                let bias = with_bias.then(|| values(29, ffn));
                let (next, dy) = (values(30, outputs * ffn), values(31, rows * outputs));
                let case = move |ops: &Ops<'_>| {
                    ops.activation(activation, s, &x, &w, bias.as_deref(), &next, &dy, acc)
                };
                let bias = if with_bias { "" } else { ", no bias" };
                cases.push((format!("{activation:?} {s:?} to {outputs} {acc:?}{bias}"), Box::new(case)));
            }
        }
    }
    for (rows, ffn) in [(1, 1), (67, 44), (5, 1536), (3, 2056)] {
        for activation in ACTIVATIONS {
            if activation != Activation::Silu && ffn != 44 {
                continue;
            }
            let (h, da) = (values(23, 2 * rows * ffn), values(24, rows * ffn));
            // Larger values than those of layers, so that the functions are not nearly linear.
            let h = h.map(|x| 4.0 * x);
            for (inputs, name) in
                [(GluInputs::PLAIN, ""), (GluInputs { limit: 1.5, offset: 1.0 }, " within a limit")]
            {
                let (h, da) = (h.clone(), da.clone());
                let case = move |ops: &Ops<'_>| ops.glu(activation, inputs, [rows, ffn], &h, &da);
                cases.push((format!("glu {rows} x {ffn} {activation:?}{name}"), Box::new(case)));
            }
        }
    }
    // The second is not vectorizable.
    for (size, (rows, inputs, ffn, outputs)) in
        [(1, 8, 8, 8), (67, 40, 44, 24), (130, 72, 264, 40), (300, 456, 520, 472), (2100, 64, 1480, 136)]
            .into_iter()
            .enumerate()
    {
        for (activation, with_bias) in
            ACTIVATIONS.map(|f| (f, false)).into_iter().chain([(Activation::Silu, true)])
        {
            if (activation != Activation::Silu || with_bias) && size != 2 {
                continue;
            }
            let s = LinearShape { rows, inputs, outputs: 2 * ffn };
            let (x, w) = (values(33, rows * inputs), values(34, 2 * ffn * inputs));
            let bias = with_bias.then(|| values(43, 2 * ffn));
            let (next, dy) = (values(35, outputs * ffn), values(36, rows * outputs));
            let case =
                move |ops: &Ops<'_>| ops.linear_glu(activation, s, &x, &w, bias.as_deref(), &next, &dy);
            let bias = if with_bias { " with bias" } else { "" };
            cases.push((format!("linear {s:?}{bias}, glu to {outputs}, {activation:?}"), Box::new(case)));
        }
    }
}
