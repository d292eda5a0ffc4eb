//! Opens files of directories that other programs have written, where anything may be in the place of a file.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::OFlags;

/// Opens a regular file, or a link to one, for reading. A FIFO would block, and some devices never end.
pub fn open_regular(path: &Path) -> io::Result<File> {
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(io::Error::new(io::ErrorKind::InvalidData, "it is not a regular file"))
    }
}

/// Reads a whole file of at most `max` bytes that [`open_regular`] opens.
pub fn read_regular(path: &Path, max: u64) -> io::Result<Vec<u8>> {
    read_bounded(open_regular(path)?, max)
}

/// Reads everything, which must be at most `max` bytes.
pub fn read_bounded(from: impl Read, max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take(max.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("it has more than {max} bytes")));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, FileType, mknodat};

    use super::*;
    use crate::chat::Templates;
    use crate::{Manifest, TOKENIZER_FILE, Tokenizer, inspect};

    #[test]
    fn fifo_or_device_in_place_of_a_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let fifo = |name: &str| mknodat(CWD, path(name), FileType::Fifo, 0o600.into(), 0).unwrap();
        std::os::unix::fs::symlink("/dev/zero", path("zero")).unwrap();
        assert!(open_regular(&path("zero")).is_err() && open_regular(dir.path()).is_err());
        fs_err::write(path(TOKENIZER_FILE), Tokenizer::bytes().to_json()).unwrap();
        std::os::unix::fs::symlink(path(TOKENIZER_FILE), path("link")).unwrap();
        open_regular(&path("link")).unwrap();

        let size = fs_err::metadata(path("link")).unwrap().len();
        assert!(read_regular(&path("link"), size).is_ok());
        let error = read_regular(&path("link"), size - 1).unwrap_err().to_string();
        assert_eq!(error, format!("it has more than {} bytes", size - 1));

        let refused = |error: &dyn std::fmt::Display| error.to_string().contains("it is not a regular file");
        fifo("chat_template.jinja");
        let templates = Templates::find(dir.path().to_str().unwrap(), None);
        assert!(refused(&templates.unwrap_err()));
        fifo("special_tokens_map.json");
        assert!(refused(&Tokenizer::from_file(&path(TOKENIZER_FILE)).unwrap_err()));
        fs_err::remove_file(path(TOKENIZER_FILE)).unwrap();
        fifo(TOKENIZER_FILE);
        assert!(refused(&Tokenizer::from_file(&path(TOKENIZER_FILE)).unwrap_err()));
        fifo(Manifest::FILE);
        assert!(refused(&Manifest::read(dir.path()).unwrap_err()));
        fifo("a.bin");
        assert!(refused(&inspect(&path("a.bin")).unwrap_err()));
    }
}
