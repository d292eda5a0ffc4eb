//! Adapters in the layout of Hugging Face's PEFT library: `adapter_config.json` and `adapter_model.safetensors`.
//!
//! PEFT has A and B of each linear layer of Hugging Face's model, under the name of the layer. The rows of B are in the
//! order of the layer's outputs, which may differ from the arena's; see [`Order`]. Neither A nor B is transposed, even
//! where the layer's weights are.

use std::collections::{BTreeMap, HashMap};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use onig::{MatchParam, Regex, RegexOptions, SearchOptions, Syntax};
use safetensors::tensor::TensorInfo;
use serde::Deserialize;
use serde_json::{Value, json};
use xlaunch_spec::job::{LoraSection, Module};
use xlaunch_spec::model::{Arch, ModelShape};

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

/// The keys of `adapter_config.json` that change results. Others are ignored.
#[derive(Clone, Debug, Deserialize)]
struct Config {
    peft_type: String,
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

/// Initialisations that leave the weights of the model as they are. PEFT computes others, such as PiSSA, from these
/// weights and subtracts them, also when it loads the adapter.
const PLAIN_INITIALISATIONS: [&str; 3] = ["gaussian", "eva", "orthogonal"];

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
        let config: Config = serde_json::from_slice(&json)
            .map_err(|error| ModelError::Read { path: file.clone(), reason: error.to_string() })?;
        let refuse = |key: &str, problem: String| {
            Err(ModelError::Config { path: file.clone(), key: key.into(), problem })
        };
        if config.peft_type != "LORA" {
            return refuse(
                "peft_type",
                format!("adapters of type {:?} are not supported, only LoRA", config.peft_type),
            );
        }
        if config.use_dora {
            return refuse("use_dora", format!("DoRA is not supported; {MERGE}"));
        }
        if config.bias.as_ref().is_some_and(|bias| bias != "none") {
            return refuse("bias", format!("trained biases are not supported; {MERGE}"));
        }
        if config.modules_to_save.as_array().is_some_and(|modules| !modules.is_empty()) {
            let problem = format!("modules that are trained as a whole are not supported; {MERGE}");
            return refuse("modules_to_save", problem);
        }
        for (key, pattern) in
            [("rank_pattern", &config.rank_pattern), ("alpha_pattern", &config.alpha_pattern)]
        {
            if !pattern.is_empty() {
                let problem = "ranks and alphas that differ between layers are not supported";
                return refuse(key, format!("{problem}; {MERGE}"));
            }
        }
        if let Some(name) =
            config.init_lora_weights.as_str().filter(|name| !PLAIN_INITIALISATIONS.contains(name))
        {
            let problem = format!(
                "{name:?} changes the weights of the model, which an adapter does not contain; convert it with PEFT's \
                 `save_pretrained(DIR, path_initial_model_for_weight_conversion=...)`"
            );
            return refuse("init_lora_weights", problem);
        }
        if !config.alora_invocation_tokens.is_null() {
            let problem = "adapters that are active after certain tokens only (aLoRA) are not supported";
            return refuse("alora_invocation_tokens", problem.into());
        }
        if !config.layer_replication.is_null() {
            let problem = "models whose blocks are replicated are not supported";
            return refuse("layer_replication", problem.into());
        }
        if !config.kasa_config.is_null() {
            return refuse(
                "kasa_config",
                "KaSA, which truncates the weights of the model, is not supported".into(),
            );
        }
        Ok(Self { path: path.into(), config })
    }

    /// Path of the directory.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the path of the model that was adapted, as PEFT saved it.
    pub(crate) fn base(&self) -> Result<PathBuf, ModelError> {
        let base = self.config.base_model_name_or_path.as_ref().filter(|base| !base.is_empty());
        base.map(PathBuf::from).ok_or_else(|| ModelError::Config {
            path: self.path.join(ADAPTER_CONFIG),
            key: "base_model_name_or_path".into(),
            problem: "it does not name the model that the adapter belongs to".into(),
        })
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
        let selection = self.selection()?;
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

    /// Returns the layers that the configuration selects.
    fn selection(&self) -> Result<Selection<'_>, ModelError> {
        let names = |key: &str, value| {
            Names::of(value).map_err(|problem| ModelError::Config {
                path: self.path.join(ADAPTER_CONFIG),
                key: key.into(),
                problem,
            })
        };
        let config = &self.config;
        // Further layers, by the names of their weights, which are not compared.
        let has_more = config.target_parameters.as_array().is_some_and(|names| !names.is_empty());
        Ok(Selection {
            targets: names("target_modules", if has_more { &Value::Null } else { &config.target_modules })?,
            excluded: names("exclude_modules", &config.exclude_modules)?,
            blocks: &config.layers_to_transform,
        })
    }
}

