//! Covers the time between the link to the coordinator and the first attempt: an agent waits for other nodes, or as a
//! spare until a node is lost.
//!
//! ```text
//! join --welcome--> the agent's socket exists, and queries are answered --Prepare--> Group, for the driver
//! ```
//! Until the welcome, a service without a run lets users see and stop the launch. A waiting agent has no run and no
//! ranks, but it is one of the job's nodes, so its service answers by asking the others. The driver later takes over
//! the same service, so that a log that is being followed continues when a spare replaces a node.

use std::future::pending;
use std::io;
use std::path::Path;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use xlaunch_proto::v1::agent_message::Body as FromAgent;
use xlaunch_proto::v1::coordinator_message::Body as ToAgent;
use xlaunch_proto::v1::{Greeting, GroupEnd, JobState, NodeRefused, Prepare, StopRequested, Waiting};
use xlaunch_spec::exit::ExitCode;

use crate::registry::Entry;
use crate::rendezvous::message::Message;
use crate::rendezvous::peers::Peers;
use crate::rendezvous::service::{self, RunningService};
use crate::run_dir::NodePlace;
use crate::status::board::{Board, Launch};
use xlaunch_cluster::candidacy::Joining;
use xlaunch_cluster::candidacy::{Election, OtherRole};
use xlaunch_cluster::coordinator::Handle;
use xlaunch_cluster::hosting::Tasks;
use xlaunch_cluster::join::join;
use xlaunch_cluster::link::{FromGroup, Link};
use xlaunch_cluster::nodes::Nodes;
use xlaunch_spec::refusal::Refusal;

/// Maximum number of calls that wait for the driver's task.
const MESSAGE_QUEUE: usize = 1024;
/// Time for the coordinator to learn that this node cannot run the job.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(5);

/// The group of which this agent is a member.
#[derive(Debug)]
pub struct Group {
    /// Link to the coordinator.
    pub link: Link,
    /// Run id of the job.
    pub run_id: String,
    /// Preparation for the first attempt.
    pub first: Prepare,
    /// Address at which other nodes reach this one.
    pub address: String,
    /// Registry entry in which this agent listens; `None` in a single-node job.
    pub entry: Option<Entry>,
    /// The service that listens there.
    queries: Option<Queries>,
    coordinator: Option<Handle>,
    /// Background tasks; `None` unless the job may have several nodes.
    tasks: Option<Tasks>,
}

/// The agent's service, its queue of calls and its board.
#[derive(Debug)]
pub(crate) struct Queries {
    pub(crate) service: RunningService,
    pub(crate) inbox: mpsc::Receiver<Message>,
    pub(crate) board: watch::Sender<Board>,
}

/// Joins the job's coordinator and waits for the first attempt of which this node is a member. `notify` shows the user
/// a line.
///
/// # Errors
/// [`ExitCode::Rendezvous`] if the coordinator cannot be reached, nodes are missing at the deadline, or this node was
/// refused; [`ExitCode::Stopped`] if a user has stopped the launch.
pub async fn first_attempt(
    nodes: Option<&Nodes>,
    greeting: Greeting,
    launch: Launch,
    notify: impl Fn(&str),
) -> Result<Group, Refusal> {
    let mut unwelcome = if nodes.is_some() { Some(Unwelcome::open(&launch).await?) } else { None };
    let joining = tokio::select! {
        joining = join(nodes, greeting, &notify) => joining?,
        refusal = stopped(&mut unwelcome, &notify) => return Err(refusal),
    };
    let Joining { mut link, mut address, mut coordinator, mut tasks, election } = joining;
    let mut other_role = election.map(Election::watch);
    let (mut run_id, mut entry, mut queries) = (String::new(), None, None);
    let mut connected = coordinator.is_some();
    loop {
        // Once another node has joined here, or this node has joined elsewhere, the role is fixed.
        if coordinator.as_ref().is_some_and(Handle::has_members) {
            other_role = None;
        }
        let message = tokio::select! {
            message = link.next() => message,
            taken = taken(&mut other_role) => {
                // The service of the old role ends before that of the new one is opened.
                leave_role(queries.take(), &notify).await?;
                entry = None;
                let election;
                Joining { link, address, coordinator, tasks, election } = taken;
                connected = coordinator.is_some();
                other_role = election.map(Election::watch);
                continue;
            }
            refusal = stopped(&mut unwelcome, &notify) => return Err(refusal),
            by = next_stop(&mut queries) => {
                request_stop(&by, &link, queries.take_if(|_| !connected), &notify).await?;
                continue;
            }
        };
        match message {
            Some(FromGroup::Message(ToAgent::Welcome(welcome))) if !welcome.refusal.is_empty() => {
                return Err(Refusal::new(exit(welcome.exit_code), welcome.refusal));
            }
            Some(FromGroup::Message(ToAgent::Welcome(welcome))) => {
                if coordinator.is_none() {
                    other_role = None;
                }
                run_id = welcome.run_id;
                if let Some(Unwelcome { queries, _entry }) = unwelcome.take()
                    && let Some(by) = queries.end().await
                {
                    request_stop(&by, &link, None, &notify).await?;
                }
                if tasks.is_some() && queries.is_none() {
                    let (opened, own) = open(&launch, &run_id, &link).await?;
                    (queries, entry) = (Some(opened), Some(own));
                }
            }
            Some(FromGroup::Message(ToAgent::Prepare(first))) => {
                queries.iter().for_each(Queries::take_part);
                return Ok(Group { link, run_id, first, address, entry, queries, coordinator, tasks });
            }
            Some(FromGroup::Message(ToAgent::End(end))) => {
                if let Some(queries) = queries {
                    queries.finish(end.exit_code).await;
                }
                if let Some(coordinator) = coordinator {
                    coordinator.finish().await;
                }
                return Err(ended(end));
            }
            Some(FromGroup::Notice(text)) => notify(&text),
            Some(message) => {
                connected = if let FromGroup::Connected(now) = message { now } else { connected };
                queries.iter().for_each(|queries| queries.heard(&message, &notify));
            }
            None => return Err(Refusal::new(ExitCode::Internal, "the coordinator has ended".to_owned())),
        }
    }
}

