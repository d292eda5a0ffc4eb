//! The network interface of this node's address.

use xlaunch_spec::command::GroupSpec;

use super::net::address;

/// A network interface of this node.
#[derive(Clone, Debug)]
pub struct Interface {
    /// Interface name, such as `eth0`.
    pub name: String,
    /// The user has named it with `--interface`.
    pub is_chosen_by_user: bool,
}

/// Returns the interface for a command's workers: the one given with `--interface`, or else the one that has the node's
/// address.
pub fn of_node(group: &GroupSpec, address: &str) -> Option<Interface> {
    if let Some(name) = group.interface.clone() {
        return Some(Interface { name, is_chosen_by_user: true });
    }
    let name = address::interface_with(address.parse().ok()?)?;
    Some(Interface { name, is_chosen_by_user: false })
}
