//! Expands arguments to files, in a stable order.
//!
//! Directories are searched for files, except those that cannot be intended as text ([`walk`]) and the output.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use super::PrepareError;
use crate::walk;

/// Something to read.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Input {
    Stdin,
    File(PathBuf),
}

/// Returns the files that `arguments` name, each file once: in the order of the arguments, and for each argument sorted
/// by path.
pub(super) fn find(arguments: &[String], output: &Path) -> Result<Vec<Input>, PrepareError> {
    let (mut inputs, mut seen) = (Vec::new(), HashSet::new());
    for argument in arguments {
        let found = match argument.as_str() {
            "-" => vec![Input::Stdin],
            argument => files(argument, output)?.into_iter().map(Input::File).collect(),
        };
        // Two paths may name one file.
        let identity = |input: &Input| match input {
            Input::File(path) => Input::File(path.canonicalize().unwrap_or_else(|_| path.clone())),
            Input::Stdin => Input::Stdin,
        };
        inputs.extend(found.into_iter().filter(|input| seen.insert(identity(input))));
    }
    if inputs.is_empty() {
        Err(PrepareError::Usage("no input: name files, directories, globs, or `-`".into()))
    } else {
        Ok(inputs)
    }
}

fn files(argument: &str, output: &Path) -> Result<Vec<PathBuf>, PrepareError> {
    let path = Path::new(argument);
    // The name of a file may look like a glob.
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => {
            let is_saved = |names: &[&str]| names.iter().all(|name| path.join(name).is_file());
            let in_arrow = |what: &str, dataset: &str| {
                PrepareError::Usage(format!(
                    "{argument}: it is a dataset in Arrow, as Python's `datasets` saves it; write {what} as Parquet \
                     with `{dataset}.to_parquet(FILE)`"
                ))
            };
            if is_saved(&SAVED_SPLITS) {
                return Err(in_arrow("the split", "dataset[\"train\"]"));
            }
            if is_saved(&SAVED_DATASET) {
                return Err(in_arrow("it", "dataset"));
            }
            let mut files = search(path, None, output, argument)?;
            // The cache of `load_dataset` has it further below.
            let has = |end: &str| files.iter().any(|file| file.to_string_lossy().ends_with(end));
            if has("/dataset_info.json") && has(".arrow") {
                return Err(in_arrow("it", "dataset"));
            }
            check_splits(path, &files)?;
            if files.iter().any(|file| is_table(file)) {
                files.retain(|file| CARDS.iter().all(|card| *file != path.join(card)));
            }
            Ok(files)
        }
        Ok(_) => Ok(vec![path.into()]),
        Err(_) if argument.contains("://") => Err(PrepareError::Usage(format!(
            "{argument} is not a file on this host: download it, or send it to the input `-` through a pipe"
        ))),
        Err(_) if argument.contains(walk::WILDCARDS) => {
            let (base, rest) = walk::split(path);
            let glob = rest.to_string_lossy();
            if let Err(error) = fast_glob::validate(glob.as_ref()) {
                return Err(PrepareError::Usage(format!("`{argument}` is not a valid glob: {error}")));
            }
            search(&base, Some(&glob), output, argument)
        }
        Err(error) => Err(PrepareError::read(argument, &error)),
    }
}

fn search(
    base: &Path,
    glob: Option<&str>,
    output: &Path,
    argument: &str,
) -> Result<Vec<PathBuf>, PrepareError> {
    let is_output = |path: &Path| path.canonicalize().is_ok_and(|path| path == output);
    let here = Path::new(".");
    let root = if base.as_os_str().is_empty() { here } else { base };
    let mut found = Vec::new();
    let searched = walk::find(root, glob, &is_output, &mut found);
    searched.map_err(|error| PrepareError::Usage(format!("failed to read {argument}: {error}")))?;
    if base.as_os_str().is_empty() {
        // Paths are written like the glob, without a directory.
        for found in &mut found {
            found.path = found.path.strip_prefix(here).unwrap_or(&found.path).to_path_buf();
        }
    }
    let files = walk::without_repeated_links(found).map_err(|file| {
        PrepareError::Usage(format!("failed to read {}: {}", file.path.display(), file.reason))
    })?;
    if files.is_empty() {
        Err(PrepareError::Usage(format!("no file matches `{argument}`")))
    } else {
        Ok(files)
    }
}

/// Files in a directory that `DatasetDict.save_to_disk` writes.
const SAVED_SPLITS: [&str; 1] = ["dataset_dict.json"];
/// Files in a directory that `Dataset.save_to_disk` writes.
const SAVED_DATASET: [&str; 2] = ["dataset_info.json", "state.json"];
/// Descriptions of a dataset in the directory with its tables.
const CARDS: [&str; 4] = ["README.md", "LICENSE", "LICENSE.md", "LICENSE.txt"];
/// Words in the paths of tables that are a dataset's training data.
const TRAIN_WORDS: [&str; 2] = ["train", "training"];
/// Words in the paths of tables that a dataset holds out, as Python's `datasets` reads them.
const HELD_OUT_WORDS: [&str; 8] =
    ["validation", "valid", "dev", "val", "test", "testing", "eval", "evaluation"];
