//! The rules between the keys of a shape.

use super::{Arch, ModelShape, NormPlace, Parallel, Positions, RopeScaling};
use crate::invalid::Invalid;

/// Maximum value of any single size.
const MAX_SIZE: usize = 1 << 20;
/// Maximum number of parameters. Together with [`MAX_SIZE`], it keeps products of sizes far from overflow.
const MAX_PARAMETERS: u128 = 1 << 40;
/// Maximum numbers of experts, and of those that a token uses, which the kernels support.
const MAX_EXPERTS: usize = 512;
const MAX_EXPERTS_PER_TOKEN: usize = 32;
/// Maximum base of rotary wavelengths, and maximum factor of their scaling.
const MAX_ROPE: f64 = 1e15;
/// Limits of factors and soft caps, far from overflow in the type of activations.
const MIN_FACTOR: f64 = 1e-6;
const MAX_FACTOR: f64 = 1e6;

impl ModelShape {
    /// Returns the number of parameters of all matrices, counting shared key heads once. Sizes must be within
    /// [`MAX_SIZE`].
    fn matrix_parameters(&self) -> u128 {
        let [layers, dim, vocab, seq, heads, head_dim] =
            [self.layers, self.dim, self.vocab, self.seq, self.heads, self.head_dim].map(|size| size as u128);
        let positions = if self.positions == Positions::Learned { seq } else { 0 };
        let embeddings = if self.tied { vocab } else { 2 * vocab };
        let [feed_forward, _] = self.feed_forward_parameters();
        dim * (layers * 4 * heads * head_dim + embeddings + positions) + feed_forward
    }

    /// Checks the rules between sizes. The launcher and every worker apply them.
    pub fn check(&self) -> Result<(), Invalid> {
        self.check_sizes()?;
        self.check_heads()?;
        self.check_experts()?;
        self.check_numbers()
    }

    pub(super) fn check_sizes(&self) -> Result<(), Invalid> {
        let sizes = [
            ("model.layers", self.layers),
            ("model.heads", self.heads),
            ("model.kv_heads", self.kv_heads),
            ("model.dim", self.dim),
            ("model.ffn", self.ffn),
            ("model.seq", self.seq),
            ("model.vocab", self.vocab),
        ];
        for (key, size) in sizes {
            if size == 0 || size > MAX_SIZE {
                return Err(Invalid::new(key, format!("{size} is out of range"), format!("1 to {MAX_SIZE}")));
            }
        }
        if self.head_dim > MAX_SIZE {
            return Err(head_dim_invalid(self.head_dim));
        }
        self.check_expert_sizes()?;
        let matrices = self.matrix_parameters();
        if matrices > MAX_PARAMETERS {
            return Err(Invalid::new(
                "model.dim",
                format!(
                    "{matrices} parameters with model.layers = {}, model.ffn = {} and model.vocab = {}",
                    self.layers, self.ffn, self.vocab
                ),
                "at most 2^40 parameters".into(),
            ));
        }
        Ok(())
    }

    fn check_heads(&self) -> Result<(), Invalid> {
        let (width, derived) = (self.head_width(), self.dim == self.attention_width());
        if width == 0 || !width.is_multiple_of(8) || width > 256 {
            if !derived {
                return Err(head_dim_invalid(width));
            }
            return Err(Invalid::new(
                "model.heads",
                format!("the head width model.dim / model.heads is {width}"),
                "a multiple of 8, at most 256".into(),
            ));
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(Invalid::new(
                "model.kv_heads",
                format!("{} does not divide model.heads = {}", self.kv_heads, self.heads),
                "a divisor of model.heads, as all key heads serve the same number of query heads".into(),
            ));
        }
        Ok(())
    }

    fn check_expert_sizes(&self) -> Result<(), Invalid> {
        for (key, size, least, most) in [
            ("model.experts", self.experts, 0, MAX_EXPERTS),
            ("model.experts_per_token", self.experts_per_token, 1, MAX_EXPERTS_PER_TOKEN),
            ("model.expert_ffn", self.expert_ffn, 0, MAX_SIZE),
            ("model.shared_experts", self.shared_experts, 0, MAX_EXPERTS),
        ] {
            if size < least || size > most {
                let expected = format!("{least} to {most}");
                return Err(Invalid::new(key, format!("{size} is out of range"), expected));
            }
        }
        Ok(())
    }

