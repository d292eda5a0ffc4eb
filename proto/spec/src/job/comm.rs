//! The section `[comm]`.

use std::fmt;

use serde::de::{self, Deserializer, IntoDeserializer, Visitor};
use serde::{Deserialize, Serialize};

use super::{JobSpec, MemorySnapshots};
use crate::invalid::Invalid;
use crate::model::ModelShape;

/// Number of ranks of a node with the most GPUs in use. Parameters are aligned in the arena so that every bucket can be
/// cut into this many equal shards; with other numbers of ranks, the last shard of a bucket is longer.
pub const EQUAL_SHARDS: usize = 8;

/// Communication of gradients and parameters between ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct CommSection {
    /// Maximum size of a gradient bucket in MiB, like DDP's bucket_cap_mb; a larger parameter is split into several
    /// buckets. Smaller buckets overlap better with backward; larger ones use bandwidth better. Sharded gradients and
    /// parameters take turns in memory by whole buckets.
    pub bucket_mb: f64,
    /// Element type in which gradients are all-reduced. Gradients of micro-steps are added in fp32.
    pub dtype: WireDtype,
    /// Number of consecutive ranks of a node that divide the experts of a model among themselves (expert parallelism):
    /// each rank holds some of the experts, with their gradients and optimizer state, and applies them to the tokens of
    /// the whole group. Divides the number of ranks of every node and `model.experts`. 1: every rank has all experts.
    /// With more, no text is sampled, and snapshots are not kept in memory.
    pub experts: usize,
    /// All-reduce buckets while backward is still running, and all-gather sharded parameters while forward is running.
    /// Turn it off only to measure its effect.
    pub overlap: bool,
    /// State that is sharded over the ranks instead of being replicated. Shards are equal on 2, 4 and 8 ranks; on other
    /// numbers of ranks, the last one has up to 64 elements per rank and bucket more.
    #[serde(alias = "shard_optimizer", deserialize_with = "shard_or_flag")]
    pub shard: Shard,
    /// Register buffers with NCCL as symmetric memory windows, so that GPUs access each other's memory directly. Needs
    /// NCCL 2.27, peer access between the GPUs and `engine.pool` other than "off". Not used on several nodes. Not
    /// faster on every machine: measure with `xlaunch bench allreduce`.
    pub windows: bool,
}

impl Default for CommSection {
    fn default() -> Self {
        Self {
            bucket_mb: 25.0,
            dtype: WireDtype::Auto,
            experts: 1,
            overlap: true,
            shard: Shard::Auto,
            windows: false,
        }
    }
}

/// State that is sharded over the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Shard {
    /// The setting that was fastest in our measurements: "optimizer" on 2, 4 or 8 GPUs that share the run's directory
    /// and do not divide experts, otherwise "none". "none" with `observe.check_every`, too, because copies of a weight
    /// can be compared only where ranks do not overwrite each other's.
    Auto,
    /// Nothing: all state is replicated.
    None,
    /// The optimizer state (ZeRO stage 1): each rank updates a part of the parameters and all-gathers the rest.
    Optimizer,
    /// The optimizer state and the gradients (ZeRO stage 2): gradients of a few blocks are in memory at a time. With
    /// `train.accumulate`, they are reduced in every micro-step, and each rank adds up its shard.
    Gradients,
    /// The optimizer state, the gradients and the parameters (ZeRO stage 3, FSDP): parameters of two blocks are in
    /// memory at a time, gathered before forward and again before backward. Embeddings and head are not sharded. No
    /// text is sampled.
    Parameters,
}

impl JobSpec {
    /// Returns the state that this many ranks shard, with or without a shared directory; never `Auto`. Adapters are
    /// never sharded.
    pub fn shard(&self, ranks: usize, cuda: bool, share_directory: bool) -> Shard {
        let compares = self.observe.check_every != 0;
        let equal_shards = ranks > 1 && EQUAL_SHARDS.is_multiple_of(ranks);
        match self.comm.shard {
            _ if ranks == 1 || self.lora.is_on() => Shard::None,
            Shard::Auto if cuda && share_directory && equal_shards && self.comm.experts == 1 && !compares => {
                Shard::Optimizer
            }
            Shard::Auto => Shard::None,
            chosen => chosen,
        }
    }

    /// Checks that this number of ranks can divide the experts of the model as `comm.experts` says. The number of ranks
    /// is not known when the configuration is read.
    pub fn check_experts(&self, ranks: usize) -> Result<(), Invalid> {
        let group = self.comm.experts;
        if ranks.is_multiple_of(group) {
            return Ok(());
        }
        let problem = format!("{ranks} ranks cannot be divided into groups of {group}");
        Err(Invalid::new("comm.experts", problem, format!("a divisor of {ranks}")))
    }

