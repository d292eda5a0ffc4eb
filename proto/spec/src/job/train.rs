//! The section `[train]`.

use serde::{Deserialize, Serialize};

use super::Optimizer;

/// The optimizer, its schedule, and evaluation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct TrainSection {
    /// Number of optimizer steps. `epochs` replaces it.
    pub steps: u64,
    /// Number of passes over the training data, instead of `steps`; may be a fraction, such as 0.5. The run has as many
    /// steps as it takes to read `epochs` times the sequences of an epoch, rounded up; a last step that is not full
    /// takes its remaining sequences from the next epoch. Counted from the sequences used so far, so a run that
    /// continues with another global batch gets another number of steps.
    pub epochs: Option<f64>,
    /// Sequences per rank and micro-step. The global batch is batch * accumulate * number of ranks sequences.
    pub batch: usize,
    /// Micro-steps per optimizer step (gradient accumulation). Increase it if the desired global batch does not fit in
    /// memory.
    pub accumulate: usize,
    /// Activations that backward recomputes instead of keeping them from forward. Saves memory, costs time, and does
    /// not change results except for rounding.
    pub recompute: Recompute,
    /// Number of tokens whose logits are in memory at a time; the gradients of the loss are computed along with it. 0
    /// means the whole micro-step. Saves memory if the vocabulary is large.
    pub classifier_chunk: usize,
    /// Factor of the load-balancing loss of a model with experts, which is added to the loss: in each layer, `E *
    /// sum_e(share_e * mean_score_e)`, with E experts and their shares of the choices. 1 is a balanced load. The shares
    /// are those of a micro-step of all ranks. 0 turns it off. This key and the next two have no effect with
    /// `lora.rank`, which freezes routers.
    pub router_aux_loss_coef: f64,
    /// Factor of the z loss of a model with experts, which is added to the loss: in each layer, the mean square of the
    /// logarithm of the sum of the exponentials of the router's logits. It keeps them small. 0 turns it off.
    pub router_z_loss_coef: f64,
    /// Change of the bias of each expert after a step, if `model.router_bias` is true: up if the expert was chosen less
    /// often in the global batch than the mean of its layer, down if more often. 0 leaves biases unchanged.
    pub router_bias_rate: f64,
    /// Optimizer of the weights of linear layers in blocks. Embeddings, the head, norms and biases always use AdamW.
    pub optimizer: Optimizer,
    /// Peak learning rate.
    pub lr: f64,
    /// Learning-rate schedule after warm-up.
    pub schedule: Schedule,
    /// Steps of linear warm-up from 0 to `lr`, at most `steps`. Default: 5 % of `steps`, at most 100.
    pub warmup: Option<u64>,
    /// Number of final steps over which the wsd schedule lowers the learning rate. Default: 20 % of `steps`.
    pub decay_steps: Option<u64>,
    /// Learning rate at the end of the cosine and wsd schedules, as a fraction of `lr`, from 0 to 1.
    pub min_lr_ratio: f64,
    /// Decay rate of AdamW's first moment.
    pub beta1: f64,
    /// Decay rate of AdamW's second moment.
    pub beta2: f64,
    /// AdamW's epsilon, added to the denominator.
    pub eps: f64,
    /// Decoupled weight decay. Applied to matrices only, not to biases and norms.
    pub weight_decay: f64,
    /// Maximum global gradient norm; larger gradients are scaled down to it. 0 turns clipping off.
    pub clip: f64,
    /// Action after a step whose loss or gradient norm is not finite. The update of such a step is never applied.
    pub nonfinite: NonFinite,
    /// Steps between evaluations; the last step is always evaluated. 0 turns evaluation off.
    pub eval_every: u64,
    /// Maximum number of batches of `batch` sequences per evaluation, over all ranks. The sequences are the first ones
    /// in file order, or packed ones in a fixed order, the same for any number of ranks.
    pub eval_batches: usize,
    /// Tokens per evaluation, rounded up to whole sequences: the first ones in file order, or packed ones in a fixed
    /// order, the same for any number of ranks and any `batch`. 0 uses `eval_batches` instead.
    pub eval_tokens: u64,
    /// Number of evaluations in a row without a lower validation loss after which training ends early, successfully and
    /// with a checkpoint. A checkpoint is also saved after each evaluation with the lowest loss so far, and the best
    /// one is kept. 0 turns early stopping off.
    pub patience: u64,
    /// Number of tokens (bytes with the byte tokenizer) of text to sample from the model and print after training.
    /// Needs a prepared directory or `data.tokenizer = "bytes"`. 0 turns sampling off.
    pub sample: usize,
    /// Steps between samples during training, which are written to `samples.jsonl` in the run's directory. A run that
    /// resumes at such a step begins with its sample. 0 samples after training only.
    pub sample_every: u64,
    /// Text that samples continue. Default: a line of the evaluation data.
    pub sample_prompt: String,
}

