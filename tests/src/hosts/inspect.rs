//! Processes and listening sockets of a host, read from the machine's `/proc`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;

use crate::{is_alive, process_name};

/// A process on a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessInfo {
    /// Process id as seen from outside.
    pub pid: u32,
    /// Name as `ps` shows it.
    pub name: String,
    /// Command line, with arguments separated by spaces.
    pub command: String,
}

/// Returns the processes of a PID namespace except its PID 1 and those that have exited.
pub(super) fn processes(namespace: &Path) -> Vec<ProcessInfo> {
    let Ok(namespace) = std::fs::read_link(namespace) else { return Vec::new() };
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let inside = pids.filter(|pid| {
        let link = std::fs::read_link(format!("/proc/{pid}/ns/pid"));
        link.is_ok_and(|link| link == namespace) && is_alive(*pid) && !is_init(*pid)
    });
    inside.map(|pid| ProcessInfo { pid, name: process_name(pid), command: command_line(pid) }).collect()
}

fn is_init(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap_or_default();
    ids.split_whitespace().last() == Some("1")
}

fn command_line(pid: u32) -> String {
    let bytes = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&bytes).trim_end_matches('\0').replace('\0', " ")
}

/// Returns the listening TCP sockets in the network namespace of a process.
pub(super) fn listeners(pid: u32) -> Vec<SocketAddr> {
    let tables = ["tcp", "tcp6"].map(|table| std::fs::read_to_string(format!("/proc/{pid}/net/{table}")));
    tables.iter().flatten().flat_map(|table| table.lines().filter_map(listener)).collect()
}

/// Returns the address in a line of `/proc/net/tcp` or `tcp6`, if its socket listens.
fn listener(line: &str) -> Option<SocketAddr> {
    const LISTEN: &str = "0A";
    let mut fields = line.split_whitespace().skip(1);
    let (address, port) = fields.next()?.split_once(':')?;
    if fields.nth(1)? != LISTEN {
        return None;
    }
    // Words of four bytes, each printed as a number in the machine's byte order.
    let words = address
        .as_bytes()
        .chunks(8)
        .map(|word| u32::from_str_radix(std::str::from_utf8(word).ok()?, 16).ok());
    let bytes: Vec<u8> =
        words.collect::<Option<Vec<u32>>>()?.into_iter().flat_map(u32::to_ne_bytes).collect();
    let address: IpAddr = match bytes.len() {
        4 => Ipv4Addr::from(<[u8; 4]>::try_from(bytes).ok()?).into(),
        _ => Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?).into(),
    };
    Some(SocketAddr::new(address, u16::from_str_radix(port, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listening_sockets_of_both_families_are_read() {
        let lines = [
            "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode",
            "   0: 0100007F:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1",
            "   1: 0A004D0A:72D8 0B004D0A:C350 01 00000000:00000000 00:00000000 00000000     0        0 1 1",
            "   2: 00000000000000000000000001000000:0016 00000000000000000000000000000000:0000 0A 0:0 0:0 0 0 0 1",
        ];
        let found: Vec<String> = lines.into_iter().filter_map(listener).map(|a| a.to_string()).collect();
        if cfg!(target_endian = "little") {
            assert_eq!(found, ["127.0.0.1:22", "[::1]:22"]);
        }
    }
}
