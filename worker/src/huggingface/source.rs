//! Reads a model in Hugging Face's layout: first checks every tensor's name, shape and type, then passes the values on
//! as pieces of the arena.
//!
//! Symbolic links are followed, because the library's cache consists of them; names in the index must be plain file
//! names.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use fs_err::File;
use half::{bf16, f16};
use rayon::ThreadPool;
use rayon::prelude::*;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde::Deserialize;
use serde_json::{Map, Value};
use xlaunch_spec::model::ModelShape;

use super::families::Family;
use super::tensor_names::{self, Mapped, Order};
use super::without_effect::FURTHER_BLOCKS;
use super::{ADAPTER_CONFIG, INDEX, ModelError, WEIGHTS, config, mxfp4};
use crate::checkpoint::{Abandoned, Arena, Piece, Sink, read_header};
use crate::inherited::{CONFIG, GENERATION_CONFIG, SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG};
use crate::model::layout::Layout;

/// Size limit of files that are read whole. An index has about 100 bytes per tensor.
pub(crate) const MAX_CONFIG_BYTES: u64 = 4 << 20;
const MAX_INDEX_BYTES: u64 = 64 << 20;
/// Values per piece, unless a tensor has another order in the arena.
const READ_LEN: usize = 1 << 20;

/// Formats of weights that are not read, with a remedy.
const OTHER_WEIGHTS: [(&[&str], &str); 4] = [
    (
        &["pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth"],
        "pickles are not read, as they can run code; convert them with `model.save_pretrained(DIR)` in Python",
    ),
    (
        &["adapter_model.safetensors", "adapter_model.bin", "adapter_config.json"],
        "an adapter is read from its directory, which has an adapter_config.json and an adapter_model.safetensors; \
         save it with PEFT's `save_pretrained(DIR)`",
    ),
    (&["tf_model.h5"], "weights of TensorFlow are not read; convert them with transformers"),
    (&["flax_model.msgpack"], "weights of Flax are not read; convert them with transformers"),
];

/// A directory with a model that this trainer can represent, according to its `config.json`.
#[derive(Clone, Debug)]
pub struct Directory {
    path: PathBuf,
    shape: ModelShape,
    /// The configuration ties the head to the embedding, but the files have another head.
    untied: bool,
    /// Number of blocks for the prediction of further tokens, which are not read.
    further_blocks: u64,
}

/// The files of a directory, whose tensors match those of a model.
#[derive(Debug)]
pub(crate) struct Weights {
    files: Vec<(PathBuf, File)>,
    parts: Vec<Part>,
}

/// Position of a tensor's values.
#[derive(Debug)]
struct Part {
    tensor: Mapped,
    file: usize,
    /// Offset in the file.
    at: u64,
    dtype: Dtype,
    /// File and offset of the scales of blocks in MXFP4.
    scales: Option<(usize, u64)>,
}

/// A tensor of the files: the index of its file, its entry there, and the offset of the file's data.
type Found = (usize, TensorInfo, u64);

/// Reason why reading ended early.
enum Failure {
    Model(ModelError),
    Abandoned,
}

impl From<ModelError> for Failure {
    fn from(error: ModelError) -> Self {
        Self::Model(error)
    }
}

impl Directory {
    /// Returns whether `path` is a model in Hugging Face's layout.
    pub fn is_one(path: &Path) -> bool {
        path.join(CONFIG).is_file()
    }

