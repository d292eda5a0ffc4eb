//! Entry points of the checkpoint module for the fuzz targets.

use std::path::Path;

use super::manifest;
use super::read::Source;
use super::tensors::{Arena, check_complete, read_contents};
use crate::model::layout::Parameters;

/// Name and size of a file, then the offset and size of each chunk.
pub type ListedFile = (String, u64, Vec<(u64, u64)>);

/// Returns the files of a manifest; `None` if the manifest is rejected.
pub(crate) fn valid_files(json: &[u8]) -> Option<Vec<ListedFile>> {
    let manifest = manifest::parse(Path::new("checkpoint"), json).ok()?;
    let file = |entry: manifest::Entry| {
        let chunks = entry.chunks.iter().map(|chunk| (chunk.offset, chunk.bytes)).collect();
        (entry.name, entry.bytes, chunks)
    };
    Some(manifest.files.into_iter().map(file).collect())
}

/// Reads every tensor of an accepted file, and checks that its values go to the right places.
pub(crate) fn read_tensors(path: &Path, layout: &Parameters, moments: bool) {
    let Ok((file, _)) = manifest::open(path) else { return };
    let Ok(tensors) = read_contents(path, &file, layout, moments) else { return };
    for tensor in &tensors {
        assert!(tensor.elements.end <= layout.len);
        assert_eq!(tensor.bytes.end - tensor.bytes.start, 4 * tensor.elements.len() as u64);
    }
    let arenas: &[Arena] = if moments { &[Arena::M, Arena::V] } else { &[Arena::Params] };
    let complete = check_complete(path, layout, arenas, &tensors).is_ok();
    let values: usize = tensors.iter().map(|tensor| tensor.elements.len()).sum();
    let expected = arenas.len() * layout.parameters();
    assert!(!complete || values == expected, "{values} values instead of {expected}");
    let source = Source::of_tensors(path, file, tensors);
    source.read_all(&|piece| {
        assert!(piece.at + piece.values.len() <= layout.len);
        Ok(())
    });
}
