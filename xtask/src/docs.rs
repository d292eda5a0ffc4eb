//! Runs the commands shown in the documentation, so that it cannot become outdated.
//!
//! A code block that begins with ```` ```sh run ```` is one shell script. It runs in the repository's root with the
//! release build of `xlaunch` first in the `PATH` and with its own runtime directory. The script fails at the first
//! command that fails.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use crate::Error;
use crate::workspace::{Workspace, forget_package, run_to_file};

/// Time limit of a block. A block that takes longer hangs.
const BLOCK_TIMEOUT_SECONDS: &str = "300";

/// One runnable block.
#[derive(Debug, PartialEq)]
struct Block {
    /// Line of its first command.
    line: usize,
    script: String,
}

/// Runs the blocks of these files, or of all documents. Returns whether every block succeeds.
pub(crate) fn run(workspace: &Workspace, files: &[String]) -> Result<bool, Error> {
    let documents: Vec<PathBuf> = match files {
        [] => workspace.files()?.iter().filter(|file| is_document(file)).cloned().collect(),
        _ => files.iter().map(PathBuf::from).collect(),
    };
    let (mut passed, mut failed) = (0, 0);
    for file in documents {
        for block in blocks(&workspace.read(&file)?) {
            let place = format!("{}:{}", file.display(), block.line);
            let begin = Instant::now();
            match run_block(&workspace.root, &block.script)? {
                None => {
                    println!("{place}: ok, {:.1} s", begin.elapsed().as_secs_f64());
                    passed += 1;
                }
                Some(failure) => {
                    println!("{place}: FAILED: {failure}\n{}", block.script);
                    failed += 1;
                }
            }
        }
    }
    println!("{passed} passed, {failed} failed");
    Ok(failed == 0)
}

fn is_document(file: &Path) -> bool {
    let markdown = file.extension().is_some_and(|extension| extension == "md");
    markdown && (file.starts_with("docs") || file.starts_with("examples") || file.components().count() == 1)
}

/// Returns the runnable blocks of a Markdown text.
fn blocks(text: &str) -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    let mut inside = false;
    for (number, line) in (1..).zip(text.lines()) {
        if line.trim() == "```sh run" {
            inside = true;
            blocks.push(Block { line: number + 1, script: String::new() });
        } else if line.trim() == "```" {
            inside = false;
        } else if let Some(block) = blocks.last_mut().filter(|_| inside) {
            block.script.push_str(line);
            block.script.push('\n');
        }
    }
    blocks
}

/// Runs a script. If it fails, describes the failure, including its output.
fn run_block(root: &Path, script: &str) -> Result<Option<String>, Error> {
    let runtime = tempfile::tempdir()?;
    // The path of this program is `target/<profile>/xtask`. The directory also has programs of tests, such as `echo`.
    let target = std::env::current_exe()?.ancestors().nth(2).map(Path::to_path_buf).unwrap_or_default();
    let programs = runtime.path().join("bin");
    std::fs::create_dir(&programs)?;
    std::os::unix::fs::symlink(target.join("release/xlaunch"), programs.join("xlaunch"))?;
    let mut path = OsString::from(programs);
    path.push(":");
    path.push(std::env::var_os("PATH").unwrap_or_default());
    let mut shell = Command::new("timeout");
    shell.args(["--kill-after", "10", BLOCK_TIMEOUT_SECONDS, "sh", "-eu", "-c", script]);
    forget_package(&mut shell);
    shell.current_dir(root).env("PATH", path).env("XDG_RUNTIME_DIR", runtime.path());
    let (status, output) = run_to_file(&mut shell)?;
    Ok((!status.success()).then(|| format!("{status}\n{}", String::from_utf8_lossy(&output))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_marked_run_are_found() {
        let text =
            "Text\n```sh run\ncd x\n\nls\n```\n```sh\nnot this\n```\n- item\n  ```sh run\n  ls\n  ```\n";
        let found = blocks(text);
        let expected = [(3, "cd x\n\nls\n"), (12, "  ls\n")];
        assert_eq!(found, expected.map(|(line, script)| Block { line, script: script.into() }));
    }

    #[test]
    fn the_first_command_that_fails_fails_the_block() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        assert_eq!(run_block(root, "true; test -f Cargo.toml").unwrap(), None);
        let failure = run_block(root, "echo why\nfalse\ntrue").unwrap().unwrap();
        assert!(failure.contains("exit status: 1") && failure.contains("why"), "{failure}");
    }

    #[test]
    fn a_failed_block_that_leaves_a_process_behind_is_reported_at_once() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let failure = run_block(root, "(sleep 1; echo late) & echo early; exit 3").unwrap().unwrap();
        assert!(failure.contains("early") && !failure.contains("late"), "{failure}");
    }
}
