//! The sections `[muon]` and `[lr_scale]`, and their checks.

use serde::{Deserialize, Serialize};

use super::JobSpec;
use crate::invalid::{Invalid, positive_in_fp32, within};
use crate::model::ModelShape;

/// Optimizer of the weights of linear layers in blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Optimizer {
    /// AdamW.
    #[default]
    AdamW,
    /// Muon: orthogonalised momentum, matrix by matrix. Queries, keys and values are separate matrices, as are gate and
    /// up. See `[muon]`.
    Muon,
}

impl Optimizer {
    /// Returns the name used in configurations.
    pub fn name(self) -> &'static str {
        match self {
            Self::AdamW => "adamw",
            Self::Muon => "muon",
        }
    }
}

/// Muon's hyperparameters, with `train.optimizer = "muon"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct MuonSection {
    /// Peak learning rate of the matrices that Muon updates, which follows the schedule of `train.lr`.
    pub lr: f64,
    /// Decay rate of the momentum, which is Nesterov's.
    pub momentum: f64,
    /// Decoupled weight decay. Default: `train.weight_decay`.
    pub weight_decay: Option<f64>,
    /// Apply weight decay only to weights whose update has their sign.
    pub cautious: bool,
    /// Factor of the learning rate by the shape of a matrix.
    pub adjust_lr: AdjustLr,
    /// NorMuon: divide each row of the orthogonalised update by the root of the moving average of its mean square, then
    /// restore the norm of the update.
    pub normuon: bool,
    /// Decay rate of NorMuon's moving average.
    pub beta2: f64,
    /// Ranks that orthogonalise a matrix. Results do not depend on it.
    pub owners: Owners,
}

impl Default for MuonSection {
    fn default() -> Self {
        Self {
            lr: 0.02,
            momentum: 0.95,
            weight_decay: None,
            cautious: true,
            adjust_lr: AdjustLr::default(),
            normuon: false,
            beta2: 0.95,
            owners: Owners::default(),
        }
    }
}

/// Factor of Muon's learning rate by the shape of a matrix. The names are those of `torch.optim.Muon`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum AdjustLr {
    /// sqrt(max(1, outputs / inputs)). Typical learning rates are 0.02 to 0.05, for models of any size.
    #[default]
    Original,
    /// 0.2 sqrt(max(outputs, inputs)): updates are about as large as AdamW's, so `muon.lr` should be of the size of its
    /// learning rate.
    MatchRmsAdamw,
}

/// Ranks that orthogonalise a matrix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Owners {
    /// One rank, which sends the result to the others, if that is estimated to be faster.
    #[default]
    Auto,
    /// One rank.
    Always,
    /// Every rank.
    Never,
}

impl MuonSection {
    pub(super) fn check(&self) -> Result<(), Invalid> {
        positive_in_fp32("muon.lr", self.lr)?;
        within("muon.momentum", self.momentum, 0.0, 0.999_999)?;
        within("muon.beta2", self.beta2, 0.0, 0.999_999)?;
        self.weight_decay.map_or(Ok(()), |decay| within("muon.weight_decay", decay, 0.0, 100.0))
    }
}

/// `[lr_scale]`: factors of `train.lr` for groups of parameters. 0 freezes a group, whose gradients still count in
/// `train.clip`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct LrScaleSection {
    /// Token and position embeddings. With a tied head, the token embedding is also the head.
    pub embeddings: f64,
    /// The output head, if it is not tied.
    pub head: f64,
    /// Scales and shifts of norms, and biases.
    pub vectors: f64,
    /// Matrices B of adapters (LoRA+ sets about 16). Needs `lora.rank`.
    pub lora_b: f64,
}

impl Default for LrScaleSection {
    fn default() -> Self {
        Self { embeddings: 1.0, head: 1.0, vectors: 1.0, lora_b: 1.0 }
    }
}

impl LrScaleSection {
    pub(super) fn check(&self, spec: &JobSpec) -> Result<(), Invalid> {
        let of_adapters = ("lr_scale.lora_b", self.lora_b);
        let of_weights = [
            ("lr_scale.embeddings", self.embeddings),
            ("lr_scale.head", self.head),
            ("lr_scale.vectors", self.vectors),
        ];
        for (key, scale) in of_weights.into_iter().chain([of_adapters]) {
            within(key, scale, 0.0, 1e6)?;
        }
        let (without_effect, problem, expected) = if spec.lora.is_on() {
            let problem = "these parameters are frozen while adapters are trained";
            (&of_weights[..], problem, "1, or lora.rank = 0")
        } else {
            (&[of_adapters][..], "no adapters are trained", "1, or lora.rank above 0")
        };
        let set = without_effect.iter().find(|(_, scale)| *scale != 1.0);
        set.map_or(Ok(()), |(key, _)| Err(Invalid::new(key, problem.into(), expected.into())))
    }

    /// Checks what depends on the sizes of the model.
    pub(super) fn check_model(&self, model: &ModelShape) -> Result<(), Invalid> {
        if model.tied && self.head != 1.0 {
            let problem = "the head is tied to the embeddings, whose factor it has".into();
            return Err(Invalid::new("lr_scale.head", problem, "1, or model.tied = false".into()));
        }
        Ok(())
    }
}
