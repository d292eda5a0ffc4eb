//! The CUDA libraries of commands that compute in this process: `xlaunch generate`, `eval` and `serve`.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use xlaunch_host::libraries::Libraries;

/// Set once the libraries are selected.
const SELECTED: &str = "XLAUNCH_LIBRARIES";
/// Exists if the driver is loaded.
const CONTROL_DEVICE: &str = "/dev/nvidiactl";

/// Starts this program again with the variables that workers get, because the loader reads its path only once. Does
/// nothing without a GPU.
pub(super) fn use_selected() {
    if std::env::var_os(SELECTED).is_some() || !Path::new(CONTROL_DEVICE).exists() {
        return;
    }
    let Ok(program) = std::env::current_exe() else { return };
    let libraries = Libraries::find(&|name| std::env::var_os(name));
    let mut command = Command::new(program);
    command.args(std::env::args_os().skip(1)).envs(libraries.variables()).env(SELECTED, "1");
    // It returns only if it fails; then the loader decides.
    let _ = command.exec();
}
