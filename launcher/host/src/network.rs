//! Addresses of this host: those on which the coordinator listens, and the one that an agent tells the other nodes.
//!
//! Names are resolved and interfaces are listed at the edge; the choices are pure functions of the results. Between
//! hosts, neither loopback nor link-local addresses are usable. An endpoint that names the loopback address itself
//! (`localhost`, `127.0.0.1`, `::1`) means that all agents of the job are on this host.

use std::io;
use std::net::IpAddr;
use std::time::Duration;

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;
use xlaunch_spec::command::GroupSpec;

pub const RESOLVE_TIMEOUT: Duration = Duration::from_secs(10);

/// The reason why no address was found.
#[derive(Debug, thiserror::Error)]
pub enum AddressError {
    /// No such interface.
    #[error("interface `{name}` does not exist; this host has {}", known.join(", "))]
    UnknownInterface {
        /// Name as given by the user.
        name: String,
        /// Interfaces that exist.
        known: Vec<String>,
    },
    /// The interface has no address for other hosts.
    #[error(
        "interface `{name}` has no address that other hosts can reach; interfaces that have one: {}",
        list(usable)
    )]
    NoAddress {
        /// Name as given by the user.
        name: String,
        /// Interfaces with a usable address.
        usable: Vec<String>,
    },
    /// The host has no address for other hosts.
    #[error("this host has no address that other hosts can reach; set one with `--local-addr`")]
    OnlyLoopback,
    /// The interfaces cannot be listed.
    #[error("failed to list the network interfaces: {0}")]
    Interfaces(io::Error),
}

fn list(names: &[String]) -> String {
    match names {
        [] => "none".into(),
        names => names.join(", "),
    }
}

/// The user's choice of the address that other nodes use.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wish<'a> {
    /// Value of `--local-addr`: a host name or an address.
    pub local_addr: Option<&'a str>,
    /// Value of `--interface`.
    pub interface: Option<&'a str>,
}

/// An address of an interface that is up.
#[derive(Clone, Debug, PartialEq, Eq)]
struct InterfaceAddress {
    name: String,
    /// `None` if it has neither an IPv4 nor an IPv6 address.
    address: Option<IpAddr>,
}

/// The owner of a name or an address, as this host sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// This host. Loopback addresses count as its own.
    Own,
    /// Another host: none of these addresses belongs to this one.
    Other(Vec<IpAddr>),
}

/// Finds out whether a name or an address belongs to this host.
///
/// # Errors
/// Fails if the name does not resolve (yet), or if the interfaces cannot be listed.
pub async fn locate(host: &str) -> io::Result<Location> {
    if rustix::system::uname().nodename().to_bytes().eq_ignore_ascii_case(host.as_bytes()) {
        return Ok(Location::Own);
    }
    let addresses = resolve(host).await?;
    let interfaces = interfaces()?;
    let is_own = addresses.iter().any(|address| has(&interfaces, *address));
    Ok(if is_own { Location::Own } else { Location::Other(addresses) })
}

/// Returns the addresses of this host that others can reach, for a message.
pub fn own_addresses() -> Vec<IpAddr> {
    let all = interfaces().unwrap_or_default().into_iter().filter_map(|interface| interface.address);
    all.filter(|address| is_usable(*address)).collect()
}

/// Chooses the address of this host for the other nodes: `--local-addr` as given, else an address of `--interface`,
/// else this host's end of the connection to the coordinator. On the coordinator's own host that end is a loopback
/// address, so the address is the one to which the endpoint's name resolves, or else the first usable one.
///
/// # Errors
/// Fails if the interface does not exist or has no usable address, or if this host has none.
pub async fn advertised(
    wish: Wish<'_>,
    endpoint_host: &str,
    connection: IpAddr,
) -> Result<String, AddressError> {
    if let Some(address) = wish.local_addr {
        return Ok(address.into());
    }
    let interfaces = interfaces().map_err(AddressError::Interfaces)?;
    // A name that does not resolve does not decide between the addresses.
    let endpoint = resolve(endpoint_host).await.unwrap_or_default();
    let local = is_loopback(endpoint_host);
    choose(wish.interface, connection.to_canonical(), local, &endpoint, &interfaces)
        .map(|address| address.to_string())
}

