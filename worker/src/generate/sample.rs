//! Draws a token from logits. Pure.
//!
//! `p = softmax(logits / temperature)`, then the `top_k` most likely tokens, then the smallest set of the most likely
//! among these whose share of the probability is at least `top_p`: the same order as Hugging Face's processors.

use crate::random::Random;

/// Settings for choosing tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0 selects the most likely token.
    pub temperature: f64,
    /// Number of tokens to draw from.
    pub top_k: Option<usize>,
    /// Share of the probability to draw from; 1 means all of it, 0 the most likely token.
    pub top_p: f64,
}

impl Sampling {
    /// Returns whether the most likely token is taken without drawing.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0 || self.top_k == Some(1) || self.top_p == 0.0
    }
}

/// Draws the tokens of one sequence.
#[derive(Clone, Debug)]
pub(crate) struct Draw {
    sampling: Sampling,
    random: Random,
}

impl Draw {
    pub(crate) fn new(sampling: Sampling, random: Random) -> Self {
        Self { sampling, random }
    }

    /// Draws a token; `None` if the logits are not finite.
    pub(crate) fn next(&mut self, logits: &[f32]) -> Option<u32> {
        let candidates = self.candidates(logits)?;
        let total: f64 = candidates.iter().map(|(_, p)| p).sum();
        let mut remaining = self.random.uniform() * total;
        let drawn = candidates.iter().find(|(_, p)| {
            remaining -= p;
            remaining <= 0.0
        });
        drawn.or(candidates.last()).map(|(id, _)| *id)
    }

    /// Returns the tokens to draw from, with weights.
    fn candidates(&self, logits: &[f32]) -> Option<Vec<(u32, f64)>> {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        if !largest.is_finite() || logits.iter().any(|logit| logit.is_nan()) {
            return None;
        }
        let weight = |logit: &f32| (f64::from(logit - largest) / self.sampling.temperature).exp();
        let mut candidates: Vec<(u32, f64)> = (0..).zip(logits.iter().map(weight)).collect();
        // Most likely first; equally likely tokens by id.
        let order = |a: &(u32, f64), b: &(u32, f64)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        if let Some(k) = self.sampling.top_k.filter(|k| *k < candidates.len()) {
            candidates.select_nth_unstable_by(k - 1, order);
            candidates.truncate(k);
        }
        if self.sampling.top_p < 1.0 {
            let total: f64 = candidates.iter().map(|(_, p)| p).sum();
            // The tokens left out have a total probability below 1 - top_p, so none of them is needed.
            #[expect(clippy::cast_precision_loss, reason = "a vocabulary is small")]
            let least = total * (1.0 - self.sampling.top_p) / candidates.len() as f64;
            candidates.retain(|(_, p)| *p >= least);
            candidates.sort_unstable_by(order);
            let mut share = 0.0;
            let needed = candidates.iter().position(|(_, p)| {
                share += p;
                share >= total * self.sampling.top_p
            });
            candidates.truncate(needed.map_or(candidates.len(), |last| last + 1));
        } else if self.sampling.top_k.is_some() {
            candidates.sort_unstable_by(order);
        }
        Some(candidates)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::stream;

    const PLAIN: Sampling = Sampling { temperature: 1.0, top_k: None, top_p: 1.0 };

    /// Returns the share of draws of each of five tokens.
    fn shares(sampling: Sampling, logits: &[f32]) -> Vec<f64> {
        let mut draw = Draw::new(sampling, stream(5, "test"));
        let mut counts = vec![0_u32; logits.len()];
        for _ in 0..20_000 {
            counts[draw.next(logits).unwrap() as usize] += 1;
        }
        counts.into_iter().map(|count| f64::from(count) / 20_000.0).collect()
    }

    fn assert_shares(sampling: Sampling, expected: &[f64]) {
        let logits: Vec<f32> = [0.1_f32, 0.4, 0.05, 0.25, 0.2].iter().map(|p| p.ln() + 3.0).collect();
        let shares = shares(sampling, &logits);
        let close =
            shares.iter().zip(expected).all(|(a, b)| (a - b).abs() < 0.015 && (*b > 0.0 || *a == 0.0));
        assert!(close, "{sampling:?}: {shares:?} instead of {expected:?}");
    }

    #[test]
    fn smallest_share_is_the_most_likely_token() {
        let greedy = [0.0, 1.0].map(|top_p| Sampling { top_p, ..PLAIN }.is_greedy());
        assert_eq!(greedy, [true, false]);
    }

    #[test]
    fn draws_follow_the_remaining_distribution() {
        assert_shares(PLAIN, &[0.1, 0.4, 0.05, 0.25, 0.2]);
        assert_shares(Sampling { top_k: Some(2), ..PLAIN }, &[0.0, 0.4 / 0.65, 0.0, 0.25 / 0.65, 0.0]);
        let three = [0.0, 0.4 / 0.85, 0.0, 0.25 / 0.85, 0.2 / 0.85];
        assert_shares(Sampling { top_p: 0.7, ..PLAIN }, &three);
        assert_shares(Sampling { top_k: Some(3), top_p: 0.9, ..PLAIN }, &three);
        assert_shares(Sampling { top_p: 0.3, ..PLAIN }, &[0.0, 1.0, 0.0, 0.0, 0.0]);
        // p^2, normalised.
        let square: Vec<f64> = [0.1_f64, 0.4, 0.05, 0.25, 0.2].iter().map(|p| p * p / 0.275).collect();
        assert_shares(Sampling { temperature: 0.5, ..PLAIN }, &square);
    }

    #[test]
    fn same_random_numbers_draw_the_same_and_others_differ() {
        let logits: Vec<f32> = (0..1000).map(|i| (i % 7) as f32 * 0.1).collect();
        let tokens = |seed, purpose| -> Vec<u32> {
            let mut draw = Draw::new(PLAIN, stream(seed, purpose));
            (0..20).map(|_| draw.next(&logits).unwrap()).collect()
        };
        assert_eq!(tokens(1, "a"), tokens(1, "a"));
        assert_ne!(tokens(1, "a"), tokens(2, "a"));
        assert_ne!(tokens(1, "a"), tokens(1, "b"));
    }

    #[test]
    fn logits_that_are_not_finite_are_refused() {
        let mut draw = Draw::new(PLAIN, stream(1, "test"));
        assert_eq!(draw.next(&[0.0, f32::NAN]), None);
        assert_eq!(draw.next(&[f32::NEG_INFINITY; 3]), None);
        assert_eq!(draw.next(&[f32::NEG_INFINITY, 1.0]), Some(1));
    }
}
