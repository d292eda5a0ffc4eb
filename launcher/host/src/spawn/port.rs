//! Reserves a TCP port for `MASTER_PORT`, which rank 0 opens some time later.
//!
//! The port could be taken in between by
//! - the kernel, as an ephemeral port: so ephemeral ports are not chosen;
//! - another xlaunch, of any user: so an abstract unix socket named after the port is held as a lock. Such names need
//!   no cleanup, and belong to a network namespace, as ports do;
//! - any other program: that is unlikely, as the port was free when it was chosen, and the search starts at a random
//!   port.
//!
//! Any user can hold the locks of all ports. In that case a port is chosen without a lock, so that no user can keep
//! others from launching.

use std::hash::BuildHasher;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::ops::RangeInclusive;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::UnixListener;
use xlaunch_spec::quantities::parse_range;

/// Lower ports belong to well-known services.
const PORT_RANGE: RangeInclusive<u16> = 20_000..=u16::MAX;

/// torchrun's default ports, left to users who choose them.
const TORCHRUN_PORTS: [u16; 2] = [29_400, 29_500];

/// A port that neither another xlaunch on this host nor the kernel will take while this value lives.
#[derive(Debug)]
pub struct MasterPort {
    number: u16,
    /// The lock. It is close-on-exec, so that no worker keeps it. `None` if other processes hold the locks of all
    /// ports.
    _lock: Option<UnixListener>,
}

impl MasterPort {
    /// Finds a port that is free on IPv4 and IPv6.
    ///
    /// # Errors
    /// No port is free, or no socket can be opened.
    pub fn reserve() -> io::Result<Self> {
        let setting =
            |name: &str| fs_err::read_to_string(format!("/proc/sys/net/ipv4/{name}")).unwrap_or_default();
        let ports = candidates(&setting("ip_local_port_range"), &setting("ip_local_reserved_ports"));
        Self::first_free(&ports, std::hash::RandomState::new().hash_one(std::process::id()))
    }

    /// The port number.
    pub fn number(&self) -> u16 {
        self.number
    }

    fn first_free(ports: &[u16], random: u64) -> io::Result<Self> {
        let start = usize::try_from(random % ports.len().max(1) as u64).unwrap_or(0);
        let (before, from) = ports.split_at(start);
        for port in from.iter().chain(before) {
            if let Some(found) = Self::lock(*port)? {
                return Ok(found);
            }
        }
        for number in from.iter().chain(before) {
            if is_free(*number)? {
                return Ok(Self { number: *number, _lock: None });
            }
        }
        Err(io::Error::new(io::ErrorKind::AddrInUse, "no port is free for MASTER_PORT"))
    }

    fn lock(number: u16) -> io::Result<Option<Self>> {
        let name = std::os::unix::net::SocketAddr::from_abstract_name(format!("xlaunch-port-{number}"))?;
        match UnixListener::bind_addr(&name) {
            Ok(lock) => Ok(is_free(number)?.then_some(Self { number, _lock: Some(lock) })),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Returns whether the port can be bound on all addresses of each address family that the host has.
///
/// # Errors
/// The host, or its sandbox, refuses sockets of both families.
fn is_free(port: u16) -> io::Result<bool> {
    let any: [SocketAddr; 2] = [(Ipv4Addr::UNSPECIFIED, port).into(), (Ipv6Addr::UNSPECIFIED, port).into()];
    let opened = any.map(|address| TcpListener::bind(address).map(drop));
    let in_use = |error: &io::Error| error.kind() == io::ErrorKind::AddrInUse;
    if opened.iter().any(|result| result.as_ref().is_err_and(in_use)) {
        return Ok(false);
    }
    let [ipv4, ipv6] = opened;
    let opened = ipv4.or_else(|error| ipv6.map_err(|_| error));
    opened.map(|()| true).map_err(|error| {
        io::Error::new(error.kind(), format!("failed to open a port for MASTER_PORT: {error}"))
    })
}

/// Returns the ports to choose from, given two kernel settings such as "32768 60999" and "8080,9000-9100".
fn candidates(ephemeral: &str, reserved: &str) -> Vec<u16> {
    let ephemeral = ephemeral.split_whitespace().collect::<Vec<_>>().join("-");
    let ephemeral = parse_range::<u16>(&ephemeral);
    let reserved: Vec<_> = reserved.split(',').filter_map(|part| parse_range::<u16>(part.trim())).collect();
    let free =
        |port: &u16| !TORCHRUN_PORTS.contains(port) && !reserved.iter().any(|range| range.contains(port));
    let (mut ports, ephemeral_ports): (Vec<u16>, Vec<u16>) = PORT_RANGE
        .filter(free)
        .partition(|port| !ephemeral.as_ref().is_some_and(|range| range.contains(port)));
    if ports.is_empty() {
        // In some containers all ports of the range are ephemeral.
        ports = ephemeral_ports;
    }
    ports
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fifty_concurrent_reservations_get_fifty_usable_ports() {
        let start = std::sync::Barrier::new(50);
        let reserve = || {
            start.wait();
            MasterPort::reserve().unwrap()
        };
        let ports: Vec<MasterPort> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..50).map(|_| scope.spawn(reserve)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let numbers: std::collections::BTreeSet<u16> = ports.iter().map(MasterPort::number).collect();
        assert_eq!(numbers.len(), 50);
        for number in numbers {
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, number)).unwrap();
        }
    }

    #[test]
    fn reserved_and_open_ports_are_skipped() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let open = listener.local_addr().unwrap().port();
        // These ports are outside the range that other tests reserve from.
        let ports: Vec<u16> = (15_000..16_000).collect();
        let random = std::hash::RandomState::new().hash_one(0);
        let held = MasterPort::first_free(&ports, random).unwrap();
        let number = held.number();
        assert!(MasterPort::first_free(&[open], 0).is_err());
        let other = ports.iter().copied().find(|port| *port != number && is_free(*port).unwrap()).unwrap();
        assert_eq!(MasterPort::first_free(&[number, open, other], 0).unwrap().number(), other);
    }

    #[test]
    fn ports_can_be_reserved_if_another_user_holds_all_locks() {
        let ports: Vec<u16> = (16_000..17_000).collect();
        let held = MasterPort::first_free(&ports, 0).unwrap();
        let without_lock = MasterPort::first_free(&[held.number()], 0).unwrap();
        assert_eq!(without_lock.number(), held.number());
    }

    #[test]
    fn ephemeral_and_reserved_ports_are_not_chosen() {
        let ports = candidates("32768\t60999\n", "20000-20002,61000\n");
        assert_eq!((ports.first(), ports.last()), (Some(&20_003), Some(&65_535)));
        assert!(![29_400, 29_500, 32_768, 60_999, 61_000].iter().any(|port| ports.contains(port)));
        assert!(ports.contains(&32_767) && ports.contains(&61_001));
        let all = candidates("1024 65535", "20000");
        assert_eq!((all.first(), all.last()), (Some(&20_001), Some(&65_535)));
    }
}
