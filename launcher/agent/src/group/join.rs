//! From the start of an agent to its link to the coordinator.

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tonic::transport::Server;
use xlaunch_proto::command::{self, Backend, GroupSpec};
use xlaunch_proto::exit::ExitCode;
use xlaunch_proto::ids::RingKey;
use xlaunch_proto::v1::Greeting;
use xlaunch_proto::v1::group_server::GroupServer;

use super::coordinator::Handle;
use super::link::Link;
use super::net::{self, ListenError, Listener, Security, TOKEN_VARIABLE, Token, Wish};
use super::presence;
use super::service::Service;
use super::state::Coordinator;
use super::work::Work;
use crate::clock;
use crate::{Refusal, devices, run_dir};

/// Between attempts to resolve a name that does not exist yet.
const RESOLVE_INTERVAL: Duration = Duration::from_millis(500);
/// Address of the only node of a job.
const LOOPBACK: &str = "127.0.0.1";

/// Several nodes.
#[derive(Clone, Debug)]
pub struct Nodes {
    /// How they find each other.
    pub spec: GroupSpec,
    /// Where the token is, unless it is in the environment.
    pub token_file: Option<PathBuf>,
}

/// An agent that has introduced itself to the coordinator, and waits for its place in an attempt.
#[derive(Debug)]
pub struct Joining {
    pub(crate) link: Link,
    /// At which other nodes reach this one.
    pub(crate) address: String,
    /// If it runs in this process.
    pub(crate) coordinator: Option<Handle>,
    /// Only with several nodes.
    pub(crate) tasks: Option<Tasks>,
}

/// Tasks that end with the group.
#[derive(Debug)]
pub(crate) struct Tasks(Vec<JoinHandle<()>>);

impl Drop for Tasks {
    fn drop(&mut self) {
        self.0.iter().for_each(JoinHandle::abort);
    }
}

/// Introduces this agent to the coordinator of a job on several nodes, or to that of one node alone.
///
/// # Errors
/// Rendezvous: the endpoint, or the address of this node, is not usable. Usage: the token cannot be used.
pub async fn join(nodes: Option<&Nodes>, work: Work) -> Result<Joining, Refusal> {
    let Some(Nodes { spec, token_file }) = nodes else { return Ok(alone(work).await) };
    let security = security(spec, token_file.as_deref()).await?;
    let host = hosts_coordinator(spec).await;
    let address = address(spec, host).await?;
    let ip = resolved(&address).await?;
    let probe = TcpListener::bind((ip, 0)).await.map_err(|error| {
        refuse(format!("failed to listen on {ip}, the address of this node: {error}; see --local-addr"))
    })?;
    let probe_port = probe.local_addr().map_err(|error| refuse(error.to_string()))?.port();
    let mut tasks = vec![tokio::spawn(presence::hold(probe))];
    let greeting = Greeting {
        node_rank: spec.node_rank,
        address,
        probe_port: probe_port.into(),
        min_nodes: spec.nodes.min,
        max_nodes: spec.nodes.max,
        ..greeting(&work)
    };
    let mut coordinator = None;
    let listener = match host {
        true => listen(spec, &security).await?,
        false => None,
    };
    let link = match listener {
        Some(listener) => {
            let handle = Handle::start(new_coordinator(random_run_id()), true);
            let link = Link::local(&handle, greeting).await;
            tasks.push(serve(listener, &handle));
            coordinator = Some(handle);
            link
        }
        None => Link::remote(spec.endpoint.clone(), security, greeting, spec.join_timeout),
    };
    Ok(Joining { link, address: ip.to_string(), coordinator, tasks: Some(Tasks(tasks)) })
}

/// A coordinator of one job without an agent: the loss of any node that runs workers leaves it running.
#[derive(Debug)]
pub struct Standalone {
    handle: Handle,
    _server: Tasks,
}

impl Standalone {
    /// Listens on the endpoint, which has to be an address of this host.
    ///
    /// # Errors
    /// Rendezvous: it is not, or the port is taken. Usage: the token cannot be used.
    pub async fn start(nodes: &Nodes) -> Result<Self, Refusal> {
        let Nodes { spec, token_file } = nodes;
        let failed = |why: &str| refuse(format!("failed to listen on {}: {why}", spec.endpoint));
        match net::is_own(&spec.endpoint.host).await {
            Ok(true) => {}
            Ok(false) => return Err(failed("it is not an address of this host")),
            Err(error) => return Err(failed(&error.to_string())),
        }
        let security = security(spec, token_file.as_deref()).await?;
        let listener = Listener::bind_host(&spec.endpoint, security).await;
        let listener = listener.map_err(|error| refuse(error.to_string()))?;
        let coordinator = new_coordinator(random_run_id());
        let coordinator = match &spec.run_id {
            Some(run_id) => coordinator.for_run(run_id.clone()),
            None => coordinator,
        };
        let handle = Handle::start(coordinator, false);
        let server = Tasks(vec![serve(listener, &handle)]);
        Ok(Self { handle, _server: server })
    }

    /// Waits until the job has ended and its agents know that. Returns its exit code.
    pub async fn ended(self) -> Option<u32> {
        self.handle.ended().await
    }
}

