//! Completions of `xlaunch gen completions`, in the shells themselves.

use std::process::{Command, Stdio};

use tempfile::TempDir;
use xlaunch_tests::{requirements, xlaunch_path};

xlaunch_harness::tests! {
    needs requirements::fish:
    fish_completes_no_files_for_job_numbers;
    needs requirements::zsh:
    zsh_completes_subcommands_and_targets;
}

fn completions(shell: &str) -> String {
    let output = Command::new(xlaunch_path()).args(["gen", "completions", shell]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns a directory with `t.toml`, a file to complete.
fn directory() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("t.toml"), "").unwrap();
    dir
}

fn fish_completes_no_files_for_job_numbers() {
    let (script, dir) = (completions("fish"), directory());
    for (line, completed) in
        [("cancel t", ""), ("hold 1 t", ""), ("submit t", "t.toml"), ("cancel --forc", "--force")]
    {
        let complete = format!("{script}\ncomplete -C 'xlaunch {line}'");
        let mut fish = Command::new("fish");
        fish.args(["--no-config", "-c", &complete]).env("HOME", dir.path()).current_dir(dir.path());
        let output = fish.output().unwrap();
        let shown = String::from_utf8_lossy(&output.stdout);
        let words: Vec<_> = shown.lines().filter_map(|line| line.split('\t').next()).collect();
        assert_eq!(words.join(" "), completed, "{line}: {output:?}");
    }
}

/// Runs zsh on a terminal of its own.
fn zsh_completes_subcommands_and_targets() {
    let dir = directory();
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
    write("_xlaunch", &completions("zsh"));
    // Ctrl-X prints the line, and ends the shell.
    write(
        ".zshrc",
        "fpath=($ZDOTDIR $fpath); autoload -Uz compinit; compinit -u -D; cd $ZDOTDIR
         show() { print -r -- \"<$BUFFER>\"; exit }; zle -N show; bindkey '^X' show; print ready\n",
    );
    let run = "zmodload zsh/zpty || exit; zpty z zsh -i; zpty -r z out '*ready*'
        zpty -w -n z \"$LINE\"$'\\t\\x18'; zpty -r z out '*<*>*'; print -r -- \"$out\"";
    for (line, completed) in [
        ("xlaunch serve --tokeni", "<xlaunch serve --tokenizer=>"),
        ("xlaunch serve t", "<xlaunch serve t.toml >"),
        ("xlaunch t.", "<xlaunch t.toml >"),
        ("xlaunch t.toml --overw", "<xlaunch t.toml --overwrite >"),
        // Not the shell's `trap` and `true`.
        ("xlaunch submit t", "<xlaunch submit t.toml >"),
        ("xlaunch cancel 1 tru", "<xlaunch cancel 1 tru>"),
        ("xlaunch cancel 1 --forc", "<xlaunch cancel 1 --force >"),
    ] {
        let mut zsh = Command::new("zsh");
        zsh.args(["-f", "-c", run]).env("LINE", line).env("ZDOTDIR", dir.path()).env("TERM", "xterm");
        let output = zsh.stdin(Stdio::null()).output().unwrap();
        let shown = String::from_utf8_lossy(&output.stdout);
        assert!(shown.contains(completed), "{line}: {output:?}");
    }
}
