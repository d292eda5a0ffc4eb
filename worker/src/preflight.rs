//! Checks a job before any worker is started: data, initial weights, the directory of checkpoints, and the checkpoint
//! to resume from, which `source` finds.

mod source;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use xlaunch_data::Tokenizer;
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::job::{DataSection, DataSource, Invalid, JobSpec, TrainSection};
use xlaunch_spec::lineage::Fingerprint;
use xlaunch_spec::model::{ModelSection, ModelShape};
use xlaunch_spec::paths::obstacle;
use xlaunch_spec::quantities::counted;
use xlaunch_spec::refusal::Refusal;

use crate::checkpoint::directory;
use crate::checkpoint::{self, Changes, CheckpointError, Lock, LockError, Parent, State};
use crate::data::{self, Mismatch, Mixture, SourceUse, TokenizerSource};
use crate::error::WorkerError;
use crate::fail;
use crate::model::layout::Layout;
use crate::weights::{self, Weights};

/// Size of a checkpoint in bytes per parameter: three arenas of F32.
const BYTES_PER_PARAMETER: u64 = 12;

/// A job that can start.
#[derive(Debug, Default)]
pub struct Preflight {
    /// Checkpoint to resume from.
    pub resume_from: Option<PathBuf>,
    /// Run and step of that checkpoint. The run is empty if the checkpoint does not record it.
    pub parent: Option<Parent>,
    /// Why no steps follow that checkpoint, if so: "has all 8 steps; ...".
    pub complete: Option<String>,
    /// Number of steps of the job, with those of the runs that it continues.
    pub steps: u64,
    /// Number of tokens of all these steps.
    pub tokens: u64,
    /// Number of tokens of an epoch, with padding.
    pub epoch_tokens: u64,
    /// The data, by split.
    pub data: BTreeMap<&'static str, Fingerprint>,
    /// Size in bytes of the checkpointed state in memory.
    pub state_bytes: u64,
    /// Facts for the user, such as how documents are packed.
    pub notes: Vec<String>,
    /// Warnings for the user; the job starts regardless.
    pub warnings: Vec<String>,
    /// Keeps other jobs out of `checkpoint.dir`. Hold it until the job has ended.
    pub lock: Option<Lock>,
}

/// A job whose data has been opened.
struct Planned {
    shape: ModelShape,
    /// The training data.
    data: Fingerprint,
    /// The sequences to train on.
    train: Mixture,
    /// Tokenizer of the training data, if it is known, after the beginning of a message about it.
    tokenizer: Option<(&'static str, Tokenizer)>,
    /// Number of ranks.
    world: u32,
}

impl Planned {
    /// Returns the job with its number of steps, from the beginning or continued from a checkpoint.
    fn job(&self, spec: &JobSpec, from: Option<&State>) -> JobSpec {
        let mut spec = spec.clone();
        let (step, used) = from.map_or((0, 0), |state| (state.step, state.sequences));
        spec.train.count_steps(self.train.rows(), self.world, step, used);
        spec
    }

    /// Returns the reason if no steps of the job follow a state.
    fn complete(&self, spec: &JobSpec, state: &State) -> Option<String> {
        let TrainSection { steps, epochs, patience, .. } = self.job(spec, Some(state)).train;
        let step = state.step;
        if step >= steps {
            let key = if epochs.is_some() { "train.epochs" } else { "train.steps" };
            return Some(format!("has all {step} steps; raise `{key}` to continue"));
        }
        let best = state.best.filter(|best| best.is_final(patience))?;
        Some(format!(
            "is where training stopped early, {} evaluations after the lowest validation loss; raise `train.patience` \
             to continue",
            best.evaluations_since
        ))
    }

