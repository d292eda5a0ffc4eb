//! Builds a checked [`JobSpec`] from `train.toml`, the environment and flags.
//!
//! Layers, each overriding the one before: defaults, the file, `XLAUNCH_<SECTION>_<KEY>`, flags (`--nproc`, `--set`).
//! Relative data paths in the file are resolved against its directory, all other paths against the working directory.
//! `~/` is the user's home directory, because no shell expands it in a file or after `--set KEY=`.
//!
//! Every layer accepts a renamed key under its old name for one release, with a warning.

mod diagnostics;
pub mod keys;
mod overrides;

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use toml::{Table, Value};
use xlaunch_spec::job::{ALTERNATIVE_KEYS, JobSpec};
use xlaunch_spec::paths::normalize;

pub use diagnostics::ConfigError;
pub use overrides::{Layer, Override, Sources};

/// Maximum size of a configuration file.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// A valid configuration.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The checked job description, with absolute paths.
    pub spec: JobSpec,
    /// Warnings for the user, one line each.
    pub warnings: Vec<String>,
    /// The origins of the values, for errors that are found later.
    pub sources: Sources,
}

/// Reads and checks a configuration. `overrides` are in order of increasing precedence.
///
/// # Errors
/// The file cannot be read or parsed, or a key or value is invalid.
pub fn load(path: &Path, overrides: &[Override]) -> Result<Loaded, ConfigError> {
    let bytes = read(path).map_err(|error| ConfigError::unreadable(path, &error))?;
    let text = decode(path, bytes)?;
    let Loaded { spec, warnings, sources } = parse(path, &text, overrides)?;
    let here = std::env::current_dir().map_err(|error| {
        let problem = format!("failed to find the working directory: {error}");
        ConfigError::value(&path.display().to_string(), &problem, "one that still exists")
    })?;
    let spec = resolve(spec, &sources, &here, std::env::home_dir().as_deref()).map_err(|path| {
        ConfigError::value(&path.display().to_string(), "the path is not UTF-8", "directories named in UTF-8")
    })?;
    Ok(Loaded { spec, warnings, sources })
}

/// Reads a configuration file, which may be a pipe.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    fs_err::File::open(path)?.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        let problem = format!("{} has more than {MAX_FILE_BYTES} bytes", path.display());
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, problem));
    }
    Ok(bytes)
}

/// Returns the text of a configuration file.
///
/// # Errors
/// The place of the first byte that is not UTF-8.
pub fn decode(path: &Path, bytes: Vec<u8>) -> Result<String, ConfigError> {
    String::from_utf8(bytes).map_err(|error| ConfigError::not_utf8(path, &error))
}

/// [`load`] without file system access: paths stay relative.
fn parse(path: &Path, text: &str, overrides: &[Override]) -> Result<Loaded, ConfigError> {
    let mut warnings = Vec::new();
    let text = &rename_keys(path, text.to_owned(), &mut warnings)?;
    let in_file = |error| ConfigError::in_file(path, text, &keys::all(), &error);
    let mut table: Table = toml::from_str(text).map_err(in_file)?;
    diagnostics::check_sections(path, text, &keys::all())?;
    // The file is parsed on its own first, because only then do errors have a place in it.
    toml::from_str::<JobSpec>(text).map_err(in_file)?;
    let overrides = renamed_overrides(overrides, &mut warnings)?;
    check_alternatives(path, text, &overrides)?;
    for change in &overrides {
        check_list_is_quoted(&table, change)?;
        apply(&mut table, change, value(&change.value))?;
        let Err(error) = spec_of(&table) else { continue };
        let mut read_as = |value: Value| {
            apply(&mut table, change, value)?;
            Ok::<_, ConfigError>(spec_of(&table).map(drop))
        };
        // Names may look like numbers, dates or lists. A mistake in a list must not become a path.
        let written = value(&change.value);
        let is_list =
            (written.is_array() || written.is_table()) && read_as(Value::Array(vec!["".into()]))?.is_ok();
        let error = match read_as(Value::String(change.value.clone()))? {
            Ok(()) if !is_list => continue,
            // It lists the possible values, which the error about the type does not.
            Err(unknown) if unknown.message().starts_with("unknown variant") => unknown,
            _ => error,
        };
        return Err(ConfigError::wrong_type(&change.source, error.message()));
    }
    let of_file =
        |error: toml::de::Error| ConfigError::wrong_type(&path.display().to_string(), error.message());
    let spec = spec_of(&table).map_err(of_file)?;
    let sources = Sources { path: path.into(), text: text.clone(), overrides };
    spec.check().map_err(|invalid| sources.error(&invalid))?;
    // With epochs, the number of steps is known only with the data.
    warnings.extend(spec.train.short_warmup().filter(|_| spec.train.epochs.is_none()));
    Ok(Loaded { spec, warnings, sources })
}

