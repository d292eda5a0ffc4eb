//! Writes the tensors of an export as the checkpoint is read: pieces of the arena arrive in any order, from several
//! threads.
//!
//! A piece is written to its file at once. Only matrices that have another order in files wait in memory until they are
//! complete, so a few of them are in memory regardless of the size of the model.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use fs_err::File;
use half::bf16;
use serde_json::{Map, Value, json};

use super::tensor_names::{Mapped, Order};
use super::{ModelError, WEIGHTS};

/// Metadata that marks files written by an export.
pub(super) const PRODUCER: (&str, &str) = ("producer", "xlaunch");

/// Element type of the exported weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExportDtype {
    /// The same as in checkpoints.
    #[default]
    Fp32,
    /// Rounded to nearest.
    Bf16,
}

impl ExportDtype {
    /// Returns PyTorch's name of the type.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Fp32 => "float32",
            Self::Bf16 => "bfloat16",
        }
    }

    /// Returns the type of a tensor in an export of this type.
    fn of(self, tensor: &Mapped) -> Self {
        if tensor.exact { Self::Fp32 } else { self }
    }

    fn width(self) -> usize {
        match self {
            Self::Fp32 => 4,
            Self::Bf16 => 2,
        }
    }

    /// Encodes the values in little-endian order; `None` if one is not finite, or becomes infinite by rounding.
    fn encode(self, values: &[f32]) -> Option<Vec<u8>> {
        if !values.iter().all(|value| value.is_finite()) {
            return None;
        }
        match self {
            Self::Fp32 => Some(values.iter().flat_map(|value| value.to_le_bytes()).collect()),
            Self::Bf16 => {
                let rounded: Vec<bf16> = values.iter().map(|value| bf16::from_f32(*value)).collect();
                let finite = rounded.iter().all(|value| value.is_finite());
                finite.then(|| rounded.iter().flat_map(|value| value.to_le_bytes()).collect())
            }
        }
    }
}

/// Maps tensors to files and offsets. Pure.
#[derive(Debug)]
pub(crate) struct Plan {
    tensors: Vec<Planned>,
    files: Vec<PlannedFile>,
    dtype: ExportDtype,
}

#[derive(Debug)]
struct Planned {
    tensor: Mapped,
    file: usize,
    /// Offset in the file.
    at: u64,
}

#[derive(Debug)]
struct PlannedFile {
    name: String,
    /// Length field and text of the header.
    header: Vec<u8>,
    bytes: u64,
}

impl Plan {
    /// Plans files with at most `max_bytes` of tensors each, unless a single tensor is larger.
    pub(crate) fn new(tensors: Vec<Mapped>, dtype: ExportDtype, max_bytes: u64) -> Self {
        let mut groups: Vec<Vec<Mapped>> = Vec::new();
        let mut filled = 0;
        for tensor in tensors {
            let bytes = tensor_bytes(&tensor, dtype);
            match groups.last_mut().filter(|_| filled + bytes <= max_bytes) {
                Some(group) => {
                    filled += bytes;
                    group.push(tensor);
                }
                None => {
                    filled = bytes;
                    groups.push(vec![tensor]);
                }
            }
        }
        let count = groups.len();
        let mut plan = Self { tensors: Vec::new(), files: Vec::new(), dtype };
        for (index, group) in groups.into_iter().enumerate() {
            let name = match count {
                1 => WEIGHTS.to_owned(),
                _ => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
            };
            plan.add(name, group);
        }
        plan
    }

    /// Plans a single file of this name.
    pub(crate) fn single(name: &str, tensors: Vec<Mapped>, dtype: ExportDtype) -> Self {
        let mut plan = Self { tensors: Vec::new(), files: Vec::new(), dtype };
        plan.add(name.into(), tensors);
        plan
    }

