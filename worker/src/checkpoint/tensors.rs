//! Positions of tensors in safetensors files. See <https://huggingface.co/docs/safetensors>, "Format".

use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use fs_err::File;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use xlaunch_data::{LFS_POINTER, LFS_REASON};

use super::{CheckpointError, Portion};
use crate::model::layout::{Param, Parameters};

/// Largest header that the format allows.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Maximum number of tensors in a file: more than ten times that of any supported model.
const MAX_TENSORS: usize = 50_000;
/// Size of the field before the header: the header's length.
const LENGTH_BYTES: usize = size_of::<u64>();

/// The arenas that a checkpoint contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Arena {
    /// Master weights.
    Params,
    /// AdamW's first moment.
    M,
    /// AdamW's second moment.
    V,
}

/// A tensor of a file: a range of one parameter in one of the arenas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stored {
    pub(super) arena: Arena,
    /// Range of elements in the arena.
    pub(super) elements: Range<usize>,
    /// Range of bytes in the file.
    pub(super) bytes: Range<u64>,
}

/// The header of a file, and the tensors after it.
#[derive(Debug)]
pub(super) struct Contents {
    /// The header, including its length field.
    pub(super) header: Vec<u8>,
    /// Tensors in order of offset, without gaps.
    pub(super) tensors: Vec<Stored>,
}

impl Contents {
    /// Describes `model.safetensors`: all parameters, each whole.
    pub(super) fn model(layout: &Parameters) -> io::Result<Self> {
        let tensor = |param: &Param| (Arena::Params, param.name.clone(), param.shape.clone(), param.stored());
        Self::new(layout.params.iter().map(tensor).collect())
    }

    /// Describes a rank's file of moments: the parts of parameters in its portion.
    pub(super) fn moments(layout: &Parameters, portion: &Portion) -> io::Result<Self> {
        let mut tensors = Vec::new();
        for (arena, prefix) in [(Arena::M, "m"), (Arena::V, "v")] {
            for param in &layout.params {
                let stored = param.stored();
                for (part, _) in portion.within(&stored) {
                    let (first, end) = (part.start - stored.start, part.end - stored.start);
                    let name = format!("{prefix}.{}[{first}:{end}]", param.name);
                    tensors.push((arena, name, vec![part.len()], part));
                }
            }
        }
        Self::new(tensors)
    }

    fn new(tensors: Vec<(Arena, String, Vec<usize>, Range<usize>)>) -> io::Result<Self> {
        let mut end = 0;
        let mut infos = Vec::with_capacity(tensors.len());
        for (_, name, shape, elements) in &tensors {
            let begin = end;
            end += elements.len() * size_of::<f32>();
            let info = TensorInfo { dtype: Dtype::F32, shape: shape.clone(), data_offsets: (begin, end) };
            infos.push((name.clone(), info));
        }
        let offsets: Vec<(usize, usize)> = infos.iter().map(|(_, info)| info.data_offsets).collect();
        let metadata = Metadata::new(None, infos).map_err(io::Error::other)?;
        let mut json = serde_json::to_vec(&metadata)?;
        // Data starts at a multiple of 8 bytes.
        json.resize(json.len().next_multiple_of(8), b' ');
        let header = [&(json.len() as u64).to_le_bytes()[..], &json].concat();
        let data = header.len() as u64;
        let tensors = tensors.into_iter().zip(offsets).map(|((arena, _, _, elements), (begin, end))| {
            Stored { arena, elements, bytes: data + begin as u64..data + end as u64 }
        });
        Ok(Self { tensors: tensors.collect(), header })
    }
}

/// Finds the parameters of this model in a file or, with `moments`, AdamW's moments.
pub(super) fn read_contents(
    path: &Path,
    file: &File,
    layout: &Parameters,
    moments: bool,
) -> Result<Vec<Stored>, CheckpointError> {
    let read = |reason: String| CheckpointError::Read { path: path.into(), reason };
    let (header, data) = read_header(file).map_err(|error| read(error.to_string()))?;
    let mut tensors = Vec::new();
    let infos = header.tensors();
    for (name, info) in &infos {
        // Files written by other programs may contain more than the parameters.
        let Some((arena, param, part)) = find(layout, name, moments) else { continue };
        let whole = part.len() == param.stored().len();
        let shape_matches = (whole && info.shape == param.shape) || info.shape == [part.len()];
        if info.dtype != Dtype::F32 || !shape_matches {
            let (dtype, shape) = (info.dtype, &info.shape);
            let difference =
                format!("{name} is {dtype:?} {shape:?}, but the model has F32 {:?}", param.shape);
            return Err(CheckpointError::OtherModel { path: path.into(), difference });
        }
        let (begin, end) = info.data_offsets;
        if end.checked_sub(begin) != Some(part.len() * size_of::<f32>()) {
            return Err(read(format!("{name}: its data offsets do not match its shape")));
        }
        let bytes = data.saturating_add(begin as u64)..data.saturating_add(end as u64);
        tensors.push(Stored { arena, elements: part, bytes });
    }
    tensors.sort_by_key(|tensor| tensor.bytes.start);
    Ok(tensors)
}