    /// Reads `config.json`.
    ///
    /// # Errors
    /// If the file cannot be read, or describes a model that cannot be represented.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let file = path.join(CONFIG);
        let json = read_whole(&file, MAX_CONFIG_BYTES)?;
        let shape = config::parse(&file, &json)?;
        check_settings(path)?;
        let further_blocks = config::further_blocks(&json);
        let mut directory = Self { path: path.into(), shape, untied: false, further_blocks };
        if directory.shape.tied && directory.has_other_head() {
            (directory.shape.tied, directory.untied) = (false, true);
        }
        Ok(directory)
    }

    /// Returns the path of the model's directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The model's shape. Its sequence length is the longest one that the model supports.
    pub fn shape(&self) -> &ModelShape {
        &self.shape
    }

    /// Returns a message for the user if parts of the files are not read, or contradict `config.json`.
    pub fn note(&self) -> Option<String> {
        let further = (self.further_blocks > 0).then(|| {
            format!(
                "{}: `{FURTHER_BLOCKS}` is {}: blocks that predict further tokens are neither trained nor exported",
                self.path.join(CONFIG).display(),
                self.further_blocks
            )
        });
        let untied = self.untied.then(|| {
            format!(
                "{}: `tie_word_embeddings` is true, but the files have a head of their own, which is used; set it to \
                 false to be read alike by all programs",
                self.path.join(CONFIG).display()
            )
        });
        let adapter = self
            .path
            .join(ADAPTER_CONFIG)
            .exists()
            .then(|| format!("{}: the adapter beside the model is not added to it", self.path.display()));
        let notes: Vec<String> = [further, untied, adapter].into_iter().flatten().collect();
        (!notes.is_empty()).then(|| notes.join("\n"))
    }

    /// Returns whether the files have a head that differs from the embedding. Transformers 5 uses both then, even if
    /// `config.json` says that they are tied. Files that cannot be read are reported by [`weights`](Self::weights).
    fn has_other_head(&self) -> bool {
        let names = Family::of(self.shape.arch).names;
        let (mut head, mut embedding) = (None, None);
        for name in self.files().into_iter().flat_map(BTreeMap::into_keys) {
            let Ok((file, _)) = open(&self.path.join(name)) else { return false };
            let Ok((header, data)) = read_header(&file) else { return false };
            for (name, info) in header.tensors() {
                let bare = name.strip_prefix(names.prefix).unwrap_or(&name).strip_suffix(".weight");
                let slot = match bare {
                    Some(bare) if bare == names.head => &mut head,
                    Some(bare) if bare == names.embedding => &mut embedding,
                    _ => continue,
                };
                let Ok(file) = file.file().try_clone() else { return false };
                let at = data.saturating_add(info.data_offsets.0 as u64);
                let len = info.data_offsets.1.saturating_sub(info.data_offsets.0);
                *slot = Some((file, at, len));
            }
        }
        head.zip(embedding).is_some_and(|(head, embedding)| !are_equal(&head, &embedding))
    }

    /// Opens the weights for a model that differs from this one at most in its sequence length. Reads only the headers.
    pub(crate) fn weights(&self, shape: &ModelShape, layout: &Layout) -> Result<Weights, ModelError> {
        let files = self.files()?;
        let names = Family::of(shape.arch).names;
        let mut found: HashMap<String, Found> = HashMap::new();
        let mut opened = Vec::with_capacity(files.len());
        for (index, (name, expected)) in files.into_iter().enumerate() {
            let path = self.path.join(name);
            let (file, bytes) = open(&path).map_err(|error| read_error(&path, &error))?;
            let (header, data) = read_header(&file).map_err(|error| read_error(&path, &error))?;
            check_length(&path, &header, data, bytes)?;
            for (name, info) in header.tensors() {
                if found.contains_key(&name) {
                    return Err(tensor_error(&path, &name, "another file contains it, too"));
                }
                check_place(&path, &name, info, data, bytes)?;
                found.insert(name, (index, info.clone(), data));
            }
            // Indexes may name frequencies of rotation that newer versions of the library no longer save.
            let is_missing =
                |name: &&String| !found.contains_key(*name) && !tensor_names::is_derived(name, names, shape);
            if let Some(missing) = expected.iter().find(is_missing) {
                return Err(tensor_error(&path, missing, &format!("not found, although {INDEX} names it")));
            }
            opened.push((path, file));
        }
        self.assign(shape, layout, opened, found)
    }

    /// Returns the names of the files, with the tensors that the index expects in each.
    fn files(&self) -> Result<BTreeMap<String, Vec<String>>, ModelError> {
        let index = self.path.join(INDEX);
        refuse_other_weights(&self.path)?;
        let has_weights = self.path.join(WEIGHTS).exists();
        if !has_weights
            && !index.exists()
            && let Some(other) = other_safetensors(&self.path)
        {
            let reason = format!(
                "it has neither {WEIGHTS} nor {INDEX}, but {other}, which is not read: download the missing file, or \
                 convert the model with `model.save_pretrained(DIR)` in Python"
            );
            return Err(ModelError::Read { path: self.path.clone(), reason });
        }
        if has_weights || !index.exists() {
            return Ok(BTreeMap::from([(WEIGHTS.to_owned(), Vec::new())]));
        }
        files_of_index(&index, &read_whole(&index, MAX_INDEX_BYTES)?)
    }

    /// Finds every tensor of the model among those of the files, and refuses all others.
    fn assign(
        &self,
        shape: &ModelShape,
        layout: &Layout,
        files: Vec<(PathBuf, File)>,
        mut found: HashMap<String, Found>,
    ) -> Result<Weights, ModelError> {
        let family = Family::of(shape.arch);
        let (prefix, head) = (family.names.prefix, format!("{}.weight", family.names.head));
        let embedding = format!("{prefix}{}.weight", family.names.embedding);
        // Names in a model without a head lack the prefix.
        let whole = found.keys().any(|name| name.starts_with(prefix));
        let mut parts = Vec::new();
        for tensor in tensor_names::tensors(family.names.found_in(found.keys()), shape, layout) {
            let mut bare = tensor.name.strip_prefix(prefix).filter(|_| !whole).unwrap_or(&tensor.name);
            // As in transformers, one of two tied tensors is enough.
            if shape.tied
                && tensor.name == embedding
                && !found.contains_key(bare)
                && found.contains_key(&head)
            {
                bare = &head;
            }
            if let Some(part) = quantized(&files, &mut found, bare, &tensor)? {
                parts.push(part);
                continue;
            }
            let Some((file, info, data)) = found.remove(bare) else {
                return Err(tensor_error(&self.path, bare, &not_found(&tensor.name, found.keys())));
            };
            check_type(&files[file].0, bare, &info, &tensor)?;
            let at = data.saturating_add(info.data_offsets.0 as u64);
            parts.push(Part { tensor, file, at, dtype: info.dtype, scales: None });
        }
        let mut others: Vec<&String> =
            found.keys().filter(|name| !tensor_names::is_derived(name, family.names, shape)).collect();
        others.sort_unstable();
        match others.first() {
            None => Ok(Weights { files, parts }),
            Some(name) => {
                let (file, ..) = found[*name];
                let reason = format!("the model of {CONFIG} has no such parameter");
                Err(tensor_error(&files[file].0, name, &reason))
            }
        }
    }
}

