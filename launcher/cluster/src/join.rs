//! Takes an agent from its start to a link to the coordinator. Once the node's role is known, `candidacy` takes it on.

use std::hash::{BuildHasher, RandomState};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{sleep, sleep_until};
use tonic::transport::Server;
use xlaunch_proto::v1::Greeting;
use xlaunch_proto::v1::group_server::GroupServer;
use xlaunch_spec::command::{self, GroupSpec};
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::ids::RingKey;

use super::candidacy::{Candidacy, Election, look};
use super::coordinator::Handle;
use super::link::Link;
use super::net::{self, Listener, Location, Security, TOKEN_VARIABLE, Token};
use super::notices::Notices;
use super::roles::{self, Role, Sight, misplaced};
use super::service::Service;
use super::state::Coordinator;
use super::work::Work;
use xlaunch_host::clock;
use xlaunch_host::devices;
use xlaunch_spec::refusal::Refusal;

/// Interval between lookups of a host name that does not resolve yet.
const LOCATE_INTERVAL: Duration = Duration::from_millis(500);
/// Address of the node in a single-node job.
const LOOPBACK: &str = "127.0.0.1";

/// Settings of a job on several nodes.
#[derive(Clone, Debug)]
pub struct Nodes {
    /// How the nodes find each other.
    pub spec: GroupSpec,
    /// File with the token, unless the token is in the environment.
    pub token_file: Option<PathBuf>,
}

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

/// Tasks that end with the group.
#[derive(Debug)]
pub struct Tasks(pub(super) Vec<JoinHandle<()>>);

impl Drop for Tasks {
    fn drop(&mut self) {
        self.0.iter().for_each(JoinHandle::abort);
    }
}

/// Introduces this agent to the coordinator: that of the job if it has several nodes, otherwise a local one. `notify`
/// shows the user a line.
///
/// # Errors
/// [`ExitCode::Rendezvous`] if the endpoint or the address of this node is not usable; [`ExitCode::Usage`] if the token
/// cannot be used.
pub async fn join(nodes: Option<&Nodes>, work: Work, notify: impl Fn(&str)) -> Result<Joining, Refusal> {
    let Some(nodes) = nodes else { return Ok(alone(work).await) };
    let spec = &nodes.spec;
    let security = security(spec, nodes.token_file.as_deref()).await?;
    let (role, sight) = first_role(spec, &notify).await?;
    let candidacy = Candidacy { spec: spec.clone(), work, security };
    let joining = match role {
        Role::Coordinator => {
            misplaced(spec, &sight, &net::own_addresses()).iter().for_each(|line| notify(line));
            candidacy.coordinate().await?
        }
        Role::Member => None,
    };
    match joining {
        Some(joining) => Ok(joining),
        None => candidacy.attend(&sight).await,
    }
}

/// Waits until the role of this node is known.
async fn first_role(spec: &GroupSpec, notify: impl Fn(&str)) -> Result<(Role, Sight), Refusal> {
    let deadline = Instant::now() + spec.join_timeout;
    let (mut notices, mut problem) = (Notices::new(Instant::now()), "no answer yet".to_owned());
    loop {
        let mut looking = pin!(look(spec));
        let sight = loop {
            let wake = deadline.min(notices.deadline());
            tokio::select! {
                sight = &mut looking => break sight,
                () = sleep_until(wake.into()) => {
                    let now = Instant::now();
                    let failure = || format!("failed to reach the coordinator at {}: {problem}", spec.endpoint);
                    if now >= deadline {
                        return Err(refuse(failure()));
                    }
                    if notices.is_due(now) {
                        let seconds = deadline.saturating_duration_since(now).as_secs();
                        notify(&format!("{}; trying for another {seconds} s", failure()));
                    }
                }
            }
        };
        if let Some(role) = roles::role(spec, &sight) {
            return Ok((role, sight));
        }
        if let Sight::Unknown(why) = sight {
            problem = why;
        }
        // In Kubernetes, the names of pods become resolvable late.
        sleep(LOCATE_INTERVAL).await;
    }
}

/// A coordinator of one job without an agent: it survives the loss of any node that runs workers.
#[derive(Debug)]
pub struct Standalone {
    handle: Handle,
    _server: Tasks,
}

