//! C libraries that tests load into processes.

use std::path::Path;
use std::process::Command;

/// Builds a library from this crate's C file `source`.
///
/// # Panics
/// If there is no C compiler, or it fails.
pub(crate) fn build(source: &str, library: &Path) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(source);
    let built = Command::new("cc").args(["-shared", "-fPIC"]).arg(source).arg("-o").arg(library).status();
    assert!(built.expect("run the C compiler").success());
}
