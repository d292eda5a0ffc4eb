//! The section `[dpo]`.

use serde::{Deserialize, Serialize};

use super::{DocumentMode, JobSpec};
use crate::invalid::{Invalid, positive_in_fp32};
use crate::model::ModelShape;

/// `[dpo]`: training on preferences (DPO), with pairs of answers that `xlaunch data prepare --preferences` has written.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct DpoSection {
    /// Weight of the distance from the model that the job starts from, `checkpoint.init`: the larger it is, the closer
    /// the trained model stays to that one. Default: 0.1 if `data.train` has pairs.
    pub beta: Option<f64>,
}

impl DpoSection {
    /// The default of `beta`, that of the paper and of trl.
    pub const BETA: f64 = 0.1;

    /// Returns whether the job trains on preferences.
    pub fn is_on(&self) -> bool {
        self.beta.is_some()
    }

    /// Checks a job that trains on preferences, as far as that does not depend on the model.
    pub(super) fn check(&self, spec: &JobSpec) -> Result<(), Invalid> {
        let Some(beta) = self.beta else { return Ok(()) };
        positive_in_fp32("dpo.beta", beta)?;
        if spec.checkpoint.init.is_none() {
            return Err(Invalid::new(
                "checkpoint.init",
                "training on preferences (DPO) starts from a model, and none is set".into(),
                "a model that answers, such as one trained on chats".into(),
            ));
        }
        match spec.data.documents.filter(|mode| *mode != DocumentMode::Packed) {
            None => Ok(()),
            Some(mode) => Err(Invalid::new(
                "data.documents",
                format!("\"{}\" with pairs of answers, which are never divided", mode.name()),
                "\"packed\"".into(),
            )),
        }
    }

    /// Checks the model of such a job.
    pub(super) fn check_model(&self, model: &ModelShape) -> Result<(), Invalid> {
        if self.is_on() && model.experts > 0 {
            let problem = "models with experts cannot be trained on preferences (DPO)".into();
            return Err(Invalid::new(
                "data.train",
                problem,
                "chats or text, or a model without experts".into(),
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn preferences_need_a_model_to_start_from_and_whole_pairs() {
        let key = |change: fn(&mut JobSpec)| {
            let mut spec = JobSpec::default();
            (spec.dpo.beta, spec.checkpoint.init) = (Some(0.1), Some("model".into()));
            change(&mut spec);
            spec.check().err().map(|invalid| invalid.key)
        };
        assert_eq!(key(|_| ()), None);
        assert_eq!(key(|spec| spec.checkpoint.init = None), Some("checkpoint.init"));
        assert_eq!(key(|spec| spec.dpo.beta = Some(0.0)), Some("dpo.beta"));
        assert_eq!(key(|spec| spec.data.documents = Some(DocumentMode::Packed)), None);
        assert_eq!(key(|spec| spec.data.documents = Some(DocumentMode::Masked)), Some("data.documents"));
        let experts = |spec: &mut JobSpec| {
            (spec.model.preset, spec.model.experts) = (Some("byte-tiny".into()), Some(4));
        };
        assert_eq!(key(experts), Some("data.train"));
    }
}
