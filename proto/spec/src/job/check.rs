//! The rules between the values of a job.

use super::{
    DataSection, Device, JobSection, JobSpec, LoraSection, MuonSection, Optimizer, Precision, Schedule,
    Tokenizer, TrainSection, WireDtype, data_source, sizes,
};
use crate::command::MAX_NPROC;
use crate::invalid::{Invalid, positive, positive_in_fp32, within};
use crate::model::ModelShape;

impl JobSpec {
    /// Checks all rules that depend only on the values, and returns the first violation.
    pub fn check(&self) -> Result<(), Invalid> {
        let train = &self.train;
        let at_least_1 = |key, value: usize| match value {
            0 => Err(Invalid::new(key, "0 is out of range".into(), "at least 1".into())),
            _ => Ok(()),
        };
        if let Some(nproc) = self.launch.nproc.filter(|nproc| !(1..=MAX_NPROC).contains(nproc)) {
            let problem = format!("{nproc} is out of range");
            return Err(Invalid::new("launch.nproc", problem, format!("1 to {MAX_NPROC}")));
        }
        self.job.check_name()?;
        at_least_1("train.steps", usize::try_from(train.steps).unwrap_or(usize::MAX))?;
        at_least_1("train.batch", train.batch)?;
        at_least_1("train.accumulate", train.accumulate)?;
        at_least_1("train.eval_batches", train.eval_batches)?;
        if train.patience != 0 && train.eval_every == 0 {
            return Err(Invalid::new(
                "train.patience",
                "early stopping needs evaluations, but train.eval_every = 0 turns them off".into(),
                "0, or train.eval_every of at least 1".into(),
            ));
        }
        at_least_1("data.train", self.data.train.len())?;
        data_source::check("data.train", &self.data.train)?;
        data_source::check("data.val", &self.data.val)?;
        self.lora.check(self)?;
        self.dpo.check(self)?;
        self.check_model()?;
        positive_in_fp32("train.lr", train.lr)?;
        positive_in_fp32("train.eps", train.eps)?;
        self.muon.check()?;
        self.lr_scale.check(self)?;
        positive("comm.bucket_mb", self.comm.bucket_mb)?;
        positive("launch.join_timeout", self.launch.join_timeout)?;
        within("launch.join_timeout", self.launch.join_timeout, 0.0, 86_400.0)?;
        within("launch.restart_window", self.launch.restart_window, 0.0, 1e9)?;
        within("launch.hang_timeout", self.launch.hang_timeout, 0.0, 86_400.0)?;
        within("launch.shutdown_timeout", self.launch.shutdown_timeout, 0.0, 86_400.0)?;
        within("launch.shutdown_timeout_max", self.launch.shutdown_timeout_max, 0.0, 86_400.0)?;
        within("train.min_lr_ratio", train.min_lr_ratio, 0.0, 1.0)?;
        match train.epochs {
            Some(epochs) => {
                positive("train.epochs", epochs)?;
                within("train.epochs", epochs, 0.0, 1e6)?;
            }
            // With epochs, the number of steps is known only with the data.
            None => self.check_schedule()?,
        }
        within("train.beta1", train.beta1, 0.0, 0.999_999)?;
        within("train.beta2", train.beta2, 0.0, 0.999_999)?;
        within("train.weight_decay", train.weight_decay, 0.0, 100.0)?;
        within("train.clip", train.clip, 0.0, f64::MAX)?;
        within("train.router_aux_loss_coef", train.router_aux_loss_coef, 0.0, 1e6)?;
        within("train.router_bias_rate", train.router_bias_rate, 0.0, 1.0)?;
        within("train.router_z_loss_coef", train.router_z_loss_coef, 0.0, 1e6)?;
        within("data.val_fraction", self.data.val_fraction, 0.0, 0.5)?;
        within("checkpoint.every_seconds", self.checkpoint.every_seconds, 0.0, 1e9)?;
        let precision = self.engine.precision;
        if self.comm.dtype == WireDtype::Bf16 && precision.is_some_and(|p| !p.has_bf16_activations()) {
            return Err(Invalid::new(
                "comm.dtype",
                "bf16 gradients need bf16 activations".into(),
                "engine.precision = \"bf16\" or \"fp8\"".into(),
            ));
        }
        if self.engine.device == Device::Cpu && self.comm.dtype == WireDtype::Bf16 {
            return Err(Invalid::new(
                "comm.dtype",
                "bf16 gradients need bf16 activations, and the CPU back end supports fp32 only".into(),
                "\"auto\" or \"fp32\" with engine.device = \"cpu\"".into(),
            ));
        }
        if self.engine.device == Device::Cpu && precision.is_some_and(|p| p != Precision::Fp32) {
            return Err(Invalid::new(
                "engine.precision",
                "the CPU back end supports fp32 only".into(),
                "\"fp32\" with engine.device = \"cpu\"".into(),
            ));
        }
        Ok(())
    }

