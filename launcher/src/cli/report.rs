//! `xlaunch report`: training runs as one HTML file.

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::refusal::Refusal;

use super::output::{QueryError, print, print_note};
use crate::render::text;
use crate::report::{self, MARK};

/// Options of `xlaunch report`.
#[derive(Debug, Args)]
pub(super) struct Report {
    /// Directories of runs or of jobs (their newest run), or files such as `metrics.jsonl`; at most 8
    #[arg(value_name = "RUN", required = true)]
    runs: Vec<PathBuf>,
    /// File to write the page to; replaces an older report, but no other file; `-` is stdout
    #[arg(long, short, value_name = "FILE", default_value = "report.html")]
    output: PathBuf,
    /// Print the figures as JSON instead of writing a page
    #[arg(long, conflicts_with = "output")]
    json: bool,
}

pub(super) fn run(options: &Report) -> Result<ExitCode, QueryError> {
    if options.runs.len() > report::MAX_RUNS {
        let message = format!("{} runs: a report shows at most {}", options.runs.len(), report::MAX_RUNS);
        return Err(Refusal::new(ExitCode::Usage, message).into());
    }
    let to_stdout = options.output == Path::new("-");
    if !options.json && !to_stdout {
        check_output(&options.output)?;
    }
    let runs = report::read(&options.runs)?;
    if options.json {
        print(text::json(&report::json(&runs)).as_bytes())?;
        return Ok(ExitCode::Done);
    }
    report::notes(&runs).iter().for_each(|note| print_note(&format!("note: {note}")));
    let page = report::html(&runs);
    if to_stdout {
        print(page.as_bytes())?;
        return Ok(ExitCode::Done);
    }
    write(&options.output, &page).map_err(|error| write_error(&options.output, &error))?;
    print(format!("{}\n", options.output.display()).as_bytes())?;
    Ok(ExitCode::Done)
}

/// Refuses to replace anything but a report, so that a mistyped name does not destroy a file.
fn check_output(path: &Path) -> Result<(), Refusal> {
    let refuse = |problem: &str| {
        let message = format!("{}: {problem}; choose another --output", path.display());
        Err(Refusal::new(ExitCode::Usage, message))
    };
    match fs_err::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(write_error(path, &error)),
        Ok(found) if !found.is_file() => refuse("it exists, and is not a regular file"),
        Ok(_) => {
            let mut begin = Vec::new();
            let read = fs_err::File::open(path)
                .and_then(|file| file.take(MARK.len() as u64).read_to_end(&mut begin));
            match read {
                Ok(_) if begin == MARK.as_bytes() => Ok(()),
                Ok(_) => refuse("it exists, and is not a report"),
                Err(error) => Err(write_error(path, &error)),
            }
        }
    }
}

/// Writes a file atomically: it is complete, or unchanged.
fn write(path: &Path, text: &str) -> io::Result<()> {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut file = tempfile::Builder::new().permissions(readable()).tempfile_in(dir)?;
    file.write_all(text.as_bytes())?;
    file.persist(path)?;
    Ok(())
}

/// Returns the mode of an ordinary file, before the umask; temporary files are private by default.
fn readable() -> std::fs::Permissions {
    std::os::unix::fs::PermissionsExt::from_mode(0o666)
}

fn write_error(path: &Path, error: &io::Error) -> Refusal {
    Refusal::new(
        ExitCode::Usage,
        format!("failed to write {}: {error}; choose another --output", path.display()),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_reports_are_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("report.html");
        assert!(check_output(&path).is_ok());
        write(&path, &format!("{MARK}old")).unwrap();
        assert!(check_output(&path).is_ok());
        write(&path, &format!("{MARK}new")).unwrap();
        assert!(fs_err::read_to_string(&path).unwrap().ends_with("new"));
        assert_eq!(fs_err::read_dir(dir.path()).unwrap().count(), 1);
        let link = dir.path().join("link");
        fs_err::os::unix::fs::symlink(&path, &link).unwrap();
        for (other, text) in [("page.html", "<!doctype html>\n<p>"), ("empty", "")] {
            fs_err::write(dir.path().join(other), text).unwrap();
            let refusal = check_output(&dir.path().join(other)).unwrap_err();
            assert!(
                refusal.exit == ExitCode::Usage && refusal.message.contains("not a report"),
                "{refusal:?}"
            );
        }
        assert!(check_output(&link).unwrap_err().message.contains("not a regular file"));
        assert!(check_output(dir.path()).is_err());
        assert!(write(&dir.path().join("no/such/dir.html"), "").is_err());
    }
}
