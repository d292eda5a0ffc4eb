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

/// Reads a whole file that [`open_regular`] opens.
pub fn read_regular(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_regular(path)?.read_to_end(&mut bytes)?;
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
