//! Where the reports of a training job go: the progress line, `metrics.jsonl`, TensorBoard, the closing summary.

pub mod metrics;
pub mod progress;
pub mod summary;
pub mod tensorboard;