/// The layers that PEFT adapts.
struct Selection<'a> {
    /// Layers that are adapted; `None` if all are.
    targets: Option<Names<'a>>,
    excluded: Option<Names<'a>>,
    blocks: &'a Value,
}

impl Selection<'_> {
    /// Returns whether PEFT does not adapt the layer of a tensor.
    fn leaves_out(&self, tensor: &Mapped) -> bool {
        let layer = tensor.name.strip_prefix(PREFIX).and_then(|name| name.split_once(".lora_"));
        let Some((layer, _)) = layer else { return false };
        let block = layer.split('.').find_map(|part| part.parse::<u64>().ok());
        let is_block = |value: &Value| block.is_some_and(|block| value.as_u64() == Some(block));
        let is_chosen = match self.blocks {
            Value::Null => true,
            Value::Array(blocks) => blocks.is_empty() || blocks.iter().any(is_block),
            one => is_block(one),
        };
        let Some(targets) = &self.targets else { return false };
        !targets.matches(layer)
            || self.excluded.as_ref().is_some_and(|names| names.matches(layer))
            || !is_chosen
    }
}

/// Names of layers in PEFT's configuration.
enum Names<'a> {
    /// A layer has one of these names, or a name that ends with a dot and one of them.
    Ends(Vec<&'a str>),
    /// The whole name matches.
    Pattern(Regex),
}

impl<'a> Names<'a> {
    /// Reads a list of names or a regular expression. `None` without either, and for `all-linear`.
    fn of(value: &'a Value) -> Result<Option<Self>, String> {
        match value {
            Value::String(all) if all.eq_ignore_ascii_case("all-linear") => Ok(None),
            Value::String(pattern) if !pattern.is_empty() => {
                python_pattern(pattern).map(|pattern| Some(Self::Pattern(pattern)))
            }
            Value::Array(names) => Ok(Some(Self::Ends(names.iter().filter_map(Value::as_str).collect()))),
            _ => Ok(None),
        }
    }

    fn matches(&self, layer: &str) -> bool {
        match self {
            Self::Ends(names) => names.iter().any(|name| {
                layer.strip_suffix(name).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
            }),
            Self::Pattern(pattern) => {
                let whole = SearchOptions::SEARCH_OPTION_NONE;
                // An error is a search that takes too long.
                let found = pattern.match_with_param(layer, 0, whole, None, MatchParam::default());
                found.is_ok_and(|end| end.is_some())
            }
        }
    }
}

/// Compiles a regular expression that matches the same whole names as `re.fullmatch` in Python.
///
/// # Errors
/// The problem, if it is not valid, or has a construct that may have another meaning in Python.
fn python_pattern(pattern: &str) -> Result<Regex, String> {
    if let Some(construct) = python_only(pattern) {
        return Err(format!(
            "the regular expression {pattern:?} has {construct:?}, which is not supported; list the names of the layers"
        ));
    }
    // As in `re.fullmatch`, the end decides between alternatives.
    let whole = format!(r"\A(?:{pattern})\Z");
    Regex::with_options(&whole, RegexOptions::REGEX_OPTION_NONE, Syntax::python())
        .map_err(|error| format!("the regular expression {pattern:?} is not valid: {}", error.description()))
}

