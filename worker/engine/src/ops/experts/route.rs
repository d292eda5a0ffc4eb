//! The router: scores of all experts, the k highest of each token, and the weights of these.
//!
//! `a = softmax(z)` or `a = sigmoid(z)` for the logits z of a token. The experts with the k highest logits are chosen;
//! if logits are equal, the one with the lower index. With biases (Wang et al., 2024), those with the highest sums of
//! score and bias are chosen instead. The weight of a chosen expert is its score without a bias, or with `normalise`
//! its share of the sum over those chosen, times `scale`.
//!
//! Backward adds the gradients of two losses. With `f_e` the share of all choices that went to expert e and `q = a /
//! sum(a)`, the balance loss of a token is `E sum_e f_e q_e`: 1 for a balanced load (Fedus et al., 2021). Its gradient
//! regards f as constant. The z loss is `logsumexp(z)^2` (Zoph et al., 2022).

use rayon::prelude::*;
use xlaunch_pool::DType;

use super::{MAX_CHOSEN, MAX_EXPERTS, index};
use crate::cpu::math::{self, sigmoid};
use crate::cpu::{Access, Threads};
use crate::cuda::{BLOCK_THREADS, KernelFile, Launch, Macro, args, expect, source};
use crate::error::Result;
use crate::ops::{Cuda, Op};
use crate::tensor::Slice;

/// Rows per task on the CPU.
const ROUTE_ROWS: usize = 64;
/// Added to the sum of sigmoid scores that divides them, which may be 0.
const ROUTE_EPS: f32 = 1e-20;

pub(crate) const KERNELS: KernelFile = KernelFile {
    source: source!("experts/route.cu"),
    kernels: &["route_fwd", "route_bwd"],
    macros: &[Macro::int("MAX_EXPERTS", MAX_EXPERTS), Macro::float("ROUTE_EPS", ROUTE_EPS)],
    dynamic_shared: &[],
};

/// The function from logits to scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Router {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of each logit.
    Sigmoid,
}

/// How N tokens choose k of E experts.
#[derive(Clone, Copy, Debug)]
pub struct RouteShape {
    /// N.
    pub rows: usize,
    /// E, at most [`MAX_EXPERTS`].
    pub experts: usize,
    /// k, at most E and [`MAX_CHOSEN`].
    pub chosen: usize,
    /// Scores.
    pub router: Router,
    /// Whether the weights of a token are divided by their sum.
    pub normalise: bool,
    /// Factor of the weights.
    pub scale: f32,
}

/// Chooses experts.
#[derive(Clone, Copy, Debug)]
pub struct RouteForward<'a> {
    /// Sizes.
    pub shape: RouteShape,
    /// (N, E) F32.
    pub logits: Slice<'a>,
    /// (E,) F32: biases of the choice.
    pub bias: Option<Slice<'a>>,
    /// (N, k) I32, each below E, those of a token in descending order of their logits, or of their biased scores.
    pub experts: Slice<'a>,
    /// (N, k) F32.
    pub weights: Slice<'a>,
}

/// The losses of a router, whose gradients are added.
#[derive(Clone, Copy, Debug)]
pub struct BalanceLoss<'a> {
    /// (E,) F32: number of choices of each expert, in any set of tokens that includes these.
    pub loads: Slice<'a>,
    /// Reciprocal of the sum of the loads.
    pub share: f32,
    /// Factor of the balance loss of each token.
    pub balance: f32,
    /// Factor of the z loss of each token.
    pub z: f32,
    /// (N,) F32: receives the balance loss of each token, without the factor.
    pub losses: Slice<'a>,
}

/// The gradient of the logits.
#[derive(Clone, Copy, Debug)]
pub struct RouteBackward<'a> {
    /// Sizes.
    pub shape: RouteShape,
    /// (N, E) F32.
    pub logits: Slice<'a>,
    /// (N, k) I32.
    pub experts: Slice<'a>,
    /// (N, k) F32.
    pub dweights: Slice<'a>,
    /// Losses of the router.
    pub loss: BalanceLoss<'a>,
    /// (N, E) activations.
    pub dlogits: Slice<'a>,
}

