//! Service links: environment variables that Kubernetes sets in each container for every service of its namespace. The
//! variables of a service called `xlaunch-train` begin with `XLAUNCH_TRAIN_`, like those that set keys of `[train]`.

/// Returns whether the variable looks like a service link, judged by its name and value.
pub(super) fn is_service_link(name: &str, value: &str) -> bool {
    name.ends_with("_SERVICE_HOST")
        || name.ends_with("_SERVICE_PORT")
        || name.contains("_SERVICE_PORT_")
        || name.ends_with("_PORT") && is_url(value)
        || name.match_indices("_PORT_").any(|(at, word)| is_port(&name[at + word.len()..]))
}

/// Returns whether the value is a URL such as `tcp://10.96.0.7:29400`.
fn is_url(value: &str) -> bool {
    ["tcp://", "udp://", "sctp://"].iter().any(|scheme| value.starts_with(scheme))
}

/// Returns whether `rest` can follow `_PORT_` in the name of a service link, such as `29400_TCP` or `29400_TCP_ADDR`.
fn is_port(rest: &str) -> bool {
    let mut words = rest.split('_');
    let number = words.next().is_some_and(|word| word.parse::<u16>().is_ok());
    let protocol = words.next().is_some_and(|word| ["TCP", "UDP", "SCTP"].contains(&word));
    let what = words.next().is_none_or(|word| ["PROTO", "PORT", "ADDR"].contains(&word));
    number && protocol && what && words.next().is_none()
}