/// Requires that the other files of settings, which exports write back, can be read.
fn check_settings(path: &Path) -> Result<(), ModelError> {
    for name in [GENERATION_CONFIG, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP] {
        let file = path.join(name);
        if file.exists() {
            let json = read_whole(&file, MAX_CONFIG_BYTES)?;
            serde_json::from_slice::<Map<String, Value>>(&json).map_err(|error| ModelError::Read {
                path: file.clone(),
                reason: format!("not an object of JSON: {error}"),
            })?;
        }
    }
    Ok(())
}

/// Returns the name of a file in this format, such as `consolidated.safetensors`.
fn other_safetensors(path: &Path) -> Option<String> {
    let names =
        std::fs::read_dir(path).ok()?.flatten().filter_map(|file| file.file_name().into_string().ok());
    names.filter(|name| name.ends_with(".safetensors")).min()
}

/// Finds a tensor of experts among those that are quantized to MXFP4.
fn quantized(
    files: &[(PathBuf, File)],
    found: &mut HashMap<String, Found>,
    name: &str,
    tensor: &Mapped,
) -> Result<Option<Part>, ModelError> {
    let Some(tensor) = tensor.transposed().filter(|_| !found.contains_key(name)) else { return Ok(None) };
    let [blocks, scales] = mxfp4::ENDINGS.map(|ending| format!("{name}{ending}"));
    if !found.contains_key(&blocks) {
        return Ok(None);
    }
    let shapes = mxfp4::shapes(&tensor.shape);
    let mut place = |name: &str, shape: &[usize]| {
        let Some((file, info, data)) = found.remove(name) else {
            return Err(tensor_error(&files[0].0, name, "not found"));
        };
        if info.dtype != Dtype::U8 || info.shape != shape {
            let (dtype, theirs) = (info.dtype, &info.shape);
            let problem = format!("it is {dtype:?} {theirs:?}, but the model has U8 {shape:?}");
            return Err(tensor_error(&files[file].0, name, &problem));
        }
        Ok((file, data.saturating_add(info.data_offsets.0 as u64)))
    };
    let ((file, at), scales) = (place(&blocks, &shapes[0])?, place(&scales, &shapes[1])?);
    Ok(Some(Part { tensor, file, at, dtype: Dtype::U8, scales: Some(scales) }))
}