/// Reads a table as text, like the file: one deserializer for both, whose code for all sections is large.
fn spec_of(table: &Table) -> Result<JobSpec, toml::de::Error> {
    toml::from_str(&table.to_string())
}

/// Replaces renamed keys in the text of the file, with a warning, so that all other code deals with current names only.
fn rename_keys(path: &Path, mut text: String, warnings: &mut Vec<String>) -> Result<String, ConfigError> {
    for (old, new) in keys::RENAMED_KEYS {
        let Some(span) = diagnostics::key_span(&text, old) else { continue };
        if diagnostics::key_span(&text, new).is_some() {
            return Err(ConfigError::renamed_twice(path, &text, span, old, new));
        }
        text.replace_range(span, new.rsplit('.').next().unwrap_or(new));
        warnings.push(format!("{}: {}", path.display(), keys::renamed_warning(old, new)));
    }
    Ok(text)
}

/// Replaces renamed keys in the overrides. Within one layer (the environment or the flags) only one of the two names
/// may be set; a flag overrides a variable of either name.
fn renamed_overrides(
    overrides: &[Override],
    warnings: &mut Vec<String>,
) -> Result<Vec<Override>, ConfigError> {
    let rename = |change: &Override| {
        let Some((old, new)) = keys::RENAMED_KEYS.iter().find(|(old, _)| *old == change.key) else {
            return Ok(change.clone());
        };
        let same_layer = |other: &&Override| other.key == *new && other.layer == change.layer;
        if let Some(other) = overrides.iter().find(same_layer) {
            let problem = format!("`{old}` was renamed to `{new}`, which {} also sets", other.source);
            return Err(ConfigError::value(&change.source, &problem, "only one of the two names"));
        }
        warnings.push(format!("{}: {}", change.source, keys::renamed_warning(old, new)));
        Ok(Override { key: (*new).into(), ..change.clone() })
    };
    overrides.iter().map(rename).collect()
}

/// Refuses both of two alternative keys in one layer. A layer that sets one replaces the other in the layers before it.
fn check_alternatives(path: &Path, text: &str, overrides: &[Override]) -> Result<(), ConfigError> {
    for (one, other) in ALTERNATIVE_KEYS {
        let problem = format!("`{other}` replaces `{one}`, which is set as well");
        let expected = "only one of them";
        if let (Some(_), Some(span)) = (diagnostics::key_span(text, one), diagnostics::key_span(text, other))
        {
            return Err(ConfigError::at(path, text, span, problem, format!("expected {expected}")));
        }
        for change in overrides.iter().filter(|change| change.key == *other) {
            if overrides.iter().any(|it| it.key == *one && it.layer == change.layer) {
                return Err(ConfigError::value(&change.source, &problem, expected));
            }
        }
    }
    Ok(())
}

