//! `state.json`: the position of a run, and the settings that must not change silently when it continues.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use xlaunch_spec::job::{DocumentMode, JobSpec, LoraSection, Optimizer, TrainSection};
use xlaunch_spec::model::ModelShape;

use xlaunch_spec::lineage::Fingerprint;

use super::CheckpointError;
use crate::best::Best;
use crate::inherited::Inherited;
use crate::schedule;

/// Learning rates that differ by less are the same schedule, computed for other numbers of steps.
const RATE_TOLERANCE: f64 = 1e-9;

/// The contents of `state.json`. Unknown keys are ignored; keys that version 1 lacks have defaults.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Version of the checkpoint layout.
    pub version: u32,
    /// Completed steps.
    pub step: u64,
    /// Number of sequences used so far by all ranks.
    pub sequences: u64,
    /// World size of the run that wrote it.
    pub world_size: u32,
    /// The model's shape.
    pub model: ModelShape,
    /// The job's seed. Together with `sequences` it determines the data order.
    pub seed: u64,
    /// Id of the run that wrote it; empty in version 1.
    #[serde(default)]
    pub run: String,
    /// Runs that this one continues, the earliest first.
    #[serde(default)]
    pub parents: Vec<Parent>,
    /// Fingerprint of the training data; `None` in version 1.
    #[serde(default)]
    pub data: Option<Fingerprint>,
    /// Sequences per step; `None` in version 1.
    #[serde(default)]
    pub batch: Option<Batch>,
    /// Number of warm-up steps. A run that continues this one keeps it unless its configuration sets another.
    #[serde(default)]
    pub warmup: Option<u64>,
    /// Loss on the held-out data after this step, if it was evaluated then.
    #[serde(default)]
    pub val_loss: Option<f64>,
    /// The lowest validation loss so far, for `train.patience`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub best: Option<Best>,
    /// Id that starts documents, if the tokenizer is known.
    #[serde(default)]
    pub end_of_text: Option<u32>,
    /// Files that came with the initial weights.
    #[serde(default)]
    pub inherited: Option<Inherited>,
    /// The job description, for information only: other versions may have other keys.
    pub spec: serde_json::Value,
    /// Adapters, if the checkpoint has those instead of all weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapted: Option<Adapted>,
    /// The reference of a run that trains all weights on preferences.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reference: Option<Frozen>,
}

/// Adapters that a run trains, and the weights that they adapt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Adapted {
    /// Settings of the adapters.
    pub lora: LoraSection,
    /// The weights.
    pub frozen: Frozen,
}

/// Weights that a run does not train.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Frozen {
    /// Path of the model.
    pub path: PathBuf,
    /// Hash of all values in fp32, independent of the format of the files.
    pub hash: String,
}

impl Frozen {
    /// Requires that the weights `found` are those with which the run of the checkpoint `path` was trained.
    pub fn check(&self, path: &Path, found: &Self) -> Result<(), CheckpointError> {
        if self.hash == found.hash {
            return Ok(());
        }
        let (saved, now) = (self.path.display(), found.path.display());
        let difference = format!("their hash was {} in {saved}, but is {} in {now}", self.hash, found.hash);
        Err(CheckpointError::OtherWeights { path: path.into(), difference })
    }
}

/// A run that was continued.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parent {
    /// Id of the continued run.
    pub run: String,
    /// The step after which another run took over.
    pub step: u64,
}

/// Number of sequences per step, and their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Batch {
    /// Sequences per rank and micro-step.
    pub batch: usize,
    /// Micro-steps per step.
    pub accumulate: usize,
    /// True if sequences are read in random order.
    pub shuffle: bool,
}

impl Batch {
    /// Reads the batch settings of a job.
    pub fn of(spec: &JobSpec) -> Self {
        Self { batch: spec.train.batch, accumulate: spec.train.accumulate, shuffle: spec.data.shuffle }
    }

    /// Returns the number of sequences per step; `None` if it overflows.
    fn sequences(self, world: u32) -> Option<u64> {
        let per_rank = u64::try_from(self.batch).ok()?.checked_mul(u64::try_from(self.accumulate).ok()?)?;
        per_rank.checked_mul(world.into())
    }
}