    /// Checks the keys of experts together. A tiny model of a dense family has values of them, too.
    fn check_experts(&self) -> Result<(), Invalid> {
        let invalid = |key, problem: String, expected: &str| Err(Invalid::new(key, problem, expected.into()));
        if self.shared_gate && self.shared_experts == 0 {
            let problem = "the model has no shared experts";
            return invalid("model.shared_gate", problem.into(), "false, or model.shared_experts above 0");
        }
        for (key, is_set) in
            [("model.router_bias", self.router_bias), ("model.router_logit_bias", self.router_logit_bias)]
        {
            if is_set && self.experts == 0 {
                return invalid(key, "the model has no experts".into(), "false, or model.experts above 0");
            }
        }
        if self.experts == 0 {
            let sizes = [
                ("model.expert_ffn", self.expert_ffn),
                ("model.dense_layers", self.dense_layers),
                ("model.shared_experts", self.shared_experts),
            ];
            return sizes.into_iter().find(|(_, size)| *size != 0).map_or(Ok(()), |(key, size)| {
                invalid(key, format!("{size} in a model without experts"), "0, or model.experts above 0")
            });
        }
        if self.experts_per_token > self.experts {
            let problem = format!("{} of model.experts = {}", self.experts_per_token, self.experts);
            return invalid("model.experts_per_token", problem, "at most model.experts");
        }
        if self.dense_layers >= self.layers {
            let problem = format!("{} of model.layers = {}", self.dense_layers, self.layers);
            return invalid("model.dense_layers", problem, "fewer than model.layers, or model.experts = 0");
        }
        if !self.gated {
            let expected = "model.gated = true, or model.experts = 0";
            return invalid("model.gated", "experts are gated".into(), expected);
        }
        if self.mlp_bias && self.shared_experts > 0 {
            let expected = "model.mlp_bias = false, or model.shared_experts = 0";
            return invalid("model.mlp_bias", "shared experts have no biases".into(), expected);
        }
        if self.parallel != Parallel::No {
            let problem = "experts beside attention are not supported";
            return invalid("model.parallel", problem.into(), "\"no\", or model.experts = 0");
        }
        Ok(())
    }

    fn check_numbers(&self) -> Result<(), Invalid> {
        within("model.norm_eps", self.norm_eps, f64::from(f32::MIN_POSITIVE), 1.0, "1.2e-38 to 1")?;
        for (key, factor, least) in [
            ("model.query_scale", self.query_scale, 0.0),
            ("model.embedding_scale", self.embedding_scale, 0.0),
            ("model.attention_softcap", self.attention_softcap, 0.0),
            ("model.glu_limit", self.glu_limit, 0.0),
            ("model.glu_offset", self.glu_offset, 0.0),
            ("model.logit_softcap", self.logit_softcap, 0.0),
            ("model.residual_scale", self.residual_scale, MIN_FACTOR),
            ("model.logit_scale", self.logit_scale, MIN_FACTOR),
            ("model.routed_scale", self.routed_scale, MIN_FACTOR),
        ] {
            let expected = if least == 0.0 { "0 to 1e6" } else { "1e-6 to 1e6" };
            within(key, factor, least, MAX_FACTOR, expected)?;
        }
        let of_gates = [("model.glu_limit", self.glu_limit), ("model.glu_offset", self.glu_offset)];
        if let Some((key, _)) = of_gates.iter().find(|(_, number)| !self.gated && *number != 0.0) {
            let problem = "feed-forward layers have no gates";
            return Err(Invalid::new(key, problem.into(), "0, or model.gated = true".into()));
        }
        if self.parallel != Parallel::No && self.norm_place != NormPlace::Pre {
            return Err(Invalid::new(
                "model.norm_place",
                "layers side by side read one residual stream".into(),
                "\"pre\", or model.parallel = \"no\"".into(),
            ));
        }
        if self.residual_scale != 1.0 && self.norm_place != NormPlace::Pre {
            let problem = format!("{} with norms of what is added to the stream", self.residual_scale);
            return Err(Invalid::new(
                "model.residual_scale",
                problem,
                "1, or model.norm_place = \"pre\"".into(),
            ));
        }
        if self.head_bias && self.tied {
            let problem = "the head of a tied model has no bias";
            return Err(Invalid::new(
                "model.head_bias",
                problem.into(),
                "false, or model.tied = false".into(),
            ));
        }
        self.check_window()?;
        self.check_rotation()
    }

    fn check_window(&self) -> Result<(), Invalid> {
        let [window, pattern] = [self.window, self.window_pattern];
        for (key, size) in [("model.window", window), ("model.window_pattern", pattern)] {
            if size > MAX_SIZE {
                return Err(Invalid::new(key, format!("{size} is out of range"), format!("0 to {MAX_SIZE}")));
            }
        }
        if window == 0 && (pattern != 0 || self.windowed_rope_theta != 0.0) {
            let key = if pattern == 0 { "model.windowed_rope_theta" } else { "model.window_pattern" };
            return Err(Invalid::new(key, "no block has a window".into(), "0, or model.window".into()));
        }
        Ok(())
    }

