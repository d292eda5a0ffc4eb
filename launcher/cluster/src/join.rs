//! Takes an agent from its start to a link to the coordinator. Once the node's role is known, `candidacy` takes it on.

use std::pin::pin;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tokio::time::{sleep, sleep_until};
use xlaunch_proto::v1::Greeting;
use xlaunch_spec::command::GroupSpec;
use xlaunch_spec::refusal::Refusal;

use super::candidacy::{Candidacy, Joining, look};
use super::coordinator::Handle;
use super::hosting::{new_coordinator, random_run_id};
use super::link::Link;
use super::net;
use super::nodes::{Nodes, refuse};
use super::notices::Notices;
use super::roles::{self, Role, Sight, misplaced};

/// Interval between lookups of a host name that does not resolve yet.
const LOCATE_INTERVAL: Duration = Duration::from_millis(500);
/// Address of the node in a single-node job.
const LOOPBACK: &str = "127.0.0.1";

/// Introduces this agent to the coordinator: that of the job if it has several nodes, otherwise a local one. `greeting`
/// describes the agent's work, without its place among the nodes. `notify` shows the user a line.
///
/// # Errors
/// `ExitCode::Rendezvous` if the endpoint or the address of this node is not usable; `ExitCode::Usage` if the token
/// cannot be used.
pub async fn join(
    nodes: Option<&Nodes>,
    greeting: Greeting,
    notify: impl Fn(&str),
) -> Result<Joining, Refusal> {
    let Some(nodes) = nodes else { return Ok(alone(greeting).await) };
    let spec = &nodes.spec;
    let security = nodes.security().await?;
    let (role, sight) = first_role(spec, &notify).await?;
    let candidacy = Candidacy { spec: spec.clone(), greeting, security };
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

async fn alone(greeting: Greeting) -> Joining {
    let (notices, lines) = mpsc::unbounded_channel();
    let handle = Handle::start(new_coordinator(random_run_id()), true, notices);
    let greeting =
        Greeting { node_rank: Some(0), address: LOOPBACK.into(), min_nodes: 1, max_nodes: 1, ..greeting };
    let link = Link::local(&handle, greeting, lines).await;
    Joining { link, address: LOOPBACK.into(), coordinator: Some(handle), tasks: None, election: None }
}