/// Extensions of tables, and of JSON.
const TABLES: [&str; 7] = ["parquet", "jsonl", "ndjson", "json", "csv", "tsv", "tab"];

/// Refuses a directory with the training data of a dataset and data that is held out from it, which would be trained
/// on.
fn check_splits(dir: &Path, files: &[PathBuf]) -> Result<(), PrepareError> {
    let first = |wanted: &[&str], other: &[&str]| {
        files.iter().find(|file| {
            let path = file.strip_prefix(dir).unwrap_or(file).to_string_lossy().to_lowercase();
            let has =
                |words: &[&str]| path.split(|c: char| !c.is_alphabetic()).any(|word| words.contains(&word));
            is_table(file) && has(wanted) && !has(other)
        })
    };
    let Some((train, held_out)) =
        first(&TRAIN_WORDS, &HELD_OUT_WORDS).zip(first(&HELD_OUT_WORDS, &TRAIN_WORDS))
    else {
        return Ok(());
    };
    let is_named = train.file_name().is_some_and(|name| name.to_string_lossy().contains(TRAIN_WORDS[0]));
    let wanted = match train.parent().filter(|_| !is_named) {
        Some(parent) => format!("their directory, such as {}", parent.display()),
        None => format!("a glob, such as '{}/**/*train*'", dir.display()),
    };
    Err(PrepareError::Usage(format!(
        "{}: it holds training data ({}) and data that is held out from it ({})\nhelp: name the files to read by \
         {wanted}",
        dir.display(),
        train.display(),
        held_out.display()
    )))
}

fn is_table(file: &Path) -> bool {
    extension(file).is_some_and(|extension| TABLES.contains(&extension.as_str()))
}

