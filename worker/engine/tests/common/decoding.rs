//! The operations of decoding, as functions of host values.

use xlaunch_engine::*;

use super::cases::rope_table;
use super::{ACTIVATIONS, Case, Ops, Outputs, Values, ids, random};

impl Ops<'_> {
    pub(crate) fn gemv(
        &self,
        s: LinearShape,
        x: &[f32],
        w: &[f32],
        bias: Option<&[f32]>,
        activation: Option<Activation>,
    ) -> Vec<f32> {
        let (x, w, bias) = (self.act(x), self.act(w), self.maybe_act(bias));
        let y = self.out_f32(s.rows * s.outputs);
        let bias = bias.as_ref().map(Tensor::all);
        let gemv = Gemv { shape: s, x: x.all(), w: w.all(), bias, activation, y: y.all() };
        self.backend.run(gemv).unwrap();
        self.read(&y)
    }

    /// Stores the rows of `qkv` in chunks of these lengths, each at slot and position. Returns outputs and cache.
    pub(crate) fn cached_attention(
        &self,
        s: CachedAttentionShape,
        qkv: &[f32],
        table: Option<&[f32]>,
        sinks: Option<&[f32]>,
        places: &[(i32, i32)],
        chunks: &[usize],
    ) -> Outputs {
        let sinks = self.maybe_act(sinks);
        let table = table.map(|table| self.tensor(DType::F32, table));
        let [keys, values] = [(); 2].map(|()| self.act(&vec![0.0; s.cache()]));
        // Reused by every chunk: they are zero afterwards.
        let counters = self.ints(&vec![0; chunks.iter().max().unwrap() * s.heads]);
        let mut outs = Vec::new();
        let mut first = 0;
        for rows in chunks.iter().copied() {
            let (places, shape) = (&places[first..first + rows], CachedAttentionShape { rows, ..s });
            let qkv = self.act(&qkv[first * s.qkv_width()..(first + rows) * s.qkv_width()]);
            let slots = self.ints(&places.iter().map(|(slot, _)| *slot).collect::<Vec<_>>());
            let positions = self.ints(&places.iter().map(|(_, position)| *position).collect::<Vec<_>>());
            let distinct =
                (0..s.slots as i32).all(|slot| places.iter().filter(|(s, _)| *s == slot).count() < 2);
            let partials = self.out_f32(shape.partials());
            let out = self.out(rows * s.heads * s.width);
            self.backend
                .run(CachedAttention {
                    shape,
                    qkv: qkv.all(),
                    rope: table.as_ref().map(Tensor::all),
                    slots: slots.all(),
                    positions: positions.all(),
                    distinct,
                    keys: keys.all(),
                    values: values.all(),
                    sinks: sinks.as_ref().map(Tensor::all),
                    partials: partials.all(),
                    counters: counters.slice(0..rows * s.heads),
                    out: out.all(),
                })
                .unwrap();
            outs.extend(self.read(&out));
            first += rows;
        }
        vec![("out", outs), ("keys", self.read(&keys)), ("values", self.read(&values))]
    }

    /// Returns ids. The next positions are not read back.
    pub(crate) fn greedy(&self, rows: usize, vocab: usize, logits: &[f32]) -> Vec<f32> {
        let (logits, ids) = (self.tensor(DType::F32, logits), self.out_f32(rows));
        let (tokens, positions) = (self.ints(&vec![7; rows]), self.ints(&vec![3; rows]));
        let (tokens, positions) = (tokens.all(), positions.all());
        let (logits, last) = (logits.all(), 10);
        let args = Greedy { rows, vocab, logits, tokens, positions, last, ids: ids.all() };
        self.backend.run(args).unwrap();
        self.read(&ids)
    }
}

/// Returns slot and position of rows of `lengths.len()` sequences: first all of their first tokens, then the rest one
/// by one.
pub(crate) fn ragged(lengths: &[usize], steps: usize) -> (Vec<(i32, i32)>, Vec<usize>) {
    let mut places = Vec::new();
    for (slot, length) in lengths.iter().enumerate() {
        places.extend((0..*length).map(|position| (slot as i32, position as i32)));
    }
    let mut chunks = vec![places.len()];
    for step in 0..steps {
        places.extend(lengths.iter().enumerate().map(|(slot, length)| (slot as i32, (length + step) as i32)));
        chunks.push(lengths.len());
    }
    (places, chunks)
}

