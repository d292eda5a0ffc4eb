//! Opens data files, and describes errors that occur when they are read.

use std::fs::File;
use std::path::Path;

use super::DataError;

pub(super) fn open_file(path: &Path) -> Result<(File, u64), DataError> {
    let file = File::open(path).map_err(|error| read_error(path, &error))?;
    let bytes = file.metadata().map_err(|error| read_error(path, &error))?.len();
    Ok((file, bytes))
}

pub(super) fn read_error(path: &Path, error: &std::io::Error) -> DataError {
    let reason = match error.kind() {
        std::io::ErrorKind::UnexpectedEof => "the file was truncated while it was in use".into(),
        _ => error.to_string(),
    };
    DataError::Read { path: path.into(), reason }
}