    /// Returns a warning for each setting that has no effect on a job with this model.
    pub fn without_effect(&self, model: &ModelShape) -> Vec<String> {
        let (section, train) = (&self.model, &self.train);
        // Initial weights set all keys of the model.
        let sets = |is_set: bool| is_set && self.checkpoint.init.is_none();
        let (default, dense) = (TrainSection::default(), model.experts == 0);
        let no_experts = "the model has no experts";
        let (aux, z) = (train.router_aux_loss_coef, train.router_z_loss_coef);
        // The setting, whether it is set without effect, and the reason.
        let settings = [
            (
                "[lora]",
                self.lora != LoraSection::default() && !self.lora.is_on(),
                "lora.rank is 0, so all weights are trained",
            ),
            (
                "[muon]",
                self.muon != MuonSection::default() && train.optimizer != Optimizer::Muon,
                "train.optimizer is not \"muon\"",
            ),
            (
                "muon.beta2",
                self.muon.beta2 != MuonSection::default().beta2
                    && train.optimizer == Optimizer::Muon
                    && !self.muon.normuon,
                "muon.normuon is false",
            ),
            (
                "train.decay_steps",
                train.decay_steps.is_some() && train.schedule != Schedule::Wsd,
                "train.schedule is not \"wsd\"",
            ),
            (
                "train.min_lr_ratio",
                train.min_lr_ratio != default.min_lr_ratio && train.schedule == Schedule::Constant,
                "train.schedule is \"constant\"",
            ),
            (
                "train.sample_every",
                train.sample_every != 0 && train.sample == 0,
                "train.sample is 0, so no text is sampled",
            ),
            (
                "train.sample_prompt",
                !train.sample_prompt.is_empty() && train.sample == 0,
                "train.sample is 0, so no text is sampled",
            ),
            (
                "train.eval_batches",
                train.eval_batches != default.eval_batches && train.eval_tokens != 0,
                "train.eval_tokens is set",
            ),
            (
                "data.val_fraction",
                self.data.val_fraction != DataSection::default().val_fraction && !self.data.val.is_empty(),
                "data.val is set",
            ),
            (
                "launch.restart_window",
                self.launch.restart_window != 0.0 && self.launch.max_restarts == 0,
                "launch.max_restarts is 0",
            ),
            (
                "checkpoint.keep_best",
                self.checkpoint.keep_best != 0 && train.eval_every == 0,
                "train.eval_every is 0, so no checkpoint has a validation loss",
            ),
            ("train.router_aux_loss_coef", dense && aux != default.router_aux_loss_coef, no_experts),
            ("train.router_z_loss_coef", dense && z != default.router_z_loss_coef, no_experts),
            (
                "train.router_bias_rate",
                !model.router_bias && train.router_bias_rate != default.router_bias_rate,
                "model.router_bias is false",
            ),
            ("model.experts_per_token", dense && sets(section.experts_per_token.is_some()), no_experts),
            ("model.router", dense && sets(section.router.is_some()), no_experts),
            ("model.normalise", dense && sets(section.normalise.is_some()), no_experts),
            ("model.routed_scale", dense && sets(section.routed_scale.is_some()), no_experts),
        ];
        let idle = settings.into_iter().filter(|(_, idle, _)| *idle);
        idle.map(|(setting, _, reason)| format!("{setting} has no effect: {reason}")).collect()
    }

