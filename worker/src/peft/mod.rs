//! Adapters in the layout of Hugging Face's PEFT library: `adapter_config.json` and `adapter_model.safetensors`.
//!
//! PEFT has A and B of each linear layer of Hugging Face's model, under the name of the layer. The rows of B are in the
//! order of the layer's outputs, which may differ from the arena's; see [`Order`]. Neither A nor B is transposed, even
//! where the layer's weights are.

mod selection;

use std::collections::{BTreeMap, HashMap};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorInfo;
use serde::Deserialize;
use serde_json::{Value, json};
use xlaunch_spec::job::{LoraSection, MAX_LORA_RANK, Module};
use xlaunch_spec::model::{Arch, ModelShape};

use self::selection::Selection;
use crate::adapter::{Adapter, layout};
use crate::checkpoint::read_header;
use crate::error::WorkerError;
use crate::huggingface::families::Family;
use crate::huggingface::source::{self, MAX_CONFIG_BYTES};
use crate::huggingface::tensor_names::{self, Mapped, Order};
use crate::huggingface::{ADAPTER_CONFIG, ADAPTER_WEIGHTS, INDEX, ModelError, WEIGHTS};
use crate::model::layout::Layout;

/// PEFT's names begin with its own modules around the model.
const PREFIX: &str = "base_model.model.";

/// A directory with an adapter in PEFT's layout.
#[derive(Clone, Debug)]
pub(crate) struct PeftDirectory {
    path: PathBuf,
    config: Config,
}

/// The key of `adapter_config.json` that decides which others it has.
#[derive(Deserialize)]
struct Method {
    peft_type: String,
}

/// The keys of `adapter_config.json` that change results. Others are ignored.
#[derive(Clone, Debug, Deserialize)]
struct Config {
    base_model_name_or_path: Option<String>,
    r: usize,
    lora_alpha: f64,
    #[serde(default)]
    use_rslora: bool,
    #[serde(default)]
    use_dora: bool,
    #[serde(default)]
    bias: Option<String>,
    #[serde(default)]
    modules_to_save: Value,
    #[serde(default)]
    rank_pattern: BTreeMap<String, Value>,
    #[serde(default)]
    alpha_pattern: BTreeMap<String, Value>,
    #[serde(default)]
    init_lora_weights: Value,
    #[serde(default)]
    alora_invocation_tokens: Value,
    #[serde(default)]
    kasa_config: Value,
    #[serde(default)]
    use_bdlora: Value,
    #[serde(default)]
    arrow_config: Value,
    #[serde(default)]
    trainable_token_indices: Value,
    #[serde(default)]
    layer_replication: Value,
    #[serde(default)]
    layers_to_transform: Value,
    #[serde(default)]
    target_modules: Value,
    #[serde(default)]
    exclude_modules: Value,
    #[serde(default)]
    target_parameters: Value,
}

impl Config {
    /// Returns the first key that is not supported, and the problem.
    fn unsupported(&self) -> Option<(&'static str, String)> {
        let is_set = |value: &Value| !value.is_null();
        let other_start =
            self.init_lora_weights.as_str().filter(|name| !PLAIN_INITIALISATIONS.contains(name));
        let refused = [
            (
                !(1..=MAX_LORA_RANK).contains(&self.r),
                "r",
                format!("{} is not a rank from 1 to {MAX_LORA_RANK}", self.r),
            ),
            (self.use_dora, "use_dora", format!("DoRA is not supported; {MERGE}")),
            (
                self.bias.as_ref().is_some_and(|bias| bias != "none"),
                "bias",
                format!("trained biases are not supported; {MERGE}"),
            ),
            (
                self.modules_to_save.as_array().is_some_and(|modules| !modules.is_empty()),
                "modules_to_save",
                format!("modules that are trained as a whole are not supported; {MERGE}"),
            ),
            (!self.rank_pattern.is_empty(), "rank_pattern", format!("{DIFFERENT}; {MERGE}")),
            (!self.alpha_pattern.is_empty(), "alpha_pattern", format!("{DIFFERENT}; {MERGE}")),
            (
                other_start.is_some(),
                "init_lora_weights",
                format!(
                    "{:?} changes the weights of the model, which an adapter does not contain; convert it with PEFT's \
                     `save_pretrained(DIR, path_initial_model_for_weight_conversion=...)`",
                    other_start.unwrap_or_default()
                ),
            ),
            (
                is_set(&self.alora_invocation_tokens),
                "alora_invocation_tokens",
                "adapters that are active after certain tokens only (aLoRA) are not supported".into(),
            ),
            (
                is_set(&self.use_bdlora) && self.use_bdlora != false,
                "use_bdlora",
                format!("BD-LoRA, whose matrices are block-diagonal, is not supported; {MERGE}"),
            ),
            (
                is_set(&self.arrow_config),
                "arrow_config",
                "adapters that are chosen for each token (Arrow) are not supported".into(),
            ),
            (
                is_set(&self.trainable_token_indices),
                "trainable_token_indices",
                format!("trained rows of the embedding are not supported; {MERGE}"),
            ),
            (
                is_set(&self.layer_replication),
                "layer_replication",
                "models whose blocks are replicated are not supported".into(),
            ),
            (
                is_set(&self.kasa_config),
                "kasa_config",
                "KaSA, which truncates the weights of the model, is not supported".into(),
            ),
        ];
        refused.into_iter().find(|(is_refused, ..)| *is_refused).map(|(_, key, problem)| (key, problem))
    }
}