/// Returns every operation of decoding.
pub(crate) fn cases(values: impl Fn(u64, usize) -> Values + Copy + 'static) -> Vec<Case> {
    let mut cases: Vec<Case> = Vec::new();
    for (rows, inputs, outputs) in
        [(1, 8, 3), (1, 768, 2304), (5, 44, 17), (8, 352, 128), (13, 768, 40), (32, 3072, 72), (31, 96, 50)]
    {
        let all = ACTIVATIONS.map(Some).into_iter().chain([None]);
        // All functions in one case of each kernel.
        let few = matches!(inputs, 44 | 352);
        for activation in all.filter(|f| few || matches!(f, None | Some(Activation::GeluTanh))) {
            let s = LinearShape { rows, inputs, outputs };
            let (x, w) = (values(50, rows * inputs), values(51, outputs * inputs));
            let bias = activation.map(|_| values(52, outputs));
            let case = move |ops: &Ops<'_>| vec![("y", ops.gemv(s, &x, &w, bias.as_deref(), activation))];
            cases.push((format!("gemv {s:?} {activation:?}"), Box::new(case)));
        }
    }
    for (heads, kv_heads, width, capacity, lengths) in [
        (1, 1, 8, 4, vec![1]),
        (12, 12, 64, 600, vec![530]),
        (6, 2, 24, 90, vec![3, 65, 20]),
        (8, 1, 128, 200, vec![1, 190]),
        (2, 2, 256, 70, vec![10, 64]),
        (4, 4, 32, 40, vec![2; 32]),
    ] {
        let slots = lengths.len();
        let options = AttentionOptions::new(width);
        let s = CachedAttentionShape { rows: 0, heads, kv_heads, width, slots, capacity, options };
        let (places, chunks) = ragged(&lengths, 3);
        let qkv = values(53, places.len() * s.qkv_width()).map(|x| 2.0 * x);
        for table in [None, Some(rope_table(capacity, width))] {
            let (qkv, places, chunks) = (qkv.clone(), places.clone(), chunks.clone());
            let rope = if table.is_some() { ", rope" } else { "" };
            let case =
                move |ops: &Ops<'_>| ops.cached_attention(s, &qkv, table.as_deref(), None, &places, &chunks);
            cases.push((format!("cached attention {s:?}{rope}"), Box::new(case)));
        }
    }
    cached_attention_options(&mut cases, values);
    for (rows, vocab, padded) in [(1, 5, 5), (3, 50_257, 50_304)] {
        // Logits with ties, and a row in which no logit is a number.
        let mut logits: Vec<f32> = ids(54, rows * padded, 1000).iter().map(|id| *id as f32).collect();
        logits[..padded].fill(f32::NAN);
        let case = move |ops: &Ops<'_>| vec![("ids", ops.greedy(rows, vocab, &logits))];
        cases.push((format!("greedy {rows} x {vocab}"), Box::new(case)));
    }
    let (s, positions) = (EmbedShape { batch: 3, seq: 1, cols: 40, vocab: 11 }, [5, 0, 2]);
    let (tokens, wte, wpe) = (ids(55, 3, 11), values(56, 11 * 40), values(57, 6 * 40));
    let case = move |ops: &Ops<'_>| {
        let (tokens, positions, out) = (ops.ints(&tokens), ops.ints(&positions), ops.out(3 * 40));
        let (wte, wpe) = (ops.act(&wte), ops.act(&wpe));
        let (tokens, wte, wpe) = (tokens.all(), wte.all(), Some(wpe.all()));
        let positions = Some(positions.all());
        let args = EmbedForward { shape: s, tokens, wte, wpe, positions, documents: None, out: out.all() };
        ops.backend.run(args).unwrap();
        vec![("out", ops.read(&out))]
    };
    cases.push(("embed at positions".into(), Box::new(case)));
    cases
}