    /// Checks that a decay set by the user fits after the warm-up. The default decay is shortened instead.
    pub fn check_schedule(&self) -> Result<(), Invalid> {
        let train = &self.train;
        let Some(decay) = train.decay_steps.filter(|_| train.schedule == Schedule::Wsd) else {
            return Ok(());
        };
        let (steps, warmup) = (train.steps, train.warmup_steps());
        if (1..=steps - warmup).contains(&decay) {
            return Ok(());
        }
        let run = match train.epochs {
            Some(epochs) => format!("{steps} steps, train.epochs = {epochs}"),
            None => format!("train.steps = {steps}"),
        };
        Err(Invalid::new(
            "train.decay_steps",
            format!("{decay} steps of decay with {warmup} of warm-up in a run of {run}"),
            format!("1 to {}", steps - warmup),
        ))
    }

    /// Checks the model. With keys that come from initial weights, it is checked once they are known.
    fn check_model(&self) -> Result<(), Invalid> {
        if self.checkpoint.init.is_some() && self.model.has_open_sizes() {
            return Ok(());
        }
        let model = self.model.resolve()?;
        self.check_divided_experts(&model)?;
        sizes::check(self, &model)?;
        self.lr_scale.check_model(&model)?;
        self.dpo.check_model(&model)?;
        if self.lora.is_on() {
            self.lora.modules(&model)?;
        }
        if self.data.tokenizer == Tokenizer::Bytes && model.vocab < 256 {
            return Err(Invalid::new(
                "model.vocab",
                format!("{} token ids for the byte tokenizer", model.vocab),
                "at least 256".into(),
            ));
        }
        Ok(())
    }
}