impl RouteShape {
    fn check(self) {
        let Self { experts, chosen, .. } = self;
        assert!(
            (1..=MAX_EXPERTS).contains(&experts) && chosen <= experts && chosen <= MAX_CHOSEN,
            "{self:?}"
        );
    }

    fn is_sigmoid(self) -> bool {
        self.router == Router::Sigmoid
    }

    /// Returns one warp per row.
    fn launch(self, gpu: &Cuda) -> Launch {
        Launch::threads(self.rows * gpu.device.warp as usize, BLOCK_THREADS)
    }
}

impl Op for RouteForward<'_> {
    fn cpu(self, threads: &Threads) {
        let (a, s) = (Access::new("route_forward"), self.shape);
        s.check();
        let logits = a.read(self.logits, s.rows * s.experts);
        let bias = self.bias.map(|bias| a.read(bias, s.experts));
        let experts = a.write_i32(self.experts, s.rows * s.chosen);
        let weights = a.write(self.weights, s.rows * s.chosen);
        threads.run(|| {
            let outputs = experts
                .par_chunks_mut(ROUTE_ROWS * s.chosen)
                .zip(weights.par_chunks_mut(ROUTE_ROWS * s.chosen));
            outputs.zip(logits.par_chunks(ROUTE_ROWS * s.experts)).for_each(
                |((experts, weights), logits)| {
                    let outputs = experts.chunks_exact_mut(s.chosen).zip(weights.chunks_exact_mut(s.chosen));
                    for ((experts, weights), logits) in outputs.zip(logits.chunks_exact(s.experts)) {
                        route(s, logits, bias, experts, weights);
                    }
                },
            );
        });
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        let Self { shape: s, logits, bias, experts, weights } = self;
        s.check();
        expect(logits, DType::F32, s.rows * s.experts);
        expect(experts, DType::I32, s.rows * s.chosen);
        expect(weights, DType::F32, s.rows * s.chosen);
        if let Some(bias) = bias {
            expect(bias, DType::F32, s.experts);
        }
        let args = args![
            logits,
            bias,
            experts,
            weights,
            s.rows,
            s.experts,
            s.chosen,
            s.is_sigmoid(),
            s.normalise,
            s.scale,
        ];
        // SAFETY: checked above.
        unsafe { gpu.launch("route_fwd", s.launch(gpu), args) }
    }
}

impl Op for RouteBackward<'_> {
    fn cpu(self, threads: &Threads) {
        let (a, s, loss) = (Access::new("route_backward"), self.shape, self.loss);
        s.check();
        let logits = a.read(self.logits, s.rows * s.experts);
        let experts = a.read_i32(self.experts, s.rows * s.chosen);
        let dweights = a.read(self.dweights, s.rows * s.chosen);
        let loads = a.read(loss.loads, s.experts);
        let losses = a.write(loss.losses, s.rows);
        let dlogits = a.write(self.dlogits, s.rows * s.experts);
        let shares: Vec<f32> = loads.iter().map(|load| load * loss.share).collect();
        threads.run(|| {
            let rows = dlogits.par_chunks_mut(s.experts).zip(losses).enumerate();
            rows.with_min_len(ROUTE_ROWS).for_each(|(row, (dlogits, token_loss))| {
                let logits = &logits[row * s.experts..][..s.experts];
                let choices = row * s.chosen..(row + 1) * s.chosen;
                let chosen = experts[choices.clone()].iter().map(|expert| index(*expert));
                let dweights = dweights[choices].iter().map(|dweight| s.scale * dweight);
                let chosen: Vec<_> = chosen.zip(dweights).collect();
                *token_loss = derive(s, logits, &chosen, &shares, [loss.balance, loss.z], dlogits);
            });
        });
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        let Self { shape: s, logits, experts, dweights, loss, dlogits } = self;
        s.check();
        expect(logits, DType::F32, s.rows * s.experts);
        expect(experts, DType::I32, s.rows * s.chosen);
        expect(dweights, DType::F32, s.rows * s.chosen);
        expect(loss.loads, DType::F32, s.experts);
        expect(loss.losses, DType::F32, s.rows);
        gpu.expect_act(dlogits, s.rows * s.experts);
        let args = args![
            logits,
            experts,
            dweights,
            loss.loads,
            dlogits,
            loss.losses,
            s.rows,
            s.experts,
            s.chosen,
            s.is_sigmoid(),
            s.normalise,
            s.scale,
            loss.share,
            loss.balance * s.experts as f32,
            loss.z,
        ];
        // SAFETY: checked above; chosen experts are below E by the operation's contract.
        unsafe { gpu.launch("route_bwd", s.launch(gpu), args) }
    }
}