/// Starts the service of an agent whose coordinator has named the run.
async fn open(launch: &Launch, run_id: &str, link: &Link) -> Result<(Queries, Entry), Refusal> {
    let entry = Entry::create(&launch.name, run_id)?;
    let launch = Launch { id: run_id.to_owned(), ..launch.clone() };
    let queries = Queries::open(&entry.socket(), launch, Some(link)).await.map_err(failed)?;
    Ok((queries, entry))
}

/// Waits until this node has taken another role; pending if no election is open.
async fn taken(other_role: &mut Option<OtherRole>) -> Joining {
    match other_role {
        Some(other_role) => other_role.taken().await,
        None => pending().await,
    }
}

/// The service of a launch whose coordinator has not answered yet, so that the run has no name.
struct Unwelcome {
    /// Dropped before its directory.
    queries: Queries,
    _entry: Entry,
}

impl Unwelcome {
    async fn open(launch: &Launch) -> Result<Self, Refusal> {
        let entry = Entry::create(&launch.name, "waiting")?;
        let queries = Queries::open(&entry.socket(), launch.clone(), None).await.map_err(failed)?;
        queries.board.send_modify(|board| board.set_reason("the coordinator has not answered yet"));
        Ok(Self { queries, _entry: entry })
    }
}

/// Waits until a user stops a launch that has not reached its coordinator; pending if there is none.
async fn stopped(unwelcome: &mut Option<Unwelcome>, notify: impl Fn(&str)) -> Refusal {
    let by = match unwelcome {
        Some(Unwelcome { queries, .. }) => stop_request(&mut queries.inbox).await,
        None => None,
    };
    match (by, unwelcome.take()) {
        (Some(by), Some(Unwelcome { queries, _entry })) => stop_alone(&by, queries, notify).await,
        _ => pending().await,
    }
}

/// Waits for a request to stop, and returns who sent it.
async fn stop_request(inbox: &mut mpsc::Receiver<Message>) -> Option<String> {
    loop {
        if let Message::Stop(by) = inbox.recv().await? {
            return Some(by);
        }
    }
}

/// Ends a launch without a connection when the callers of its service have their answers.
async fn stop_alone(by: &str, queries: Queries, notify: impl Fn(&str)) -> Refusal {
    notify(&format!("stop requested by {by}"));
    queries.finish(ExitCode::Stopped.code().into()).await;
    stopped_by_user()
}

fn stopped_by_user() -> Refusal {
    let message = "stopped by a user while waiting for other nodes: the job never began here";
    Refusal::new(ExitCode::Stopped, message)
}

/// Waits until a user asks the service of a launch with a name to stop it. Returns who.
async fn next_stop(queries: &mut Option<Queries>) -> String {
    let by = match queries {
        Some(queries) => stop_request(&mut queries.inbox).await,
        None => None,
    };
    match by {
        Some(by) => by,
        None => pending().await,
    }
}

/// Asks the coordinator to stop the job or, if `alone` has the service of a launch without a connection, ends the
/// launch.
async fn request_stop(
    by: &str,
    link: &Link,
    alone: Option<Queries>,
    notify: impl Fn(&str),
) -> Result<(), Refusal> {
    match alone {
        Some(queries) => Err(stop_alone(by, queries, notify).await),
        None => {
            notify(&format!("stop requested by {by}"));
            link.send(FromAgent::StopRequested(StopRequested { signal: 0 }));
            Ok(())
        }
    }
}

/// Ends the service of a role that this node gives up.
async fn leave_role(queries: Option<Queries>, notify: impl Fn(&str)) -> Result<(), Refusal> {
    let Some(queries) = queries else { return Ok(()) };
    match queries.end().await {
        Some(by) => {
            notify(&format!("stop requested by {by}"));
            Err(stopped_by_user())
        }
        None => Ok(()),
    }
}

/// Shows the user why this node waits, as the coordinator has said. A spare is told at the beginning of every attempt,
/// but its user only once.
pub(crate) fn waits(board: &watch::Sender<Board>, waiting: &Waiting, notify: impl Fn(&str)) {
    if !(waiting.spare && board.borrow().is_spare()) {
        notify(&waiting.text);
    }
    board.send_modify(|board| board.set_spare(waiting.spare));
}