impl JobSection {
    /// Checks the name, which is also the name of a directory below `output`.
    fn check_name(&self) -> Result<(), Invalid> {
        if self.name.contains(['/', '\0']) || [".", ".."].contains(&self.name.as_str()) {
            let expected = "a name without `/`, as it is that of a directory in job.output".into();
            return Err(Invalid::new(
                "job.name",
                format!("{:?} cannot be the name of a job", self.name),
                expected,
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Arch;

    type Change = fn(&mut JobSpec);

    #[test]
    fn check_names_the_key_of_an_invalid_value() {
        let key = |change: fn(&mut JobSpec)| {
            let mut spec = JobSpec::default();
            change(&mut spec);
            spec.check().unwrap_err().key
        };
        assert_eq!(key(|s| s.train.lr = f64::NAN), "train.lr");
        assert_eq!(key(|s| s.train.batch = 0), "train.batch");
        assert_eq!(key(|s| s.train.eval_batches = 0), "train.eval_batches");
        assert_eq!(key(|s| (s.train.patience, s.train.eval_every) = (3, 0)), "train.patience");
        for name in ["..", ".", "../up", "/etc", "a/b", "a\0"] {
            let mut spec = JobSpec::default();
            spec.job.name = name.into();
            assert_eq!(spec.check().unwrap_err().key, "job.name", "{name:?}");
        }
        assert_eq!(key(|s| s.launch.nproc = Some(0)), "launch.nproc");
        assert_eq!(key(|s| s.launch.nproc = Some(MAX_NPROC + 1)), "launch.nproc");
        assert_eq!(key(|s| s.train.lr = 1e39), "train.lr");
        assert_eq!(key(|s| s.train.eps = 1e-60), "train.eps");
        let bf16_on_cpu = |s: &mut JobSpec| {
            s.comm.dtype = WireDtype::Bf16;
            s.engine.device = Device::Cpu;
        };
        assert_eq!(key(bf16_on_cpu), "comm.dtype");
        assert_eq!(key(|s| s.train.beta2 = 1.0), "train.beta2");
        assert_eq!(key(|s| s.muon.momentum = 1.0), "muon.momentum");
        assert_eq!(key(|s| s.muon.lr = 0.0), "muon.lr");
        assert_eq!(key(|s| s.muon.beta2 = 1.0), "muon.beta2");
        assert_eq!(key(|s| s.muon.weight_decay = Some(-0.1)), "muon.weight_decay");
        assert_eq!(key(|s| s.model.vocab = Some(100)), "model.vocab");
        assert_eq!(key(|s| s.data.train.clear()), "data.train");
        let long_decay = |s: &mut JobSpec| {
            s.train.schedule = Schedule::Wsd;
            (s.train.steps, s.train.warmup, s.train.decay_steps) = (100, Some(20), Some(81));
        };
        assert_eq!(key(long_decay), "train.decay_steps");
        for epochs in [0.0, -1.0, f64::NAN, f64::INFINITY, 2e6] {
            let spec = JobSpec {
                train: TrainSection { epochs: Some(epochs), ..TrainSection::default() },
                ..JobSpec::default()
            };
            assert_eq!(spec.check().unwrap_err().key, "train.epochs", "{epochs}");
        }
    }

    #[test]
    fn settings_without_effect_are_named_with_the_reason() {
        let warnings = |changes: &[Change]| {
            let mut spec = JobSpec::default();
            changes.iter().for_each(|change| change(&mut spec));
            spec.without_effect(&spec.model.resolve().unwrap())
        };
        assert!(warnings(&[]).is_empty());
        let moe = |s: &mut JobSpec| s.model.experts = Some(4);
        let cases: [(&str, Change, Change); 14] = [
            ("[lora]", |s| s.lora.alpha = Some(32.0), |s| s.lora.rank = 8),
            ("[muon]", |s| s.muon.lr = 0.1, |s| s.train.optimizer = Optimizer::Muon),
            (
                "muon.beta2",
                |s| (s.muon.beta2, s.train.optimizer) = (0.9, Optimizer::Muon),
                |s| s.muon.normuon = true,
            ),
            ("train.decay_steps", |s| s.train.decay_steps = Some(9), |s| s.train.schedule = Schedule::Wsd),
            (
                "train.min_lr_ratio",
                |s| (s.train.min_lr_ratio, s.train.schedule) = (0.2, Schedule::Constant),
                |s| s.train.schedule = Schedule::Cosine,
            ),
            (
                "train.sample_every",
                |s| (s.train.sample_every, s.train.sample) = (5, 0),
                |s| s.train.sample = 9,
            ),
            (
                "train.sample_prompt",
                |s| (s.train.sample_prompt, s.train.sample) = ("a".into(), 0),
                |s| s.train.sample = 9,
            ),
            (
                "train.eval_batches",
                |s| (s.train.eval_batches, s.train.eval_tokens) = (9, 100),
                |s| s.train.eval_tokens = 0,
            ),
            (
                "data.val_fraction",
                |s| (s.data.val_fraction, s.data.val) = (0.1, vec!["val".into()]),
                |s| s.data.val.clear(),
            ),
            ("launch.restart_window", |s| s.launch.restart_window = 60.0, |s| s.launch.max_restarts = 1),
            (
                "checkpoint.keep_best",
                |s| (s.checkpoint.keep_best, s.train.eval_every) = (1, 0),
                |s| {
                    s.train.eval_every = 5;
                },
            ),
            ("train.router_aux_loss_coef", |s| s.train.router_aux_loss_coef = 0.1, moe),
            (
                "train.router_bias_rate",
                |s| s.train.router_bias_rate = 0.1,
                |s| {
                    (s.model.experts, s.model.router_bias) = (Some(4), Some(true));
                },
            ),
            ("model.experts_per_token", |s| s.model.experts_per_token = Some(2), moe),
        ];
        for (setting, change, effect) in cases {
            let found = warnings(&[change]);
            assert!(
                found.len() == 1 && found[0].starts_with(&format!("{setting} has no effect: ")),
                "{found:?}"
            );
            assert!(warnings(&[change, effect]).is_empty(), "{setting}");
        }
    }

    #[test]
    fn sizes_that_are_still_to_be_read_from_weights_are_not_compared_with_the_default_model() {
        let changes: [(&str, Change); 3] = [
            ("model.kv_heads", |spec| spec.model.kv_heads = Some(3)),
            ("lr_scale.head", |spec| (spec.model.arch, spec.lr_scale.head) = (Some(Arch::Gpt2), 3.0)),
            ("comm.experts", |spec| spec.comm.experts = 2),
        ];
        for (key, change) in changes {
            let mut spec = JobSpec::default();
            change(&mut spec);
            assert_eq!(spec.check().unwrap_err().key, key);
            spec.checkpoint.init = Some("model".into());
            assert_eq!(spec.check(), Ok(()));
            spec.model.preset = Some("byte-tiny".into());
            assert_eq!(spec.check().unwrap_err().key, key);
        }
    }
}
