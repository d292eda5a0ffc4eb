//! Selects a file for each library. Pure, except that it looks for cuDNN's other files.

use std::path::PathBuf;

use super::search::{Host, files};
use super::{File, Kind, Selected, version};

/// The file to which `libcudnn.so.9` forwards calls.
const CUDNN_GRAPH: &str = "libcudnn_graph.so.9";

/// Selects all libraries for a driver that supports this major version of CUDA, if that is known.
pub(super) fn all(host: &Host<'_>, driver: Option<u64>) -> Vec<Selected> {
    let dirs = host.dirs();
    let mut selected: Vec<Selected> = Vec::new();
    for kind in Kind::ALL {
        let cuda = selected.first().and_then(|nvrtc| nvrtc.file.as_ref()?.cuda);
        let files = files(kind, &dirs);
        let named = (host.variable)(kind.variable()).filter(|path| !path.is_empty()).map(PathBuf::from);
        selected.push(match named {
            Some(path) => named_by_user(kind, path, files),
            None => newest(kind, files, |file| problem(kind, file, driver, cuda)),
        });
    }
    selected
}

/// Takes the file that the user named, even if it does not exist: the worker's error names it.
fn named_by_user(kind: Kind, path: PathBuf, files: Vec<File>) -> Selected {
    let (version, cuda) = version::of(kind, &path);
    let real = path.canonicalize().ok();
    let others = files.into_iter().filter(|file| file.path.canonicalize().ok() != real);
    let reason = format!("{} names another file", kind.variable());
    let others = others.map(|file| (file, reason.clone())).collect();
    Selected { kind, file: Some(File { path, version, cuda, in_loader_path: false }), others }
}

/// Takes the newest file without a problem. Of files with equal or unknown versions, the first is taken.
fn newest(kind: Kind, mut files: Vec<File>, problem: impl Fn(&File) -> Option<String>) -> Selected {
    // The sort is stable; `None` is less than any version.
    files.sort_by(|a, b| b.version.cmp(&a.version));
    let (mut chosen, mut others) = (None, Vec::new());
    for file in files {
        match problem(&file) {
            Some(reason) => others.push((file, reason)),
            None if chosen.is_none() => chosen = Some(file),
            None => {
                let reason = if file.version.is_some() { "not newer" } else { "its version is unknown" };
                others.push((file, reason.to_owned()));
            }
        }
    }
    Selected { kind, file: chosen, others }
}

/// Returns the reason why a file cannot be used.
fn problem(kind: Kind, file: &File, driver: Option<u64>, cuda: Option<u64>) -> Option<String> {
    if let (Some(needed), Some(supported)) = (file.cuda, driver)
        && needed > supported
    {
        return Some(format!("it is for CUDA {needed}, and the driver supports CUDA {supported}"));
    }
    if kind != Kind::Cudnn {
        return None;
    }
    if let (Some(own), Some(others)) = (file.cuda, cuda)
        && own != others
    {
        return Some(format!("it is for CUDA {own}, and NVRTC is of CUDA {others}"));
    }
    let is_complete = file.path.with_file_name(CUDNN_GRAPH).exists();
    (!is_complete).then(|| format!("there is no {CUDNN_GRAPH} next to it"))
}
