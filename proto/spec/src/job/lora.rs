//! The section `[lora]`, and the linear layers that it adapts.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::{JobSpec, Optimizer, Shard, one_or_more};
use crate::invalid::Invalid;
use crate::model::{Arch, ModelShape};

/// Highest rank of adapters.
pub const MAX_LORA_RANK: usize = 1 << 16;

/// `[lora]`: low-rank adapters, which are trained instead of the weights that `checkpoint.init` names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct LoraSection {
    /// Rank of the adapters: the rows of A and the columns of B. 0 trains all weights instead.
    pub rank: usize,
    /// Numerator of the scale, which is `alpha / rank`. Default: twice the rank.
    pub alpha: Option<f64>,
    /// Adapted layers of every block: "all-linear", or names from "q", "k", "v", "o" (attention), "gate", "up" and
    /// "down" (feed-forward). Models whose files fuse matrices have one adapter for each: "qkv" (GPT-2, Phi 3,
    /// GPT-NeoX) and "gate_up" (Phi 3, GLM-4). The names in Hugging Face's models, such as "q_proj" or "c_attn", work
    /// as well. In models with experts, only attention has adapters.
    #[serde(deserialize_with = "one_or_more::deserialize")]
    #[cfg_attr(feature = "schema", schemars(with = "one_or_more::OneOrMore"))]
    pub targets: Vec<String>,
    /// Must be 0: dropout of the adapters' inputs is not supported.
    pub dropout: f64,
    /// Scale by `alpha / sqrt(rank)` (rank-stabilised LoRA), which suits ranks of 64 and more.
    pub rslora: bool,
}

impl Default for LoraSection {
    fn default() -> Self {
        Self { rank: 0, alpha: None, targets: vec![ALL_LINEAR.into()], dropout: 0.0, rslora: false }
    }
}

/// Value of `targets` for every linear layer of the blocks.
const ALL_LINEAR: &str = "all-linear";

/// A linear layer of a block, as the trainer multiplies it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Layer {
    /// Projection to queries, keys and values.
    Qkv,
    /// Projection of attention's output.
    Proj,
    /// Projection to the activation function's input.
    Fc,
    /// Projection of its output.
    Out,
}

/// A part of a layer that has an adapter of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Module {
    /// Name in `targets`.
    pub name: &'static str,
    /// The layer.
    pub layer: Layer,
    /// Outputs of the layer that belong to the module.
    pub outputs: Range<usize>,
}

/// Names in Hugging Face's models, and those of the modules.
const ALIASES: [(&str, &str); 17] = [
    ("q_proj", "q"),
    ("k_proj", "k"),
    ("v_proj", "v"),
    ("o_proj", "o"),
    ("dense", "o"),
    ("c_attn", "qkv"),
    ("qkv_proj", "qkv"),
    ("query_key_value", "qkv"),
    ("gate_proj", "gate"),
    ("up_proj", "up"),
    ("down_proj", "down"),
    ("gate_up_proj", "gate_up"),
    ("c_fc", "up"),
    ("fc1", "up"),
    ("fc2", "down"),
    ("dense_h_to_4h", "up"),
    ("dense_4h_to_h", "down"),
];

impl Module {
    /// Returns all modules of a block: one for each linear layer of Hugging Face's model; in a model with experts, only
    /// those of attention.
    pub fn all(shape: &ModelShape) -> Vec<Self> {
        let (queries, keys) = (shape.attention_width(), shape.kv_heads * shape.head_dim);
        let mut modules = Vec::new();
        let mut add = |name, layer, outputs| modules.push(Self { name, layer, outputs });
        if matches!(shape.arch, Arch::Gpt2 | Arch::GptNeoX | Arch::Phi3) {
            add("qkv", Layer::Qkv, 0..queries + 2 * keys);
        } else {
            add("q", Layer::Qkv, 0..queries);
            add("k", Layer::Qkv, queries..queries + keys);
            add("v", Layer::Qkv, queries + keys..queries + 2 * keys);
        }
        add("o", Layer::Proj, 0..shape.dim);
        if shape.experts > 0 {
            return modules;
        }
        match (shape.gated, shape.arch) {
            (true, Arch::Phi3 | Arch::Glm | Arch::Glm4) => add("gate_up", Layer::Fc, 0..2 * shape.ffn),
            (true, _) => {
                add("gate", Layer::Fc, 0..shape.ffn);
                add("up", Layer::Fc, shape.ffn..2 * shape.ffn);
            }
            (false, _) => add("up", Layer::Fc, 0..shape.ffn),
        }
        add("down", Layer::Out, 0..shape.dim);
        modules
    }