/// Describes a tensor that is missing. Wrappers such as that of `torch.compile` put a prefix before all names, and
/// models of images have the text model as a part.
fn not_found<'a>(name: &str, others: impl Iterator<Item = &'a String> + Clone) -> String {
    if let Some(part) = others.clone().filter(|other| other.contains("language_model.")).min() {
        return format!(
            "not found, but {part:?} is: the files are those of a model of images or sound; save its text model on its \
             own in Python, which consists of `language_model` and `lm_head`"
        );
    }
    let prefixes = others.filter_map(|other| other.strip_suffix(name)).filter(|prefix| prefix.ends_with('.'));
    let Some(prefix) = prefixes.min() else { return "not found".into() };
    let other = format!("{prefix}{name}");
    format!(
        "not found, but {other:?} is: save the model without its wrapper, or remove {prefix:?} from the names"
    )
}

/// Returns whether two tensors, each a file, an offset and a length, have the same bytes.
fn are_equal(a: &(std::fs::File, u64, usize), b: &(std::fs::File, u64, usize)) -> bool {
    let mut offset = 0;
    while a.2 == b.2 && offset < a.2 {
        let len = (a.2 - offset).min(READ_LEN);
        let read = |(file, at, _): &(std::fs::File, u64, usize)| {
            let mut bytes = vec![0; len];
            file.read_exact_at(&mut bytes, at.saturating_add(offset as u64)).map(|()| bytes)
        };
        match (read(a), read(b)) {
            (Ok(a), Ok(b)) if a == b => offset += len,
            _ => return false,
        }
    }
    a.2 == b.2
}

/// Refuses a directory that has other weights than those that are read, the file of such weights, and a single file of
/// a model.
pub(crate) fn refuse_other_weights(path: &Path) -> Result<(), ModelError> {
    if path.join(WEIGHTS).exists() || path.join(INDEX).exists() {
        return Ok(());
    }
    let is_file = path.is_file();
    let found = |name: &&&str| if is_file { path.ends_with(name) } else { path.join(name).exists() };
    for (names, what) in OTHER_WEIGHTS {
        if let Some(name) = names.iter().find(found) {
            let reason =
                if is_file { what.to_owned() } else { format!("it has no {WEIGHTS}, but {name}: {what}") };
            return Err(ModelError::Read { path: path.into(), reason });
        }
    }
    match path.parent().filter(|parent| is_file && Directory::is_one(parent)) {
        None => Ok(()),
        Some(parent) => {
            let reason = format!("it belongs to the model in {}; name that directory", parent.display());
            Err(ModelError::Read { path: path.into(), reason })
        }
    }
}