/// Returns the largest logit and the sum of the exponentials of their differences to it.
fn largest_and_sum(logits: &[f32]) -> (f32, f32) {
    let largest = math::max(logits);
    (largest, math::sum(logits.len(), |e| math::exp(logits[e] - largest)))
}

fn route(s: RouteShape, logits: &[f32], bias: Option<&[f32]>, experts: &mut [i32], weights: &mut [f32]) {
    let (largest, sum) = largest_and_sum(logits);
    let score = |e: usize| match s.router {
        Router::Softmax => math::exp(logits[e] - largest) / sum,
        Router::Sigmoid => sigmoid(logits[e]),
    };
    // NaN is chosen last, which leaves every choice below E. The weights become NaN through the sum.
    // Adding 0 makes -0 equal to 0.
    let key = |e: usize| {
        let key = bias.map_or(logits[e], |bias| score(e) + bias[e]);
        if key.is_nan() { f32::NEG_INFINITY } else { key + 0.0 }
    };
    let keys: Vec<f32> = (0..s.experts).map(key).collect();
    let mut order: Vec<usize> = (0..s.experts).collect();
    order.sort_by(|a, b| keys[*b].total_cmp(&keys[*a]).then(a.cmp(b)));
    let mut total = 0.0;
    for ((expert, weight), e) in experts.iter_mut().zip(weights.iter_mut()).zip(order) {
        *expert = i32::try_from(e).unwrap_or(i32::MAX);
        *weight = score(e) + 0.0 * sum;
        total += *weight;
    }
    let total = if s.normalise { total + ROUTE_EPS } else { 1.0 };
    weights.iter_mut().for_each(|weight| *weight = *weight / total * s.scale);
}

/// Computes the gradients of a token's logits from those of the weights of its choices. Returns its balance loss.
fn derive(
    s: RouteShape,
    logits: &[f32],
    chosen: &[(usize, f32)],
    shares: &[f32],
    [balance, z]: [f32; 2],
    dlogits: &mut [f32],
) -> f32 {
    let (largest, sum) = largest_and_sum(logits);
    let probabilities: Vec<f32> = logits.iter().map(|z| math::exp(z - largest) / sum).collect();
    let score = |e: usize| if s.is_sigmoid() { sigmoid(logits[e]) } else { probabilities[e] };
    // Gradients of the scores.
    let total = chosen.iter().map(|(e, _)| score(*e)).sum::<f32>() + ROUTE_EPS;
    let inner: f32 = chosen.iter().map(|(e, dweight)| dweight * score(*e) / total).sum();
    dlogits.fill(0.0);
    for (e, dweight) in chosen {
        dlogits[*e] += if s.normalise { (dweight - inner) / total } else { *dweight };
    }
    let all = if s.is_sigmoid() { (0..s.experts).map(score).sum::<f32>() + ROUTE_EPS } else { 1.0 };
    let loss = (0..s.experts).map(|e| shares[e] * score(e)).sum::<f32>() / all;
    let factor = balance * s.experts as f32;
    for (e, gradient) in dlogits.iter_mut().enumerate() {
        *gradient += factor * (shares[e] - loss) / all;
    }
    // Gradients of the logits.
    let lse = largest + sum.ln();
    let mean: f32 = dlogits.iter().enumerate().map(|(e, gradient)| gradient * probabilities[e]).sum();
    for (e, gradient) in dlogits.iter_mut().enumerate() {
        let slope = if s.is_sigmoid() {
            score(e) * (1.0 - score(e)) * *gradient
        } else {
            probabilities[e] * (*gradient - mean)
        };
        *gradient = slope + 2.0 * z * lse * probabilities[e];
    }
    loss * s.experts as f32
}