/// Initialisations that leave the weights of the model as they are. PEFT computes others, such as PiSSA, from these
/// weights and subtracts them, also when it loads the adapter.
const PLAIN_INITIALISATIONS: [&str; 4] = ["gaussian", "eva", "orthogonal", "mica"];

/// Problem of patterns of ranks and alphas.
const DIFFERENT: &str = "ranks and alphas that differ between layers are not supported";

/// Remedy for adapters that are not supported.
const MERGE: &str = "merge the adapter into its model with PEFT's `merge_and_unload`";

impl PeftDirectory {
    /// Returns whether `path` has an adapter and no model.
    pub(crate) fn is_one(path: &Path) -> bool {
        let has = |name: &str| path.join(name).exists();
        has(ADAPTER_CONFIG) && has(ADAPTER_WEIGHTS) && !has(WEIGHTS) && !has(INDEX)
    }

    /// Reads `adapter_config.json`.
    pub(crate) fn open(path: &Path) -> Result<Self, ModelError> {
        let file = path.join(ADAPTER_CONFIG);
        let json = source::read_whole(&file, MAX_CONFIG_BYTES)?;
        let invalid =
            |error: serde_json::Error| ModelError::Read { path: file.clone(), reason: error.to_string() };
        let Method { peft_type } = serde_json::from_slice(&json).map_err(invalid)?;
        if peft_type != "LORA" {
            let problem = format!("adapters of type {peft_type:?} are not supported, only LoRA");
            return Err(ModelError::Config { path: file, key: "peft_type".into(), problem });
        }
        let opened = Self { path: path.into(), config: serde_json::from_slice(&json).map_err(invalid)? };
        match opened.config.unsupported() {
            None => Ok(opened),
            Some((key, problem)) => Err(opened.error(key, problem)),
        }
    }

    /// Path of the directory.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the path of the model that was adapted, as PEFT saved it.
    pub(crate) fn base(&self) -> Result<PathBuf, ModelError> {
        let base = self.config.base_model_name_or_path.as_ref().filter(|base| !base.is_empty());
        base.map(PathBuf::from).ok_or_else(|| {
            let problem = "it does not name the model that the adapter belongs to";
            self.error("base_model_name_or_path", problem.into())
        })
    }

    /// Builds an error about a key of the configuration.
    fn error(&self, key: &str, problem: String) -> ModelError {
        ModelError::Config { path: self.path.join(ADAPTER_CONFIG), key: key.into(), problem }
    }

    /// Reads the adapter, which must be for models of this shape.
    pub(crate) fn read(&self, shape: &ModelShape) -> Result<Adapter, WorkerError> {
        let path = self.path.join(ADAPTER_WEIGHTS);
        let failed = |error: std::io::Error| source::read_error(&path, &error);
        let (file, bytes) = source::open(&path).map_err(failed)?;
        let (header, data) = read_header(&file).map_err(failed)?;
        let mut found: HashMap<String, TensorInfo> =
            header.tensors().into_iter().map(|(name, info)| (name, info.clone())).collect();
        let all = LoraSection {
            rank: self.config.r,
            alpha: Some(self.config.lora_alpha),
            rslora: self.config.use_rslora,
            ..LoraSection::default()
        };
        let has = |module: &Module| -> Result<bool, WorkerError> {
            let only = LoraSection { targets: vec![module.name.into()], ..all.clone() };
            Ok(tensors(shape, &layout(shape, &only)?).iter().any(|tensor| found.contains_key(&tensor.name)))
        };
        let mut targets = Vec::new();
        for module in Module::all(shape) {
            if has(&module)? {
                targets.push(module.name.to_owned());
            }
        }
        let lora = LoraSection { targets, ..all };
        let mut adapter = Adapter::zeroed(shape, lora.clone())?;
        let model_type = Family::of(shape.arch).model_type;
        let selection =
            Selection::of(&self.config, model_type).map_err(|(key, problem)| self.error(key, problem))?;
        // Layers that PEFT does not adapt lack A and B. Both stay zero, also in training, as the gradient of each
        // contains the other.
        let modules = tensors(shape, &layout(shape, &lora)?);
        let is_adapted = |pair: &&[Mapped]| {
            pair.iter().any(|tensor| found.contains_key(&tensor.name)) || !selection.leaves_out(&pair[0])
        };
        let expected: Vec<&Mapped> = modules.chunks_exact(2).filter(is_adapted).flatten().collect();
        for tensor in expected {
            if found.contains_key(&tensor.name) && selection.leaves_out(tensor) {
                let problem = "PEFT does not read it: `target_modules`, `exclude_modules` or `layers_to_transform` of \
                               the configuration leave its layer out; correct them, or remove it from the file";
                return Err(source::tensor_error(&path, &tensor.name, problem).into());
            }
            let Some(info) = found.remove(&tensor.name) else {
                let problem = "not found: an adapter has A and B of its layers in all blocks, except those that \
                               `layers_to_transform`, `target_modules` or `exclude_modules` of its configuration leave \
                               out";
                return Err(source::tensor_error(&path, &tensor.name, problem).into());
            };
            source::check_type(&path, &tensor.name, &info, tensor)?;
            source::check_place(&path, &tensor.name, &info, data, bytes)?;
            let (begin, end) = info.data_offsets;
            let mut bytes = vec![0; end - begin];
            file.file().read_exact_at(&mut bytes, data + begin as u64).map_err(failed)?;
            let values = source::decode(&bytes, info.dtype);
            if !values.iter().all(|value| value.is_finite()) {
                let problem = "it has values that are not finite";
                return Err(source::tensor_error(&path, &tensor.name, problem).into());
            }
            adapter.set(tensor.elements.start, &tensor.to_arena(&values));
        }
        match found.keys().min() {
            None => Ok(adapter),
            Some(name) => {
                let problem = format!("it does not belong to a linear layer of the model's blocks; {MERGE}");
                Err(source::tensor_error(&path, name, &problem).into())
            }
        }
    }
}