/// Adds cached attention with windows and soft caps. Splits have 64 positions or more.
fn cached_attention_options(cases: &mut Vec<Case>, values: impl Fn(u64, usize) -> Values + Copy) {
    for (heads, kv_heads, width, capacity, lengths, window, softcap) in [
        (2, 1, 64, 300, vec![250], Some(1), None),
        (2, 1, 64, 300, vec![250, 3], Some(64), None),
        (2, 2, 24, 300, vec![260], Some(65), Some(2.0)),
        (4, 1, 32, 300, vec![150, 280], Some(130), None),
        (2, 2, 128, 90, vec![70], Some(90), Some(3.0)),
        (4, 4, 80, 90, vec![7, 80], None, Some(3.0)),
    ] {
        let slots = lengths.len();
        let scale = (0.4 * AttentionOptions::new(width).scale.get()).into();
        let options =
            AttentionOptions { scale, window, softcap: softcap.map(Scalar::from), documents: false };
        let s = CachedAttentionShape { rows: 0, heads, kv_heads, width, slots, capacity, options };
        let (places, chunks) = ragged(&lengths, 3);
        let qkv = values(53, places.len() * s.qkv_width()).map(|x| 4.0 * x);
        for sinks in [None, Some(values(58, heads).map(|x| 3.0 * x))] {
            let (qkv, places, chunks) = (qkv.clone(), places.clone(), chunks.clone());
            let with = if sinks.is_some() { ", sinks" } else { "" };
            let case =
                move |ops: &Ops<'_>| ops.cached_attention(s, &qkv, None, sinks.as_deref(), &places, &chunks);
            cases.push((format!("cached attention {s:?}{with}"), Box::new(case)));
        }
    }
}

/// A plain implementation of cached attention in f64. Returns the outputs.
pub(crate) fn plain_attention(
    s: CachedAttentionShape,
    qkv: &[f32],
    table: Option<&[f32]>,
    sinks: Option<&[f32]>,
    places: &[(i32, i32)],
) -> Vec<f32> {
    let (half, width) = (s.width / 2, s.width);
    let head = |row: usize, head: usize| -> Vec<f64> {
        let x = &qkv[row * s.qkv_width() + head * width..][..width];
        let position = places[row].1 as usize;
        let rotated = head < s.heads + s.kv_heads;
        (0..width)
            .map(|i| match table.filter(|_| rotated).map(|table| &table[position * width..]) {
                None => f64::from(x[i]),
                Some(t) if i < half => f64::from(x[i] * t[i] - x[i + half] * t[i + half]),
                Some(t) => f64::from(x[i] * t[i - half] + x[i - half] * t[i]),
            })
            .collect()
    };
    let mut out = Vec::new();
    for (row, (slot, position)) in places.iter().enumerate() {
        let seen: Vec<usize> = (0..places.len())
            .filter(|i| places[*i].0 == *slot && visible(s.options, *position, places[*i].1))
            .collect();
        for h in 0..s.heads {
            let (q, kv) = (head(row, h), h / (s.heads / s.kv_heads));
            let weights: Vec<f64> = seen
                .iter()
                .map(|i| {
                    let k = head(*i, s.heads + kv);
                    score(s.options, q.iter().zip(&k).map(|(q, k)| q * k).sum::<f64>()).exp()
                })
                .collect();
            let total = weights.iter().sum::<f64>() + sinks.map_or(0.0, |sinks| f64::from(sinks[h]).exp());
            let values: Vec<Vec<f64>> = seen.iter().map(|i| head(*i, s.heads + s.kv_heads + kv)).collect();
            out.extend(
                (0..width).map(|c| {
                    (weights.iter().zip(&values).map(|(p, v)| p * v[c]).sum::<f64>() / total) as f32
                }),
            );
        }
    }
    out
}

/// Returns whether a query sees a key.
fn visible(options: AttentionOptions, query: i32, key: i32) -> bool {
    let window = options.window.map_or(i32::MAX, |window| window as i32);
    key <= query && query - key < window
}

fn score(options: AttentionOptions, product: f64) -> f64 {
    let score = f64::from(options.scale.get()) * product;
    options.softcap.map_or(score, |cap| f64::from(cap.get()) * (score / f64::from(cap.get())).tanh())
}

/// Returns the values of a seed without rounding.
pub(crate) fn plain(seed: u64, len: usize) -> Vec<f32> {
    random(seed, len)
}