    fn is_target(&self, target: &str) -> bool {
        // GPT-2 and StarCoder2 have two layers of this name.
        target == ALL_LINEAR
            || target == self.name
            || target == "c_proj" && ["o", "down"].contains(&self.name)
            || ALIASES.contains(&(target, self.name))
    }
}

impl LoraSection {
    /// Returns whether adapters are trained.
    pub fn is_on(&self) -> bool {
        self.rank > 0
    }

    /// Returns `alpha`.
    #[expect(clippy::cast_precision_loss, reason = "a rank is small")]
    pub fn alpha(&self) -> f64 {
        self.alpha.unwrap_or(2.0 * self.rank as f64)
    }

    /// Returns the factor of the adapters' outputs.
    #[expect(clippy::cast_precision_loss, reason = "a rank is small")]
    pub fn scale(&self) -> f64 {
        let rank = self.rank.max(1) as f64;
        self.alpha() / if self.rslora { rank.sqrt() } else { rank }
    }

    /// Returns the modules of a block that have adapters.
    ///
    /// # Errors
    /// If a target is not a module of the model.
    pub fn modules(&self, shape: &ModelShape) -> Result<Vec<Module>, Invalid> {
        let mut modules = Module::all(shape);
        let unknown = |target: &&String| !modules.iter().any(|module| module.is_target(target));
        if let Some(target) = self.targets.iter().find(unknown) {
            let names: Vec<String> = modules.iter().map(|module| format!("\"{}\"", module.name)).collect();
            let expected = format!("\"{ALL_LINEAR}\", or names from {}", names.join(", "));
            return Err(Invalid::new(
                "lora.targets",
                format!("`{target}` is not a linear layer of the model's blocks"),
                expected,
            ));
        }
        modules.retain(|module| self.targets.iter().any(|target| module.is_target(target)));
        Ok(modules)
    }

    /// Returns the first key for which the adapters of two sections differ, with both values.
    pub fn difference(&self, other: &Self, shape: &ModelShape) -> Option<(&'static str, String, String)> {
        let names = |section: &Self| {
            let modules = section.modules(shape).unwrap_or_default();
            modules.iter().map(|module| module.name).collect::<Vec<_>>().join(", ")
        };
        let keys = [
            ("lora.rank", self.rank.to_string(), other.rank.to_string()),
            ("lora.targets", names(self), names(other)),
            ("lora.alpha", self.alpha().to_string(), other.alpha().to_string()),
            ("lora.rslora", self.rslora.to_string(), other.rslora.to_string()),
        ];
        keys.into_iter().find(|(_, own, other)| own != other)
    }

