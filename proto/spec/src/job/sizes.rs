//! Limits of the products of configuration values: tokens of a micro-step, of a step and of a run. Within them no
//! product of sizes overflows. They are far above what any device can train. Also checks the sizes that FP8 requires.

use crate::invalid::Invalid;
use crate::job::{JobSpec, Precision};
use crate::model::ModelShape;

/// Maximum number of tokens of one rank in a micro-step, which are the rows of the activations.
const MAX_MICRO_STEP_TOKENS: u64 = 1 << 31;
/// Maximum number of tokens of all ranks in a step.
const MAX_STEP_TOKENS: u64 = 1 << 48;
/// Maximum number of tokens of all ranks in all steps, as the position in the data is a 64-bit number.
const MAX_RUN_TOKENS: u64 = 1 << 62;
/// Sizes of FP8 matrices on tensor cores must be multiples of this.
const FP8_MULTIPLE: usize = 16;

/// Checks the products of sizes. Each factor is at least 1.
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
    // Every choice of an expert is a row, and ranks that divide experts may have the choices of all.
    let choices =
        if model.experts > 0 { (model.experts_per_token * spec.comm.experts.max(1)) as u64 } else { 1 };
    within(MAX_MICRO_STEP_TOKENS, batch, choices).map_err(|most| {
        let problem =
            format!("{choices} experts for each of {batch} tokens per micro-step do not fit in memory");
        Invalid::new("model.experts_per_token", problem, format!("at most {most}, or a smaller train.batch"))
    })?;
    if spec.engine.precision == Some(Precision::Fp8) { check_fp8(spec, model) } else { Ok(()) }
}

/// Checks the sizes of the blocks' linear layers for FP8: their inputs, their outputs, and the rows, one per token of a
/// micro-step.
fn check_fp8(spec: &JobSpec, model: &ModelShape) -> Result<(), Invalid> {
    let all_experts = model.experts > 0 && model.dense_layers == 0;
    let sizes = [
        ("model.dim", "model.dim", model.dim),
        ("model.ffn", "model.ffn", if all_experts { 0 } else { model.ffn }),
        ("model.expert_ffn", "the width of an expert", model.expert_width()),
        ("model.heads", "the width of all heads", model.attention_width()),
        ("model.kv_heads", "the width of queries, keys and values", model.qkv_width()),
        ("train.batch", "train.batch times model.seq", spec.train.batch * model.seq),
    ];
    let other = sizes.into_iter().find(|(_, _, size)| !size.is_multiple_of(FP8_MULTIPLE));
    other.map_or(Ok(()), |(key, what, size)| {
        let problem = format!("{what} is {size}, which engine.precision = \"fp8\" cannot multiply");
        Err(Invalid::new(key, problem, format!("a multiple of {FP8_MULTIPLE}")))
    })
}

/// Returns the product, or as an error the largest `factor` whose product is within the limit.
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
    fn fp8_needs_multiples_of_16() {
        let error = |change: fn(&mut JobSpec)| {
            let mut spec = JobSpec::default();
            spec.engine.precision = Some(Precision::Fp8);
            change(&mut spec);
            spec.check().err().map(|invalid| invalid.key)
        };
        assert_eq!(error(|_| ()), None);
        assert_eq!(error(|s| s.model.ffn = Some(1000)), Some("model.ffn"));
        fn experts(spec: &mut JobSpec, width: usize) {
            let model = &mut spec.model;
            (model.experts, model.experts_per_token, model.expert_ffn) = (Some(4), Some(2), Some(width));
            // No block uses it.
            model.ffn = Some(1000);
        }
        assert_eq!(error(|s| experts(s, 40)), Some("model.expert_ffn"));
        assert_eq!(error(|s| experts(s, 48)), None);
        assert_eq!(error(|s| (s.train.batch, s.model.seq) = (3, Some(100))), Some("train.batch"));
        assert_eq!(error(|s| (s.model.dim, s.model.heads) = (Some(40), Some(1))), Some("model.dim"));
        assert_eq!(error(|s| (s.train.batch, s.model.seq) = (4, Some(100))), None);
    }

    #[test]
    fn largest_sizes_are_accepted() {
        assert_eq!(error(|s| s.train.batch = 1 << 24), None);
        assert_eq!(error(|s| (s.train.batch, s.train.accumulate) = (1 << 24, 1 << 17)), None);
        assert_eq!(error(|s| (s.train.batch, s.train.steps) = (8, 1 << 52)), None);
    }
}
