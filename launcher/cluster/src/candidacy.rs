//! Assumes a node's role in its group, and can switch to the other role as long as the election is open.

use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use xlaunch_proto::v1::Greeting;
use xlaunch_spec::command::{Backend, GroupSpec};

use super::coordinator::Handle;
use super::hosting::{Tasks, new_coordinator, random_run_id, serve};
use super::link::Link;
use super::net::{self, Dialed, Dialer, ListenError, Listener, Location, Security, Urgency, Wish};
use super::nodes::refuse;
use super::presence;
use super::roles::{self, Role, Sight};
use xlaunch_spec::refusal::Refusal;

/// Interval between the lookups of the endpoint that may give this node another role.
const ELECTION_INTERVAL: Duration = Duration::from_secs(1);
/// Time for a remote coordinator to answer, before a node that runs one itself gives its own up.
const OTHER_COORDINATOR_TIMEOUT: Duration = Duration::from_secs(10);
/// Looking up a route needs a port; any number will do.
const DISCARD_PORT: u16 = 9;

/// An agent that has introduced itself to the coordinator and waits for its place in an attempt.
#[derive(Debug)]
pub struct Joining {
    pub link: Link,
    /// Address at which other nodes reach this one.
    pub address: String,
    /// The coordinator, if it runs in this process.
    pub coordinator: Option<Handle>,
    /// Background tasks; `None` in a single-node job.
    pub tasks: Option<Tasks>,
    /// `Some` while this node may still get another role, which is only before it has joined.
    pub election: Option<Election>,
}

/// Everything a node needs to take either role.
#[derive(Clone, Debug)]
pub(super) struct Candidacy {
    pub(super) spec: GroupSpec,
    /// The work of this agent. Its place among the nodes is filled in when it joins.
    pub(super) greeting: Greeting,
    pub(super) security: Security,
}

impl Candidacy {
    /// Runs the coordinator in this process; `None` if another agent of this host already does.
    pub(super) async fn coordinate(&self) -> Result<Option<Joining>, Refusal> {
        let Some(listener) = listen(&self.spec, &self.security).await? else { return Ok(None) };
        let (greeting, address, presence) = self.greeting(Ipv4Addr::LOCALHOST.into()).await?;
        let (notices, lines) = mpsc::unbounded_channel();
        let handle = Handle::start(new_coordinator(random_run_id()), true, notices);
        let link = Link::local(&handle, greeting, lines).await;
        let tasks = Tasks(vec![presence, serve(listener, &handle)]);
        Ok(Some(self.joining(link, address, Some(handle), tasks)))
    }

    /// Connects to the coordinator at the endpoint.
    pub(super) async fn attend(&self, sight: &Sight) -> Result<Joining, Refusal> {
        let route = match sight {
            Sight::Other { route, .. } => *route,
            // Not used: the address is given, or chosen among those of this host.
            Sight::Own | Sight::Unknown(_) => Ipv4Addr::LOCALHOST.into(),
        };
        let (greeting, address, presence) = self.greeting(route).await?;
        let Self { spec, security, .. } = self;
        let link = Link::remote(spec.endpoint.clone(), security.clone(), greeting, spec.join_timeout);
        Ok(self.joining(link, address, None, Tasks(vec![presence])))
    }

    fn joining(&self, link: Link, address: IpAddr, coordinator: Option<Handle>, tasks: Tasks) -> Joining {
        let role = if coordinator.is_some() { Role::Coordinator } else { Role::Member };
        let election = roles::may_change(&self.spec).then(|| Election { candidacy: self.clone(), role });
        Joining { link, address: address.to_string(), coordinator, tasks: Some(tasks), election }
    }

    /// Returns the greeting with this node's address, and the task by which others see that this process lives.
    async fn greeting(&self, route: IpAddr) -> Result<(Greeting, IpAddr, JoinHandle<()>), Refusal> {
        let spec = &self.spec;
        let wish = Wish { local_addr: spec.local_addr.as_deref(), interface: spec.interface.as_deref() };
        let address = net::advertised(wish, &spec.endpoint.host, route).await;
        let address = address.map_err(|error| refuse(error.to_string()))?;
        let ip = resolved(&address).await?;
        let probe = TcpListener::bind((ip, 0)).await.map_err(|error| {
            refuse(format!("failed to listen on {ip}, the address of this node: {error}; see --local-addr"))
        })?;
        let probe_port = probe.local_addr().map_err(|error| refuse(error.to_string()))?.port();
        let greeting = Greeting {
            node_rank: spec.node_rank,
            address,
            probe_port: probe_port.into(),
            min_nodes: spec.nodes.min,
            max_nodes: spec.nodes.max,
            ..self.greeting.clone()
        };
        Ok((greeting, ip, tokio::spawn(presence::hold(probe))))
    }
}