/// Returns the addresses for the coordinator to listen on: the endpoint's addresses that belong to this host, or else
/// all that other hosts can reach; in addition, loopback addresses to which its name resolves here. `0.0.0.0` and `::`
/// are used as they are.
///
/// # Errors
/// Fails if this host has no usable address.
pub async fn to_listen(endpoint_host: &str) -> Result<Vec<IpAddr>, AddressError> {
    let interfaces = interfaces().map_err(AddressError::Interfaces)?;
    let resolved = resolve(endpoint_host).await.unwrap_or_default();
    let addresses = listening(is_loopback(endpoint_host), &resolved, &interfaces);
    if addresses.is_empty() { Err(AddressError::OnlyLoopback) } else { Ok(addresses) }
}

/// Returns the addresses to which a name resolves within [`RESOLVE_TIMEOUT`].
///
/// # Errors
/// Fails if the name cannot be resolved.
pub async fn resolve(host: &str) -> io::Result<Vec<IpAddr>> {
    let found = tokio::time::timeout(RESOLVE_TIMEOUT, tokio::net::lookup_host((host, 0))).await;
    let found = found.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))?;
    Ok(found.map(|address| address.ip().to_canonical()).collect())
}

/// Lists the addresses of all interfaces that are up, in the kernel's order.
fn interfaces() -> io::Result<Vec<InterfaceAddress>> {
    let found = getifaddrs()?.filter(|entry| entry.flags.contains(InterfaceFlags::IFF_UP));
    let interface = |entry: nix::ifaddrs::InterfaceAddress| {
        let storage = entry.address;
        let v4 = storage.and_then(|address| address.as_sockaddr_in().map(|address| IpAddr::V4(address.ip())));
        let v6 =
            || storage.and_then(|address| address.as_sockaddr_in6().map(|address| IpAddr::V6(address.ip())));
        InterfaceAddress { name: entry.interface_name, address: v4.or_else(v6) }
    };
    Ok(found.map(interface).collect())
}

/// The network interface for a job's traffic.
#[derive(Clone, Debug)]
pub struct Interface {
    /// Interface name, such as `eth0`.
    pub name: String,
    /// The user has named it with `--interface`.
    pub is_chosen_by_user: bool,
}

impl Interface {
    /// Returns the interface for a command's workers: the one given with `--interface`, or else the one that has the
    /// node's address.
    pub fn of_node(group: &GroupSpec, address: &str) -> Option<Self> {
        if let Some(name) = group.interface.clone() {
            return Some(Self { name, is_chosen_by_user: true });
        }
        let name = interface_with(address.parse().ok()?)?;
        Some(Self { name, is_chosen_by_user: false })
    }
}

/// Returns the name of the interface with this address.
fn interface_with(address: IpAddr) -> Option<String> {
    let found = interfaces().ok()?.into_iter().find(|interface| interface.address == Some(address));
    found.map(|interface| interface.name)
}

/// Returns whether the endpoint's host means that all nodes are on one host.
fn is_loopback(host: &str) -> bool {
    match host.parse::<IpAddr>() {
        Ok(address) => address.to_canonical().is_loopback(),
        Err(_) => host.eq_ignore_ascii_case("localhost"),
    }
}

