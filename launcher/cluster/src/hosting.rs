//! Runs a coordinator in this process, for the agent that hosts it or on its own.

use std::hash::{BuildHasher, RandomState};
use std::time::Instant;

use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tonic::transport::Server;
use xlaunch_host::clock;
use xlaunch_proto::v1::group_server::GroupServer;
use xlaunch_spec::ids::RingKey;
use xlaunch_spec::refusal::Refusal;

use super::coordinator::Handle;
use super::net::{self, Listener, Location};
use super::nodes::{Nodes, refuse};
use super::service::Service;
use super::state::Coordinator;

/// Tasks that end with the group.
#[derive(Debug)]
pub struct Tasks(pub Vec<JoinHandle<()>>);

impl Drop for Tasks {
    fn drop(&mut self) {
        self.0.iter().for_each(JoinHandle::abort);
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
    /// `ExitCode::Rendezvous` if it is not, or if the port is taken; `ExitCode::Usage` if the token cannot be used.
    pub async fn start(nodes: &Nodes, notices: mpsc::UnboundedSender<String>) -> Result<Self, Refusal> {
        let spec = &nodes.spec;
        let failed = |why: &str| refuse(format!("failed to listen on {}: {why}", spec.endpoint));
        match net::locate(&spec.endpoint.host).await {
            Ok(Location::Own) => {}
            Ok(Location::Other(_)) => return Err(failed("it is not an address of this host")),
            Err(error) => return Err(failed(&error.to_string())),
        }
        let security = nodes.security().await?;
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