    /// Sets the number of steps, and checks the schedule against it.
    fn schedule(&self, spec: &JobSpec, from: Option<&State>, ready: &mut Preflight) -> Result<(), Refusal> {
        let spec = self.job(spec, from);
        let TrainSection { steps, batch, accumulate, .. } = spec.train;
        spec.check_schedule().map_err(usage)?;
        let (step, used) = from.map_or((0, 0), |state| (state.step, state.sequences));
        let per_step = (batch * accumulate) as u64 * u64::from(self.world);
        let note = |source: SourceUse| {
            let (share, epochs) = (100.0 * source.share, source.epochs());
            let SourceUse { name, rows, .. } = source;
            format!(
                "data source {name}: {share:.2} % of the sequences, {epochs:.2} epochs of {rows} sequences"
            )
        };
        let sequences = used.saturating_add(steps.saturating_sub(step).saturating_mul(per_step));
        ready.notes.extend(self.train.usage(sequences).into_iter().map(note));
        ready.warnings.extend(spec.train.short_warmup().filter(|_| spec.train.epochs.is_some()));
        ready.steps = steps;
        ready.tokens = sequences.saturating_mul(self.shape.seq as u64);
        Ok(())
    }
}

impl From<WorkerError> for Refusal {
    fn from(error: WorkerError) -> Self {
        Self::new(error.exit(), error.to_string())
    }
}

impl From<CheckpointError> for Refusal {
    fn from(error: CheckpointError) -> Self {
        WorkerError::from(error).into()
    }
}

impl From<LockError> for Refusal {
    fn from(error: LockError) -> Self {
        let exit = match error {
            LockError::Held { .. } => ExitCode::Retryable,
            LockError::Io { .. } => ExitCode::Data,
        };
        Self::new(exit, error.to_string())
    }
}

/// Opens the data, locks and checks `checkpoint.dir`, and finds the checkpoint to resume from. `job_dir` contains the
/// job's earlier runs; `world` is the number of ranks. Runs on the node of rank 0; other nodes use [`preflight_data`].
pub fn preflight(spec: &JobSpec, job_dir: &Path, world: u32) -> Result<Preflight, Refusal> {
    let (mut ready, planned) = check_data(spec, world)?;
    let shape = &planned.shape;
    let layout = Layout::of_job(spec, shape).map_err(usage)?;
    let layout = layout.trained();
    let init = open_init(spec, shape, &mut ready)?;
    let bytes = (layout.parameters() as u64).saturating_mul(BYTES_PER_PARAMETER);
    let dir = spec.checkpoint.dir.as_ref().map(Path::new);
    let steps = if spec.train.epochs.is_some() { u64::MAX } else { spec.train.steps };
    let most = spec.checkpoint.most_at_a_time(steps);
    let tight = most.and_then(|most| directory::room_warning(dir.unwrap_or(job_dir), bytes, most));
    ready.warnings.extend(tight);
    let checked = ready.warnings.len();
    match dir {
        Some(dir) => ready.lock = Some(claim(dir, &spec.job.name, bytes, &mut ready.warnings)?),
        None => directory::check_room(job_dir, bytes)?,
    }
    let is_complete = |state: &State| planned.complete(spec, state).is_some();
    let mut find_start =
        || match source::find(spec, (shape, layout), job_dir, &is_complete, &mut ready.warnings)? {
            Some(path) => resume(spec, &planned, path, &mut ready),
            None => {
                check_tokenizer(init.as_ref(), planned.tokenizer.as_ref(), &mut ready.warnings)?;
                planned.schedule(spec, None, &mut ready)?;
                start_afresh(spec, job_dir, &mut ready.warnings)
            }
        };
    match find_start() {
        Ok(()) => Ok(ready),
        Err(refusal) => Err(with_changes(refusal, &ready.warnings[checked..])),
    }
}

/// Opens and checks the initial weights, without reading the values.
fn open_init(spec: &JobSpec, shape: &ModelShape, ready: &mut Preflight) -> Result<Option<Weights>, Refusal> {
    let Some(path) = &spec.checkpoint.init else { return Ok(None) };
    let weights = Weights::open(Path::new(path))?;
    weights.check(shape)?;
    ready.warnings.extend(weights.note());
    weights.check_adapter(spec, shape)?;
    Ok(Some(weights))
}

/// Refuses to start training on data of another tokenizer than that of the initial weights, whose ids stand for other
/// text. Where only some texts have other ids, the weights are still of use.
fn check_tokenizer(
    init: Option<&Weights>,
    data: Option<&(&str, Tokenizer)>,
    warnings: &mut Vec<String>,
) -> Result<(), Refusal> {
    let (Some(init), Some((data, theirs))) = (init, data) else { return Ok(()) };
    let own = match init.tokenizer() {
        Ok(Some(own)) => own,
        Ok(None) => return Ok(()),
        Err(error) => {
            warnings.push(format!(
                "the tokenizer of checkpoint.init is not compared with that of data.train: {error}"
            ));
            return Ok(());
        }
    };
    match data::tokenizer_mismatch(data, theirs, &own) {
        None => {}
        Some(Mismatch::Rules(message)) => warnings.push(message),
        Some(Mismatch::Ids(message)) => return Err(Refusal { exit: ExitCode::Data, message }),
    }
    Ok(())
}

/// Adds what was done to checkpoints before it: a job that cannot start has no other place to report that.
fn with_changes(mut refusal: Refusal, changes: &[String]) -> Refusal {
    if !changes.is_empty() {
        refusal.message += &format!("; before that: {}", changes.join("; "));
    }
    refusal
}

/// Checks only configuration and data, not checkpoints: the part of [`preflight`] that every node needs.
pub fn preflight_data(spec: &JobSpec, world: u32) -> Result<Preflight, Refusal> {
    check_data(spec, world).map(|(ready, _)| ready)
}

/// Runs the part of [`preflight`] that changes nothing. Checks only a checkpoint that `checkpoint.resume` names: a
/// search for one to resume from would lock and clean the directory.
pub fn preflight_dry_run(spec: &JobSpec, world: u32) -> Result<Preflight, Refusal> {
    let (mut ready, planned) = check_data(spec, world)?;
    let init = open_init(spec, &planned.shape, &mut ready)?;
    if let Some(path) = spec.checkpoint.resume_path() {
        let (path, rejected) = directory::locate(path)?;
        ready.warnings.extend(rejected.into_iter().map(|(_, error)| error.to_string()));
        check_continued(spec, &planned, &path, &mut ready)?;
    } else {
        check_tokenizer(init.as_ref(), planned.tokenizer.as_ref(), &mut ready.warnings)?;
        planned.schedule(spec, None, &mut ready)?;
    }
    Ok(ready)
}

fn check_data(spec: &JobSpec, world: u32) -> Result<(Preflight, Planned), Refusal> {
    // Checks the launcher's environment. The workers check the variable again, because a job of the daemon has its own.
    fail::check().map_err(WorkerError::Setting)?;
    let shape = spec.model.resolve().map_err(usage)?;
    // The configuration was checked when it was read, but the number of workers is known only now, and a file of
    // weights does not complete the model.
    let mut complete = spec.clone();
    complete.model.complete(&shape);
    complete.check().map_err(usage)?;
    spec.check_experts(world as usize).map_err(usage)?;
    let dataset = weights::dataset(spec, &shape)?;
    let data = dataset.train.fingerprint().map_err(WorkerError::from)?;
    let mut ready = Preflight { data: [("train", data.clone())].into(), ..Preflight::default() };
    if let Some(val) = dataset.val_fingerprint().map_err(WorkerError::from)? {
        ready.data.insert("validation", val);
    }
    for source in dataset.train.sources() {
        let name = if source.name.is_empty() { String::new() } else { format!("{}: ", source.name) };
        ready.notes.extend(source.plan.packing().map(|packing| format!("{name}{packing}")));
        let evaluated =
            || dataset.val.iter().flat_map(|val| val.rows.sources()).any(|it| it.name == source.name);
        if spec.data.val.is_empty() && spec.train.eval_every != 0 && !dataset.val.is_empty() && !evaluated() {
            ready
                .warnings
                .push(format!("{name}not evaluated: it has less validation data than one sequence"));
        }
    }
    let held_out = dataset.val.iter().flat_map(|val| val.rows.sources());
    let too_long = held_out.filter_map(|source| source.plan.packing()?.too_long).sum::<u64>();
    if too_long > 0 {
        ready.notes.push(format!(
            "left out of the held-out data: {} longer than model.seq",
            counted(too_long, "pair")
        ));
    }
    if dataset.val.is_empty() && spec.train.eval_every != 0 {
        let shorter = "evaluation is off: the held-out data is shorter than one sequence";
        let message = match &dataset.tokenizer {
            TokenizerSource::File { manifest: Some(manifest), .. } if manifest.val.documents == 0 => {
                "evaluation is off: data.train was prepared without held-out data, see `--val`".into()
            }
            TokenizerSource::File { .. } => {
                format!("{shorter}; prepare the data with a larger `--val` or lower `model.seq`")
            }
            _ => format!("{shorter}; raise `data.val_fraction` or lower `model.seq`"),
        };
        if spec.train.patience != 0 {
            return Err(Refusal { exit: ExitCode::Usage, message: format!("train.patience: {message}") });
        }
        ready.warnings.push(message);
    }
    if matches!(dataset.tokenizer, TokenizerSource::Bytes) {
        ready.warnings.extend(rows_as_text(&spec.data.train));
    }
    ready.warnings.extend(inherited_ffn(&spec.model, &shape));
    ready.warnings.extend(spec.without_effect(&shape));
    let is_prepared = matches!(dataset.tokenizer, TokenizerSource::File { manifest: Some(_), .. });
    let holds_out = spec.data.val_fraction != DataSection::default().val_fraction;
    if is_prepared && holds_out && spec.data.val.is_empty() {
        let reason = "data.train is a prepared directory, which has its own validation data";
        ready.warnings.push(format!("data.val_fraction has no effect: {reason}"));
    }
    // Checkpoints contain the tokenizer even if no text is sampled.
    let tokenizer = dataset.tokenizer.load().map_err(WorkerError::from)?;
    let beginning = if is_prepared { "data.train was prepared with" } else { "data.train is read with" };
    let tokenizer = tokenizer.map(|tokenizer| (beginning, tokenizer));
    let layout = Layout::of_job(spec, &shape).map_err(usage)?;
    ready.state_bytes = (layout.trained().len as u64).saturating_mul(BYTES_PER_PARAMETER);
    ready.epoch_tokens = dataset.train.rows() * shape.seq as u64;
    let planned = Planned { shape, data, train: dataset.train, tokenizer, world };
    Ok((ready, planned))
}

/// Returns a warning if rows of JSON or a table are read as plain text.
fn rows_as_text(train: &[DataSource]) -> Option<String> {
    const ROW_ENDINGS: [&str; 5] = [".jsonl", ".ndjson", ".json", ".csv", ".tsv"];
    let is_rows = |source: &&DataSource| ROW_ENDINGS.iter().any(|end| source.path.ends_with(end));
    let DataSource { path, .. } = train.iter().find(is_rows)?;
    Some(format!(
        "data.train: {path} is read as plain text, with the keys, quotes and other columns of its rows; `xlaunch data \
         prepare` takes their text"
    ))
}

/// Returns a warning if the width of the feed-forward layers comes from a preset whose `model.dim` differs.
fn inherited_ffn(section: &ModelSection, shape: &ModelShape) -> Option<String> {
    let preset = ModelSection { preset: section.preset.clone(), ..ModelSection::default() }.resolve().ok()?;
    if section.ffn.is_some() || section.dim.is_none_or(|dim| dim == preset.dim) {
        return None;
    }
    let fitting = (preset.ffn * shape.dim).div_ceil(preset.dim).next_multiple_of(8);
    let name = section.preset.as_deref().unwrap_or("byte-tiny");
    Some(format!(
        "model.ffn is not set and stays {} as in the preset {name}, whose model.dim is {}; the same ratio for \
         model.dim = {} is model.ffn = {fitting}",
        preset.ffn, preset.dim, shape.dim
    ))
}

fn usage(invalid: Invalid) -> Refusal {
    Refusal { exit: ExitCode::Usage, message: invalid.to_string() }
}

/// Locks a directory of checkpoints, removes leftovers of jobs that were killed, and checks that it is writable.
fn claim(dir: &Path, job: &str, bytes: u64, warnings: &mut Vec<String>) -> Result<Lock, Refusal> {
    let write =
        |error: std::io::Error| CheckpointError::Write { path: dir.into(), reason: error.to_string() };
    if let Some(what) = obstacle(dir) {
        return Err(Refusal { exit: ExitCode::Usage, message: format!("checkpoint.dir: {what}") });
    }
    fs_err::create_dir_all(dir).map_err(write)?;
    let lock = Lock::acquire(dir, &holder(job))?;
    warnings.extend(lock.warning().map(str::to_owned));
    let unfinished = directory::clean(dir).map_err(write)?;
    warnings.extend(unfinished.iter().map(ToString::to_string));
    directory::check_writable(dir, bytes)?;
    Ok(lock)
}

/// Describes the holder of a lock to other jobs.
pub(crate) fn holder(job: &str) -> String {
    format!("job `{job}`, process {}", std::process::id())
}

/// Checks that the job can continue from a checkpoint, and sets later checkpoints aside.
fn resume(spec: &JobSpec, planned: &Planned, path: PathBuf, ready: &mut Preflight) -> Result<(), Refusal> {
    let state = check_continued(spec, planned, &path, ready)?;
    ready.complete = planned.complete(spec, &state);
    if ready.complete.is_some() {
        ready.resume_from = Some(path);
        return Ok(());
    }
    if let Some(dir) = &spec.checkpoint.dir {
        // Checkpoints after the one to continue from are not part of the run.
        abandon(Path::new(dir), Some(state.step), &mut ready.warnings)?;
    }
    ready.parent = Some(Parent { run: state.run, step: state.step });
    ready.resume_from = Some(path);
    Ok(())
}

/// Returns the state of a checkpoint that the job may continue from.
fn check_continued(
    spec: &JobSpec,
    planned: &Planned,
    path: &Path,
    ready: &mut Preflight,
) -> Result<State, Refusal> {
    let state = directory::open(path, &planned.shape)?;
    state.check_trained(path, spec)?;
    planned.schedule(spec, Some(&state), ready)?;
    let Changes { refused, others } =
        state.changes(&planned.job(spec, Some(&state)), planned.world, &planned.data);
    if !refused.is_empty() && !spec.checkpoint.resume_changed {
        let message = format!(
            "checkpoint {} belongs to a run with other settings: {}; to continue it anyway, pass `--resume-changed`",
            path.display(),
            refused.join("; ")
        );
        return Err(Refusal { exit: ExitCode::Data, message });
    }
    let changes: Vec<String> = refused.into_iter().chain(others).collect();
    if !changes.is_empty() {
        ready.warnings.push(format!("since checkpoint {}: {}", path.display(), changes.join("; ")));
    }
    Ok(state)
}

/// Starts a new run. `checkpoint.dir` must be empty unless the user allows its use.
fn start_afresh(spec: &JobSpec, job_dir: &Path, warnings: &mut Vec<String>) -> Result<(), Refusal> {
    if spec.checkpoint.resume == "auto" {
        let searched = spec.checkpoint.dir.as_ref().map_or(job_dir, Path::new);
        warnings.push(format!(
            "no checkpoint of job `{}` below {}: starting at step 1",
            spec.job.name,
            searched.display()
        ));
    }
    let Some(dir) = spec.checkpoint.dir.as_ref().map(Path::new) else { return Ok(()) };
    if !spec.checkpoint.overwrite
        && let Some(found) = directory::scan(dir)?.first()
    {
        let message = format!(
            "checkpoint directory {} is not empty: it contains {}; continue from it with `--resume`, choose another \
             `checkpoint.dir`, or set its checkpoints aside with `--overwrite`",
            dir.display(),
            checkpoint::name(found.step)
        );
        return Err(Refusal { exit: ExitCode::Usage, message });
    }
    Ok(abandon(dir, None, warnings)?)
}

fn abandon(dir: &Path, after: Option<u64>, warnings: &mut Vec<String>) -> Result<(), CheckpointError> {
    let renamed = directory::abandon_after(dir, after);
    let renamed =
        renamed.map_err(|error| CheckpointError::Write { path: dir.into(), reason: error.to_string() })?;
    let describe = |path: &PathBuf| format!("set aside, as it is not part of this run: {}", path.display());
    warnings.extend(renamed.iter().map(describe));
    Ok(())
}

#[cfg(test)]
mod tests {
    use xlaunch_data::TOKENIZER_FILE;
    use xlaunch_spec::job::CheckpointSection;

