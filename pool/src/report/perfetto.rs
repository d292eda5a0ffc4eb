//! Counters over time, in the Trace Event Format that Perfetto and Chrome open.

use serde_json::{Value, json};

use super::{Snapshot, tag};
use crate::trace::Action;

impl Snapshot {
    /// A JSON trace with the bytes live and mapped, and a mark for every refused request. `process` tells ranks apart.
    pub fn perfetto(&self, process: u32) -> String {
        let counters = self.events.iter().map(|event| {
            let args = json!({ "live": event.live, "mapped": event.mapped });
            json!({ "ph": "C", "ts": event.micros, "pid": process, "name": "pool", "args": args })
        });
        let refused = self.events.iter().filter(|event| event.action == Action::OutOfMemory).map(|event| {
            let args = json!({ "bytes": event.bytes, "tag": tag(event.site) });
            json!({ "ph": "i", "s": "p", "ts": event.micros, "pid": process, "tid": 0,
                    "name": "out of memory", "args": args })
        });
        let all: Vec<Value> = counters.chain(refused).collect();
        json!({ "traceEvents": all, "displayTimeUnit": "ms" }).to_string()
    }
}
