//! Tests of reports: statistics under PyTorch's names, snapshots and their file formats.

#![expect(clippy::unwrap_used, reason = "a failed call fails the test")]

use std::path::Path;
use std::process::Command;

use xlaunch_pool::{Mode, Options, Pool, PoolBuf};

const MIB: usize = 1 << 20;

xlaunch_harness::suite! {
    snapshot_lists_live_buffers_by_site,
    stats_have_pytorch_names,
    perfetto_trace_has_counters_of_every_event,
    sites_have_relative_paths;
    needs python: memory_viz_pickle_is_valid_and_blocks_tile_segments;
}

fn python() -> xlaunch_harness::Requirement {
    let found = Command::new("python3").arg("--version").output();
    found.map(drop).map_err(|error| format!("python3 cannot be started: {error}"))
}

fn snapshot_lists_live_buffers_by_site() {
    let pool = Pool::host(Mode::On);
    let _kept: Vec<_> = (0..3).map(|_| pool.alloc::<u8>(5000).unwrap()).collect();
    let sites = pool.snapshot().by_site();
    let [(Some(site), 15360, 3)] = sites[..] else { panic!("{sites:?}") };
    assert!(site.location.file().ends_with("snapshot.rs"));
}

fn stats_have_pytorch_names() {
    let pool = Pool::host(Mode::On);
    let _buf = pool.alloc::<u8>(1000).unwrap();
    let counters = pool.stats().torch();
    let value = |name: &str| counters.iter().find(|(other, _)| other == name).map(|(_, value)| *value);
    assert_eq!(value("allocated_bytes.all.current"), Some(1024));
    assert_eq!(value("requested_bytes.all.peak"), Some(1000));
    assert_eq!(value("allocation.all.allocated"), Some(1));
    assert_eq!(value("reserved_bytes.all.current"), Some(2 << 20));
    assert_eq!(value("num_device_alloc"), Some(1));
    assert_eq!(value("num_ooms"), Some(0));
}

/// Creates a pool with events, and the buffers that it holds.
fn traced_pool() -> (Pool, Vec<PoolBuf<u8>>) {
    let pool = Pool::host(Options { trace: 1000, ..Options::default() });
    let kept = [3000, 5 * MIB, 70_000].map(|len| pool.alloc::<u8>(len).unwrap()).into();
    drop(pool.alloc::<u8>(2 * MIB).unwrap());
    (pool, kept)
}

/// CPython loads the pickle and checks the properties that the viewer relies on.
fn memory_viz_pickle_is_valid_and_blocks_tile_segments() {
    let (pool, _kept) = traced_pool();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("snapshot.pickle");
    pool.snapshot().write_memory_viz(&path).unwrap();
    assert_eq!(std::fs::read(&path).unwrap()[..2], [0x80, 2], "protocol 2, which the viewer reads");
    let script = r"
import pickle, pickletools, sys
data = open(sys.argv[1], 'rb').read()
allowed = '''PROTO EMPTY_DICT EMPTY_LIST MARK APPENDS SETITEMS BINUNICODE BININT BININT1 BININT2 LONG1
             NEWTRUE NEWFALSE TUPLE2 TUPLE NONE STOP'''.split()
used = {op.name for op, _, _ in pickletools.genops(data)}
assert used <= set(allowed), used - set(allowed)
s = pickle.loads(data)
for segment in s['segments']:
    assert segment['total_size'] == sum(b['size'] for b in segment['blocks'])
    at = segment['address']
    for block in segment['blocks']:
        assert block['address'] == at, block
        at += block['size']
live = sum(b['requested_size'] for g in s['segments'] for b in g['blocks'] if b['state'] == 'active_allocated')
actions = [e['action'] for e in s['device_traces'][0]]
frame = s['device_traces'][0][0]['frames'][0]
print(live, ' '.join(actions), frame['filename'].split('/')[-1])
";
    let output = Command::new("python3").arg("-c").arg(script).arg(&path).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let live = 3000 + 5 * MIB + 70_000;
    let expected = format!("{live} alloc alloc alloc alloc free_requested free_completed snapshot.rs\n");
    assert_eq!(out, expected, "{err}");
}

fn perfetto_trace_has_counters_of_every_event() {
    let (pool, _kept) = traced_pool();
    let json: serde_json::Value = serde_json::from_str(&pool.snapshot().perfetto(3)).unwrap();
    let events = json["traceEvents"].as_array().unwrap();
    assert_eq!((events.len(), &events[0]["ph"], &events[0]["pid"]), (5, &"C".into(), &3.into()));
    let live: Vec<u64> = events.iter().map(|event| event["args"]["live"].as_u64().unwrap()).collect();
    assert!(live[3] == live[2] + (2 << 20) && live[4] == live[2], "{live:?}");
}

/// Reports must not reveal directories of the machine that built the program.
fn sites_have_relative_paths() {
    let (pool, _kept) = traced_pool();
    let site = pool.snapshot().by_site()[0].0.unwrap();
    assert!(Path::new(site.location.file()).is_relative());
}