async fn alone(work: Work) -> Joining {
    let handle = Handle::start(new_coordinator(random_run_id()), true);
    let greeting = Greeting {
        node_rank: Some(0),
        address: LOOPBACK.into(),
        min_nodes: 1,
        max_nodes: 1,
        ..greeting(&work)
    };
    let link = Link::local(&handle, greeting).await;
    Joining { link, address: LOOPBACK.into(), coordinator: Some(handle), tasks: None }
}

fn greeting(work: &Work) -> Greeting {
    Greeting {
        instance: work.instance.clone(),
        version: xlaunch_proto::VERSION.into(),
        run_id: work.run_id.clone().unwrap_or_default(),
        work: work.digest.clone(),
        work_text: work.text.clone(),
        host: devices::host_name(),
        workers: work.workers,
        new: true,
        rules: Some(work.rules.clone()),
        completed: work.completed.clone(),
        ..Greeting::default()
    }
}

/// A coordinator without members.
pub fn new_coordinator(run_id: String) -> Coordinator {
    let seed = RandomState::new().hash_one(std::process::id());
    Coordinator::new(run_id, seed, new_key, Instant::now())
}

/// Unique among runs that start in the same second, on whatever node. Sorts by time.
pub fn random_run_id() -> String {
    let random = RandomState::new().hash_one(std::process::id());
    format!("{}-{:08x}", run_dir::timestamp(clock::unix().as_secs()), random & 0xffff_ffff)
}

/// A secret.
fn new_key() -> [u8; 32] {
    // Fails only before the system's entropy is initialised, long before users run programs.
    RingKey::random().map_or([0; 32], |key| key.0)
}

fn refuse(message: String) -> Refusal {
    Refusal::new(ExitCode::Rendezvous, message)
}

/// Listens for other agents. Of several agents on the endpoint's host one has the coordinator, unless it is fixed
/// which.
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

async fn hosts_coordinator(spec: &GroupSpec) -> bool {
    match (spec.hosts_coordinator, spec.backend) {
        (Some(hosts), _) => hosts,
        (None, Backend::Static) => spec.node_rank == Some(0),
        // A name that does not resolve yet is another host's.
        (None, Backend::Dynamic) => net::is_own(&spec.endpoint.host).await.unwrap_or(false),
    }
}

/// With the keys of this job.
async fn security(spec: &GroupSpec, token_file: Option<&Path>) -> Result<Security, Refusal> {
    let token = match (spec.security, token_file) {
        (command::Security::Insecure, _) => return Ok(Security::Insecure),
        (command::Security::Munge, _) => {
            let munge = Security::munge().await;
            return munge.map_err(|error| Refusal::new(ExitCode::Usage, error.to_string()));
        }
        (command::Security::Token, Some(path)) => Token::read(path).map(Some),
        (command::Security::Token, None) => Token::from_environment(),
    };
    let token = token.map_err(|error| Refusal::new(error.exit_code(), error.to_string()))?;
    let missing = || Refusal::new(ExitCode::Usage, format!("{TOKEN_VARIABLE} is not set"));
    Security::from_token(&token.ok_or_else(missing)?)
        .map_err(|error| Refusal::new(ExitCode::Internal, error.to_string()))
}

/// The address of this node for others, or the name that the user gave it.
async fn address(spec: &GroupSpec, host: bool) -> Result<String, Refusal> {
    let wish = Wish { local_addr: spec.local_addr.as_deref(), interface: spec.interface.as_deref() };
    let deadline = Instant::now() + spec.join_timeout;
    let endpoint = &spec.endpoint.host;
    let connection = loop {
        if host || spec.local_addr.is_some() {
            break Ipv4Addr::LOCALHOST.into();
        }
        match routed(endpoint, spec.endpoint.ports.first().copied().unwrap_or(0)).await {
            Ok(address) => break address,
            Err(error) if Instant::now() >= deadline => {
                return Err(refuse(format!("failed to reach the coordinator at {}: {error}", spec.endpoint)));
            }
            // Names of pods appear late.
            Err(_) => tokio::time::sleep(RESOLVE_INTERVAL).await,
        }
    };
    net::advertised(wish, endpoint, connection).await.map_err(|error| refuse(error.to_string()))
}

/// The address that a connection of this host to another would have.
async fn routed(host: &str, port: u16) -> io::Result<IpAddr> {
    for to in tokio::net::lookup_host((host, port)).await? {
        let any: IpAddr = if to.is_ipv4() { [0; 4].into() } else { [0_u16; 8].into() };
        // Sends nothing: the kernel only looks up the route.
        let found = UdpSocket::bind((any, 0)).and_then(|socket| {
            socket.connect(to)?;
            socket.local_addr()
        });
        if let Ok(own) = found {
            return Ok(own.ip());
        }
    }
    Err(io::ErrorKind::NetworkUnreachable.into())
}

async fn resolved(address: &str) -> Result<IpAddr, Refusal> {
    let found = tokio::net::lookup_host((address, 0)).await.map(|mut all| all.next());
    let unknown =
        || refuse(format!("the address of this node, {address}, does not resolve; see --local-addr"));
    found.ok().flatten().map(|it| it.ip()).ok_or_else(unknown)
}

/// Serves the coordinator to agents that have proved that they belong to the job.
pub fn serve(listener: Listener, handle: &Handle) -> JoinHandle<()> {
    let service = GroupServer::new(Service { events: handle.events() });
    let server = Server::builder().add_service(service);
    tokio::spawn(async move {
        // Without it, agents lose the coordinator.
        let _ = server.serve_with_incoming(listener.incoming()).await;
    })
}
