//! Entry points of the fuzz targets in `worker/fuzz`. Only with the feature `fuzzing`.

pub use crate::prepare::fuzz::jsonl;