/// Returns the first construct of a regular expression that Oniguruma may read in another way than Python: flags,
/// names, references and conditions, sets in sets, and unusual quantifiers.
fn python_only(pattern: &str) -> Option<&str> {
    const GROUPS: [&str; 5] = ["(?:", "(?=", "(?!", "(?<=", "(?<!"];
    let (mut at, mut in_set, mut quantified) = (0, false, false);
    while let Some(character) = pattern[at..].chars().next() {
        let rest = &pattern[at..];
        let (mut len, mut quantifies) = (character.len_utf8(), false);
        match character {
            '\\' => {
                let escaped = rest[1..].chars().next()?;
                len += escaped.len_utf8();
                // Oniguruma has anchors with quotes and angle brackets.
                let is_literal = escaped.is_ascii_punctuation() && !"`'<>".contains(escaped);
                if !is_literal && !"dDwWsS".contains(escaped) {
                    return Some(&rest[..len]);
                }
            }
            ']' => in_set = false,
            '[' if in_set => return Some("["),
            '[' => {
                in_set = true;
                len += usize::from(rest[1..].starts_with('^'));
                // The first bracket is a member of the set.
                if rest[len..].starts_with(']') {
                    return Some(&rest[..=len]);
                }
            }
            '&' | '|' | '~' | '-' if in_set && rest[1..].starts_with(character) => return Some(&rest[..2]),
            _ if in_set => {}
            '(' if rest.starts_with("(?") => {
                let group = GROUPS.iter().find(|group| rest.starts_with(**group));
                let Some(group) = group else { return Some(rest.get(..3).unwrap_or(rest)) };
                (len, quantifies) = (group.len(), true);
            }
            // Nothing to repeat.
            '(' => quantifies = true,
            '*' | '+' | '?' | '{' => {
                let end = rest.find('}').filter(|_| character == '{').unwrap_or(0);
                let quantifier = &rest[..=end];
                if quantified || character == '{' && !is_repetition(quantifier) {
                    return Some(quantifier);
                }
                (len, quantifies) = (quantifier.len(), true);
                // A lazy quantifier matches the same whole names.
                len += usize::from(character != '{' && rest[len..].starts_with('?'));
            }
            _ => {}
        }
        (at, quantified) = (at + len, quantifies);
    }
    None
}