/// Returns the tensors of an adapter, A and B of each layer, in the arena of adapters.
pub(crate) fn tensors(shape: &ModelShape, layout: &Layout) -> Vec<Mapped> {
    let (model, rank) = (weights(shape, layout), layout.rank_and_scale().0);
    let modules = layout.adapted_modules().into_iter().filter_map(|module| {
        let weight = model.get(&module.weight.start)?;
        let name = weight.name.strip_suffix(".weight")?;
        let outputs = module.weight.len() / module.inputs;
        let tensor = |part: &str, shape: [usize; 2], elements, order| Mapped {
            name: format!("{PREFIX}{name}.lora_{part}.weight"),
            shape: shape.to_vec(),
            elements,
            order,
            exact: false,
            prefix: false,
        };
        let rows = match &weight.order {
            Order::Rows(rows) => Order::Rows(rows.clone()),
            Order::Same | Order::Transposed | Order::Alternating => Order::Same,
        };
        let a = tensor("A", [rank, module.inputs], module.a, Order::Same);
        Some([a, tensor("B", [outputs, rank], module.b, rows)])
    });
    modules.flatten().collect()
}

/// Returns the tensors of the model by their place in its arena.
fn weights(shape: &ModelShape, layout: &Layout) -> HashMap<usize, Mapped> {
    let tensors = tensor_names::tensors(Family::of(shape.arch).names, shape, layout);
    tensors.into_iter().map(|tensor| (tensor.elements.start, tensor)).collect()
}

/// Returns `adapter_config.json`.
pub(crate) fn config(shape: &ModelShape, lora: &LoraSection, base: &Path) -> Result<Value, WorkerError> {
    let layout = layout(shape, lora)?;
    let (names, model) = (Family::of(shape.arch).names, weights(shape, &layout));
    let block = names.block(0);
    let in_block =
        |tensor: &Mapped| Some(tensor.name.strip_suffix(".weight")?.strip_prefix(&block)?.to_owned());
    let last = |name: &str| name.rsplit('.').next().unwrap_or_default().to_owned();
    let all: Vec<String> = model.values().filter_map(in_block).collect();
    let modules = layout.adapted_modules();
    let adapted = modules.iter().filter_map(|module| in_block(model.get(&module.weight.start)?));
    // PEFT compares the ends of names. GPT-2 has two layers that end alike.
    let mut targets: Vec<String> = adapted
        .map(|name| {
            let is_unique = all.iter().filter(|other| last(other) == last(&name)).count() == 1;
            if is_unique { last(&name) } else { name }
        })
        .collect();
    targets.sort();
    Ok(json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.to_string_lossy(),
        "r": lora.rank,
        "lora_alpha": whole(lora.alpha()),
        "use_rslora": lora.rslora,
        "lora_dropout": 0.0,
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": shape.arch == Arch::Gpt2,
        "init_lora_weights": true,
        "inference_mode": true,
        "modules_to_save": null,
        "use_dora": false,
        "rank_pattern": {},
        "alpha_pattern": {},
    }))
}

/// Returns a number as an integer, if it is one: PEFT writes alpha like that.
#[expect(clippy::cast_possible_truncation, reason = "checked by the comparison")]
fn whole(number: f64) -> Value {
    if number.fract() == 0.0 && number.abs() < 1e15 { json!(number as i64) } else { json!(number) }
}

#[cfg(test)]
mod tests;
