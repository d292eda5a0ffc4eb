//! Finds the coordinator and connects to it, for as long as it takes. `search` decides what is tried and when.

use std::io;
use std::net::SocketAddr;
use std::time::Instant;

use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::sleep_until;
use xlaunch_spec::command::Endpoint;

use super::Security;
use super::connect::{ConnectError, Connection, Reason, connect_to};
use super::search::{Action, AttemptId, Search, Urgency};
use xlaunch_host::clock::IDLE_SLEEP;

/// Connects to one coordinator, as often as needed. Remembers the address that worked.
#[derive(Debug)]
pub struct Dialer {
    security: Security,
    search: Search,
    attempts: JoinSet<(AttemptId, Result<Connection, Reason>)>,
    /// The pending lookup. It is not aborted with the attempts: the resolver's thread cannot be interrupted, and its
    /// answer is still of use.
    lookup: Option<JoinHandle<io::Result<Vec<SocketAddr>>>>,
    reached: (mpsc::UnboundedSender<AttemptId>, mpsc::UnboundedReceiver<AttemptId>),
}

/// The result of an attempt.
#[derive(Debug)]
pub enum Dialed {
    /// An authenticated connection. All other attempts have been ended.
    Connected(Connection),
    /// One attempt failed; others may be in progress. See [`Dialer::problem`].
    Failed,
}

impl Dialer {
    /// Creates a dialer. Nothing is tried before the first call of [`next`](Self::next).
    pub fn new(endpoint: Endpoint, security: Security) -> Self {
        Self {
            security,
            search: Search::new(endpoint, Instant::now()),
            attempts: JoinSet::new(),
            lookup: None,
            reached: mpsc::unbounded_channel(),
        }
    }

    /// Waits until an attempt has connected or failed. May be dropped and called again: attempts continue in the
    /// meantime.
    pub async fn next(&mut self, urgency: Urgency) -> Dialed {
        loop {
            self.start(urgency);
            let deadline = self.search.deadline(urgency);
            let deadline = deadline.unwrap_or_else(|| Instant::now() + IDLE_SLEEP);
            tokio::select! {
                Some(ended) = self.attempts.join_next() => {
                    let Ok((id, result)) = ended else { continue };
                    match result {
                        Ok(connection) => {
                            self.search.connected(id, Instant::now());
                            self.attempts = JoinSet::new();
                            return Dialed::Connected(connection);
                        }
                        Err(reason) => {
                            self.search.failed(id, reason, Instant::now());
                            return Dialed::Failed;
                        }
                    }
                }
                Some(id) = self.reached.1.recv() => self.search.reached(id, Instant::now()),
                found = found(&mut self.lookup) => {
                    self.lookup = None;
                    let failed = found.is_err();
                    self.search.resolved(found, Instant::now());
                    if failed {
                        return Dialed::Failed;
                    }
                }
                () = sleep_until(deadline.into()) => {}
            }
        }
    }

    fn start(&mut self, urgency: Urgency) {
        for action in self.search.poll(urgency, Instant::now()) {
            match action {
                Action::Resolve => {
                    let host = self.search.endpoint().host.clone();
                    self.lookup = Some(tokio::spawn(resolve(host)));
                }
                Action::Try(id, address) => {
                    let (security, reached) = (self.security.clone(), self.reached.0.clone());
                    self.attempts.spawn(async move {
                        // The receiver is gone if the dialer has ended.
                        let reached = || _ = reached.send(id);
                        (id, connect_to(address, &security, reached).await)
                    });
                }
            }
        }
    }

    /// Starts the search again after the connection was lost, at the address that worked.
    pub fn restart(&mut self) {
        self.search.restart(Instant::now());
    }

    /// Returns whether the process of the coordinator is gone: its address refuses connections, or a different process
    /// has it.
    pub fn is_gone(&self) -> bool {
        self.search.is_gone()
    }

    /// Takes the failure that no later attempt can mend, if there is one.
    pub fn take_final_error(&mut self) -> Option<ConnectError> {
        self.search.take_final_error()
    }

    /// Describes in one line why there is no connection, by the most specific failure.
    pub fn problem(&self) -> String {
        self.search.problem(Instant::now())
    }

    /// Returns whether every candidate has failed at least once.
    #[cfg(test)]
    pub(super) fn is_exhausted(&self) -> bool {
        self.search.is_exhausted()
    }
}

/// Waits for the result of the lookup; pending if none is running.
async fn found(lookup: &mut Option<JoinHandle<io::Result<Vec<SocketAddr>>>>) -> io::Result<Vec<SocketAddr>> {
    match lookup {
        Some(lookup) => lookup.await.unwrap_or_else(|error| Err(io::Error::other(error))),
        None => std::future::pending().await,
    }
}

async fn resolve(host: String) -> io::Result<Vec<SocketAddr>> {
    Ok(tokio::net::lookup_host((host, 0)).await?.collect())
}
