//! Entry points of the fuzz targets in `worker/fuzz`. They exist only with the feature `fuzzing`.

pub use crate::prepare::fuzz::jsonl;