/// Returns the files that an index names, each with its tensors.
pub(super) fn files_of_index(path: &Path, json: &[u8]) -> Result<BTreeMap<String, Vec<String>>, ModelError> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let invalid = |reason: String| ModelError::Read { path: path.into(), reason };
    let Index { weight_map } = serde_json::from_slice(json).map_err(|error| invalid(error.to_string()))?;
    let mut files: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (tensor, file) in weight_map {
        let plain = Path::new(&file).file_name().is_some_and(|name| name == &*file);
        if !plain || !file.ends_with(".safetensors") || file.contains(char::is_control) {
            return Err(tensor_error(
                path,
                &tensor,
                &format!("{file:?} is not the name of a file in the same directory"),
            ));
        }
        files.entry(file).or_default().push(tensor);
    }
    if files.is_empty() { Err(invalid("it names no tensors".into())) } else { Ok(files) }
}

/// Checks that the file ends with its last tensor: trailing data would be ignored.
fn check_length(path: &Path, header: &Metadata, data: u64, bytes: u64) -> Result<(), ModelError> {
    let end = header.tensors().values().map(|info| info.data_offsets.1 as u64).max().unwrap_or(0);
    match bytes.checked_sub(data.saturating_add(end)) {
        Some(0) | None => Ok(()),
        Some(rest) => {
            let reason = format!("{rest} bytes follow its last tensor: it is damaged, or two files in one");
            Err(ModelError::Read { path: path.into(), reason })
        }
    }
}

/// Checks that a tensor lies within its file. The check of the header has already compared its size with its shape.
pub(crate) fn check_place(
    path: &Path,
    name: &str,
    info: &TensorInfo,
    data: u64,
    bytes: u64,
) -> Result<(), ModelError> {
    let (begin, end) = info.data_offsets;
    let inside = data.checked_add(end as u64).is_some_and(|end| end <= bytes);
    if begin <= end && inside {
        Ok(())
    } else {
        Err(tensor_error(path, name, &format!("its data is outside the file of {bytes} bytes")))
    }
}

/// Checks that a tensor of a file has the type and shape of the model's.
pub(crate) fn check_type(
    path: &Path,
    name: &str,
    info: &TensorInfo,
    tensor: &Mapped,
) -> Result<(), ModelError> {
    if width(info.dtype).is_none() {
        let dtype = info.dtype;
        let problem = format!("its type is {dtype:?}, but only F32, BF16 and F16 are read");
        return Err(tensor_error(path, name, &problem));
    }
    let same = match (&*info.shape, &*tensor.shape) {
        ([rows, theirs], [wanted, ours]) if tensor.prefix => rows >= wanted && theirs == ours,
        (theirs, ours) => theirs == ours,
    };
    if !same {
        let (theirs, ours) = (&info.shape, &tensor.shape);
        return Err(tensor_error(
            path,
            name,
            &format!("its shape is {theirs:?}, but the model has {ours:?}"),
        ));
    }
    Ok(())
}

/// Returns the bytes per value of a type; `None` if that type is not read.
fn width(dtype: Dtype) -> Option<usize> {
    match dtype {
        Dtype::F32 => Some(4),
        Dtype::BF16 | Dtype::F16 => Some(2),
        _ => None,
    }
}

impl Weights {
    /// Reads all weights.
    pub(crate) fn read(&self, threads: &ThreadPool, sink: Sink<'_>) -> Result<(), ModelError> {
        let tasks: Vec<(&Part, Range<usize>)> = self.parts.iter().flat_map(Part::pieces).collect();
        let read = |(part, values)| self.read_piece(part, values, sink);
        match threads.install(|| tasks.into_par_iter().try_for_each(read)) {
            Err(Failure::Model(error)) => Err(error),
            Ok(()) | Err(Failure::Abandoned) => Ok(()),
        }
    }

