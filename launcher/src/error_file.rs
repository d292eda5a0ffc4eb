//! Writes the launcher's own `TORCHELASTIC_ERROR_FILE`, as torchrun does.

use xlaunch_agent::report::error_file;
use xlaunch_host::clock;
use xlaunch_spec::refusal::Refusal;

use xlaunch_agent::stderr::print_line;

/// Writes the file, if the variable is set and there is something to write.
pub(crate) fn record(contents: Option<&str>) {
    let path = std::env::var_os("TORCHELASTIC_ERROR_FILE").filter(|path| !path.is_empty());
    let Some((path, contents)) = path.zip(contents) else { return };
    if let Err(error) = fs_err::write(&path, contents) {
        print_line(format_args!("warning: TORCHELASTIC_ERROR_FILE: {error}"));
    }
}

/// Writes why a launch has failed or was not started.
pub(crate) fn record_refusal(refusal: &Refusal) {
    record(error_file::of_refusal(refusal, clock::unix().as_secs()).as_deref());
}
