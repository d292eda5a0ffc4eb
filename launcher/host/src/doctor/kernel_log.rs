//! Reads the Xid errors that the NVIDIA driver has logged since boot from the kernel log, `/dev/kmsg`.

use std::io::{ErrorKind, Read};
use std::time::Duration;

use fs_err::os::unix::fs::OpenOptionsExt;
use rustix::fs::OFlags;
use rustix::time::{ClockId, clock_gettime};

/// Size of the read buffer. It must hold any record, because a read with a smaller buffer fails.
const RECORD_BYTES: usize = 8192;
/// Upper bound on the records read, beyond the capacity of any kernel log buffer.
const MAX_RECORDS: usize = 1_000_000;

/// An Xid error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Xid {
    /// Domain, bus and device of the GPU, in lower case: `0000:3b:00`.
    pub bus: String,
    pub number: u32,
    pub age: Duration,
}

/// Returns all Xid errors in the log; `None` if it cannot be read, which usually requires root.
pub fn xids() -> Option<Vec<Xid>> {
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let mut log = fs_err::OpenOptions::new().read(true).custom_flags(flags).open("/dev/kmsg").ok()?;
    let now = clock_gettime(ClockId::Monotonic);
    let now = Duration::from_secs(now.tv_sec.cast_unsigned());
    let (mut found, mut record) = (Vec::new(), [0; RECORD_BYTES]);
    for _ in 0..MAX_RECORDS {
        match log.read(&mut record) {
            Ok(0) => break,
            Ok(len) => found.extend(parse(&String::from_utf8_lossy(&record[..len]), now)),
            // Unread records have been overwritten; the next read continues after them.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(_) => return None,
        }
    }
    Some(found)
}

/// Parses a record such as `4,1234,98765432,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=7, GPU has fallen off the bus.`. The
/// text follows priority, sequence number and microseconds since boot.
fn parse(record: &str, now: Duration) -> Option<Xid> {
    let (head, text) = record.split_once(';')?;
    let at = Duration::from_micros(head.split(',').nth(2)?.parse().ok()?);
    let (bus, rest) = text.strip_prefix("NVRM: Xid (PCI:")?.split_once("): ")?;
    let digits = rest.find(|sign: char| !sign.is_ascii_digit()).unwrap_or(rest.len());
    let number = rest[..digits].parse().ok()?;
    Some(Xid { bus: bus.to_lowercase(), number, age: now.saturating_sub(at) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_driver_records_are_parsed() {
        let now = Duration::from_secs(100);
        let text =
            "4,1234,40000000,-;NVRM: Xid (PCI:0000:3B:00): 79, pid=7, fallen off the bus.\n SUBSYSTEM=x\n";
        let expected = Xid { bus: "0000:3b:00".into(), number: 79, age: Duration::from_secs(60) };
        assert_eq!(parse(text, now), Some(expected));
        for other in [
            "4,1,40,-;NVRM: loading NVIDIA UNIX module",
            "4,1,40,-;NVRM: Xid (PCI:0000:3b:00): many",
            "4,1;NVRM: Xid (PCI:0000:3b:00): 79",
            "NVRM: Xid (PCI:0000:3b:00): 79",
            "",
        ] {
            assert_eq!(parse(other, now), None, "{other}");
        }
    }

    #[test]
    fn reading_the_log_ends() {
        // Not every machine lets this process read the log.
        if let Some(found) = xids() {
            assert!(found.len() < MAX_RECORDS);
        }
    }
}