/// Differences between a job and the run that it continues.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Changes that would make it a different run: continue only if the user confirms.
    pub refused: Vec<String>,
    /// Changes that deserve a warning.
    pub others: Vec<String>,
}

impl State {
    /// Returns the weights that the run reads from another place than its checkpoints.
    pub fn frozen(&self) -> Option<&Frozen> {
        self.adapted.as_ref().map(|adapted| &adapted.frozen).or(self.reference.as_ref())
    }

    /// Checks that a job trains what the checkpoint `path` with this state contains: all weights, or the same adapters.
    pub fn check_trained(&self, path: &Path, spec: &JobSpec) -> Result<(), CheckpointError> {
        let other =
            |difference: String| Err(CheckpointError::OtherTraining { path: path.into(), difference });
        let lora = &spec.lora;
        let Some(Adapted { lora: saved, frozen }) = &self.adapted else {
            if !lora.is_on() {
                return Ok(());
            }
            return other(format!(
                "it has all weights of a model, but lora.rank = {} trains adapters; to adapt these weights, set \
                 `checkpoint.init` to this path and `checkpoint.resume` to \"off\"",
                lora.rank
            ));
        };
        if !lora.is_on() {
            return other(format!(
                "it has adapters (LoRA) of {}, but the job trains all weights; set `[lora]` as in that run, or merge \
                 the adapters with `xlaunch export --merge` and start from the result with `checkpoint.init`",
                frozen.path.display()
            ));
        }
        match saved.difference(lora, &self.model) {
            None => Ok(()),
            Some((key, saved, now)) => other(format!("{key} is {saved} there, {now} in this job")),
        }
    }

    /// Compares the job that continues from this state with the run that wrote the state.
    pub fn changes(&self, spec: &JobSpec, world: u32, data: &Fingerprint) -> Changes {
        let mut changes = Changes::default();
        if self.seed != spec.job.seed {
            changes.refused.push(format!("job.seed was {}, is now {}", self.seed, spec.job.seed));
        }
        if let Some(saved) = self.data.as_ref().filter(|saved| *saved != data) {
            let same = if saved.tokens == data.tokens {
                "; as many tokens, but other ones, or the sources of a mixture in another order or with other weights"
            } else {
                ""
            };
            changes.refused.push(format!("the training data was {saved}, is now {data}{same}"));
        }
        self.compare_batch(Batch::of(spec), world, &mut changes);
        // Versions without the key had AdamW only.
        let before = self.spec["train"]["optimizer"].as_str().unwrap_or(Optimizer::AdamW.name());
        let now = spec.train.optimizer.name();
        if before != now {
            let reason = "whose moments mean something else";
            changes.refused.push(format!("train.optimizer was {before}, is now {now}, {reason}"));
        }
        // Versions without the key had joined documents only.
        let before = self.spec["data"]["documents"].as_str().unwrap_or(DocumentMode::Joined.name());
        let now = spec.data.documents().name();
        if before != now {
            changes.refused.push(format!("data.documents was {before}, is now {now}"));
        }
        // A run without a warm-up of its own has that of the run that it continues.
        let (mut saved, mut new) = (self.spec.clone(), serde_json::to_value(spec).unwrap_or_default());
        for spec in [&mut saved, &mut new] {
            if let Some(warmup) = spec.pointer_mut("/train/warmup").filter(|warmup| warmup.is_null()) {
                *warmup = self.warmup.into();
            }
        }
        for section in new.as_object().into_iter().flat_map(|sections| sections.keys()) {
            compare(section, &saved[section], &new[section], &mut changes.others);
        }
        changes.others.extend(self.changed_rate(&spec.train));
        changes
    }

    /// Describes a jump of the learning rate at the next step: a schedule that depends on the number of steps has one
    /// where a run is continued for more of them.
    fn changed_rate(&self, new: &TrainSection) -> Option<String> {
        // Versions with other keys are not compared.
        let mut old: TrainSection = serde_json::from_value(self.spec["train"].clone()).ok()?;
        let mut new = new.clone();
        old.warmup = old.warmup.or(self.warmup);
        new.warmup = new.warmup.or(self.warmup);
        let [before, after] = [&old, &new].map(|train| schedule::learning_rate(train, self.step));
        // Another peak rate is a change of its own.
        let [part_before, part_after] = [before / old.lr, after / new.lr];
        let differs = (part_before - part_after).abs() > RATE_TOLERANCE * part_before.abs();
        let step = self.step + 1;
        differs.then(|| format!("the learning rate of step {step} was {before:.3e}, is now {after:.3e}"))
    }

