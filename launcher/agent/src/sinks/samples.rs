//! `samples.jsonl`: the texts that the model has written, one JSON object per line. Created with the first one.

use std::io;
use std::path::Path;

use serde_json::json;
use xlaunch_proto::v1::worker_report::Report;

use super::points::Points;
use super::{RankReport, ReportSink};
use crate::clock;

const FILE: &str = "samples.jsonl";

#[derive(Debug)]
pub(crate) struct Samples {
    points: Points,
}

impl Samples {
    /// For the run in `run_dir`, which continues the one in `parent`.
    pub(crate) fn new(run_dir: &Path, parent: Option<&Path>) -> Self {
        Self { points: Points::new(run_dir.join(FILE), parent.map(|parent| parent.join(FILE))) }
    }
}

impl ReportSink for Samples {
    fn report(&mut self, report: &RankReport) -> io::Result<()> {
        match &report.report {
            Report::TrainStarted(started) => self.points.begin(started.first_step),
            Report::Sample(sample) => self.points.append(&json!({
                "_step": sample.step,
                "_timestamp": clock::unix().as_secs_f64(),
                "prompt": sample.prompt,
                "text": sample.text,
            })),
            _ => Ok(()),
        }
    }

    fn finish(&mut self) -> io::Result<()> {
        self.points.flush()
    }

    fn missing(&self) -> u64 {
        self.points.missing()
    }
}
