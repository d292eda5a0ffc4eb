//! Limits of everything that is multiplied from the configuration: tokens of a micro-step, of a step and of a run.
//! Within them no product of sizes overflows. They are far above what any device can train.

use crate::invalid::Invalid;
use crate::model::ModelShape;
use crate::spec::JobSpec;

/// Tokens of one rank in a micro-step: rows of the activations.
const MAX_MICRO_STEP_TOKENS: u64 = 1 << 31;
/// Tokens of all ranks in a step.
const MAX_STEP_TOKENS: u64 = 1 << 48;
/// Tokens of all ranks in all steps: the position in the data is a 64-bit number.
const MAX_RUN_TOKENS: u64 = 1 << 62;

/// Checks the products of sizes, of which each factor is at least 1.
pub(super) fn check(spec: &JobSpec, model: &ModelShape) -> Result<(), Invalid> {
    let (train, seq) = (&spec.train, model.seq as u64);
    let ranks = spec.launch.nproc.unwrap_or(1);
    let batch = within(MAX_MICRO_STEP_TOKENS, seq, train.batch as u64).map_err(|most| {
        Invalid::new(
            "train.batch",
            format!("{} sequences of model.seq = {seq} tokens do not fit in memory", train.batch),
            format!("at most 2^31 tokens per rank and micro-step, {most} sequences"),
        )
    })?;
    let too_many_per_step = |key, problem: String, most| {
        Invalid::new(key, problem, format!("at most 2^48 tokens per step, here {most}"))
    };
    let per_rank = within(MAX_STEP_TOKENS, batch, train.accumulate as u64).map_err(|most| {
        let problem = format!("{} micro-steps of {batch} tokens per rank", train.accumulate);
        too_many_per_step("train.accumulate", problem, most)
    })?;
    let step = within(MAX_STEP_TOKENS, per_rank, ranks.into()).map_err(|most| {
        too_many_per_step("launch.nproc", format!("{ranks} ranks with {per_rank} tokens each"), most)
    })?;
    within(MAX_RUN_TOKENS, step, train.steps).map_err(|most| {
        Invalid::new(
            "train.steps",
            format!("{} steps of {step} tokens", train.steps),
            format!("at most 2^62 tokens per run, {most} steps"),
        )
    })?;
    Ok(())
}

/// The product, or the largest `factor` whose product is within the limit.
fn within(limit: u64, size: u64, factor: u64) -> Result<u64, u64> {
    size.checked_mul(factor).filter(|product| *product <= limit).ok_or(limit / size)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(change: fn(&mut JobSpec)) -> Option<Invalid> {
        let mut spec = JobSpec::default();
        change(&mut spec);
        spec.check().err()
    }

    #[test]
    fn sizes_whose_products_overflow_are_refused_with_the_largest_possible_value() {
        let text = error(|s| s.train.batch = 1_000_000_000_000_000_000).unwrap().to_string();
        let expected = "train.batch: 1000000000000000000 sequences of model.seq = 128 tokens do not fit in memory; \
                        expected at most 2^31 tokens per rank and micro-step, 16777216 sequences";
        assert_eq!(text, expected);
        // These products wrap to zero.
        for (key, change) in [
            ("train.batch", (|s| s.train.batch = 1 << 59) as fn(&mut JobSpec)),
            ("train.accumulate", |s| s.train.accumulate = 1 << 61),
            ("train.steps", |s| s.train.steps = 1 << 61),
            ("launch.nproc", |s| {
                (s.train.batch, s.train.accumulate, s.launch.nproc) = (1 << 24, 1 << 16, Some(4))
            }),
        ] {
            assert_eq!(error(change).map(|invalid| invalid.key), Some(key));
        }
    }

    #[test]
    fn largest_sizes_are_accepted() {
        assert_eq!(error(|s| s.train.batch = 1 << 24), None);
        assert_eq!(error(|s| (s.train.batch, s.train.accumulate) = (1 << 24, 1 << 17)), None);
        assert_eq!(error(|s| (s.train.batch, s.train.steps) = (8, 1 << 52)), None);
    }
}