/// Describes the end of a node that took part in no attempt.
fn ended(end: GroupEnd) -> Refusal {
    let exit = exit(end.exit_code);
    let texts = [end.root, end.notice].into_iter().find(|text| !text.is_empty());
    Refusal::new(
        exit,
        texts.unwrap_or_else(|| match exit {
            ExitCode::Done => "the job is done; this node was not needed".into(),
            _ => format!("the job has ended without this node: {}", exit.meaning()),
        }),
    )
}

fn exit(code: u32) -> ExitCode {
    let code = u8::try_from(code).unwrap_or(1);
    ExitCode::from_code(code.into()).unwrap_or(match code {
        129.. => ExitCode::Signal(code - 128),
        _ => ExitCode::Worker(code),
    })
}

fn failed(error: io::Error) -> Refusal {
    Refusal::new(ExitCode::Internal, format!("failed to answer queries: {error}"))
}

impl Queries {
    /// Starts the service. `link` is given if the job may have several nodes.
    pub(crate) async fn open(socket: &Path, launch: Launch, link: Option<&Link>) -> io::Result<Self> {
        let (messages, inbox) = mpsc::channel(MESSAGE_QUEUE);
        let board = watch::Sender::new(Board::new(launch));
        let others = link.map(|link| Peers::new(link.sender()));
        let service = service::serve_node(socket, messages, board.clone(), others).await?;
        Ok(Self { service, inbox, board })
    }

    /// Handles a message from the coordinator while the node takes part in no attempt.
    fn heard(&self, message: &FromGroup, notify: impl Fn(&str)) {
        match message {
            FromGroup::Connected(connected) => {
                self.board.send_modify(|board| board.set_connected(*connected));
            }
            FromGroup::Message(ToAgent::Waiting(waiting)) => {
                waits(&self.board, waiting, notify);
                self.board.send_modify(|board| board.set_reason(&waiting.text));
            }
            FromGroup::Message(answer) => {
                self.service.peers.iter().for_each(|peers| peers.received(answer.clone()));
            }
            FromGroup::CutOff(_) | FromGroup::Notice(_) => {}
        }
    }

    /// Records that the node waits no longer.
    fn take_part(&self) {
        self.board.send_modify(|board| {
            board.set_spare(false);
            board.set_reason("");
        });
    }

    /// Ends the service, which another one replaces, when its callers have their answers. Returns who has asked to stop
    /// in the meantime: a request that was accepted must not be lost.
    async fn end(self) -> Option<String> {
        let Self { service, mut inbox, board } = self;
        inbox.close();
        // Streams end with the board's final state.
        board.send_modify(|board| board.set_state(JobState::Done));
        service.finish().await;
        stop_request(&mut inbox).await
    }

    /// Ends the service: the job is over, without an attempt here.
    async fn finish(self, exit_code: u32) {
        let state = if exit_code == 0 { JobState::Done } else { JobState::Failed };
        self.board.send_modify(|board| board.set_state(state));
        self.service.finish().await;
    }
}

impl Group {
    /// Ends the job on all nodes, because this node cannot run it.
    pub async fn refuse(self, refusal: &Refusal) {
        let exit_code = refusal.exit.code().into();
        self.link.send(FromAgent::Refused(NodeRefused { exit_code, message: refusal.message.clone() }));
        let mut link = self.link;
        // Wait until the coordinator has received it.
        let ended = async {
            while let Some(message) = link.next().await {
                if matches!(message, FromGroup::Message(ToAgent::End(_))) {
                    break;
                }
            }
        };
        let _ = tokio::time::timeout(REFUSAL_TIMEOUT, ended).await;
        if let Some(coordinator) = self.coordinator {
            coordinator.finish().await;
        }
    }

    /// Returns what names this node's part of the run's directory.
    pub fn place(&self) -> NodePlace {
        NodePlace { node_rank: self.first.node_rank, run_number: self.first.run_number }
    }

    /// Returns whether the job may have several nodes, regardless of how many it has now.
    pub fn may_have_peers(&self) -> bool {
        self.tasks.is_some()
    }

    /// Returns whether other nodes take part in the first attempt. More may join later: see
    /// [`may_have_peers`](Self::may_have_peers).
    pub fn has_peers(&self) -> bool {
        self.first.nodes > 1
    }

    /// Returns the agent's service for a launch that has a run now: the one that has answered so far, or a new one on
    /// `socket`.
    pub(crate) async fn take_queries(&mut self, socket: &Path, launch: Launch) -> io::Result<Queries> {
        let Some(queries) = self.queries.take() else { return Queries::open(socket, launch, None).await };
        queries.board.send_modify(|board| board.set_launch(launch));
        Ok(queries)
    }

    /// Gives the other agents time to learn of the end, if the coordinator runs here. Must be called when the job is
    /// over.
    pub async fn finish(self) {
        drop(self.link);
        if let Some(coordinator) = self.coordinator {
            coordinator.finish().await;
        }
    }
}