/// Returns whether other hosts can reach the address.
fn is_usable(address: IpAddr) -> bool {
    let link_local = match address {
        IpAddr::V4(address) => address.is_link_local() || address.is_broadcast(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    !(link_local || address.is_loopback() || address.is_unspecified() || address.is_multicast())
}

fn has(interfaces: &[InterfaceAddress], address: IpAddr) -> bool {
    // An interface lists only one address of 127.0.0.0/8, but all of them are local.
    let any_v4_loopback = address.is_ipv4() && address.is_loopback();
    any_v4_loopback || interfaces.iter().any(|interface| interface.address == Some(address))
}

/// Chooses the address to tell other nodes; see [`advertised`]. `local`: all nodes are on this host.
fn choose(
    wished: Option<&str>,
    connection: IpAddr,
    local: bool,
    endpoint: &[IpAddr],
    interfaces: &[InterfaceAddress],
) -> Result<IpAddr, AddressError> {
    let usable = |address: &IpAddr| is_usable(*address) || (local && address.is_loopback());
    let addresses = |wanted: Option<&str>| -> Vec<IpAddr> {
        let named = interfaces.iter().filter(|interface| wanted.is_none_or(|name| interface.name == name));
        named.filter_map(|interface| interface.address).filter(usable).collect()
    };
    let same_family = |found: Vec<IpAddr>| {
        let same = found.iter().find(|address| address.is_ipv4() == connection.is_ipv4()).copied();
        same.or(found.first().copied())
    };
    if let Some(name) = wished {
        return same_family(addresses(Some(name))).ok_or_else(|| no_address(name, interfaces));
    }
    if usable(&connection) {
        return Ok(connection);
    }
    let own: Vec<IpAddr> =
        endpoint.iter().filter(|address| usable(address) && has(interfaces, **address)).copied().collect();
    same_family(own).or_else(|| same_family(addresses(None))).ok_or(AddressError::OnlyLoopback)
}

fn no_address(name: &str, interfaces: &[InterfaceAddress]) -> AddressError {
    let names = |keep: &dyn Fn(&InterfaceAddress) -> bool| {
        let mut names: Vec<String> =
            interfaces.iter().filter(|found| keep(found)).map(|found| found.name.clone()).collect();
        names.sort();
        names.dedup();
        names
    };
    if interfaces.iter().any(|interface| interface.name == name) {
        let usable = names(&|interface| interface.address.is_some_and(is_usable));
        return AddressError::NoAddress { name: name.into(), usable };
    }
    AddressError::UnknownInterface { name: name.into(), known: names(&|_| true) }
}

/// Chooses the addresses to listen on; see [`to_listen`]. `local`: all nodes are on this host.
fn listening(local: bool, endpoint: &[IpAddr], interfaces: &[InterfaceAddress]) -> Vec<IpAddr> {
    let named = |address: &&IpAddr| {
        address.is_unspecified() || (has(interfaces, **address) && (local || is_usable(**address)))
    };
    let named: Vec<IpAddr> = endpoint.iter().filter(named).copied().collect();
    let all =
        interfaces.iter().filter_map(|interface| interface.address).filter(|address| is_usable(*address));
    let mut addresses = if named.is_empty() { all.collect() } else { named };
    // Agents of this host connect to the address to which the name resolves here: 127.0.1.1 if it is the host's own
    // name, and /etc/hosts is Debian's. Other hosts cannot reach that, so it does not replace the other addresses.
    if !addresses.is_empty() && !addresses.iter().any(IpAddr::is_unspecified) {
        addresses
            .extend(endpoint.iter().filter(|address| address.is_loopback() && has(interfaces, **address)));
    }
    let mut seen = std::collections::BTreeSet::new();
    addresses.retain(|address| seen.insert(*address));
    addresses
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ips(texts: &[&str]) -> Vec<IpAddr> {
        texts.iter().map(|text| ip(text)).collect()
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// A host with two networks, one of them with both families.
    fn host() -> Vec<InterfaceAddress> {
        let addresses = [
            ("lo", "127.0.0.1"),
            ("lo", "::1"),
            ("eth0", "10.77.0.10"),
            ("eth0", "fd77::10"),
            ("eth0", "fe80::1"),
            ("ib0", "10.88.0.10"),
            ("link", "169.254.3.4"),
        ];
        let mut interfaces: Vec<InterfaceAddress> = addresses
            .map(|(name, address)| InterfaceAddress { name: name.into(), address: Some(ip(address)) })
            .into();
        interfaces.push(InterfaceAddress { name: "bare".into(), address: None });
        interfaces
    }

    fn chosen(wished: Option<&str>, connection: &str, endpoint: &str) -> Result<String, String> {
        let resolved: Vec<IpAddr> = match endpoint {
            "h0" => ips(&["127.0.1.1", "fd77::10"]),
            "other" => ips(&["10.77.0.11"]),
            _ => endpoint.parse().into_iter().collect(),
        };
        let found = choose(wished, ip(connection), is_loopback(endpoint), &resolved, &host());
        found.map(|address| address.to_string()).map_err(|error| error.to_string())
    }

    #[test]
    fn advertised_address_is_that_of_the_connection_unless_it_is_loopback() {
        for (connection, endpoint, expected) in [
            ("10.77.0.10", "other", "10.77.0.10"),
            ("fd77::10", "other", "fd77::10"),
            // The coordinator's own host: Debian's /etc/hosts gives its name a loopback address first.
            ("127.0.0.1", "h0", "fd77::10"),
            ("127.0.0.1", "other", "10.77.0.10"),
            ("::1", "other", "fd77::10"),
            ("fe80::1", "other", "fd77::10"),
            // All nodes are on this host.
            ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
            ("::1", "::1", "::1"),
        ] {
            let found = chosen(None, connection, endpoint);
            assert_eq!(found.as_deref(), Ok(expected), "{connection} {endpoint}");
        }
        let alone = [InterfaceAddress { name: "lo".into(), address: Some(ip("127.0.0.1")) }];
        let error = choose(None, ip("127.0.0.1"), false, &[], &alone).unwrap_err().to_string();
        assert!(error.contains("no address that other hosts can reach; set one"), "{error}");
    }

    #[test]
    fn interface_gives_an_address_of_the_connections_family() {
        assert_eq!(chosen(Some("eth0"), "10.77.0.10", "other").as_deref(), Ok("10.77.0.10"));
        assert_eq!(chosen(Some("eth0"), "fd77::10", "other").as_deref(), Ok("fd77::10"));
        assert_eq!(chosen(Some("ib0"), "fd77::10", "other").as_deref(), Ok("10.88.0.10"));
    }

    #[test]
    fn unsuitable_interface_is_named_with_those_that_exist() {
        let error = chosen(Some("ib1"), "10.77.0.10", "other").unwrap_err();
        assert_eq!(error, "interface `ib1` does not exist; this host has bare, eth0, ib0, link, lo");
        for name in ["lo", "link", "bare"] {
            let error = chosen(Some(name), "10.77.0.10", "other").unwrap_err();
            assert!(error.starts_with(&format!("interface `{name}` has no address")), "{error}");
            assert!(error.ends_with("interfaces that have one: eth0, ib0"), "{error}");
        }
    }

    #[test]
    fn coordinator_listens_where_other_hosts_and_its_own_agents_reach_it() {
        let listens =
            |host_name: &str, resolved: &[&str]| listening(is_loopback(host_name), &ips(resolved), &host());
        assert_eq!(listens("h0", &["10.77.0.10"]), ips(&["10.77.0.10"]));
        // The agents of this host connect to 127.0.1.1, because that is what the name means here.
        assert_eq!(listens("h0", &["127.0.1.1", "fd77::10"]), ips(&["fd77::10", "127.0.1.1"]));
        let all_and_own = ips(&["10.77.0.10", "fd77::10", "10.88.0.10", "127.0.1.1"]);
        assert_eq!(listens("h0", &["127.0.1.1", "127.0.1.1"]), all_and_own);
        assert_eq!(listens("service", &["10.96.0.1"]), ips(&["10.77.0.10", "fd77::10", "10.88.0.10"]));
        assert_eq!(listens("localhost", &["::1", "127.0.0.1"]), ips(&["::1", "127.0.0.1"]));
        // `0.0.0.0` contains the loopback addresses.
        assert_eq!(listens("0.0.0.0", &["0.0.0.0"]), ips(&["0.0.0.0"]));
        assert_eq!(listens("any", &["127.0.1.1", "0.0.0.0"]), ips(&["0.0.0.0"]));
        // A loopback address alone is no place for a coordinator of several hosts.
        assert!(listening(false, &ips(&["127.0.1.1"]), &[]).is_empty());
        assert!(listening(false, &[], &[]).is_empty());
    }

    #[tokio::test]
    async fn own_names_and_addresses_are_recognised() {
        let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
        for host in ["127.0.0.1", "127.9.9.9", "localhost", &name.to_uppercase()] {
            assert_eq!(locate(host).await.unwrap(), Location::Own, "{host}");
        }
        // Reserved for documentation.
        for other in ["192.0.2.1", "2001:db8::1"] {
            assert_eq!(locate(other).await.unwrap(), Location::Other(vec![ip(other)]));
        }
        for interface in interfaces().unwrap() {
            if let Some(address) = interface.address {
                assert_eq!(locate(&address.to_string()).await.unwrap(), Location::Own, "{interface:?}");
            }
        }
        locate("name.invalid").await.unwrap_err();
    }
}