/// Returns the extension of a file's name, ignoring that of its compression.
pub(super) fn extension(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_string_lossy().to_lowercase();
    let name = [".gz", ".zst"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(&name);
    name.rsplit_once('.').map(|(_, extension)| extension.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_and_globs_skip_caches_hidden_files_and_output() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        for file in [
            "b.txt",
            "a.txt",
            "sub/c.txt",
            ".git/d.txt",
            ".e.txt",
            "target/f.txt",
            "out/g.txt",
            "h[1]",
            "run[1]/i.txt",
        ] {
            let path = root.join(file);
            fs_err::create_dir_all(path.parent().unwrap()).unwrap();
            fs_err::write(path, "x").unwrap();
        }
        fs_err::write(root.join("target/CACHEDIR.TAG"), "").unwrap();
        let names = |arguments: &[&str]| -> Vec<String> {
            let arguments: Vec<String> =
                arguments.iter().map(|argument| format!("{}/{argument}", root.display())).collect();
            let name = |input: Input| match input {
                Input::Stdin => "-".to_owned(),
                Input::File(path) => path.strip_prefix(&root).unwrap().display().to_string(),
            };
            find(&arguments, &root.join("out")).unwrap().into_iter().map(name).collect()
        };
        assert_eq!(names(&["."]), ["a.txt", "b.txt", "h[1]", "run[1]/i.txt", "sub/c.txt"]);
        assert_eq!(names(&["run[1]/*.txt"]), ["run[1]/i.txt"]);
        assert_eq!(names(&["sub", "*.txt", "sub/*"]), ["sub/c.txt", ".e.txt", "a.txt", "b.txt"]);
        assert_eq!(names(&["h[1]", ".git/d.txt"]), ["h[1]", ".git/d.txt"]);
        assert_eq!(names(&["sub/c.txt", "sub/../sub/c.txt", "sub/."]), ["sub/c.txt"]);
        let refusal = |argument: &str| find(&[argument.to_owned()], &root).unwrap_err().to_string();
        assert!(refusal("/nonexistent/a").contains("No such file"));
        assert!(refusal(&format!("{}/*.md", root.display())).contains("no file matches"));
        assert!(refusal("s3://bucket/*.jsonl").contains("not a file on this host: download it"));
    }

    #[test]
    fn directory_with_data_that_is_held_out_is_refused_and_a_card_is_skipped() {
        let refusal = |files: &[&str]| {
            let dir = tempfile::tempdir().unwrap();
            for file in files {
                let path = dir.path().join(file);
                fs_err::create_dir_all(path.parent().unwrap()).unwrap();
                fs_err::write(path, "x").unwrap();
            }
            let arguments = |end: &str| [format!("{}{end}", dir.path().display())];
            assert_eq!(find(&arguments("/**"), Path::new("/none")).unwrap().len(), files.len());
            let cards = files.iter().filter(|file| CARDS.contains(file)).count();
            match find(&arguments(""), Path::new("/none")) {
                Ok(found) => {
                    assert_eq!(found.len(), files.len() - cards);
                    None
                }
                Err(error) => Some(error.to_string()),
            }
        };
        for files in [
            ["README.md", "data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"],
            ["train_sft.jsonl.gz", "train_gen.jsonl.gz", "eval_sft.jsonl.gz"],
            ["c4-train.00000.json.zst", "c4-validation.00000.json.zst", "c4-train.00001.json.zst"],
            ["train/0.csv", "dev/0.csv", "train/1.csv"],
        ] {
            let error = refusal(&files).unwrap();
            let wanted =
                if files[0].starts_with("train/") { "their directory, such as" } else { "/**/*train*'" };
            assert!(error.contains("held out") && error.contains(wanted), "{error}");
        }
        for files in [
            ["train.py", "test.py", "tests/data.json"],
            ["train-00000.parquet", "train-00001.parquet", "README.md"],
            ["latest.jsonl", "trains.jsonl", "test-train.jsonl"],
            ["a.jsonl.gz", "LICENSE", "README.md"],
            ["a.csv", "docs/README.md", "LICENSE.txt"],
        ] {
            assert_eq!(refusal(&files), None, "{files:?}");
        }
        let saved = ["dataset_dict.json", "train/data-00000-of-00001.arrow", "train/state.json"];
        assert!(refusal(&saved).unwrap().contains("`dataset[\"train\"].to_parquet(FILE)`"));
        let saved = ["data-00000-of-00001.arrow", "dataset_info.json", "state.json"];
        assert!(refusal(&saved).unwrap().contains("write it as Parquet with `dataset.to_parquet(FILE)`"));
        let cached = ["text/0.0.0/dataset_info.json", "text/0.0.0/text-train.arrow"];
        assert!(refusal(&cached).unwrap().contains("write it as Parquet with `dataset.to_parquet(FILE)`"));
    }

    /// The cache of Hugging Face's hub has links in `snapshots` to files in `blobs`.
    #[test]
    fn links_to_files_are_read_once_and_links_to_directories_are_skipped() {
        let dir = tempfile::tempdir().unwrap();
        let snapshot = dir.path().join("snapshots/1");
        fs_err::create_dir_all(snapshot.join("data")).unwrap();
        fs_err::create_dir(dir.path().join("blobs")).unwrap();
        fs_err::write(dir.path().join("blobs/77"), "{}").unwrap();
        fs_err::write(snapshot.join("data/own.jsonl"), "{}").unwrap();
        for (target, link) in [
            ("../../../blobs/77", "data/a.jsonl"),
            ("a.jsonl", "data/b.jsonl"),
            ("data/own.jsonl", "first.jsonl"),
            ("../../..", "data/loop"),
            ("user@host.77", "data/.#a.jsonl"),
        ] {
            std::os::unix::fs::symlink(target, snapshot.join(link)).unwrap();
        }
        for argument in [snapshot.clone(), snapshot.join("**/*.jsonl")] {
            let found = find(&[argument.display().to_string()], Path::new("/none")).unwrap();
            let expected = ["data/a.jsonl", "data/own.jsonl"].map(|name| Input::File(snapshot.join(name)));
            assert_eq!(found, expected, "{}", argument.display());
        }
        // A blob that was not downloaded, or not copied along with the snapshot.
        std::os::unix::fs::symlink("../../../blobs/78", snapshot.join("data/c.jsonl")).unwrap();
        for argument in [snapshot.clone(), snapshot.join("**/*.jsonl")] {
            let error = find(&[argument.display().to_string()], Path::new("/none")).unwrap_err().to_string();
            assert!(error.contains("data/c.jsonl: it is a link to a file that does not exist"), "{error}");
        }
        find(&[snapshot.join("**/[ab].jsonl").display().to_string()], Path::new("/none")).unwrap();
    }

    /// A program may write data into it, but reading it would wait for the program.
    #[test]
    fn fifo_in_a_directory_is_refused_and_one_that_is_named_is_an_input() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = |name: &str| {
            let (kind, mode) = (rustix::fs::FileType::Fifo, 0o600.into());
            rustix::fs::mknodat(rustix::fs::CWD, dir.path().join(name), kind, mode, 0).unwrap();
        };
        let found = |end: &str| find(&[format!("{}{end}", dir.path().display())], Path::new("/none"));
        fs_err::write(dir.path().join("a.txt"), "x").unwrap();
        fifo(".control");
        assert_eq!(found("").unwrap().len(), 1);
        fifo("b.txt");
        for argument in ["", "/*.txt"] {
            let error = found(argument).unwrap_err().to_string();
            assert!(error.contains("b.txt: it is a FIFO"), "{error}");
        }
        assert_eq!((found("/b.txt").unwrap().len(), found("/a*").unwrap().len()), (1, 1));
        std::os::unix::fs::symlink("b.txt", dir.path().join("c")).unwrap();
        assert!(found("/c*").unwrap_err().to_string().contains("it is a FIFO"));
    }
}