    /// Checks a job with adapters, as far as that does not depend on the model.
    pub(super) fn check(&self, spec: &JobSpec) -> Result<(), Invalid> {
        if !self.is_on() {
            return Ok(());
        }
        let invalid = |key, problem: &str, expected: &str| {
            Err(Invalid::new(key, problem.to_owned(), expected.to_owned()))
        };
        if self.rank > MAX_LORA_RANK {
            let problem = format!("{} is more than any layer has inputs", self.rank);
            return invalid("lora.rank", &problem, &format!("at most {MAX_LORA_RANK}"));
        }
        if spec.checkpoint.init.is_none() {
            let problem = "adapters need the weights of a model, and `checkpoint.init` is not set";
            return invalid("lora.rank", problem, "checkpoint.init = \"MODEL\", or 0 to train all weights");
        }
        if self.dropout != 0.0 {
            let problem = format!("{} is not supported: adapters are trained without dropout", self.dropout);
            return invalid("lora.dropout", &problem, "0");
        }
        if self.alpha.is_some_and(|alpha| !(alpha.is_finite() && alpha > 0.0)) {
            let problem = format!("{} is not a positive number", self.alpha());
            return invalid("lora.alpha", &problem, "a finite number above 0");
        }
        if self.targets.is_empty() {
            return invalid("lora.targets", "no layer has an adapter", "\"all-linear\", or names of layers");
        }
        if spec.train.optimizer != Optimizer::AdamW {
            let problem = "adapters are trained with AdamW only: Muon is for whole matrices";
            return invalid("train.optimizer", problem, "\"adamw\" with lora.rank above 0");
        }
        if spec.comm.experts > 1 {
            let problem = "with adapters, every rank has all weights of the model";
            return invalid("comm.experts", problem, "1 with lora.rank above 0");
        }
        if spec.comm.shard >= Shard::Optimizer {
            let problem =
                "adapters are too small to be sharded, and every rank needs all weights of the model";
            return invalid("comm.shard", problem, "\"none\" with lora.rank above 0");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(arch: Arch, targets: &[&str]) -> Result<String, String> {
        let targets = targets.iter().map(|target| (*target).to_owned()).collect();
        let section = LoraSection { rank: 4, targets, ..LoraSection::default() };
        let modules = section.modules(&arch.base()).map_err(|invalid| invalid.to_string())?;
        Ok(modules.iter().map(|module| module.name).collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn targets_are_own_names_or_those_of_the_family_and_others_are_refused() {
        assert_eq!(names(Arch::Llama, &["all-linear"]).unwrap(), "q k v o gate up down");
        assert_eq!(names(Arch::Gpt2, &["all-linear"]).unwrap(), "qkv o up down");
        assert_eq!(names(Arch::Phi3, &["all-linear"]).unwrap(), "qkv o gate_up down");
        assert_eq!(names(Arch::Glm4, &["all-linear"]).unwrap(), "q k v o gate_up down");
        assert_eq!(names(Arch::Qwen3, &["v", "q_proj"]).unwrap(), "q v");
        assert_eq!(names(Arch::Mixtral, &["all-linear"]).unwrap(), "q k v o");
        assert_eq!(names(Arch::Gpt2, &["c_attn", "c_proj"]).unwrap(), "qkv o down");
        assert_eq!(names(Arch::GptNeoX, &["query_key_value", "dense"]).unwrap(), "qkv o");
        let error = names(Arch::Gpt2, &["q"]).unwrap_err();
        assert!(error.starts_with("lora.targets: `q` is not a linear layer"), "{error}");
        assert!(error.ends_with("\"all-linear\", or names from \"qkv\", \"o\", \"up\", \"down\""), "{error}");
    }

    #[test]
    fn modules_cover_every_output_of_a_layer_once() {
        for arch in Arch::all().filter(|arch| arch.base().experts == 0) {
            let shape = arch.base();
            let widths = [shape.qkv_width(), shape.dim, shape.ffn_inputs(), shape.dim];
            for (layer, width) in [Layer::Qkv, Layer::Proj, Layer::Fc, Layer::Out].into_iter().zip(widths) {
                let mut end = 0;
                for module in Module::all(&shape).iter().filter(|module| module.layer == layer) {
                    assert_eq!(module.outputs.start, end, "{arch:?} {module:?}");
                    end = module.outputs.end;
                }
                assert_eq!(end, width, "{arch:?} {layer:?}");
            }
        }
    }

    #[test]
    fn scale_is_alpha_by_the_rank_or_its_root() {
        let section = LoraSection { rank: 16, ..LoraSection::default() };
        assert_eq!((section.alpha(), section.scale()), (32.0, 2.0));
        assert_eq!(LoraSection { alpha: Some(8.0), ..section.clone() }.scale(), 0.5);
        assert_eq!(LoraSection { alpha: Some(8.0), rslora: true, ..section }.scale(), 2.0);
    }

    #[test]
    fn settings_that_adapters_do_not_support_are_refused_by_key() {
        let error = |change: fn(&mut JobSpec)| {
            let mut spec = JobSpec::default();
            spec.lora.rank = 8;
            spec.checkpoint.init = Some("model".into());
            change(&mut spec);
            spec.check().err().map(|invalid| invalid.key)
        };
        assert_eq!(error(|_| ()), None);
        assert_eq!(error(|spec| spec.checkpoint.init = None), Some("lora.rank"));
        assert_eq!(error(|spec| spec.lora.rank = usize::MAX), Some("lora.rank"));
        assert_eq!(error(|spec| spec.lora.dropout = 0.1), Some("lora.dropout"));
        assert_eq!(error(|spec| spec.lora.alpha = Some(-1.0)), Some("lora.alpha"));
        assert_eq!(error(|spec| spec.lora.targets.clear()), Some("lora.targets"));
        assert_eq!(error(|spec| spec.train.optimizer = Optimizer::Muon), Some("train.optimizer"));
        assert_eq!(error(|spec| spec.comm.shard = Shard::Optimizer), Some("comm.shard"));
        let wrong = |spec: &mut JobSpec| {
            (spec.model.preset, spec.lora.targets) = (Some("byte-tiny".into()), vec!["c_attn".into()]);
        };
        assert_eq!(error(wrong), Some("lora.targets"));
    }
}