    /// Checks what divided experts require of the other values.
    pub(super) fn check_divided_experts(&self, model: &ModelShape) -> Result<(), Invalid> {
        let group = self.comm.experts;
        let invalid = |key, problem: String, expected: &str| Err(Invalid::new(key, problem, expected.into()));
        if group == 1 {
            return Ok(());
        }
        if group == 0 {
            return invalid("comm.experts", "0 is out of range".into(), "at least 1");
        }
        if model.experts == 0 {
            return invalid(
                "comm.experts",
                "the model has no experts to divide".into(),
                "1, or model.experts",
            );
        }
        if !model.experts.is_multiple_of(group) {
            let problem = format!("model.experts = {} cannot be divided among {group} ranks", model.experts);
            return invalid("comm.experts", problem, "a divisor of model.experts");
        }
        if self.comm.shard >= Shard::Gradients {
            let problem = "gradients and parameters of divided experts cannot be sharded as well".into();
            return invalid("comm.shard", problem, "\"none\" or \"optimizer\" with comm.experts above 1");
        }
        if self.checkpoint.memory == MemorySnapshots::On {
            let problem = "ranks that divide experts keep no snapshots in memory".into();
            return invalid("checkpoint.memory", problem, "\"auto\" or \"off\" with comm.experts above 1");
        }
        self.launch.nproc.map_or(Ok(()), |ranks| self.check_experts(ranks as usize))
    }
}

/// Deserialises a [`Shard`], or the value of the old key `comm.shard_optimizer`: true or false.
fn shard_or_flag<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Shard, D::Error> {
    struct Either;
    impl Visitor<'_> for Either {
        type Value = Shard;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("\"auto\", \"none\", \"optimizer\", \"gradients\" or \"parameters\"")
        }

        fn visit_bool<E: de::Error>(self, sharded: bool) -> Result<Shard, E> {
            Ok(if sharded { Shard::Optimizer } else { Shard::None })
        }

        fn visit_str<E: de::Error>(self, name: &str) -> Result<Shard, E> {
            Shard::deserialize(name.into_deserializer())
        }
    }
    deserializer.deserialize_any(Either)
}

/// Element type in which gradients are all-reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum WireDtype {
    /// bf16 with `engine.precision = "bf16"` or `"fp8"`, fp32 otherwise.
    Auto,
    /// 4 bytes per gradient.
    Fp32,
    /// 2 bytes per gradient. Needs `engine.precision = "bf16"` or `"fp8"`.
    Bf16,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_divided_follows_the_request_and_on_many_gpus_the_default() {
        let spec = |value: &str| JobSpec {
            comm: serde_json::from_str(&format!("{{\"shard\":{value}}}")).unwrap(),
            ..JobSpec::default()
        };
        let shard =
            |value: &str, ranks, cuda, share_directory| spec(value).shard(ranks, cuda, share_directory);
        for (ranks, cuda, share_directory, default) in [
            (4, true, true, Shard::Optimizer),
            (8, true, true, Shard::Optimizer),
            (2, true, true, Shard::Optimizer),
            (6, true, true, Shard::None),
            (16, true, true, Shard::None),
            (4, false, true, Shard::None),
            (4, true, false, Shard::None),
        ] {
            assert_eq!(shard("\"auto\"", ranks, cuda, share_directory), default, "{ranks} {cuda}");
            assert_eq!(shard("\"auto\"", 1, cuda, share_directory), Shard::None);
            let mut compared = spec("\"auto\"");
            compared.observe.check_every = 100;
            assert_eq!(compared.shard(ranks, cuda, share_directory), Shard::None, "nothing to compare");
            for (value, chosen) in [
                ("\"none\"", Shard::None),
                ("\"optimizer\"", Shard::Optimizer),
                ("\"gradients\"", Shard::Gradients),
                ("\"parameters\"", Shard::Parameters),
                // The values of the old key.
                ("true", Shard::Optimizer),
                ("false", Shard::None),
            ] {
                assert_eq!(shard(value, ranks, cuda, share_directory), chosen);
                assert_eq!(shard(value, 1, cuda, share_directory), Shard::None, "one rank has all");
            }
        }
        let old: CommSection = serde_json::from_str("{\"shard_optimizer\":true}").unwrap();
        assert_eq!(old.shard, Shard::Optimizer);
        let error = serde_json::from_str::<CommSection>("{\"shard\":\"some\"}").unwrap_err().to_string();
        assert!(error.contains("`none`, `optimizer`, `gradients`, `parameters`"), "{error}");
    }
}