    fn compare_batch(&self, new: Batch, world: u32, changes: &mut Changes) {
        if self.world_size != world {
            changes.others.push(format!("the number of ranks was {}, is now {world}", self.world_size));
        }
        let Some(saved) = self.batch else { return };
        if saved.shuffle != new.shuffle {
            changes.refused.push(format!("data.shuffle was {}, is now {}", saved.shuffle, new.shuffle));
        }
        let (before, after) = (saved.sequences(self.world_size), new.sequences(world));
        if before == after {
            return;
        }
        let count = |sequences: Option<u64>| sequences.map_or("?".into(), |count| count.to_string());
        let change = format!("a step used {} sequences of all ranks, now {}", count(before), count(after));
        // With the same configuration on another number of ranks, the change is obviously intended.
        if (saved.batch, saved.accumulate) == (new.batch, new.accumulate) {
            changes.others.push(change);
        } else {
            changes.refused.push(change);
        }
    }
}

/// Beginnings of the names of keys that are compared separately, or that may change at any time because they affect
/// neither training nor evaluation.
const NOT_COMPARED: [&str; 16] = [
    "checkpoint.",
    "data.documents",
    "data.shuffle",
    "data.train",
    "engine.memory_limit_mb",
    "engine.pool",
    "job.",
    "launch.",
    "lora.",
    "model.",
    "muon.owners",
    "observe.",
    "train.accumulate",
    "train.batch",
    "train.optimizer",
    "train.sample",
];