/// Returns the parameter that a tensor belongs to, and its elements in the arena.
fn find<'a>(layout: &'a Parameters, name: &str, moments: bool) -> Option<(Arena, &'a Param, Range<usize>)> {
    let (arena, name) = if moments {
        match name.split_at_checked(2)? {
            ("m.", rest) => (Arena::M, rest),
            ("v.", rest) => (Arena::V, rest),
            _ => return None,
        }
    } else {
        (Arena::Params, name)
    };
    let (name, part) = match name.strip_suffix(']').and_then(|name| name.rsplit_once('[')) {
        Some((name, part)) if moments => (name, Some(part)),
        _ => (name, None),
    };
    let param = layout.params.iter().find(|param| param.name == name)?;
    let stored = param.stored();
    let elements = match part {
        None => stored,
        Some(part) => {
            let (first, end) = part.split_once(':')?;
            let (first, end) = (first.parse::<usize>().ok()?, end.parse::<usize>().ok()?);
            if first > end || end > stored.len() {
                return None;
            }
            stored.start + first..stored.start + end
        }
    };
    Some((arena, param, elements))
}

/// Reads the header of a safetensors file; also returns the offset of the data.
pub(crate) fn read_header(file: &File) -> io::Result<(Metadata, u64)> {
    let invalid = |reason: &str| io::Error::new(io::ErrorKind::InvalidData, reason);
    let bytes = file.metadata()?.len();
    if bytes < LENGTH_BYTES as u64 {
        return Err(invalid(&format!("it has only {bytes} bytes, so it is not a safetensors file")));
    }
    let mut length = [0; LENGTH_BYTES];
    file.file().read_exact_at(&mut length, 0)?;
    if LFS_POINTER.starts_with(&length) {
        return Err(invalid(LFS_REASON));
    }
    let (length, begin) = (u64::from_le_bytes(length), LENGTH_BYTES as u64);
    if length > MAX_HEADER_BYTES.min(bytes.saturating_sub(begin)) {
        return Err(invalid("the length of its safetensors header is invalid"));
    }
    let mut header = vec![0; usize::try_from(length).map_err(io::Error::other)?];
    file.file().read_exact_at(&mut header, begin)?;
    // A parsed tensor takes ten times as much memory as its text in the header.
    let tensors = memchr::memmem::find_iter(&header, b"\"data_offsets\"").take(MAX_TENSORS + 1).count();
    if tensors > MAX_TENSORS {
        return Err(invalid(&format!("its safetensors header has more than {MAX_TENSORS} tensors")));
    }
    Ok((serde_json::from_slice(&header)?, begin + length))
}

/// Checks that the tensors contain every parameter of these arenas exactly once.
pub(super) fn check_complete(
    path: &Path,
    layout: &Parameters,
    arenas: &[Arena],
    tensors: &[Stored],
) -> Result<(), CheckpointError> {
    let damaged = |reason: String| CheckpointError::Damaged { path: path.into(), reason };
    for arena in arenas {
        let mut parts: Vec<&Range<usize>> =
            tensors.iter().filter(|tensor| tensor.arena == *arena).map(|tensor| &tensor.elements).collect();
        parts.sort_by_key(|part| part.start);
        let mut parts = parts.into_iter().peekable();
        for param in &layout.params {
            let stored = param.stored();
            let mut end = stored.start;
            while let Some(part) = parts.next_if(|part| part.start < stored.end) {
                if part.start != end {
                    return Err(damaged(format!("it does not contain every value of {} once", param.name)));
                }
                end = part.end;
            }
            if end != stored.end {
                return Err(damaged(format!("tensor {} not found", param.name)));
            }
        }
    }
    Ok(())
}
