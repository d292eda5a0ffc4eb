//! The web page as a part of the daemon: it never ends the daemon.
//!
//! The address is bound before readiness is notified, so that a page that can be served is there from the start. If it
//! is taken, any user may have taken it: the daemon starts all the same, tries again, and says so in `xlaunch node`.

use std::io;
use std::time::Duration;

use tokio::sync::watch;
use tracing::{error, info, warn};
use xlaunch_agent::Refusal;
use xlaunch_proto::exit::ExitCode;

use super::open::retry_while_in_use;
use crate::commands::NodeHandle;
use crate::{service, web};

const PAGE_RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// The page with its address, bound or not.
pub(super) struct Page {
    listen: web::Listen,
    bound: io::Result<web::Listener>,
    show_logs: bool,
    /// Why the page is not served; empty if it is.
    problem: watch::Sender<String>,
}

impl Page {
    /// Binds `web.listen`.
    ///
    /// # Errors
    /// If it is not an address. One that cannot be bound is tried again in [`serve`](Self::serve).
    pub(super) async fn open(listen: &str, show_logs: bool) -> Result<Self, Refusal> {
        let listen = web::Listen::parse(listen).map_err(|message| Refusal::new(ExitCode::Usage, message))?;
        let bound = retry_while_in_use(async || web::Listener::bind(&listen).await).await;
        let problem = watch::Sender::new(bound.as_ref().err().map(ToString::to_string).unwrap_or_default());
        Ok(Self { listen, bound, show_logs, problem })
    }

    /// Why the page is not served; empty if it is.
    pub(super) fn problem(&self) -> watch::Receiver<String> {
        self.problem.subscribe()
    }

    /// Serves the page until the shutdown, from whenever its address is free.
    pub(super) async fn serve(self, node: NodeHandle, shutdown: watch::Receiver<bool>) {
        let Self { listen, mut bound, show_logs, problem } = self;
        loop {
            match bound {
                Ok(listener) => {
                    problem.send_replace(String::new());
                    let logs = if show_logs { service::log_tail(node.clone()) } else { web::no_logs() };
                    let until = super::requested(shutdown.clone());
                    let served = tokio::spawn(web::serve(listener, node.clone(), logs, until)).await;
                    let Err(panicked) = served else { return };
                    error!("the page failed, starting it again: {panicked}");
                }
                Err(refused) => {
                    warn!("{refused}; trying again every {} s", PAGE_RETRY_INTERVAL.as_secs());
                    problem.send_replace(refused.to_string());
                }
            }
            bound = loop {
                tokio::select! {
                    () = tokio::time::sleep(PAGE_RETRY_INTERVAL) => {}
                    () = super::requested(shutdown.clone()) => return,
                }
                let again = web::Listener::bind(&listen).await;
                // Warned of once, not at every attempt.
                if again.is_ok() || problem.borrow().is_empty() {
                    break again;
                }
            };
            if bound.is_ok() {
                info!("the page is served");
            }
        }
    }
}