    fn check_rotation(&self) -> Result<(), Invalid> {
        if self.positions == Positions::Learned {
            let base = Arch::Gpt2.base();
            let unused = [
                ("model.rope_scaling", self.rope_scaling == base.rope_scaling),
                ("model.rope_theta", self.rope_theta == base.rope_theta),
                ("model.rope_fraction", self.rope_fraction == base.rope_fraction),
                ("model.no_rope_every", self.no_rope_every == base.no_rope_every),
                ("model.windowed_rope_theta", self.windowed_rope_theta == base.windowed_rope_theta),
                ("model.embedding_scale", self.embedding_scale == base.embedding_scale),
            ];
            let Some((key, _)) = unused.iter().find(|(_, is_default)| !is_default) else { return Ok(()) };
            return Err(Invalid::new(
                key,
                "the model has learned position embeddings".into(),
                "no such key, or model.positions = \"rotary\"".into(),
            ));
        }
        within("model.rope_theta", self.rope_theta, 1.0, MAX_ROPE, "1 to 1e15")?;
        if self.windowed_rope_theta != 0.0 {
            within("model.windowed_rope_theta", self.windowed_rope_theta, 1.0, MAX_ROPE, "0, or 1 to 1e15")?;
        }
        if !(0.0..=1.0).contains(&self.rope_fraction) || self.rotated_width() < 2 {
            return Err(Invalid::new(
                "model.rope_fraction",
                format!("{} is out of range", self.rope_fraction),
                format!(
                    "{} to 1, at least one pair of a head's {} elements",
                    2.0 / self.head_dim as f64,
                    self.head_dim
                ),
            ));
        }
        if self.no_rope_every > MAX_SIZE {
            return Err(Invalid::new(
                "model.no_rope_every",
                format!("{} is out of range", self.no_rope_every),
                format!("0 to {MAX_SIZE}"),
            ));
        }
        self.rope_scaling
            .check(self.rotated_width() / 2)
            .map_err(|(problem, expected)| Invalid::new("model.rope_scaling", problem, expected))
    }
}

impl RopeScaling {
    /// Checks the numbers for so many rotated pairs; returns the problem and what was expected.
    fn check(&self, pairs: usize) -> Result<(), (String, String)> {
        let (factor, original) = match *self {
            Self::Default => return Ok(()),
            Self::Linear { factor } => (factor, 1),
            Self::Dynamic { factor, original_max_position_embeddings: original }
            | Self::Yarn { factor, original_max_position_embeddings: original, .. }
            | Self::Llama3 { factor, original_max_position_embeddings: original, .. }
            | Self::LongRope { factor, original_max_position_embeddings: original, .. } => (factor, original),
        };
        if !(1.0..=MAX_ROPE).contains(&factor) {
            return Err((format!("factor = {factor}"), "a factor of at least 1".into()));
        }
        if original == 0 || original > MAX_SIZE {
            let expected = format!("original_max_position_embeddings from 1 to {MAX_SIZE}");
            return Err((format!("original_max_position_embeddings = {original}"), expected));
        }
        let in_order = |low: f64, high: f64| low > 0.0 && low < high && high <= MAX_ROPE;
        match *self {
            Self::Llama3 { low_freq_factor: low, high_freq_factor: high, .. } if !in_order(low, high) => {
                Err((
                    format!("low_freq_factor = {low}, high_freq_factor = {high}"),
                    "0 < low_freq_factor < high_freq_factor".into(),
                ))
            }
            Self::Yarn { beta_fast: fast, beta_slow: slow, .. } if !in_order(slow, fast) => {
                Err((format!("beta_fast = {fast}, beta_slow = {slow}"), "0 < beta_slow < beta_fast".into()))
            }
            Self::Yarn { attention_factor: factor, .. } | Self::LongRope { attention_factor: factor, .. }
                if !(0.0..=MAX_FACTOR).contains(&factor) =>
            {
                Err((format!("attention_factor = {factor}"), "0 to 1e6".into()))
            }
            // The default of attention_factor divides by its logarithm.
            Self::LongRope { original_max_position_embeddings: 1, .. } => {
                Err(("original_max_position_embeddings = 1".into(), "at least 2".into()))
            }
            Self::LongRope { .. } if !is_whole(factor * original as f64) => {
                Err((format!("factor = {factor}"), format!("a quotient of a length by {original}")))
            }
            Self::LongRope { ref short_factor, ref long_factor, .. } => {
                let fits = |factors: &[f64]| {
                    factors.len() == pairs
                        && factors.iter().all(|factor| *factor > 0.0 && *factor <= MAX_ROPE)
                };
                let lists = [("short_factor", short_factor), ("long_factor", long_factor)];
                match lists.into_iter().find(|(_, factors)| !fits(factors)) {
                    None => Ok(()),
                    Some((key, factors)) => Err((
                        format!("{key} has {} elements", factors.len()),
                        format!("one above 0 for each of the {pairs} rotated pairs"),
                    )),
                }
            }
            _ => Ok(()),
        }
    }
}

/// Returns whether a number is whole but for rounding.
fn is_whole(number: f64) -> bool {
    (number - number.round()).abs() < 1e-6
}

fn head_dim_invalid(width: usize) -> Invalid {
    Invalid::new("model.head_dim", format!("{width} is out of range"), "a multiple of 8, at most 256".into())
}

fn within(key: &'static str, value: f64, low: f64, high: f64, expected: &str) -> Result<(), Invalid> {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    Err(Invalid::new(key, format!("{value:e} is out of range"), expected.into()))
}
