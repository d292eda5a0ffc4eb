//! Operations of mixtures of experts on the CPU against plain implementations in f64.

#![expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "small numbers")]

mod common;

use common::experts::{Inputs, Load, Sizes};
use common::{Ops, Outputs, Values, distance, random};
use xlaunch_engine::*;

const LOADS: [Load; 4] = [Load::Random, Load::Same, Load::Tied, Load::Biased];

fn with_cpu<R>(f: impl FnOnce(&Ops<'_>) -> R) -> R {
    let backend = Backend::cpu(2, PoolMode::On);
    f(&Ops { backend: &backend, grads: DType::F32 })
}

fn get<'a>(outputs: &'a Outputs, name: &str) -> &'a [f32] {
    outputs.iter().find(|(output, _)| *output == name).map_or(&[], |(_, values)| values)
}

fn expect(what: &str, outputs: &Outputs, name: &str, expected: &[f64]) {
    let expected: Vec<f32> = expected.iter().map(|x| *x as f32).collect();
    let distance = distance(get(outputs, name), &expected);
    assert!(distance < 2e-6, "{name} of {what}: {distance:.2e}");
}

/// Returns the experts with the highest logits, or sums of score and bias; of equal ones, the first.
fn choose(s: RouteShape, logits: &[f64], bias: Option<&[f32]>) -> Vec<usize> {
    let mut order: Vec<usize> = (0..s.experts).collect();
    let scores = scores(s, logits);
    let keys: Vec<f64> =
        (0..s.experts).map(|e| bias.map_or(logits[e], |bias| scores[e] + f64::from(bias[e]))).collect();
    order.sort_by(|a, b| keys[*b].partial_cmp(&keys[*a]).unwrap_or(std::cmp::Ordering::Equal).then(a.cmp(b)));
    order.truncate(s.chosen);
    order
}

fn logsumexp(logits: &[f64]) -> f64 {
    logits.iter().map(|z| z.exp()).sum::<f64>().ln()
}

fn scores(s: RouteShape, logits: &[f64]) -> Vec<f64> {
    let lse = logsumexp(logits);
    let score =
        |z: &f64| if s.router == Router::Softmax { (z - lse).exp() } else { 1.0 / (1.0 + (-z).exp()) };
    logits.iter().map(score).collect()
}

fn weights(s: RouteShape, logits: &[f64], chosen: &[usize]) -> Vec<f64> {
    let scores = scores(s, logits);
    let total: f64 = if s.normalise { chosen.iter().map(|e| scores[*e]).sum() } else { 1.0 };
    chosen.iter().map(|e| f64::from(s.scale) * scores[*e] / total).collect()
}

fn balance(s: RouteShape, logits: &[f64], shares: &[f64]) -> f64 {
    let scores = scores(s, logits);
    let total: f64 = scores.iter().sum();
    s.experts as f64 * scores.iter().zip(shares).map(|(score, share)| share * score / total).sum::<f64>()
}

/// Returns the number of choices of each expert.
fn loads(s: RouteShape, chosen: &[usize]) -> Vec<f64> {
    let mut loads = vec![0.0; s.experts];
    chosen.iter().for_each(|e| loads[*e] += 1.0);
    loads
}

/// Returns the sums of the outputs of the experts that are not in the first third.
fn some_experts(sizes: Sizes, inputs: &Inputs, chosen: &[usize]) -> Vec<f64> {
    let (s, cols, outputs) = (sizes.route, sizes.cols, sizes.outputs);
    let mut sums = vec![0.0; s.rows * outputs];
    for (choice, expert) in chosen.iter().enumerate().filter(|(_, expert)| **expert >= s.experts / 3) {
        let token = choice / s.chosen;
        for o in 0..outputs {
            let w = &inputs.w[(expert * outputs + o) * cols..][..cols];
            let x = &inputs.x[token * cols..][..cols];
            sums[token * outputs + o] +=
                w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum::<f64>();
        }
    }
    sums
}