impl Standalone {
    /// Listens on the endpoint, which has to be an address of this host. `notices` receives lines for the user.
    ///
    /// # Errors
    /// [`ExitCode::Rendezvous`] if it is not, or if the port is taken; [`ExitCode::Usage`] if the token cannot be used.
    pub async fn start(nodes: &Nodes, notices: mpsc::UnboundedSender<String>) -> Result<Self, Refusal> {
        let Nodes { spec, token_file } = nodes;
        let failed = |why: &str| refuse(format!("failed to listen on {}: {why}", spec.endpoint));
        match net::locate(&spec.endpoint.host).await {
            Ok(Location::Own) => {}
            Ok(Location::Other(_)) => return Err(failed("it is not an address of this host")),
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
        let handle = Handle::start(coordinator, false, notices);
        let server = Tasks(vec![serve(listener, &handle)]);
        Ok(Self { handle, _server: server })
    }

    /// Waits until the job has ended and its agents know it. Returns the job's exit code.
    pub async fn ended(self) -> Option<u32> {
        self.handle.ended().await
    }
}

async fn alone(work: Work) -> Joining {
    let (notices, lines) = mpsc::unbounded_channel();
    let handle = Handle::start(new_coordinator(random_run_id()), true, notices);
    let greeting = Greeting {
        node_rank: Some(0),
        address: LOOPBACK.into(),
        min_nodes: 1,
        max_nodes: 1,
        ..greeting(&work)
    };
    let link = Link::local(&handle, greeting, lines).await;
    Joining { link, address: LOOPBACK.into(), coordinator: Some(handle), tasks: None, election: None }
}

pub(super) fn greeting(work: &Work) -> Greeting {
    Greeting {
        instance: work.instance.clone(),
        version: xlaunch_proto::VERSION.into(),
        run_id: work.run_id.clone().unwrap_or_default(),
        work: work.digest.clone(),
        work_text: work.text.clone(),
        settings: work.settings.clone(),
        host: devices::host_name(),
        workers: work.workers,
        new: true,
        rules: Some(work.rules.clone()),
        completed: work.completed.clone(),
        free_run: work.free_run,
        ..Greeting::default()
    }
}

/// Creates a coordinator without members.
pub fn new_coordinator(run_id: String) -> Coordinator {
    let seed = RandomState::new().hash_one(std::process::id());
    Coordinator::new(run_id, seed, new_key, Instant::now())
}

/// Returns a run id that is unique even among runs that start in the same second on different nodes. Ids sort by time.
pub fn random_run_id() -> String {
    let random = RandomState::new().hash_one(std::process::id());
    format!("{}-{:08x}", clock::timestamp(clock::unix().as_secs()), random & 0xffff_ffff)
}

/// Returns a new secret key for the ring.
fn new_key() -> [u8; 32] {
    // Fails only before the system's entropy is initialised, long before users run programs.
    RingKey::random().map_or([0; 32], |key| key.0)
}

pub(super) fn refuse(message: String) -> Refusal {
    Refusal::new(ExitCode::Rendezvous, message)
}

/// Returns how connections of this job are secured.
async fn security(spec: &GroupSpec, token_file: Option<&Path>) -> Result<Security, Refusal> {
    let security = keys(spec, token_file).await?;
    match &spec.run_id {
        // Coordinators of other jobs may occupy some of the ports.
        Some(run_id) if spec.endpoint.ports.len() > 1 => Ok(security.for_job(run_id)),
        _ => Ok(security),
    }
}

async fn keys(spec: &GroupSpec, token_file: Option<&Path>) -> Result<Security, Refusal> {
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

/// Serves the coordinator to agents that have proved to belong to the job.
pub fn serve(listener: Listener, handle: &Handle) -> JoinHandle<()> {
    let service = GroupServer::new(Service { events: handle.events() });
    let server = Server::builder().add_service(service);
    let notices = handle.notices();
    tokio::spawn(async move {
        // If serving fails, agents lose the coordinator and say so.
        let _ = server.serve_with_incoming(listener.incoming(notices)).await;
    })
}