    fn add(&mut self, name: String, group: Vec<Mapped>) {
        let (file, mut end) = (self.files.len(), 0);
        let mut header = Map::new();
        header.insert("__metadata__".into(), json!({"format": "pt", PRODUCER.0: PRODUCER.1}));
        let mut placed = Vec::with_capacity(group.len());
        for tensor in group {
            let begin = end;
            end += tensor_bytes(&tensor, self.dtype);
            let dtype = if self.dtype.of(&tensor) == ExportDtype::Bf16 { "BF16" } else { "F32" };
            let info = json!({"dtype": dtype, "shape": tensor.shape, "data_offsets": [begin, end]});
            header.insert(tensor.name.clone(), info);
            placed.push((tensor, begin));
        }
        let mut text = Value::Object(header).to_string().into_bytes();
        // Data starts at a multiple of 8 bytes.
        text.resize(text.len().next_multiple_of(8), b' ');
        let header = [&(text.len() as u64).to_le_bytes()[..], &text].concat();
        let data = header.len() as u64;
        self.tensors.extend(placed.into_iter().map(|(tensor, begin)| Planned {
            tensor,
            file,
            at: data + begin,
        }));
        self.files.push(PlannedFile { name, header, bytes: data + end });
    }

    /// Returns `model.safetensors.index.json`, if there are several files.
    pub(crate) fn index(&self) -> Option<Value> {
        let file = |planned: &Planned| json!(self.files[planned.file].name);
        let map: Map<String, Value> =
            self.tensors.iter().map(|planned| (planned.tensor.name.clone(), file(planned))).collect();
        let bytes: u64 = self.tensors.iter().map(|planned| tensor_bytes(&planned.tensor, self.dtype)).sum();
        (self.files.len() > 1).then(|| json!({"metadata": {"total_size": bytes}, "weight_map": map}))
    }

    /// Returns the total size of all files in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }
}

fn tensor_bytes(tensor: &Mapped, dtype: ExportDtype) -> u64 {
    (tensor.elements.len() * dtype.of(tensor).width()) as u64
}

/// Values that another order permutes, with the number of those that are missing.
type Incomplete = (Vec<f32>, usize);

/// The files of a plan during writing.
#[derive(Debug)]
pub(crate) struct Writer {
    plan: Plan,
    files: Vec<File>,
    dir: PathBuf,
    /// Indices of the tensors in the order of the arena.
    by_place: Vec<usize>,
    /// Incomplete [units](Mapped::unit) by tensor and number.
    pending: Mutex<HashMap<(usize, usize), Incomplete>>,
    written: AtomicUsize,
}

impl Writer {
    /// Creates the files in `dir`.
    pub(crate) fn create(plan: Plan, dir: &Path) -> Result<Self, ModelError> {
        let create = |file: &PlannedFile| {
            let created = File::create(dir.join(&file.name))?;
            created.file().set_len(file.bytes)?;
            created.file().write_all_at(&file.header, 0)?;
            Ok(created)
        };
        let files = plan.files.iter().map(create).collect::<io::Result<Vec<File>>>();
        let files = files.map_err(|error| write_error(dir, &error))?;
        let mut by_place: Vec<usize> = (0..plan.tensors.len()).collect();
        by_place.sort_by_key(|index| plan.tensors[*index].tensor.elements.start);
        let (pending, written) = (Mutex::default(), AtomicUsize::new(0));
        Ok(Self { plan, files, dir: dir.into(), by_place, pending, written })
    }

    /// Directory of the files.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Writes values that start at element `at` of the arena.
    pub(crate) fn put(&self, at: usize, values: &[f32]) -> Result<(), ModelError> {
        let piece = at..at + values.len();
        let tensor = |index: &usize| &self.plan.tensors[*index].tensor;
        let first = self.by_place.partition_point(|index| tensor(index).elements.end <= piece.start);
        for index in &self.by_place[first..] {
            let elements = &tensor(index).elements;
            if elements.start >= piece.end {
                break;
            }
            let part = elements.start.max(piece.start)..elements.end.min(piece.end);
            self.put_part(*index, &values[part.start - at..part.end - at], part)?;
        }
        Ok(())
    }

    fn put_part(&self, index: usize, values: &[f32], part: Range<usize>) -> Result<(), ModelError> {
        let Planned { tensor, .. } = &self.plan.tensors[index];
        let first = part.start - tensor.elements.start;
        if tensor.order == Order::Same {
            return self.write(index, first, values);
        }
        let unit = tensor.unit();
        let (mut first, mut values) = (first, values);
        while !values.is_empty() {
            let (number, start) = (first / unit, first % unit);
            let (own, rest) = values.split_at(values.len().min(unit - start));
            let whole = {
                let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
                let key = (index, number);
                let (matrix, missing) = pending.entry(key).or_insert_with(|| (vec![0.0; unit], unit));
                matrix[start..start + own.len()].copy_from_slice(own);
                *missing = missing.saturating_sub(own.len());
                if *missing == 0 { pending.remove(&key) } else { None }
            };
            if let Some((matrix, _)) = whole {
                self.write(index, number * unit, &tensor.to_file(&matrix))?;
            }
            (first, values) = (first + own.len(), rest);
        }
        Ok(())
    }

