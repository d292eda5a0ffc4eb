//! Log-probabilities of tokens. Pure.
//!
//! `logprob(i) = logit_i - max - ln(sum_j exp(logit_j - max))`, over all ids of the model, before temperature and other
//! sampling settings.

/// The smallest log-probability that is reported: JSON has no infinities.
const MIN_LOGPROB: f64 = -9999.0;

/// A token, its log-probability, and the most likely tokens in its place.
#[derive(Clone, Debug, PartialEq)]
pub struct Scored {
    /// Id of the token.
    pub token: u32,
    /// Natural logarithm of its probability.
    pub logprob: f64,
    /// Ids and log-probabilities of the most likely tokens, the most likely one first.
    pub top: Vec<(u32, f64)>,
}

/// Scores `token`, and the `count` most likely tokens; `None` if the logits are not finite.
pub(super) fn score(logits: &[f32], token: u32, count: usize) -> Option<Scored> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if !largest.is_finite() || logits.iter().any(|logit| logit.is_nan()) {
        return None;
    }
    // Terms in single precision are exact to 6e-8, and four times as fast.
    let sum: f64 = logits.iter().map(|logit| f64::from((logit - largest).exp())).sum();
    let log_sum = f64::from(largest) + sum.ln();
    let logprob = |logit: f32| (f64::from(logit) - log_sum).max(MIN_LOGPROB);
    let own = logits.get(usize::try_from(token).ok()?)?;
    let top = most_likely(logits, count).into_iter().map(|(id, logit)| (id, logprob(logit))).collect();
    Some(Scored { token, logprob: logprob(*own), top })
}

/// Returns the `count` largest logits with their ids, the largest first, and of equal ones the lowest id first.
fn most_likely(logits: &[f32], count: usize) -> Vec<(u32, f32)> {
    let mut top: Vec<(u32, f32)> = Vec::with_capacity(count + 1);
    for (id, logit) in (0..).zip(logits) {
        if top.len() < count || top.last().is_some_and(|(_, least)| logit > least) {
            let place = top.partition_point(|(_, other)| other >= logit);
            top.insert(place, (id, *logit));
            top.truncate(count);
        }
    }
    top
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_are_those_of_softmax() {
        let logits: Vec<f32> = [0.1_f32, 0.4, 0.05, 0.25, 0.2].iter().map(|p| p.ln() + 300.0).collect();
        let found = score(&logits, 2, 2).unwrap();
        let close = |a: f64, b: f64| (a - b.ln()).abs() < 1e-4;
        assert!(close(found.logprob, 0.05) && found.token == 2, "{found:?}");
        assert!(matches!(found.top[..], [(1, a), (3, b)] if close(a, 0.4) && close(b, 0.25)), "{found:?}");
        // The score of a token is the same number wherever it appears.
        assert_eq!(score(&logits, 1, 1).unwrap().logprob, found.top[0].1);
        assert_eq!(score(&logits, 1, 0).unwrap().top, []);
        assert_eq!(score(&logits, 0, 9).unwrap().top.len(), 5);
    }

    #[test]
    fn equally_likely_tokens_are_in_order_of_id_and_scores_are_finite() {
        let found = score(&[1.0, 2.0, 2.0, f32::NEG_INFINITY, 2.0], 3, 3).unwrap();
        assert_eq!(found.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [1, 2, 4]);
        assert_eq!(found.logprob, MIN_LOGPROB);
        assert_eq!(score(&[0.0, f32::NAN], 0, 1), None);
        assert_eq!(score(&[f32::NEG_INFINITY; 2], 0, 1), None);
        assert_eq!(score(&[0.0; 2], 2, 1), None);
    }
}