/// Returns whether this is `{n}`, `{n,}` or `{n,m}`.
fn is_repetition(quantifier: &str) -> bool {
    let is_count = |count: &str| !count.is_empty() && count.bytes().all(|byte| byte.is_ascii_digit());
    let counts = quantifier.trim_matches(['{', '}']);
    let (from, to) = counts.split_once(',').unwrap_or((counts, ""));
    is_count(from) && (to.is_empty() || is_count(to))
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
mod tests {
    use safetensors::Dtype;
    use safetensors::tensor::TensorView;
    use xlaunch_data::TOKENIZER_FILE;

    use super::*;
    use crate::pretrained::Source;
    use crate::weights::Weights;

    #[test]
    fn every_linear_layer_of_every_family_is_a_module_with_its_name_in_peft() {
        for arch in Arch::all() {
            let shape = ModelShape { layers: 2, experts: arch.base().experts.min(2), ..arch.base() };
            let lora = LoraSection { rank: 2, ..LoraSection::default() };
            let layout = layout(&shape, &lora).unwrap();
            let found = tensors(&shape, &layout);
            assert_eq!(found.len(), 2 * layout.adapted_modules().len(), "{arch:?}");
            assert_eq!(found.len(), 2 * 2 * Module::all(&shape).len(), "{arch:?}");
            // All matrices of blocks are adapted, but those of experts.
            if shape.experts > 0 {
                continue;
            }
            let block = Family::of(arch).names.block(0);
            let is_matrix = |tensor: &&Mapped| tensor.name.starts_with(&block) && tensor.shape.len() == 2;
            let model = weights(&shape, &layout);
            assert_eq!(model.values().filter(is_matrix).count(), Module::all(&shape).len(), "{arch:?}");
        }
    }

    /// Writes an adapter of ones with the tensors whose names are kept.
    fn write(
        dir: &Path,
        base: &Path,
        shape: &ModelShape,
        keys: &[(&str, Value)],
        keep: impl Fn(&str) -> bool,
    ) {
        let lora = LoraSection { rank: 2, ..LoraSection::default() };
        let mut config = config(shape, &lora, base).unwrap();
        keys.iter().for_each(|(key, value)| config[*key] = value.clone());
        fs_err::write(dir.join(ADAPTER_CONFIG), config.to_string()).unwrap();
        let kept: Vec<Mapped> = tensors(shape, &layout(shape, &lora).unwrap())
            .into_iter()
            .filter(|tensor| keep(&tensor.name))
            .collect();
        let ones: Vec<u8> = kept
            .iter()
            .flat_map(|tensor| tensor.elements.clone())
            .flat_map(|_| 1_f32.to_le_bytes())
            .collect();
        let view = |tensor: &Mapped| {
            let bytes = &ones[..4 * tensor.elements.len()];
            (tensor.name.clone(), TensorView::new(Dtype::F32, tensor.shape.clone(), bytes).unwrap())
        };
        let file = safetensors::serialize(kept.iter().map(view), None).unwrap();
        fs_err::write(dir.join(ADAPTER_WEIGHTS), file).unwrap();
    }

    /// Writes such an adapter, and reads it.
    fn reread(
        shape: &ModelShape,
        keys: &[(&str, Value)],
        keep: impl Fn(&str) -> bool,
    ) -> Result<Adapter, String> {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), Path::new("base"), shape, keys, keep);
        let directory = PeftDirectory::open(dir.path()).unwrap();
        directory.read(shape).map_err(|error| error.to_string())
    }

    #[test]
    fn adapter_in_a_pickle_is_refused_as_one() {
        let dir = tempfile::tempdir().unwrap();
        let shape = Arch::Llama.base();
        write(dir.path(), Path::new("base"), &shape, &[], |_| true);
        let weights = dir.path().join(ADAPTER_WEIGHTS);
        fs_err::rename(weights, dir.path().join("adapter_model.bin")).unwrap();
        let base = Weights::File("base".into());
        let error = base.with_adapter(dir.path()).unwrap_err().to_string();
        assert!(error.contains("adapter_model.bin") && error.contains("save_pretrained"), "{error}");
    }

    #[test]
    fn layers_that_peft_did_not_adapt_keep_their_weights() {
        let shape = ModelShape { layers: 3, ..Arch::Llama.base() };
        let last = |name: &str| name.contains(".layers.2.");
        let pattern = json!(r".*\.2\..*proj");
        let attention = ["q_proj", "k_proj", "v_proj", "o_proj"].map(|name| format!("2.self_attn.{name}"));
        let mlp = ["gate_proj", "up_proj", "down_proj"].map(|name| format!("layers.2.mlp.{name}"));
        let in_last = [&attention[..], &mlp].concat();
        for keys in [
            ("layers_to_transform", json!([2])),
            ("layers_to_transform", json!(2)),
            ("target_modules", pattern),
            ("target_modules", json!(in_last)),
        ] {
            let adapter = reread(&shape, std::slice::from_ref(&keys), last).unwrap();
            let values: Vec<f32> = adapter.pieces().flat_map(|(_, values)| values).collect();
            let modules = layout(&shape, &adapter.lora).unwrap().adapted_modules();
            let each = Module::all(&shape).len();
            assert_eq!(modules.len(), 3 * each);
            for (index, module) in modules.iter().enumerate() {
                let expected = if index / each == 2 { 1.0 } else { 0.0 };
                let all = values[module.a.clone()].iter().chain(&values[module.b.clone()]);
                assert!(all.copied().all(|value| value == expected), "{keys:?}: {index}");
            }
        }
        // A file that lacks what its configuration does not leave out.
        let missing = |keys: &[(&str, Value)], keep: &dyn Fn(&str) -> bool| {
            let error = reread(&shape, keys, keep).unwrap_err();
            assert!(error.contains("layers.0.") || error.contains("layers.2."), "{error}");
            assert!(error.contains("not found") && error.contains("`layers_to_transform`"), "{error}");
        };
        missing(&[], &last);
        missing(&[("layers_to_transform", json!([0, 2]))], &last);
        missing(&[("layers_to_transform", json!([2]))], &|name| {
            last(name) && !name.contains("q_proj.lora_A")
        });
    }

    /// PEFT leaves out such tensors when it loads an adapter.
    #[test]
    fn tensors_of_layers_that_the_configuration_leaves_out_are_refused() {
        let shape = ModelShape { layers: 3, ..Arch::Llama.base() };
        let attention = json!(["q_proj", "k_proj", "v_proj", "o_proj"]);
        for keys in [
            ("target_modules", attention.clone()),
            ("target_modules", json!(["proj"])),
            ("exclude_modules", json!(["mlp.up_proj"])),
            ("exclude_modules", json!(r".*\.mlp\.(up|down)_proj")),
            ("layers_to_transform", json!([0, 2])),
            ("layers_to_transform", json!(1)),
            ("target_modules", json!(r".*\.(q|k|v|o)_proj")),
            ("target_modules", json!(r"^(?!.*\.1\.)model\.layers\.[0-9]{1,2}\.(?:self_attn|mlp)\.\w+$")),
            // The whole name has to match.
            ("target_modules", json!("q_proj|.*_proj.")),
        ] {
            let error = reread(&shape, std::slice::from_ref(&keys), |_| true).unwrap_err();
            assert!(error.contains("PEFT does not read it"), "{keys:?}: {error}");
        }
        reread(&shape, &[("target_modules", attention)], |name| name.contains("self_attn")).unwrap();
        for all in [
            "all-linear",
            "All-Linear",
            r".*_proj",
            r"model\.layers\.\d+\.\S+?\.(q_proj|[^q]+_proj)",
            "model|model.*",
        ] {
            reread(&shape, &[("target_modules", json!(all))], |_| true).unwrap();
        }
        let parameters = ("target_parameters", json!(["q_proj.weight"]));
        reread(&shape, &[("target_modules", json!([])), parameters], |name| name.contains("q_proj")).unwrap();
    }

    #[test]
    fn regular_expressions_that_python_may_read_otherwise_are_refused() {
        let shape = ModelShape { layers: 1, ..Arch::Llama.base() };
        for (pattern, why) in [
            ("(?i).*Q_PROJ", "has \"(?i\""),
            (r"(?P<a>.*)_proj", "has \"(?P\""),
            (r"(.).*\1_proj", r#"has "\\1""#),
            (".*++_proj", "has \"+\""),
            (".*_proj{,2}", "has \"{,2}\""),
            (".*{2}?_proj", "has \"{2}\""),
            ("[[:alpha:].0_]+", "has \"[\""),
            ("[]a].*", "has \"[]\""),
            ("[a--b].*", "has \"--\""),
            (r".*_proj\'", r#"has "\\'""#),
            ("(*FAIL)", "has \"*\""),
            (".*(_proj", "is not valid"),
        ] {
            for key in ["target_modules", "exclude_modules"] {
                let error = reread(&shape, &[(key, json!(pattern))], |_| true).unwrap_err();
                assert!(error.contains(key) && error.contains(why), "{pattern}: {error}");
            }
        }
    }

    #[test]
    fn names_and_targets_are_those_that_peft_writes() {
        let shape = ModelShape { layers: 1, ..Arch::Llama.base() };
        let lora =
            LoraSection { rank: 2, targets: vec!["q".into(), "down".into()], ..LoraSection::default() };
        let names: Vec<String> =
            tensors(&shape, &layout(&shape, &lora).unwrap()).into_iter().map(|tensor| tensor.name).collect();
        assert!(
            names.contains(&"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight".into()),
            "{names:?}"
        );
        assert!(
            names.contains(&"base_model.model.model.layers.0.mlp.down_proj.lora_B.weight".into()),
            "{names:?}"
        );
        let written = config(&shape, &lora, Path::new("base")).unwrap();
        assert_eq!(
            (&written["target_modules"], &written["lora_alpha"]),
            (&json!(["down_proj", "q_proj"]), &json!(4))
        );
        // Two layers of GPT-2 have names that end alike.
        let lora = LoraSection { targets: vec!["o".into()], ..lora };
        let shape = ModelShape { layers: 1, ..Arch::Gpt2.base() };
        let written = config(&shape, &lora, Path::new("base")).unwrap();
        assert_eq!(
            (&written["target_modules"], &written["fan_in_fan_out"]),
            (&json!(["attn.c_proj"]), &json!(true))
        );
    }

    #[test]
    fn tokenizer_and_template_beside_an_adapter_come_first() {
        let dir = tempfile::tempdir().unwrap();
        let (base, adapter) = (dir.path().join("base"), dir.path().join("adapter"));
        let model = json!({
            "model_type": "llama", "vocab_size": 300, "hidden_size": 16, "intermediate_size": 8,
            "num_hidden_layers": 1, "num_attention_heads": 2, "eos_token_id": 7,
        });
        let text = |dir: &Path, token: &str| {
            let special = json!({"id": 1, "content": token, "special": true, "single_word": false,
                "lstrip": false, "rstrip": false, "normalized": false});
            let file = json!({"added_tokens": [special],
                "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}});
            fs_err::write(dir.join(TOKENIZER_FILE), file.to_string()).unwrap();
            fs_err::write(dir.join("chat_template.jinja"), token).unwrap();
        };
        fs_err::create_dir(&base).unwrap();
        fs_err::create_dir(&adapter).unwrap();
        fs_err::write(base.join("config.json"), model.to_string()).unwrap();
        text(&base, "<base>");
        let shape = Source::find(&base).unwrap().shape;
        write(&adapter, &base, &shape, &[], |_| true);
        let check = |token: &str| {
            for source in [
                Source::find(&adapter).unwrap(),
                Source::find(&base).unwrap().with_adapter(Some(&adapter)).unwrap(),
            ] {
                let (tokenizer, inherited) = (source.tokenizer.unwrap(), source.inherited.unwrap());
                assert_eq!(tokenizer.added_token(1), Some(token));
                assert_eq!((inherited.chat_template(), inherited.end_ids()), (Some(token), vec![7]));
            }
            // What a job that starts from the adapter passes on.
            let inherited = Weights::open(&adapter).unwrap().inherited().unwrap();
            assert_eq!(inherited.chat_template(), Some(token));
        };
        check("<base>");
        text(&adapter, "<own>");
        check("<own>");
    }
}
