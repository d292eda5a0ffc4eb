//! The section `[comm]`. As in `sections`, doc comments of fields and variants are user documentation.

use std::fmt;

use serde::de::{self, Deserializer, IntoDeserializer, Visitor};
use serde::{Deserialize, Serialize};

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
        Self { bucket_mb: 25.0, dtype: WireDtype::Auto, overlap: true, shard: Shard::Auto, windows: false }
    }
}

/// State that is sharded over the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Shard {
    /// The setting that was fastest in our measurements: "optimizer" on 2, 4 or 8 GPUs that share the run's directory,
    /// otherwise "none".
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

impl CommSection {
    /// Returns the state that this many ranks shard, with or without a shared directory; never `Auto`.
    pub fn shard(&self, ranks: usize, cuda: bool, share_directory: bool) -> Shard {
        let shards = cuda && share_directory && ranks > 1 && EQUAL_SHARDS.is_multiple_of(ranks);
        match self.shard {
            Shard::Auto if shards => Shard::Optimizer,
            Shard::Auto => Shard::None,
            _ if ranks == 1 => Shard::None,
            chosen => chosen,
        }
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
        let shard = |value: &str, ranks, cuda, share_directory| {
            let comm: CommSection = serde_json::from_str(&format!("{{\"shard\":{value}}}")).unwrap();
            comm.shard(ranks, cuda, share_directory)
        };
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
