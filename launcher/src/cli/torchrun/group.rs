//! The [`GroupSpec`] of a launch on several nodes, or none for one node.
//!
//! ```text
//! flags, then PET_*, then one engine's allocation --resolve--> GroupSpec, settings with their sources
//! ```
//! Invariants:
//! - `--standalone`, `--nnodes 1` and an engine's allocation of one node give a launch on one node, without a socket;
//! - when called as torchrun, a launch does not look for an engine, like torchrun;
//! - a number of nodes or a rank that contradicts the engine is refused, and the error names both values;
//! - several nodes authenticate each other unless the user turns that off, or calls this program torchrun.

use std::path::PathBuf;
use std::time::Duration;

use xlaunch_proto::env;
use xlaunch_spec::command::{Backend, Endpoint, GroupSpec, NodeCount, Security};

use super::super::engine::{self, Allocation, Sourced};
use super::Name;
use super::reader::Reader;
use super::values;

/// torchrun's default ports of the two rendezvous backends.
const STATIC_PORT: u16 = 29500;
pub(crate) const DYNAMIC_PORT: u16 = 29400;
const DEFAULT: &str = "default";

/// The nodes that a launch may use.
#[derive(Clone, Copy)]
pub(crate) enum Scope<'a> {
    /// A foreground launch: several nodes if flags or the engine say so. The function detects the engine.
    Nodes(&'a dyn Fn() -> Result<Option<Allocation>, String>),
    /// A job of the node's daemon: this node only.
    OneNode,
}

/// The part of a launch in a job on several nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Group {
    pub(crate) spec: GroupSpec,
    /// Path of the token, if it is not in `XLAUNCH_TOKEN`.
    pub(crate) token_file: Option<PathBuf>,
    /// Warnings to print before the launch.
    pub(crate) warnings: Vec<String>,
}