impl Default for TrainSection {
    fn default() -> Self {
        Self {
            steps: 1000,
            epochs: None,
            batch: 8,
            accumulate: 1,
            recompute: Recompute::None,
            classifier_chunk: 0,
            router_aux_loss_coef: 0.01,
            router_z_loss_coef: 0.001,
            router_bias_rate: 0.001,
            optimizer: Optimizer::AdamW,
            lr: 1e-3,
            schedule: Schedule::Cosine,
            warmup: None,
            decay_steps: None,
            min_lr_ratio: 0.1,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            clip: 1.0,
            nonfinite: NonFinite::Stop,
            eval_every: 250,
            eval_batches: 16,
            eval_tokens: 0,
            patience: 0,
            sample: 240,
            sample_every: 0,
            sample_prompt: String::new(),
        }
    }
}

impl TrainSection {
    /// Sets `steps` to the number that `epochs` demands, if it is set, with data of `rows` sequences on `ranks` ranks.
    /// The first `step` steps have used `used` sequences.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a positive number of sequences, far below 2^53"
    )]
    pub fn count_steps(&mut self, rows: u64, ranks: u32, step: u64, used: u64) {
        if let Some(epochs) = self.epochs {
            let per_step = (self.batch as u64 * self.accumulate as u64).saturating_mul(ranks.into());
            let wanted = (epochs * rows as f64).round().max(1.0) as u64;
            self.steps = step + wanted.saturating_sub(used).div_ceil(per_step);
        }
    }

    /// Returns a warning if the whole run is warm-up, shorter than configured.
    pub fn short_warmup(&self) -> Option<String> {
        let (warmup, steps) = (self.warmup.filter(|warmup| *warmup > self.steps)?, self.steps);
        Some(format!("train.warmup: {warmup} steps in a run of {steps}: all {steps} are warm-up"))
    }

    /// Returns the steps of linear warm-up, with the default filled in, and at most the number of steps.
    pub fn warmup_steps(&self) -> u64 {
        self.warmup.unwrap_or_else(|| (self.steps / 20).min(100)).min(self.steps)
    }

    /// Returns the steps over which the wsd schedule lowers the learning rate, with the default filled in, and at most
    /// the number of steps after the warm-up.
    pub fn decay_steps(&self) -> u64 {
        self.decay_steps.unwrap_or_else(|| self.steps.div_ceil(5)).min(self.steps - self.warmup_steps())
    }
}

/// Activations that backward recomputes instead of keeping them from forward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// Nothing.
    #[default]
    None,
    /// Outputs of norms and of the activation function, which need no matrix multiplication.
    Cheap,
    /// Everything in a block except its input. Most of the forward pass runs twice.
    Block,
}

/// Learning-rate schedule after warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Schedule {
    /// Cosine decay from `lr` to `lr * min_lr_ratio`, which would be reached one step after the last.
    Cosine,
    /// Warm-up, stable, decay: `lr`, then linear decay over the last `decay_steps` to `lr * min_lr_ratio`, which would
    /// be reached one step after the last. A run can be continued for more steps from a checkpoint before the decay.
    Wsd,
    /// `lr` at every step.
    Constant,
}

/// Action after a step whose loss or gradient norm is not finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum NonFinite {
    /// The job fails with exit code 1 and is not restarted. No checkpoint is saved.
    Stop,
    /// The step is skipped: weights and optimizer state do not change, while schedule, bias correction and data
    /// advance. A checkpoint that is due is saved after the next step that is not skipped, or when the job is stopped.
    /// After 10 consecutive skipped steps, or if the last step of the job is skipped, the same as stop.
    Skip,
}

/// Number of consecutive skipped steps that end a job with `train.nonfinite = "skip"`.
const MAX_SKIPPED_STEPS: u32 = 10;

impl NonFinite {
    /// Returns the number of consecutive steps without a finite loss and norm that ends the job.
    pub fn limit(self) -> u32 {
        match self {
            Self::Stop => 1,
            Self::Skip => MAX_SKIPPED_STEPS,
        }
    }
}