/// Lists the keys of a section whose values differ, except those that are [`NOT_COMPARED`].
fn compare(section: &str, saved: &serde_json::Value, new: &serde_json::Value, changes: &mut Vec<String>) {
    let (Some(saved), Some(new)) = (saved.as_object(), new.as_object()) else { return };
    for (key, value) in new {
        let name = format!("{section}.{key}");
        if NOT_COMPARED.iter().any(|beginning| name.starts_with(beginning)) {
            continue;
        }
        if let Some(old) = saved.get(key).filter(|old| *old != value) {
            changes.push(match (old.is_null(), value.is_null()) {
                (true, _) => format!("{name} was not set, is now {value}"),
                (_, true) => format!("{name} was {old}, is no longer set"),
                _ => format!("{name} was {old}, is now {value}"),
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(spec: &JobSpec) -> State {
        State {
            version: super::super::VERSION,
            step: 10,
            sequences: 160,
            world_size: 2,
            model: spec.model.resolve().unwrap(),
            seed: spec.job.seed,
            run: "r".into(),
            parents: Vec::new(),
            data: Some(Fingerprint { tokens: 100, hash: "a".into() }),
            batch: Some(Batch::of(spec)),
            warmup: Some(5),
            val_loss: None,
            best: None,
            end_of_text: None,
            inherited: None,
            spec: serde_json::to_value(spec).unwrap(),
            adapted: None,
            reference: None,
        }
    }

    #[test]
    fn changed_data_batch_seed_and_shuffle_are_refused_and_other_changes_are_named() {
        let (spec, data) = (JobSpec::default(), Fingerprint { tokens: 100, hash: "a".into() });
        let saved = state(&spec);
        assert_eq!(saved.changes(&spec, 2, &data), Changes::default());
        let refused = |change: fn(&mut JobSpec)| {
            let mut spec = spec.clone();
            change(&mut spec);
            saved.changes(&spec, 2, &data).refused.join("; ")
        };
        assert_eq!(refused(|spec| spec.job.seed = 1), "job.seed was 1337, is now 1");
        assert_eq!(refused(|spec| spec.data.shuffle = false), "data.shuffle was true, is now false");
        let packed = refused(|spec| spec.data.documents = Some(DocumentMode::Packed));
        assert_eq!(packed, "data.documents was joined, is now packed");
        assert_eq!(refused(|spec| spec.data.documents = Some(DocumentMode::Joined)), "");
        assert!(refused(|spec| spec.train.batch = 7).contains("16 sequences of all ranks, now 14"));
        assert!(refused(|spec| spec.train.lr = 0.5).is_empty());
        let muon = refused(|spec| spec.train.optimizer = Optimizer::Muon);
        assert!(muon.starts_with("train.optimizer was adamw, is now muon"), "{muon}");
        let other = Fingerprint { tokens: 101, hash: "b".into() };
        assert_eq!(
            saved.changes(&spec, 2, &other).refused,
            ["the training data was 100 tokens (a), is now 101 tokens (b)"]
        );
        let other = Fingerprint { tokens: 100, hash: "b".into() };
        assert!(saved.changes(&spec, 2, &other).refused[0].contains("a mixture in another order"));

        let others = |change: fn(&mut JobSpec)| {
            let mut spec = spec.clone();
            change(&mut spec);
            saved.changes(&spec, 2, &data).others.join("; ")
        };
        assert_eq!(others(|spec| spec.lr_scale.head = 0.0), "lr_scale.head was 1.0, is now 0.0");
        assert_eq!(others(|spec| spec.train.eval_every = 7), "train.eval_every was 250, is now 7");
        assert_eq!(others(|spec| spec.train.eval_tokens = 9), "train.eval_tokens was 0, is now 9");
        let epochs = others(|spec| spec.train.epochs = Some(8.0));
        assert!(epochs.starts_with("train.epochs was not set, is now 8.0"), "{epochs}");
        let with_epochs =
            JobSpec { train: TrainSection { epochs: Some(8.0), ..spec.train.clone() }, ..spec.clone() };
        let changes = state(&with_epochs).changes(&spec, 2, &data);
        assert!(changes.others.contains(&"train.epochs was 8.0, is no longer set".into()), "{changes:?}");
        assert!(others(|spec| spec.train.warmup = Some(9)).starts_with("train.warmup was 5, is now 9"));
        assert_eq!(others(|spec| (spec.train.warmup, spec.train.sample) = (Some(5), 0)), "");

        let mut spec = spec.clone();
        spec.train.lr = 0.5;
        assert_eq!(saved.changes(&spec, 2, &data).others, ["train.lr was 0.001, is now 0.5"]);
        let steps = spec.train.steps;
        spec.train.steps *= 2;
        let others = saved.changes(&spec, 2, &data).others;
        assert_eq!(
            others[..2],
            [
                "train.lr was 0.001, is now 0.5".to_owned(),
                format!("train.steps was {steps}, is now {}", 2 * steps)
            ]
        );
        assert!(others[2].starts_with("the learning rate of step 11 was "), "{others:?}");
    }

    #[test]
    fn same_global_batch_on_another_number_of_ranks_is_accepted() {
        let (mut spec, data) = (JobSpec::default(), Fingerprint { tokens: 100, hash: "a".into() });
        let saved = state(&spec);
        spec.train.batch *= 2;
        let changes = saved.changes(&spec, 1, &data);
        assert!(changes.refused.is_empty(), "{changes:?}");
        assert_eq!(changes.others, ["the number of ranks was 2, is now 1"]);
        // The unchanged configuration on more ranks is a larger batch, as the user asked for.
        let changes = saved.changes(&JobSpec::default(), 4, &data);
        assert!(changes.refused.is_empty() && changes.others.len() == 2, "{changes:?}");
    }

    #[test]
    fn state_with_unknown_and_without_newer_keys_is_read() {
        let mut json = serde_json::to_value(state(&JobSpec::default())).unwrap();
        json["from the future"] = 1.into();
        json["spec"]["other"] = serde_json::json!({"key": 1});
        for key in ["run", "parents", "data", "batch", "warmup", "val_loss"] {
            json.as_object_mut().unwrap().remove(key);
        }
        let mut read: State = serde_json::from_value(json).unwrap();
        assert_eq!((read.step, read.run.as_str(), &read.data), (10, "", &None));
        read.spec["train"].as_object_mut().unwrap().remove("optimizer");
        let changes = read.changes(&JobSpec::default(), 2, &Fingerprint { tokens: 1, hash: "z".into() });
        assert_eq!(changes, Changes::default(), "what is not known is not compared");
    }
}