/// Values from flags, environment and engine, by name, for `xlaunch env`. After an error, it contains those that were
/// found before the error.
pub(crate) type Settings = Vec<(&'static str, Sourced<String>)>;

/// Returns the group of this launch; `None` for one node.
pub(super) fn resolve(
    reader: &Reader<'_>,
    name: Name,
    scope: Scope<'_>,
    settings: &mut Settings,
) -> Result<Option<Group>, String> {
    let nodes = reader.sourced("nnodes", values::nodes)?;
    let rank = reader.sourced("node-rank", values::whole)?;
    let backend = reader.sourced("rdzv-backend", values::backend)?;
    let several = nodes.as_ref().filter(|nodes| nodes.value.max > 1);
    let Scope::Nodes(detect) = scope else {
        return match several.map(|nodes| &nodes.source) {
            Some(source) => Err(refused_by_daemon(source)),
            None => Ok(one_node(DEFAULT, settings)),
        };
    };
    if reader.is_set("standalone")? {
        let needs_others =
            |nodes: &&Sourced<NodeCount>| nodes.value.min > 1 && reader.line.last("nnodes").is_some();
        return match several.filter(needs_others) {
            Some(nodes) => Err(format!("--standalone is for one node, but {} is given", nodes.source)),
            None => Ok(one_node("--standalone", settings)),
        };
    }
    if let Some(one) = nodes.as_ref().filter(|nodes| nodes.value.max == 1) {
        return Ok(one_node(&one.source, settings));
    }
    let detected = match name {
        Name::Torchrun => Ok(None),
        Name::Xlaunch => detect(),
    };
    let allocation = match detected {
        // Complete flags need no engine, as in a script that starts each node by ssh.
        Err(_) if several.is_some() && rank.is_some() && has_endpoint(reader) => None,
        found => found?,
    };
    // An allocation of a single node may take part in a job that its engine does not know.
    let is_alone = |found: &Allocation| found.nodes.as_ref().is_some_and(|nodes| nodes.value == 1);
    let (alone, allocation) = match allocation {
        Some(found) if is_alone(&found) => (found.nodes.map(|nodes| nodes.source), None),
        found => (None, found),
    };
    let known = allocation.as_ref().and_then(|found| found.nodes.as_ref());
    let nodes = match (several, known) {
        (Some(given), Some(known)) => agreed_nodes(given, known, backend.as_ref())?,
        (Some(given), None) => given.clone(),
        (None, Some(known)) => known.map(|&count| NodeCount { min: count, max: count }),
        (None, None) => return Ok(one_node(alone.as_deref().unwrap_or(DEFAULT), settings)),
    };
    let backend = backend.unwrap_or_else(|| default(Backend::Static));
    if backend.value == Backend::Static && nodes.value.min < nodes.value.max {
        return Err(format!(
            "{}: the static rendezvous has a fixed number of nodes; use --rdzv-backend c10d",
            nodes.source
        ));
    }
    group(reader, name, &nodes, rank, &backend, allocation.as_ref(), settings).map(Some)
}

fn refused_by_daemon(source: &str) -> String {
    format!(
        "{source}: the daemon runs jobs on one node; use Slurm or Kubernetes, or run `xlaunch --nnodes` on each node"
    )
}

/// Records that the job has one node. As in torchrun, its node rank is then ignored.
fn one_node(source: &str, settings: &mut Settings) -> Option<Group> {
    settings.push(("nodes", Sourced { value: "1".into(), source: source.to_owned() }));
    None
}

fn has_endpoint(reader: &Reader<'_>) -> bool {
    ["rdzv-endpoint", "master-addr"].iter().any(|flag| reader.raw(flag).is_some())
}

/// Returns the number of nodes given by flags, if the engine does not contradict it. With a dynamic group, the engine
/// may have more nodes than the maximum: they are spares.
fn agreed_nodes(
    given: &Sourced<NodeCount>,
    known: &Sourced<u32>,
    backend: Option<&Sourced<Backend>>,
) -> Result<Sourced<NodeCount>, String> {
    let NodeCount { min, max } = given.value;
    let dynamic = backend.is_some_and(|backend| backend.value == Backend::Dynamic);
    match known.value {
        count if (min..=max).contains(&count) || dynamic && count > max => Ok(given.clone()),
        _ => Err(format!("{} contradicts {}; give the same number, or none", given.source, known.source)),
    }
}

fn group(
    reader: &Reader<'_>,
    name: Name,
    nodes: &Sourced<NodeCount>,
    rank: Option<Sourced<u32>>,
    backend: &Sourced<Backend>,
    allocation: Option<&Allocation>,
    settings: &mut Settings,
) -> Result<Group, String> {
    settings.push(("nodes", nodes.map(ToString::to_string)));
    settings.push(("backend", backend.map(ToString::to_string)));
    let mut warnings = Vec::new();
    let rank = rank.filter(|rank| {
        // With a dynamic group, torchrun ignores the rank; here it is a preference, which this one cannot be.
        let is_ignored = backend.value == Backend::Dynamic && rank.value >= nodes.value.max;
        if is_ignored {
            let (rank, nodes) = (&rank.source, &nodes.source);
            warnings.push(format!("{rank} has no effect: it is outside the range of {nodes}"));
        }
        !is_ignored
    });
    let node_rank = node_rank(rank, nodes, backend.value, allocation)?;
    settings.push((
        "node rank",
        node_rank.as_ref().map_or_else(|| default("any".into()), |it| it.map(u32::to_string)),
    ));
    let id = reader.sourced("rdzv-id", |text| Ok(text.to_owned()))?.filter(|id| id.value != "none");
    let run_id = id.or_else(|| allocation.and_then(|found| found.run_id.clone()));
    settings.push(("run id", run_id.clone().unwrap_or_else(|| default("the coordinator's".into()))));
    let (endpoint, hosts_coordinator) = endpoint(reader, nodes, backend.value, allocation)?;
    settings.push(("endpoint", endpoint.map(shown_endpoint)));
    let (security, token_file) = security(reader, name, nodes, allocation)?;
    settings.push(("security", security.map(ToString::to_string)));
    let mut spec = GroupSpec::new(nodes.value, backend.value, endpoint.value, security.value);
    spec.node_rank = node_rank.map(|rank| rank.value);
    spec.run_id = run_id.map(|id| id.value);
    spec.hosts_coordinator = hosts_coordinator;
    spec.sigterm_is_preemption = allocation.is_some_and(Allocation::preempts_by_sigterm);
    spec.local_addr = reader.parsed("local-addr", values::address)?;
    spec.interface = reader.parsed("interface", |text| Ok(text.to_owned()))?;
    if let Some(conf) = reader.sourced("rdzv-conf", values::pairs)? {
        configure(&mut spec, &conf, &mut warnings)?;
    }
    if spec.security == Security::Insecure {
        warnings.push(format!(
            "plain TCP without authentication ({}): any host that reaches {} can join this job; --token-file turns on \
             TLS",
            security.source, spec.endpoint
        ));
    }
    spec.check().map_err(|error| error.to_string())?;
    Ok(Group { spec, token_file, warnings })
}

/// Returns this node's rank. As in torchrun, the default is 0 with a static rendezvous.
fn node_rank(
    given: Option<Sourced<u32>>,
    nodes: &Sourced<NodeCount>,
    backend: Backend,
    allocation: Option<&Allocation>,
) -> Result<Option<Sourced<u32>>, String> {
    let known = allocation.and_then(|found| found.node_rank.as_ref());
    let complete = allocation.is_some_and(|found| found.nodes.is_some());
    if let Some(given) = given {
        if given.value >= nodes.value.max {
            return Err(format!(
                "{} is outside the range: {} means ranks below {}",
                given.source, nodes.source, nodes.value.max
            ));
        }
        return match known.filter(|known| complete && known.value != given.value) {
            Some(known) => Err(format!("{} contradicts {}", given.source, known.source)),
            None => Ok(Some(given)),
        };
    }
    match (known, backend) {
        (Some(known), _) if known.value < nodes.value.max => Ok(Some(known.clone())),
        // The node is a spare.
        (_, Backend::Dynamic) => Ok(None),
        (Some(known), Backend::Static) => Err(format!(
            "{} is outside the range: {} means ranks below {}",
            known.source, nodes.source, nodes.value.max
        )),
        (None, Backend::Static) => match allocation.filter(|_| complete) {
            Some(found) => Err(format!("{} does not say which node this is; use --node-rank", found.engine)),
            None => Ok(Some(default(0))),
        },
    }
}

/// Returns the endpoint, and whether this node has the coordinator, if the engine determines that.
fn endpoint(
    reader: &Reader<'_>,
    nodes: &Sourced<NodeCount>,
    backend: Backend,
    allocation: Option<&Allocation>,
) -> Result<(Sourced<Endpoint>, Option<bool>), String> {
    let port = match backend {
        Backend::Static => STATIC_PORT,
        Backend::Dynamic => DYNAMIC_PORT,
    };
    let at =
        |host: &str, own: Option<u16>| Endpoint { host: host.to_owned(), ports: vec![own.unwrap_or(port)] };
    if let Some(given) = reader.sourced("rdzv-endpoint", values::group_endpoint)? {
        return Ok((given.map(|(host, own)| at(host, *own)), None));
    }
    // torchrun uses these flags for the static rendezvous only.
    if backend == Backend::Static
        && let Some(address) = reader.sourced("master-addr", values::address)?
    {
        let own = reader.parsed("master-port", values::port)?.flatten();
        return Ok((address.map(|host| at(host, own)), None));
    }
    if let Some((found, known)) = allocation.and_then(|found| Some((found, found.endpoint.as_ref()?))) {
        let endpoint = known.map(|(host, ports)| Endpoint { host: host.clone(), ports: ports.clone() });
        // The node rank decides, because the names and addresses of the engine's first host may not be known here.
        return Ok((endpoint, found.node_rank.as_ref().map(|rank| rank.value == 0)));
    }
    let engine = allocation.map(|found| format!(", which {} does not give", found.engine));
    Err(format!(
        "{}: several nodes need the address of their coordinator{}; use --rdzv-endpoint HOST:PORT with the name or \
         address of the first node",
        nodes.source,
        engine.unwrap_or_default()
    ))
}

fn security(
    reader: &Reader<'_>,
    name: Name,
    nodes: &Sourced<NodeCount>,
    allocation: Option<&Allocation>,
) -> Result<(Sourced<Security>, Option<PathBuf>), String> {
    let is = |value, source: &str| Sourced { value, source: source.to_owned() };
    let in_environment = (reader.environment)(env::TOKEN).is_some_and(|token| !token.is_empty());
    match (reader.raw("token-file"), reader.is_set("rdzv-insecure")?) {
        (Some(_), true) => Err("--token-file and --rdzv-insecure cannot be combined".into()),
        (Some(file), false) => {
            let source = format!("--token-file {}", file.display());
            Ok((is(Security::Token, &source), Some(PathBuf::from(file))))
        }
        (None, true) => Ok((is(Security::Insecure, "--rdzv-insecure"), None)),
        (None, false) if in_environment => Ok((is(Security::Token, env::TOKEN), None)),
        (None, false) if allocation.is_some_and(|found| found.munge) => {
            Ok((is(Security::Munge, "munged"), None))
        }
        (None, false) if name == Name::Torchrun => Ok((is(Security::Insecure, "called as torchrun"), None)),
        (None, false) => {
            let token = format!(
                "--token-file FILE or {}, at least 16 bytes and the same on every node; on a trusted network, \
                 --rdzv-insecure turns authentication off",
                env::TOKEN
            );
            Err(match allocation {
                Some(found) if found.engine == engine::SLURM => format!(
                    "{}: several nodes need munge, or a secret token: munged does not run on this node (no `{}`); \
                     start it on all nodes, or use {token}",
                    nodes.source,
                    engine::MUNGE_SOCKET
                ),
                _ => format!("{}: several nodes need a secret token: {token}", nodes.source),
            })
        }
    }
}

/// Checks `--rdzv-conf` of a launch on one node, where it has no effect.
pub(super) fn check_conf(conf: &Sourced<Vec<(String, String)>>) -> Result<(), String> {
    let one = NodeCount { min: 1, max: 1 };
    let endpoint = Endpoint { host: String::new(), ports: Vec::new() };
    let mut spec = GroupSpec::new(one, Backend::Dynamic, endpoint, Security::Insecure);
    configure(&mut spec, conf, &mut Vec::new())
}

/// Applies `--rdzv-conf`.
fn configure(
    spec: &mut GroupSpec,
    conf: &Sourced<Vec<(String, String)>>,
    warnings: &mut Vec<String>,
) -> Result<(), String> {
    let mut unknown = Vec::new();
    for (key, value) in &conf.value {
        let fail = |expected: String| format!("{}: {key}={value}: {expected}", conf.source);
        let seconds = || -> Result<Duration, String> { values::seconds(value).map_err(fail) };
        match (key.as_str(), spec.backend) {
            ("join_timeout", _) | ("timeout", Backend::Static) => spec.join_timeout = seconds()?,
            ("last_call_timeout", _) => spec.last_call_timeout = seconds()?,
            ("keep_alive_interval", _) => spec.keep_alive_interval = seconds()?,
            ("keep_alive_max_attempt", _) => {
                spec.keep_alive_max_attempt = values::whole(value).map_err(fail)?;
            }
            ("is_host", _) => spec.hosts_coordinator = Some(values::truth(value).map_err(fail)?),
            _ => unknown.push(key.as_str()),
        }
    }
    if !unknown.is_empty() {
        warnings.push(format!("--rdzv-conf: {} has no effect here", unknown.join(", ")));
    }
    Ok(())
}

fn shown_endpoint(endpoint: &Endpoint) -> String {
    match endpoint.ports.len() {
        0 | 1 => endpoint.to_string(),
        ports => format!("{endpoint} (or one of {} others)", ports - 1),
    }
}

fn default<T>(value: T) -> Sourced<T> {
    Sourced { value, source: DEFAULT.into() }
}

#[cfg(test)]
mod tests;