/// Compares the router's outputs and gradients; returns the choices.
fn check_router(what: &str, s: RouteShape, inputs: &Inputs, outputs: &Outputs) -> Vec<usize> {
    let logits: Vec<f64> = inputs.logits.iter().map(|z| f64::from(*z)).collect();
    let bias = inputs.bias.as_deref();
    let chosen: Vec<usize> = logits.chunks(s.experts).flat_map(|logits| choose(s, logits, bias)).collect();
    let loads = loads(s, &chosen);
    let shares: Vec<f64> = loads.iter().map(|load| load / chosen.len() as f64).collect();
    let rows = || logits.chunks(s.experts).zip(chosen.chunks(s.chosen));
    let all: Vec<f64> = rows().flat_map(|(logits, chosen)| weights(s, logits, chosen)).collect();
    expect(what, outputs, "weights", &all);
    expect(what, outputs, "loads", &loads);
    let losses: Vec<f64> = rows().map(|(logits, _)| balance(s, logits, &shares)).collect();
    expect(what, outputs, "losses", &losses);
    let mut dlogits = Vec::new();
    for ((logits, chosen), dweights) in rows().zip(inputs.dweights.chunks(s.chosen)) {
        let loss = |logits: &[f64]| {
            let weights = weights(s, logits, chosen);
            let sum: f64 = weights.iter().zip(dweights).map(|(w, dw)| w * f64::from(*dw)).sum();
            sum + 0.3 * balance(s, logits, &shares) + 0.05 * logsumexp(logits).powi(2)
        };
        for e in 0..s.experts {
            let moved = |step: f64| {
                let mut logits = logits.to_vec();
                logits[e] += step;
                loss(&logits)
            };
            dlogits.push((moved(1e-5) - moved(-1e-5)) / 2e-5);
        }
    }
    expect(what, outputs, "dlogits", &dlogits);
    chosen
}

#[test]
fn experts_match_a_plain_implementation_for_every_load() {
    for router in [Router::Softmax, Router::Sigmoid] {
        for (normalise, load) in [true, false].into_iter().flat_map(|n| LOADS.map(|load| (n, load))) {
            let sizes = Sizes::new([37, 5, 2, 12, 20], router, normalise);
            let (s, inputs) = (sizes.route, sizes.inputs(load, Values::random));
            let what = format!("{router:?}, normalise {normalise}, {load:?}");
            let outputs = with_cpu(|ops| ops.experts(sizes, &inputs, Accumulate::Overwrite));
            let chosen = check_router(&what, s, &inputs, &outputs);
            expect(&what, &outputs, "loads in another order", &loads(s, &chosen));
            expect(&what, &outputs, "sums of some experts", &some_experts(sizes, &inputs, &chosen));
            // The choice of each row.
            let mut order: Vec<usize> = (0..chosen.len()).collect();
            order.sort_by_key(|choice| chosen[*choice]);
            check_rows(&what, sizes, &inputs, &outputs, &order);
            check_layers(
                &what,
                sizes,
                &inputs,
                &outputs,
                &order.iter().map(|c| chosen[*c]).collect::<Vec<_>>(),
            );
        }
    }
}

fn check_rows(what: &str, sizes: Sizes, inputs: &Inputs, outputs: &Outputs, order: &[usize]) {
    let (s, cols) = (sizes.route, sizes.cols);
    let x = |token: usize, c: usize| f64::from(inputs.x[token * cols + c]);
    let y = |row: usize, c: usize| f64::from(inputs.dy[row * cols + c]);
    let weight = |choice: usize| f64::from(get(outputs, "weights")[choice]);
    let [mut rows, mut sums, mut dx] = [vec![], vec![0.0; inputs.x.len()], vec![0.0; inputs.x.len()]];
    let (mut drows, mut dweights) = (vec![], vec![0.0; order.len()]);
    for (row, choice) in order.iter().copied().enumerate() {
        let token = choice / s.chosen;
        for c in 0..cols {
            rows.push(x(token, c));
            sums[token * cols + c] += weight(choice) * y(row, c);
            dx[token * cols + c] += y(row, c);
            drows.push(weight(choice) * x(token, c));
            dweights[choice] += x(token, c) * y(row, c);
        }
    }
    let added = |sums: &[f64]| -> Vec<f64> {
        sums.iter().zip(inputs.x.iter()).map(|(s, x)| s + f64::from(*x)).collect()
    };
    expect(what, outputs, "rows", &rows);
    expect(what, outputs, "sums", &sums);
    expect(what, outputs, "added", &added(&sums));
    expect(what, outputs, "dx", &dx);
    expect(what, outputs, "dx added", &added(&dx));
    expect(what, outputs, "drows", &drows);
    expect(what, outputs, "dweights", &dweights);
}