    use super::*;

    #[test]
    fn fresh_start_in_place_of_a_resume_is_a_warning_that_names_the_searched_directory() {
        let dir = tempfile::tempdir().unwrap();
        fs_err::write(dir.path().join("a.txt"), "some text. ".repeat(1000)).unwrap();
        let warnings = |resume: &str, saved: Option<&str>| {
            let mut spec = JobSpec::default();
            spec.job.name = "train".into();
            spec.checkpoint = CheckpointSection { resume: resume.into(), ..spec.checkpoint.clone() };
            spec.data = DataSection {
                train: vec![format!("{}/*.txt", dir.path().display()).into()],
                ..spec.data.clone()
            };
            spec.checkpoint.dir = saved.map(str::to_owned);
            preflight(&spec, Path::new("/x/runs/train"), 1).unwrap().warnings
        };
        let warning =
            |dir: &str| vec![format!("no checkpoint of job `train` below {dir}: starting at step 1")];
        assert_eq!(warnings("auto", None), warning("/x/runs/train"));
        let saved = dir.path().join("saved").display().to_string();
        assert_eq!(warnings("auto", Some(&saved)), warning(&saved));
        assert!(warnings("off", None).is_empty());
    }

    #[test]
    fn room_for_fewer_checkpoints_than_are_kept_is_a_warning() {
        let dir = tempfile::tempdir().unwrap();
        fs_err::write(dir.path().join("a.txt"), "some text. ".repeat(1000)).unwrap();
        let warnings = |keep: usize| {
            let mut spec = JobSpec::default();
            spec.job.name = "train".into();
            (spec.checkpoint.every, spec.checkpoint.keep) = (1, keep);
            spec.data.train = vec![format!("{}/*.txt", dir.path().display()).into()];
            spec.train.steps = 1 << 30;
            preflight(&spec, dir.path(), 1).unwrap().warnings
        };
        assert_eq!(warnings(1), [""; 0]);
        // Keeps all.
        let tight = warnings(0);
        let expected =
            format!("free in {}, but it has to hold up to 1073741824 at a time", dir.path().display());
        assert!(matches!(&tight[..], [line] if line.contains(&expected)), "{tight:?}");
    }

