//! Counters over time, in the Trace Event Format of Perfetto and Chrome.

use serde_json::{Value, json};

use super::Snapshot;
use crate::trace::Action;

impl Snapshot {
    /// Returns a JSON trace of the live and mapped bytes, with a mark at every failed request. `process` is the process
    /// id shown in the trace, such as a rank.
    pub fn perfetto(&self, process: u32) -> String {
        let counters = self.events.iter().map(|event| {
            let args = json!({ "live": event.live, "mapped": event.mapped });
            json!({ "ph": "C", "ts": event.micros, "pid": process, "name": "pool", "args": args })
        });
        let failures = self.events.iter().filter(|event| event.action == Action::OutOfMemory).map(|event| {
            let args = json!({ "bytes": event.bytes, "tag": event.site.map_or("", |site| site.tag) });
            json!({ "ph": "i", "s": "p", "ts": event.micros, "pid": process, "tid": 0,
                    "name": "out of memory", "args": args })
        });
        let events: Vec<Value> = counters.chain(failures).collect();
        json!({ "traceEvents": events, "displayTimeUnit": "ms" }).to_string()
    }
}