    /// Reads a range of bytes of a tensor at this offset of a file.
    fn read_bytes(&self, file: usize, at: u64, range: Range<usize>) -> Result<Vec<u8>, ModelError> {
        let (path, file) = &self.files[file];
        let mut bytes = vec![0; range.len()];
        let at = at.saturating_add(range.start as u64);
        file.file().read_exact_at(&mut bytes, at).map_err(|error| read_error(path, &error))?;
        Ok(bytes)
    }

    fn read_piece(&self, part: &Part, range: Range<usize>, sink: Sink<'_>) -> Result<(), Failure> {
        let path = &self.files[part.file].0;
        let values = match part.scales {
            Some((file, at)) => {
                let blocks = self.read_bytes(part.file, part.at, mxfp4::bytes_of_blocks(&range))?;
                let scales = self.read_bytes(file, at, mxfp4::bytes_of_scales(&range))?;
                mxfp4::decode(&blocks, &scales)
            }
            None => {
                let width = width(part.dtype).unwrap_or(size_of::<f32>());
                let bytes = self.read_bytes(part.file, part.at, range.start * width..range.end * width)?;
                decode(&bytes, part.dtype)
            }
        };
        if !values.iter().all(|value| value.is_finite()) {
            return Err(tensor_error(path, &part.tensor.name, "it has values that are not finite").into());
        }
        let at = part.tensor.elements.start + range.start;
        let values = match part.tensor.order {
            Order::Same => values,
            Order::Transposed | Order::Alternating | Order::Rows(_) => part.tensor.to_arena(&values),
        };
        sink(Piece { arena: Arena::Params, at, values }).map_err(|Abandoned| Failure::Abandoned)
    }
}

impl Part {
    /// Returns the range of values of each piece.
    fn pieces(&self) -> impl Iterator<Item = (&Self, Range<usize>)> {
        let len = self.tensor.elements.len();
        // A matrix in another order is read whole. It is small compared with the model.
        let step = if self.tensor.order == Order::Same { READ_LEN } else { self.tensor.unit().max(1) };
        (0..len).step_by(step).map(move |start| (self, start..(start + step).min(len)))
    }
}

pub(crate) fn decode(bytes: &[u8], dtype: Dtype) -> Vec<f32> {
    let pairs = || bytes.chunks_exact(2).map(|pair| [pair[0], pair[1]]);
    match dtype {
        Dtype::BF16 => pairs().map(|pair| bf16::from_le_bytes(pair).to_f32()).collect(),
        Dtype::F16 => pairs().map(|pair| f16::from_le_bytes(pair).to_f32()).collect(),
        _ => bytes
            .chunks_exact(4)
            .map(|four| f32::from_le_bytes([four[0], four[1], four[2], four[3]]))
            .collect(),
    }
}

/// Opens a regular file, or a link to one. Also returns its size.
pub(crate) fn open(path: &Path) -> io::Result<(File, u64)> {
    let file = xlaunch_data::open_regular(path)?;
    let bytes = file.metadata()?.len();
    Ok((File::from_parts(file, path), bytes))
}

pub(crate) fn read_whole(path: &Path, max: u64) -> Result<Vec<u8>, ModelError> {
    xlaunch_data::read_regular(path, max).map_err(|error| read_error(path, &error))
}

pub(crate) fn read_error(path: &Path, error: &io::Error) -> ModelError {
    ModelError::Read { path: path.into(), reason: error.to_string() }
}

/// Builds an error about a tensor. Its name comes from a file, so it is quoted to escape control characters.
pub(crate) fn tensor_error(path: &Path, name: &str, problem: &str) -> ModelError {
    ModelError::Tensor { path: path.into(), name: format!("{name:?}"), problem: problem.into() }
}
