//! Decides which node runs the coordinator when no flag says so. Pure.
//!
//! Node rank 0 runs it in a static group; in a dynamic one, the node whose resolver says that it has the endpoint's
//! address. A name may resolve late, or to another address at first, so the resolver is asked again until the node has
//! joined. A node that does not know the address yet waits: two coordinators, or none, would be worse.

use std::net::IpAddr;

use xlaunch_spec::command::{Backend, GroupSpec};

/// Answer of this host's resolver about the endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Sight {
    /// It is an address of this host.
    Own,
    /// It is an address of another host.
    Other {
        /// Addresses to which the name resolves.
        addresses: Vec<IpAddr>,
        /// This host's address on a connection to it.
        route: IpAddr,
    },
    /// It does not resolve, or no route leads to it; holds the reason.
    Unknown(String),
}

/// A node's role in its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// The node runs the coordinator.
    Coordinator,
    /// The node connects to the coordinator.
    Member,
}

/// Returns the role of this node; `None` if it is not known yet.
pub(super) fn role(spec: &GroupSpec, sight: &Sight) -> Option<Role> {
    let hosts = match (spec.hosts_coordinator, spec.backend, sight) {
        (Some(hosts), ..) => hosts,
        (None, Backend::Static, _) => spec.node_rank == Some(0),
        (None, Backend::Dynamic, Sight::Own) => true,
        (None, Backend::Dynamic, Sight::Other { .. }) => false,
        (None, Backend::Dynamic, Sight::Unknown(_)) => return None,
    };
    if hosts {
        return Some(Role::Coordinator);
    }
    // The address that this node advertises depends on its route to the coordinator.
    let is_known = !matches!(sight, Sight::Unknown(_)) || spec.local_addr.is_some();
    is_known.then_some(Role::Member)
}

/// Returns whether another answer from the resolver can change the role.
pub(super) fn may_change(spec: &GroupSpec) -> bool {
    spec.backend == Backend::Dynamic && spec.hosts_coordinator.is_none()
}

/// Returns a warning if this node runs the coordinator at an address where other nodes will not look for it.
pub(super) fn misplaced(spec: &GroupSpec, sight: &Sight, own: &[IpAddr]) -> Option<String> {
    let Sight::Other { addresses, .. } = sight else { return None };
    let list = |all: &[IpAddr]| all.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let host = &spec.endpoint.host;
    let resolved = match host.parse::<IpAddr>() {
        Ok(_) => format!("`{host}`"),
        Err(_) => format!("`{host}` ({})", list(addresses)),
    };
    Some(format!(
        "warning: this node runs the coordinator, but {resolved} is not an address of this host ({}), so other nodes \
         look for it elsewhere; unless connections are forwarded, give all nodes an address of this host with \
         `--rdzv-endpoint`",
        list(own)
    ))
}

#[cfg(test)]
mod tests {
    use xlaunch_spec::command::{Endpoint, NodeCount, Security};

    use super::*;

    fn spec(backend: Backend) -> GroupSpec {
        let endpoint = Endpoint { host: "h0".into(), ports: vec![29400] };
        GroupSpec::new(NodeCount { min: 2, max: 2 }, backend, endpoint, Security::Token)
    }

    fn other() -> Sight {
        Sight::Other { addresses: vec!["10.0.0.2".parse().unwrap()], route: "10.0.0.1".parse().unwrap() }
    }

    fn unknown() -> Sight {
        Sight::Unknown("no such name".into())
    }

    #[test]
    fn dynamic_node_decides_by_the_name_and_not_before_it_resolves() {
        let spec = spec(Backend::Dynamic);
        assert_eq!(role(&spec, &Sight::Own), Some(Role::Coordinator));
        assert_eq!(role(&spec, &other()), Some(Role::Member));
        assert_eq!(role(&spec, &unknown()), None);
        let named = GroupSpec { local_addr: Some("10.0.0.1".into()), ..spec.clone() };
        assert_eq!(role(&named, &unknown()), None);
        assert!(may_change(&spec));
    }

    #[test]
    fn is_host_and_static_ranks_do_not_depend_on_names() {
        let fixed = |rank| GroupSpec { node_rank: Some(rank), ..spec(Backend::Static) };
        for sight in [Sight::Own, other(), unknown()] {
            assert_eq!(role(&fixed(0), &sight), Some(Role::Coordinator));
        }
        assert_eq!(role(&fixed(1), &Sight::Own), Some(Role::Member));
        assert_eq!(role(&fixed(1), &unknown()), None);
        let named = GroupSpec { local_addr: Some("10.0.0.1".into()), ..fixed(1) };
        assert_eq!(role(&named, &unknown()), Some(Role::Member));
        let host = GroupSpec { hosts_coordinator: Some(true), ..spec(Backend::Dynamic) };
        assert_eq!(role(&host, &other()), Some(Role::Coordinator));
        assert!(!may_change(&host) && !may_change(&fixed(0)));
    }

    #[test]
    fn coordinator_at_another_hosts_address_is_reported() {
        let own = ["10.0.0.1".parse().unwrap()];
        let line = misplaced(&spec(Backend::Static), &other(), &own).unwrap();
        assert!(line.contains("`h0` (10.0.0.2) is not an address of this host (10.0.0.1)"), "{line}");
        assert_eq!(misplaced(&spec(Backend::Static), &Sight::Own, &own), None);
        assert_eq!(misplaced(&spec(Backend::Static), &unknown(), &own), None);
    }
}