    /// Writes values of a tensor in their final order, starting at its value `first`.
    fn write(&self, index: usize, first: usize, values: &[f32]) -> Result<(), ModelError> {
        let Planned { tensor, file, at } = &self.plan.tensors[index];
        let dtype = self.plan.dtype.of(tensor);
        let bytes = dtype.encode(values).ok_or_else(|| ModelError::Tensor {
            path: self.dir.join(&self.plan.files[*file].name),
            name: tensor.name.clone(),
            problem: format!("it has values that are not finite in {}", dtype.name()),
        })?;
        let at = at + (first * dtype.width()) as u64;
        let file = &self.files[*file];
        file.file().write_all_at(&bytes, at).map_err(|error| write_error(file.path(), &error))?;
        self.written.fetch_add(values.len(), Ordering::Relaxed);
        Ok(())
    }

    /// Makes everything durable.
    ///
    /// # Errors
    /// If syncing fails, or a value is missing.
    pub(crate) fn finish(self) -> Result<(), ModelError> {
        let expected: usize = self.plan.tensors.iter().map(|planned| planned.tensor.elements.len()).sum();
        let written = self.written.into_inner();
        if written != expected {
            let reason = format!("only {written} of {expected} values were read");
            return Err(ModelError::Write { path: self.dir, reason });
        }
        let sync = |file: &File| file.sync_all().map_err(|error| write_error(file.path(), &error));
        self.files.iter().try_for_each(sync)
    }
}

pub(crate) fn write_error(path: &Path, error: &io::Error) -> ModelError {
    let is_full = matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded);
    let help = if is_full { "\nhelp: free space, or name another directory with --output" } else { "" };
    ModelError::Write { path: path.into(), reason: format!("{error}{help}") }
}

#[cfg(test)]
mod tests {
    use xlaunch_spec::model::PRESETS;

    use super::*;
    use crate::huggingface::families::Family;
    use crate::huggingface::tensor_names;
    use crate::model::layout::Layout;

    fn plan(max_bytes: u64) -> Plan {
        let shape = &PRESETS[0].1;
        let tensors = tensor_names::tensors(Family::of(shape.arch).names, shape, &Layout::new(shape));
        Plan::new(tensors, ExportDtype::Bf16, max_bytes)
    }

    #[test]
    fn large_models_are_split_into_files_that_an_index_lists() {
        let whole = plan(u64::MAX);
        assert_eq!((whole.files.len(), whole.files[0].name.as_str(), whole.index()), (1, WEIGHTS, None));
        let split = plan(200_000);
        let count = split.files.len();
        assert!(count > 3, "{count}");
        assert_eq!(split.files[1].name, format!("model-00002-of-{count:05}.safetensors"));
        let index = split.index().unwrap();
        let total: u64 = split.tensors.iter().map(|planned| tensor_bytes(&planned.tensor, split.dtype)).sum();
        assert_eq!(index["metadata"]["total_size"], total);
        for (at, file) in split.files.iter().enumerate() {
            let tensors: Vec<&Planned> = split.tensors.iter().filter(|planned| planned.file == at).collect();
            let bytes: u64 = tensors.iter().map(|planned| tensor_bytes(&planned.tensor, split.dtype)).sum();
            assert!(bytes <= 200_000 || tensors.len() == 1, "{}", file.name);
            assert!(tensors.iter().all(|planned| index["weight_map"][&planned.tensor.name] == file.name));
        }
    }

    #[test]
    fn values_that_overflow_in_bf16_are_refused() {
        assert!(ExportDtype::Fp32.encode(&[f32::MAX]).is_some());
        assert!(ExportDtype::Bf16.encode(&[f32::MAX]).is_none());
        assert!(ExportDtype::Fp32.encode(&[0.0, f32::NAN]).is_none());
        assert_eq!(ExportDtype::Bf16.encode(&[1.0]).unwrap(), [0x80, 0x3f]);
    }
}