    #[test]
    fn rows_that_are_read_as_text_are_a_warning() {
        let dir = tempfile::tempdir().unwrap();
        fs_err::write(dir.path().join("a.jsonl"), "{\"text\": \"some text\"}\n".repeat(1000)).unwrap();
        let warnings = |files: &str| {
            let mut spec = JobSpec::default();
            spec.data.train = vec![dir.path().join(files).display().to_string().into()];
            preflight_data(&spec, 1).unwrap().warnings
        };
        fs_err::write(dir.path().join("b.csv"), "id,text\n1,some text\n".repeat(1000)).unwrap();
        for files in ["*.jsonl", "b.csv"] {
            let found = warnings(files);
            assert!(
                found.len() == 1 && found[0].contains(&format!("{files} is read as plain text")),
                "{found:?}"
            );
        }
        assert!(warnings("*").is_empty());
    }

    #[test]
    fn data_of_another_tokenizer_is_refused_and_another_bos_is_a_warning() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs_err::write(dir.path().join(name), text).unwrap();
        write(
            "config.json",
            r#"{"model_type": "llama", "vocab_size": 50257, "hidden_size": 16, "intermediate_size": 8,
                "num_hidden_layers": 1, "num_attention_heads": 2}"#,
        );
        let model = Weights::open(dir.path()).unwrap();
        let check = |data: Tokenizer| {
            let mut warnings = Vec::new();
            let data = ("data.train was prepared with", data);
            check_tokenizer(Some(&model), Some(&data), &mut warnings).map(|()| warnings)
        };
        let gpt2 = Tokenizer::gpt2();
        assert!(check(gpt2.clone()).unwrap().is_empty(), "the model's own is unknown");
        write(TOKENIZER_FILE, &gpt2.to_json());
        assert!(check(gpt2.clone()).unwrap().is_empty());
        let warnings = check(gpt2.with_bos(gpt2.end_of_text()).unwrap()).unwrap();
        assert!(warnings.len() == 1 && warnings[0].contains("prepared with --bos always"), "{warnings:?}");
        let message = check(Tokenizer::bytes()).unwrap_err().message;
        assert!(
            message.starts_with("data.train was prepared with tokenizer `bytes` (hash ")
                && message.contains("but the model has `gpt2` (hash "),
            "{message}"
        );
        write(TOKENIZER_FILE, "{}");
        let warnings = check(gpt2).unwrap();
        assert!(warnings.len() == 1 && warnings[0].contains("is not compared"), "{warnings:?}");
    }

    #[test]
    fn keys_that_a_file_of_weights_leaves_open_have_the_values_of_the_default_model() {
        let mut spec = JobSpec::default();
        (spec.checkpoint.init, spec.comm.experts) = (Some("model.safetensors".into()), 2);
        let message = preflight_data(&spec, 2).unwrap_err().message;
        assert!(message.starts_with("comm.experts: the model has no experts"), "{message}");
    }

    #[test]
    fn settings_of_adapters_without_a_rank_are_a_warning() {
        let dir = tempfile::tempdir().unwrap();
        fs_err::write(dir.path().join("a.txt"), "some text\n".repeat(1000)).unwrap();
        let mut spec = JobSpec::default();
        spec.data.train = vec![dir.path().join("a.txt").display().to_string().into()];
        assert!(preflight_data(&spec, 1).unwrap().warnings.is_empty());
        spec.lora.alpha = Some(32.0);
        let warnings = preflight_data(&spec, 1).unwrap().warnings;
        assert!(warnings.len() == 1 && warnings[0].contains("lora.rank is 0"), "{warnings:?}");
    }
}
