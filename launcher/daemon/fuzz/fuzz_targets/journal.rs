//! Fuzzes journals with arbitrary contents: parses, repairs, applies and compacts them. Repair and compaction must keep
//! all valid records.
#![no_main]

use std::time::Duration;

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use serde_json::{Value, json};
use xlaunch_daemon::fuzz::{History, Node, is_intact, repaired, seal};

#[derive(Arbitrary, Debug)]
enum Input<'a> {
    /// The contents of the file.
    File(&'a [u8]),
    /// The lines of the file, most of them with a valid checksum.
    Lines(Vec<Line<'a>>),
}

#[derive(Arbitrary, Debug)]
enum Line<'a> {
    Record(Record<'a>),
    Sealed(&'a [u8]),
    Header(Option<u8>),
    Damaged(&'a [u8]),
    Repeated(u8),
}

/// A number, mostly small, so that records refer to each other.
#[derive(Arbitrary, Debug)]
enum Number {
    Small(u8),
    Any(u64),
}

impl Number {
    fn get(&self) -> u64 {
        match self {
            Self::Small(number) => u64::from(number % 8),
            Self::Any(number) => *number,
        }
    }
}

#[derive(Arbitrary, Debug)]
enum Record<'a> {
    Submitted {
        job: Number,
        request: u8,
        uid: u8,
        priority: i32,
        gpus: u8,
        workers: u32,
        grace: f64,
        name: &'a str,
        time_limit: Option<u32>,
        reserved: [Option<u8>; 2],
        held: Option<bool>,
        after: Vec<(Number, u8, Option<bool>)>,
        array: Option<(Number, u8)>,
        requeue: bool,
    },
    Array {
        job: Number,
        indices: Vec<u8>,
        parallel: u8,
    },
    Held {
        job: Number,
        admin: bool,
    },
    Released {
        job: Number,
    },
    Reprioritised {
        job: Number,
        priority: i32,
    },
    Warned {
        job: Number,
    },
    TimeLimitReached {
        job: Number,
        at: Number,
    },
    Used {
        uid: u8,
        gpu_seconds: f64,
        at: Number,
    },
    HalfLife(u64),
    Starting {
        job: Number,
        start: u32,
        gpus: Vec<u8>,
        boot: &'a str,
        at: Number,
    },
    Cancelled {
        job: Number,
        uid: u32,
    },
    Ended {
        job: Number,
        end: u8,
        exit: Option<u8>,
        reason: &'a str,
        at: Number,
        order: Number,
        usage: Option<(u64, u64)>,
    },
    Requeued {
        job: Number,
        reason: &'a str,
        lost: bool,
        at: Number,
        usage: Option<(u64, u64)>,
    },
    Drained {
        gpus: Vec<u8>,
        undo: bool,
        reason: &'a str,
    },
    Forgotten {
        job: Number,
    },
    Counted {
        submitted: Number,
        ended: Number,
    },
}

const CONDITION: [&str; 3] = ["ok", "any", "fail"];
const END: [&str; 4] = ["done", "failed", "cancelled", "lost"];

fn usage_json((cpu_ms, peak): (u64, u64)) -> Value {
    json!({"cpu_ms": cpu_ms, "peak_memory_bytes": peak})
}

fn gpus(numbers: &[u8]) -> Vec<String> {
    numbers.iter().map(|number| format!("GPU-{}", number % 4)).collect()
}

impl Record<'_> {
    fn json(&self) -> Value {
        match self {
            Self::Submitted {
                job,
                request,
                uid,
                priority,
                gpus,
                workers,
                grace,
                name,
                time_limit,
                reserved: [cpus, memory],
                held,
                after,
                array,
                requeue,
            } => {
                let dependency = |(job, condition, met): &(Number, u8, Option<bool>)| {
                    let condition = CONDITION[usize::from(condition % 3)];
                    json!({"job": job.get(), "condition": condition, "met": met})
                };
                let element = |(first, index): &(Number, u8)| {
                    json!({"first": first.get(), "index": index, "parallel": 2})
                };
                json!({
                    "record": "submitted", "job": job.get(), "request_id": (request % 4).to_string(),
                    "uid": uid % 3, "priority": priority, "gpus": gpus % 4, "workers": workers, "patience": grace,
                    "name": name, "time_limit": time_limit, "cpus": cpus, "memory": memory, "requeue": requeue,
                    "held": held.map(|admin| json!({"uid": 1, "admin": admin})),
                    "after": after.iter().map(dependency).collect::<Vec<_>>(),
                    "array": array.as_ref().map(element),
                })
            }
            Self::Array { job, indices, parallel } => json!({
                "record": "submitted_array", "indices": indices,
                "first": {
                    "job": job.get(), "request_id": "a", "workers": 1,
                    "array": {"first": job.get(), "index": 0, "parallel": parallel},
                },
            }),
            Self::Held { job, admin } => {
                json!({"record": "held", "job": job.get(), "uid": 1, "admin": admin, "at": 1})
            }
            Self::Released { job } => json!({"record": "released", "job": job.get(), "uid": 1, "at": 1}),
            Self::Reprioritised { job, priority } => json!({
                "record": "reprioritised", "job": job.get(), "priority": priority, "uid": 1, "at": 1,
            }),
            Self::Warned { job } => json!({"record": "warned", "job": job.get(), "at": 1}),
            Self::TimeLimitReached { job, at } => {
                json!({"record": "time_limit_reached", "job": job.get(), "at": at.get()})
            }
            Self::Used { uid, gpu_seconds, at } => {
                json!({"record": "used", "uid": uid % 3, "gpu_seconds": gpu_seconds, "at": at.get()})
            }
            Self::HalfLife(seconds) => json!({"record": "half_life", "seconds": seconds}),
            Self::Starting { job, start, gpus: held, boot, at } => json!({
                "record": "starting", "job": job.get(), "start": start, "gpus": gpus(held), "boot": boot,
                "at": at.get(),
            }),
            Self::Cancelled { job, uid } => {
                json!({"record": "cancelled", "job": job.get(), "uid": uid, "at": 1})
            }
            Self::Ended { job, end, exit, reason, at, order, usage } => json!({
                "record": "ended", "job": job.get(), "exit": exit, "reason": reason, "report": "", "at": at.get(),
                "end": END[usize::from(end % 4)], "order": order.get(),
                "usage": usage.map(usage_json),
            }),
            Self::Requeued { job, reason, lost, at, usage } => json!({
                "record": "requeued", "job": job.get(), "reason": reason, "lost": lost, "at": at.get(),
                "usage": usage.map(usage_json),
            }),
            Self::Drained { gpus: drained, undo, reason } => json!({
                "record": "drained", "gpus": gpus(drained), "undo": undo, "reason": reason, "uid": 0, "at": 1,
            }),
            Self::Forgotten { job } => json!({"record": "forgotten", "job": job.get()}),
            Self::Counted { submitted, ended } => {
                json!({"record": "counted", "submitted": submitted.get(), "ended": ended.get()})
            }
        }
    }
}

impl Input<'_> {
    fn file(&self) -> Vec<u8> {
        let lines = match self {
            Self::File(file) => return file.to_vec(),
            Self::Lines(lines) => lines,
        };
        let mut file: Vec<Vec<u8>> = Vec::new();
        for line in lines {
            let line = match line {
                Line::Record(record) => seal(record.json().to_string().as_bytes()),
                Line::Sealed(json) => seal(json),
                Line::Header(version) => {
                    let version = version.map_or(1, |version| version % 3);
                    seal(json!({"format": "xlaunch-journal", "version": version}).to_string().as_bytes())
                }
                Line::Damaged(bytes) => bytes.to_vec(),
                Line::Repeated(at) if file.is_empty() => vec![*at],
                Line::Repeated(at) => file[usize::from(*at) % file.len()].clone(),
            };
            file.push(line);
        }
        file.concat()
    }
}

fuzz_target!(|input: Input<'_>| {
    let file = input.file();
    let Some(history) = History::parse(&file) else { return };

    let repaired = repaired(&file).expect("readable");
    assert!(is_intact(&repaired), "a repaired journal needs no repair");
    assert_eq!(History::parse(&repaired).expect("readable"), history, "repair keeps valid records");
    let encoded = history.encode();
    assert!(is_intact(&encoded));
    assert_eq!(History::parse(&encoded).expect("as written"), history);

    let compacted = history.compacted();
    assert!(compacted.has_same_jobs(&history), "compaction keeps all jobs: {history:#?}\n{compacted:#?}");
    assert_eq!(History::parse(&compacted.encode()).expect("as written"), compacted);

    let node = Node { gpus: 4, cpu_workers: 4, allow_commands: true, max_grace: Duration::from_secs(120) };
    let (starts, waits) = history.schedule(node);
    let (mut queue, _) = history.queued_and_forgotten(1);
    let mut scheduled = [starts, waits].concat();
    (queue.sort_unstable(), scheduled.sort_unstable());
    assert_eq!(scheduled, queue, "each queued job starts or waits");
    history.messages();
});
