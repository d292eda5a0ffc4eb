//! A switch with hosts on its ports: a bridge in its own network namespace.
//!
//! The network is not connected to anything else, so any number of networks can use the same addresses at the same
//! time.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::{Mutex, PoisonError};

use super::faults::Faults;
use super::namespaces::Namespaces;

/// Host `N` has the addresses `10.77.0.(10 + N)` and `fd77::(10 + N)`.
const FIRST: usize = 10;
/// Maximum number of hosts in a network.
const MAX_HOSTS: usize = 90;

pub(super) fn address(host: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, 0, last_part(host))
}

/// Returns an address with the same decimal digits as the IPv4 address: `fd77::10` is host 0.
pub(super) fn address6(host: usize) -> Ipv6Addr {
    let digits = last_part(host);
    Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, u16::from(digits / 10 * 16 + digits % 10))
}

fn last_part(host: usize) -> u8 {
    assert!(host < MAX_HOSTS, "a network has at most {MAX_HOSTS} hosts");
    u8::try_from(FIRST + host).expect("below 100")
}

/// A switch and its faults.
#[derive(Debug)]
pub(super) struct Network {
    switch: Namespaces,
    faults: Mutex<Faults>,
}

impl Network {
    pub(super) fn new() -> Result<Self, String> {
        let network = Self { switch: Namespaces::of_switch()?, faults: Mutex::default() };
        network.switch.run(&["ip", "-batch", "-"], "link add br0 type bridge\nlink set br0 up\n")?;
        network.switch.run(&["nft", "-f", "-"], &Faults::default().ruleset())?;
        Ok(network)
    }

    /// Connects a host to its port: interface `eth0` with an IPv4 and an IPv6 address.
    pub(super) fn attach(&self, host: usize, namespaces: &Namespaces) -> Result<(), String> {
        let pid = namespaces.pid();
        let port = format!(
            "link add p{host} type veth peer name eth0 netns {pid}\nlink set p{host} master br0\nlink set p{host} up\n"
        );
        self.switch.run(&["ip", "-batch", "-"], &port)?;
        // `nodad`: an address that is still being checked for duplicates cannot be bound.
        let interface = format!(
            "addr add {}/24 dev eth0\naddr add {}/64 dev eth0 nodad\nlink set lo up\nlink set eth0 up\n",
            address(host),
            address6(host)
        );
        namespaces.run(&["ip", "-batch", "-"], &interface)
    }

    /// Removes a port. The host at the other end may have disappeared.
    pub(super) fn detach(&self, host: usize) {
        let _ = self.switch.run(&["ip", "link", "del", &format!("p{host}")], "");
    }

    /// Changes the faults. They are in effect when this returns.
    pub(super) fn change(&self, change: impl FnOnce(&mut Faults)) {
        let mut faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut faults);
        self.switch.run(&["nft", "-f", "-"], &faults.ruleset()).unwrap_or_else(|error| panic!("{error}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_both_families_end_in_the_same_digits() {
        assert_eq!(
            (address(0).to_string(), address6(0).to_string()),
            ("10.77.0.10".into(), "fd77::10".into())
        );
        assert_eq!(
            (address(89).to_string(), address6(89).to_string()),
            ("10.77.0.99".into(), "fd77::99".into())
        );
    }
}