fn check_layers(what: &str, sizes: Sizes, inputs: &Inputs, outputs: &Outputs, expert_of: &[usize]) {
    let (ins, outs) = (sizes.cols, sizes.outputs);
    let dy = &inputs.dy[inputs.dy.len() - expert_of.len() * outs..];
    let [mut y, mut dx, mut dw, mut dbias] =
        [expert_of.len() * outs, expert_of.len() * ins, inputs.w.len(), inputs.layer_bias.len()]
            .map(|n| vec![0.0; n]);
    for (row, expert) in expert_of.iter().enumerate() {
        for o in 0..outs {
            dbias[expert * outs + o] += f64::from(dy[row * outs + o]);
            for i in 0..ins {
                let at = (expert * outs + o) * ins + i;
                let [x, w, dy] = [inputs.dy[row * ins + i], inputs.w[at], dy[row * outs + o]].map(f64::from);
                y[row * outs + o] += x * w;
                dx[row * ins + i] += dy * w;
                dw[at] += dy * x;
            }
        }
    }
    expect(what, outputs, "y", &y);
    expect(what, outputs, "layer's dx", &dx);
    expect(what, outputs, "dw", &dw);
    let bias =
        |(i, y): (usize, &f64)| y + f64::from(inputs.layer_bias[expert_of[i / outs] * outs + i % outs]);
    let biased: Vec<f64> = y.iter().enumerate().map(bias).collect();
    expect(what, outputs, "y with biases", &biased);
    expect(what, outputs, "dbias", &dbias);
}

#[test]
fn biases_move_towards_a_balanced_load_in_steps_that_are_applied() {
    let bias = [0.5, 0.5, 0.5, -1.0, -1.0, 2.0];
    let update = |loss| with_cpu(|ops| ops.router_bias(3, &[4.0, 6.0, 5.0, 7.0, 0.0, 1.0], &bias, loss));
    assert_eq!(update(1.0), [0.51, 0.49, 0.5, -1.01, -0.99, 2.01]);
    assert_eq!(update(f32::NAN), bias);
    // A difference of one choice decides, even if it is lost in the sum of loads in F32.
    let large = [16_777_216.0, 16_777_215.0];
    assert_eq!(with_cpu(|ops| ops.router_bias(2, &large, &[0.0; 2], 1.0)), [-0.01, 0.01]);
}

#[test]
fn rows_of_decoding_do_not_depend_on_each_other() {
    let (inputs, outputs, experts) = (100, 41, 3);
    let (x, w) = (random(1, 9 * inputs), random(2, experts * outputs * inputs));
    let backend = Backend::cpu(2, PoolMode::On);
    let run = |x: &[f32], offsets: [i32; 4]| {
        let rows = x.len() / inputs;
        let tensors = [x, &w, &vec![0.0; rows * outputs]].map(|values| {
            let tensor = backend.alloc(DType::F32, values.len())?;
            backend.write_f32(tensor.all(), values).map(|()| tensor)
        });
        let [Ok(x), Ok(w), Ok(y)] = tensors else { panic!("no memory") };
        let Ok(starts) = backend.alloc(DType::I32, 4) else { panic!("no memory") };
        let shape = GroupedShape { rows, experts, inputs, outputs };
        let mut values = vec![0.0; rows * outputs];
        backend
            .write_i32(starts.all(), &offsets)
            .and_then(|()| {
                let (offsets, x, w, y) = (starts.all(), x.all(), w.all(), y.all());
                backend.run(GroupedForward { shape, offsets, x, w, y })
            })
            .and_then(|()| backend.read_f32(y.all(), &mut values))
            .unwrap_or_else(|error| panic!("{error}"));
        values
    };
    let together = run(&x, [0, 4, 5, 9]);
    for (row, offsets) in [(0, [0, 1, 1, 1]), (3, [0, 1, 1, 1]), (4, [0, 0, 1, 1]), (8, [0, 0, 0, 1])] {
        let alone = run(&x[row * inputs..(row + 1) * inputs], offsets);
        assert_eq!(alone, together[row * outputs..(row + 1) * outputs], "row {row}");
    }
}

#[test]
fn a_token_without_numbers_chooses_valid_experts_and_its_weights_are_not_numbers() {
    for router in [Router::Softmax, Router::Sigmoid] {
        let sizes = Sizes::new([2, 5, 2, 8, 8], router, true);
        let mut inputs = sizes.inputs(Load::Random, Values::random);
        let mut logits = inputs.logits.to_vec();
        logits[..5].fill(f32::NAN);
        inputs.logits = Values::new(|| logits);
        let outputs = with_cpu(|ops| ops.experts(sizes, &inputs, Accumulate::Overwrite));
        let weights = get(&outputs, "weights");
        assert!(
            weights[..2].iter().all(|w| w.is_nan()) && weights[2..].iter().all(|w| w.is_finite()),
            "{weights:?}"
        );
        assert_eq!(get(&outputs, "loads").iter().sum::<f32>(), 4.0);
        assert!(get(&outputs, "y").iter().all(|y| y.is_finite()), "every row has an expert");
    }
}