/// Refuses a list without quotes, as a shell passes on `["a", "b"]`. As text it would be a glob for a file `a` or `b`.
fn check_list_is_quoted(table: &Table, change: &Override) -> Result<(), ConfigError> {
    let text = &change.value;
    if !(text.starts_with('[') && text.ends_with(']') && value(text).is_str()) {
        return Ok(());
    }
    let mut table = table.clone();
    apply(&mut table, change, Value::Array(vec!["".into()]))?;
    if spec_of(&table).is_err() {
        return Ok(());
    }
    let problem = format!("the elements of `{text}` have no quotes, which a shell removes");
    Err(ConfigError::value(&change.source, &problem, &format!(r#"'{}=["A", "B"]'"#, change.key)))
}

fn apply(table: &mut Table, change: &Override, value: Value) -> Result<(), ConfigError> {
    let known = keys::all();
    let Some((section, key)) = change.key.split_once('.').filter(|_| known.contains(&change.key)) else {
        let help = keys::nearest(&change.key, &known);
        return Err(ConfigError::value(&change.source, &format!("unknown key `{}`", change.key), &help));
    };
    let section = table.entry(section).or_insert_with(|| Value::Table(Table::new()));
    if let Value::Table(section) = section {
        let replaced = ALTERNATIVE_KEYS.iter().find_map(|(one, other)| match change.key.as_str() {
            key if key == *one => Some(other),
            key if key == *other => Some(one),
            _ => None,
        });
        if let Some((_, replaced)) = replaced.and_then(|key| key.split_once('.')) {
            section.remove(replaced);
        }
        section.insert(key.into(), value);
    }
    Ok(())
}

/// Parses a TOML value. Text that is not TOML becomes a string, so that `--set model.arch=gpt2` needs no quotes.
fn value(text: &str) -> Value {
    let parsed = toml::from_str::<Table>(&format!("value = {text}"));
    parsed.ok().and_then(|mut table| table.remove("value")).unwrap_or_else(|| Value::String(text.into()))
}

/// Makes paths absolute, and names a job without a name after the file.
///
/// # Errors
/// An absolute path that is not UTF-8: the description of a job is text, which would name another file.
fn resolve(
    mut spec: JobSpec,
    sources: &Sources,
    here: &Path,
    home: Option<&Path>,
) -> Result<JobSpec, PathBuf> {
    let path = &sources.path;
    let config_dir = here.join(path).parent().map_or_else(|| here.to_path_buf(), Path::to_path_buf);
    let absolute = |base: &Path, path: &str| {
        // An address on the network is refused by its name later.
        if path.contains("://") {
            return Ok(path.to_owned());
        }
        let path = match (path.strip_prefix("~/"), home) {
            (Some(rest), Some(home)) => home.join(rest),
            _ => base.join(path),
        };
        normalize(&path).into_os_string().into_string().map_err(PathBuf::from)
    };
    for (key, data) in [("data.train", &mut spec.data.train), ("data.val", &mut spec.data.val)] {
        let is_overridden = sources.overrides.iter().any(|change| change.key == key);
        let base = if is_overridden { here } else { &config_dir };
        for source in data {
            source.path = absolute(base, &source.path)?;
        }
    }
    spec.job.output = absolute(here, &spec.job.output)?;
    for path in spec.checkpoint.dir.iter_mut().chain(&mut spec.checkpoint.init) {
        *path = absolute(here, path)?;
    }
    if spec.checkpoint.resume_path().is_some() {
        spec.checkpoint.resume = absolute(here, &spec.checkpoint.resume)?;
    }
    if spec.job.name.is_empty() {
        spec.job.name =
            path.file_stem().map_or_else(|| "job".into(), |stem| stem.to_string_lossy().into_owned());
    }
    Ok(spec)
}

#[cfg(test)]
mod tests {
    use xlaunch_proto::env;
    use xlaunch_spec::refusal::Refusal;

    use super::*;

    /// Returns each file with its flags, followed by the message that the user gets.
    fn messages<'a>(wrong: impl IntoIterator<Item = (&'a str, &'a [&'a str])>) -> String {
        let message = |(text, flags): (&str, &[&str])| {
            let overrides: Result<Vec<_>, _> = flags.iter().map(|it| Override::from_flag(it)).collect();
            let loaded = overrides.and_then(|overrides| parse(Path::new("train.toml"), text, &overrides));
            let found = Refusal::from(loaded.unwrap_err()).message;
            let flags = flags.iter().map(|flag| format!("--set {flag}\n")).collect::<Vec<_>>().concat();
            format!("{text}{flags}=>\n{found}\n")
        };
        wrong.into_iter().map(message).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn path_that_is_no_text_is_refused_where_it_would_be_used() {
        use std::os::unix::ffi::OsStrExt;
        let here = Path::new(std::ffi::OsStr::from_bytes(b"/caf\xe9"));
        let resolved = |text: &str| {
            let Loaded { spec, sources, .. } = parse(Path::new("/a.toml"), text, &[]).unwrap();
            resolve(spec, &sources, here, None)
        };
        assert_eq!(resolved("").unwrap_err(), here.join("runs"));
        assert_eq!(resolved("[job]\noutput = \"/out\"\n").unwrap().job.output, "/out");
    }

    #[test]
    fn endless_file_is_refused() {
        let error = load(Path::new("/dev/zero"), &[]).unwrap_err().to_string();
        assert!(error.contains("has more than 1048576 bytes"), "{error}");
    }

    #[test]
    fn mistakes_in_a_file_are_reported_with_their_place_and_what_was_expected() {
        let wrong = [
            "[train]\nsteps = 10\nlearning_rat = 1\nlrr = 3e-4\n",
            "[train]\nlrr = 3e-4\n",
            "train.lrr = 3e-4\n",
            "train = { steps = 3, lrr = 3e-4 }\n",
            "lr = 3e-4\n",
            "[trian]\nlr = 3e-4\n",
            "[train.lr]\nvalue = 3e-4\n",
            "[train.extra]\nlr = 3e-4\n",
            "[train]\nsteps = = 3\n",
            "[train\nsteps = 3\n",
            "[job]\nname = \"a\n",
            "[train]\nsteps = 3\nsteps = 4\n",
            "[train]\n[train]\n",
            "[train]\nsteps = \"500\"\n",
            "[train]\nsteps = 5e2\n",
            "[train]\nsteps = -1\n",
            "[launch]\nnproc = 5000000000\n",
            "[train]\nsteps = 9223372036854775808\n",
            "[train]\nsteps = 99999999999999999999\n",
            "[train]\nlr = [1]\n",
            "[comm]\noverlap = 1\n",
            "[job]\nname = 1\n",
            "[data]\ntrain = 1\n",
            "[launch]\ndevices = \"a\"\n",
            "[model]\narch = 3\n",
            "[model]\narch = \"bert\"\n",
            "train = 3\n",
            "train = [3]\n",
            "[[train]]\nlr = 1\n",
            "[train]\nlr = -1.0\n",
            // The value that does not fit is a default of the preset; the message still names the key.
            "[model]\nheads = 3\n",
            "[launch]\nhang_timeout = 9\nstall_timeout = 8\n",
            // The place is right behind characters of several bytes.
            "[job]\nname = \"ä\" 3\n",
        ];
        insta::assert_snapshot!("file", messages(wrong.map(|text| (text, &[][..]))));
    }

    #[test]
    fn mistakes_in_flags_are_reported_with_the_flag() {
        let wrong: [&[&str]; 8] = [
            &["train.lr"],
            &["train.stepz=3"],
            &["lr=3"],
            &["train.steps=x"],
            &["train.lr=fast"],
            &["train.lr=0"],
            &["checkpoint.memory=true"],
            &["launch.stall_timeout=8", "launch.hang_timeout=9"],
        ];
        insta::assert_snapshot!("flags", messages(wrong.map(|flags| ("", flags))));
    }

    #[test]
    fn error_about_two_keys_names_the_origin_of_the_other_value() {
        let error = |text: &str, overrides: &[Override]| {
            parse(Path::new("a.toml"), text, overrides).unwrap_err().to_string()
        };
        let text = "[train]\nsteps = 500\nbatch = 20000000\n";
        let problem = "20000000 sequences of model.seq = 512 tokens do not fit in memory; \
                       expected at most 2^31 tokens per rank and micro-step, 4194304 sequences";
        let flags = ["model.seq=256", "model.seq=512"].map(|it| Override::from_flag(it).unwrap());
        let expected = format!("a.toml:3:9: train.batch: {problem}; model.seq = 512 comes from --set");
        assert_eq!(error(text, &flags), expected);
        let variable = variables(&[("XLAUNCH_MODEL_HEADS", "3")]);
        let error = error("", &variable);
        let origin = "; model.heads = 3 comes from environment variable XLAUNCH_MODEL_HEADS";
        assert!(error.ends_with(origin), "{error}");
    }

    #[test]
    fn warm_up_is_cut_to_the_steps_of_a_shorter_run_with_a_warning() {
        let load = |steps: &str| {
            let flag = [Override::from_flag(steps).unwrap()];
            parse(Path::new("a.toml"), "[train]\nsteps = 500\nwarmup = 50\n", &flag).unwrap()
        };
        let shorter = load("train.steps=20");
        assert_eq!(shorter.spec.train.warmup_steps(), 20);
        assert_eq!(shorter.warnings, ["train.warmup: 50 steps in a run of 20: all 20 are warm-up"]);
        let long_enough = load("train.steps=50");
        assert_eq!((long_enough.spec.train.warmup_steps(), long_enough.warnings), (50, Vec::new()));
    }

    #[test]
    fn steps_and_epochs_replace_each_other_across_layers_but_not_within_one() {
        let load = |text: &str, flags: &[&str]| {
            let flags: Vec<_> = flags.iter().map(|flag| Override::from_flag(flag).unwrap()).collect();
            let loaded = parse(Path::new("a.toml"), text, &flags);
            loaded.map(|it| (it.spec.train.steps, it.spec.train.epochs)).map_err(|error| error.to_string())
        };
        let default = JobSpec::default().train.steps;
        assert_eq!(load("[train]\nepochs = 3\n", &[]), Ok((default, Some(3.0))));
        assert_eq!(load("[train]\nsteps = 5\n", &["train.epochs=0.5"]), Ok((default, Some(0.5))));
        assert_eq!(load("[train]\nepochs = 3\n", &["train.steps=5"]), Ok((5, None)));
        let problem =
            "`train.epochs` replaces `train.steps`, which is set as well; expected only one of them";
        let both = load("[train]\nsteps = 5\nlr = 0.1\nepochs = 3\n", &["train.steps=7"]);
        assert_eq!(both, Err(format!("a.toml:4:1: {problem}")));
        let both = load("", &["train.epochs=3", "train.steps=7"]);
        assert_eq!(both, Err(format!("--set train.epochs=3: {problem}")));
    }

    #[test]
    fn unknown_key_in_a_variable_is_refused_and_other_variables_are_ignored() {
        let error = |name: &str| {
            let error = parse(Path::new("a.toml"), "", &variables(&[(name, "3")])).unwrap_err();
            error.to_string()
        };
        let expected =
            "environment variable XLAUNCH_TRAIN_LRR: unknown key `train.lrr`; did you mean `train.lr`?";
        assert_eq!(error("XLAUNCH_TRAIN_LRR"), expected);
        assert!(error("XLAUNCH_LAUNCH_SILENCES").contains("unknown key `launch.silences`"));
        let others = [
            env::AGENT_SOCKET,
            env::ATTEMPT,
            env::DEVICE,
            env::JOB_ID,
            env::LOG_FALLBACK,
            env::POOL_DEBUG,
            env::POOL_TRACE,
            env::PROFILE,
            env::SCOPE,
            env::WORKER_PROGRAM,
            "XLAUNCH_BENCH",
            "XLAUNCH_CACHE",
            "XLAUNCH_CUBLASLT",
            "XLAUNCH_CUDNN",
            "XLAUNCH_LIBRARIES",
            "XLAUNCH_LOG",
            "XLAUNCH_NCCL",
            "XLAUNCH_NVRTC",
            "XLAUNCH_SOCKET",
            "XLAUNCH_TEST_PYTHON",
            "TRAIN_LRR",
        ];
        assert_eq!(variables(&others.map(|name| (name, "3"))), []);
    }

    #[test]
    fn variables_of_kubernetes_services_and_of_hooks_are_not_keys() {
        let address = "10.96.0.7";
        let service = [
            ("XLAUNCH_TRAIN_SERVICE_HOST", address),
            ("XLAUNCH_TRAIN_SERVICE_PORT", "29400"),
            ("XLAUNCH_TRAIN_SERVICE_PORT_RDZV", "29400"),
            ("XLAUNCH_TRAIN_PORT", "tcp://10.96.0.7:29400"),
            ("XLAUNCH_JOB_GPT_2_PORT_29400_TCP", "tcp://10.96.0.7:29400"),
            ("XLAUNCH_TRAIN_PORT_29400_TCP_PROTO", "tcp"),
            ("XLAUNCH_TRAIN_PORT_29400_TCP_PORT", "29400"),
            ("XLAUNCH_TRAIN_PORT_53_UDP_ADDR", address),
        ];
        assert_eq!(variables(&service), []);
        let hook = [
            ("XLAUNCH_HOOK_JOB_NAME", "n"),
            ("XLAUNCH_JOB_NAME", "n"),
            ("XLAUNCH_JOB_UID", "7"),
            ("XLAUNCH_HOOK_JOB_UID", "7"),
        ];
        assert_eq!(variables(&hook), []);
        // A hook can still set the name of a training job that it starts.
        let named = variables(&[("XLAUNCH_HOOK_JOB_NAME", "n"), ("XLAUNCH_JOB_NAME", "other")]);
        assert_eq!(
            named.iter().map(|it| (it.key.as_str(), it.value.as_str())).collect::<Vec<_>>(),
            [("job.name", "other")]
        );
        for (name, value) in [
            ("XLAUNCH_TRAIN_PORT", "29400"),
            ("XLAUNCH_TRAIN_SERVICE_HOSTS", address),
            ("XLAUNCH_TRAIN_PORT_X_TCP", "1"),
            ("XLAUNCH_TRAIN_PORT_1_TCP_LR", "1"),
        ] {
            let error = parse(Path::new("a.toml"), "", &variables(&[(name, value)])).unwrap_err().to_string();
            assert!(error.contains("unknown key"), "{error}");
        }
    }

    #[test]
    fn flags_override_the_environment_and_both_override_the_file() {
        let variables =
            [("XLAUNCH_TRAIN_LR".into(), "0.5".into()), ("XLAUNCH_TRAIN_STEPS".into(), "7".into())];
        let mut overrides = Override::from_environment(variables.into_iter()).unwrap();
        overrides.push(Override::from_flag("train.lr=0.25").unwrap());
        overrides.push(Override::from_flag("model.arch=gpt2").unwrap());
        let text = "[train]\nlr = 1.0\nsteps = 1\nbatch = 3\n";
        let spec = parse(Path::new("a.toml"), text, &overrides).unwrap().spec;
        assert_eq!((spec.train.lr, spec.train.steps, spec.train.batch), (0.25, 7, 3));
        assert_eq!(spec.model.arch, Some(xlaunch_spec::model::Arch::Gpt2));
    }

    #[test]
    fn paths_become_absolute_and_the_job_is_named_after_the_file() {
        let text = "[data]\ntrain = [\"../**/*.rs\", \"/x/y.txt\"]\n[checkpoint]\ndir = \"ck\"\n";
        let path = Path::new("deploy/tiny.toml");
        let resolved_with = |text: &str, overrides: &[Override]| {
            let Loaded { spec, sources, .. } = parse(path, text, overrides).unwrap();
            resolve(spec, &sources, Path::new("/home/me"), Some(Path::new("/root"))).unwrap()
        };
        let resolved = |text: &str| resolved_with(text, &[]);
        let spec = resolved(text);
        assert_eq!(spec.data.train, ["/home/me/**/*.rs".into(), "/x/y.txt".into()]);
        assert_eq!((spec.job.output.as_str(), spec.job.name.as_str()), ("/home/me/runs", "tiny"));
        assert_eq!(spec.checkpoint.dir.as_deref(), Some("/home/me/ck"));
        let spec = resolved("[job]\noutput = \"~/runs\"\n[data]\ntrain = [\"~/a/*.txt\", \"~b/*.txt\"]\n");
        assert_eq!(spec.job.output, "/root/runs");
        assert_eq!(spec.data.train, ["/root/a/*.txt".into(), "/home/me/deploy/~b/*.txt".into()]);
        let spec = resolved("[data]\ntrain = \"s3://bucket/a.txt\"\n");
        assert_eq!(spec.data.train, ["s3://bucket/a.txt".into()]);

        // What a user writes on the command line starts where the user is.
        let text = "[data]\ntrain = \"a\"\nval = \"v\"\n";
        for change in [
            Override::from_flag("data.train=[\"b\"]").unwrap(),
            variables(&[("XLAUNCH_DATA_TRAIN", "b")]).remove(0),
        ] {
            let data = resolved_with(text, &[change]).data;
            assert_eq!(data.train, ["/home/me/b".into()]);
            assert_eq!(data.val, ["/home/me/deploy/v".into()]);
        }
    }

    fn renamed(text: &str, overrides: &[Override]) -> Result<(f64, Vec<String>), String> {
        let loaded = parse(Path::new("train.toml"), text, overrides).map_err(|error| error.to_string())?;
        Ok((loaded.spec.launch.hang_timeout, loaded.warnings))
    }

    fn variables(names: &[(&str, &str)]) -> Vec<Override> {
        let variables = names.iter().map(|(name, value)| (name.into(), value.into()));
        Override::from_environment(variables).unwrap()
    }

    #[test]
    fn text_that_looks_like_another_type_is_text_where_text_is_expected() {
        for name in ["20261127", "1e3", "true", "inf", "[a]", "[1]"] {
            for change in [
                Override::from_flag(&format!("job.name={name}")).unwrap(),
                variables(&[("XLAUNCH_JOB_NAME", name)]).remove(0),
            ] {
                let spec = parse(Path::new("a.toml"), "", &[change]).unwrap().spec;
                assert_eq!(spec.job.name, name);
            }
        }
        // As a glob, each would match files with one character in their names.
        for list in [
            r#"[{path = "a", wieght = 1}]"#,
            r#"[{path = "a", weight = 1}, "b"]"#,
            r#"{path = "a"}"#,
            "[1]",
            "[a,b]",
        ] {
            let change = Override::from_flag(&format!("data.train={list}")).unwrap();
            let error = parse(Path::new("a.toml"), "", &[change]).unwrap_err().to_string();
            assert!(error.starts_with("--set data.train="), "{error}");
        }
    }

    #[test]
    fn variables_of_others_may_have_any_bytes_but_a_key_must_have_text() {
        use std::os::unix::ffi::OsStringExt;
        let bytes = || std::ffi::OsString::from_vec(b"a\xff".to_vec());
        let others = [("PS1".into(), bytes()), (bytes(), "1".into()), ("XLAUNCH_JOB_ID".into(), bytes())];
        assert_eq!(Override::from_environment(others.into_iter()).unwrap(), []);
        let key = [("XLAUNCH_JOB_OUTPUT".into(), bytes())];
        let refused = Override::from_environment(key.into_iter()).unwrap_err().to_string();
        assert!(
            refused.contains("environment variable XLAUNCH_JOB_OUTPUT") && refused.contains("UTF-8"),
            "{refused}"
        );
    }

    #[test]
    fn renamed_key_is_accepted_with_a_warning_in_every_layer() {
        let warning = "`launch.stall_timeout` was renamed to `launch.hang_timeout`; \
                       the old name will be removed in the next release";
        let file = renamed("[launch]\nstall_timeout = 9\nnproc = 2\n", &[]).unwrap();
        assert_eq!(file, (9.0, vec![format!("train.toml: {warning}")]));
        let flag = [Override::from_flag("launch.stall_timeout=8").unwrap()];
        let source = "--set launch.stall_timeout=8";
        assert_eq!(renamed("", &flag).unwrap(), (8.0, vec![format!("{source}: {warning}")]));
        let variable = variables(&[("XLAUNCH_LAUNCH_STALL_TIMEOUT", "7")]);
        let source = "environment variable XLAUNCH_LAUNCH_STALL_TIMEOUT";
        assert_eq!(renamed("", &variable).unwrap(), (7.0, vec![format!("{source}: {warning}")]));
        assert_eq!(renamed("[launch]\nhang_timeout = 6\n", &[]).unwrap(), (6.0, Vec::new()));
    }

    #[test]
    fn layers_keep_their_precedence_across_a_renamed_key() {
        let mut overrides = variables(&[("XLAUNCH_LAUNCH_HANG_TIMEOUT", "7")]);
        assert_eq!(renamed("[launch]\nstall_timeout = 9\n", &overrides).unwrap().0, 7.0);
        overrides.push(Override::from_flag("launch.stall_timeout=8").unwrap());
        assert_eq!(renamed("[launch]\nstall_timeout = 9\n", &overrides).unwrap().0, 8.0);
    }

    #[test]
    fn old_and_new_name_in_the_environment_are_refused() {
        let both = [("XLAUNCH_LAUNCH_STALL_TIMEOUT", "8"), ("XLAUNCH_LAUNCH_HANG_TIMEOUT", "9")];
        assert!(renamed("", &variables(&both)).is_err());
    }

    #[test]
    fn renamed_key_does_not_hide_other_errors() {
        let error = renamed("[launch]\nstall_timeout = 9\n[train]\nlrr = 1\n", &[]).unwrap_err();
        assert!(error.contains("unknown key `train.lrr`") && error.contains("`train.lr`"), "{error}");
        assert!(renamed("[launch]\nstall_timeout = \"x\"\n", &[]).is_err());
    }
}