/// An open election: which node runs the coordinator is not settled yet.
#[derive(Debug)]
pub struct Election {
    candidacy: Candidacy,
    role: Role,
}

impl Election {
    /// Waits in the background until this node gets the other role, and takes it. The agent then introduces itself
    /// again.
    pub fn watch(self) -> OtherRole {
        OtherRole(tokio::spawn(async move {
            loop {
                sleep(ELECTION_INTERVAL).await;
                let sight = look(&self.candidacy.spec).await;
                let taken = match (self.role, roles::role(&self.candidacy.spec, &sight)) {
                    (Role::Member, Some(Role::Coordinator)) => self.candidacy.coordinate().await,
                    // A name that resolves wrongly for a moment must not end the coordinator.
                    (Role::Coordinator, Some(Role::Member)) if self.is_answered().await => {
                        self.candidacy.attend(&sight).await.map(Some)
                    }
                    _ => Ok(None),
                };
                // If the switch fails, the node keeps its role.
                if let Ok(Some(joining)) = taken {
                    return joining;
                }
            }
        }))
    }

    /// Returns whether a coordinator of this job answers at the endpoint.
    async fn is_answered(&self) -> bool {
        let Candidacy { spec, security, .. } = &self.candidacy;
        let mut dialer = Dialer::new(spec.endpoint.clone(), security.clone());
        let answered =
            async { while !matches!(dialer.next(Urgency::Joining).await, Dialed::Connected(_)) {} };
        timeout(OTHER_COORDINATOR_TIMEOUT, answered).await.is_ok()
    }
}

/// A pending change of this node's role.
#[derive(Debug)]
pub struct OtherRole(JoinHandle<Joining>);

impl Drop for OtherRole {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl OtherRole {
    /// Waits until this node has taken the other role.
    pub async fn taken(&mut self) -> Joining {
        match (&mut self.0).await {
            Ok(joining) => joining,
            // The task panicked: the role does not change any more.
            Err(_) => std::future::pending().await,
        }
    }
}

/// Listens for other agents. Returns `None` if the election is open and another agent of the endpoint's host has the
/// coordinator already.
async fn listen(spec: &GroupSpec, security: &Security) -> Result<Option<Listener>, Refusal> {
    match Listener::bind_host(&spec.endpoint, security.clone()).await {
        Ok(listener) => Ok(Some(listener)),
        Err(ListenError::InUse(_))
            if spec.backend == Backend::Dynamic && spec.hosts_coordinator.is_none() =>
        {
            Ok(None)
        }
        Err(error) => Err(refuse(error.to_string())),
    }
}

/// Asks this host's resolver about the endpoint.
pub(super) async fn look(spec: &GroupSpec) -> Sight {
    match net::locate(&spec.endpoint.host).await {
        Ok(Location::Own) => Sight::Own,
        Ok(Location::Other(addresses)) => match route(&addresses) {
            Some(route) => Sight::Other { addresses, route },
            None => Sight::Unknown("there is no route to it; check the address and routes".into()),
        },
        Err(error) => Sight::Unknown(net::unresolved(&error)),
    }
}

/// Returns this host's address on a connection to one of `addresses`.
fn route(addresses: &[IpAddr]) -> Option<IpAddr> {
    addresses.iter().find_map(|to| {
        let any: IpAddr = if to.is_ipv4() { [0; 4].into() } else { [0_u16; 8].into() };
        // `connect` on a UDP socket sends nothing: the kernel only looks up the route.
        let socket = UdpSocket::bind((any, 0)).ok()?;
        socket.connect((*to, DISCARD_PORT)).ok()?;
        socket.local_addr().ok().map(|own| own.ip())
    })
}

async fn resolved(address: &str) -> Result<IpAddr, Refusal> {
    let found = tokio::net::lookup_host((address, 0)).await.map(|mut all| all.next());
    let unknown =
        || refuse(format!("the address of this node, {address}, does not resolve; see --local-addr"));
    found.ok().flatten().map(|it| it.ip()).ok_or_else(unknown)
}
