//! Serves the web page as part of the daemon. A failure of the page never ends the daemon.
//!
//! The address is bound before readiness is notified, so that the page is available from the start. If the address is
//! in use, which any user can cause, the daemon starts anyway, keeps trying, and reports the problem in `xlaunch node`.
//! With `xlaunch-web.socket`, systemd binds the address before any user can.

use std::io;
use std::time::Duration;

use tokio::sync::watch;
use tracing::{error, info, warn};
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::refusal::Refusal;

use super::open::retry_while_in_use;
use crate::commands::NodeHandle;
use crate::config::WebSection;
use crate::{service, web};

const PAGE_RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// The address that the page listens on.
enum Address {
    /// A listener that systemd has passed.
    Passed(std::net::TcpListener),
    Configured(web::Listen),
}

impl Address {
    async fn bind(&self) -> io::Result<web::Listener> {
        match self {
            Self::Passed(listener) => web::Listener::passed(listener),
            Self::Configured(listen) => web::Listener::bind(listen).await,
        }
    }
}

/// The page and its address, bound or not.
pub(super) struct Page {
    address: Address,
    bound: io::Result<web::Listener>,
    show_logs: bool,
    /// The reason why the page is not served; empty if it is.
    problem: watch::Sender<String>,
}

impl Page {
    /// Binds `web.listen`, unless systemd has passed a listener. `None` if there is neither.
    ///
    /// # Errors
    /// `web.listen` is not a valid address. If it cannot be bound, [`serve`](Self::serve) tries again.
    pub(super) async fn open(
        config: &WebSection,
        passed: Option<std::net::TcpListener>,
    ) -> Result<Option<Self>, Refusal> {
        let address = match (passed, &config.listen) {
            (Some(listener), _) => Address::Passed(listener),
            (None, Some(listen)) => {
                let listen = web::Listen::parse(listen);
                Address::Configured(listen.map_err(|message| Refusal::new(ExitCode::Usage, message))?)
            }
            (None, None) => return Ok(None),
        };
        let bound = retry_while_in_use(async || address.bind().await).await;
        if let Err(refused) = &bound {
            warn!("{refused}; trying again every {} s", PAGE_RETRY_INTERVAL.as_secs());
        }
        let problem = watch::Sender::new(bound.as_ref().err().map(ToString::to_string).unwrap_or_default());
        Ok(Some(Self { address, bound, show_logs: config.show_logs, problem }))
    }

    /// Returns a receiver of the reason why the page is not served; empty if it is.
    pub(super) fn problem(&self) -> watch::Receiver<String> {
        self.problem.subscribe()
    }

    /// Serves the page until the shutdown, starting once its address is free.
    pub(super) async fn serve(self, node: NodeHandle, shutdown: watch::Receiver<bool>) {
        let Self { address, mut bound, show_logs, problem } = self;
        loop {
            let now = bound.as_ref().err().map(ToString::to_string).unwrap_or_default();
            // Logged only on a change, not at every attempt.
            let has_changed =
                problem.send_if_modified(|problem| std::mem::replace(problem, now.clone()) != now);
            match bound {
                Ok(listener) => {
                    if has_changed {
                        info!("the page is served");
                    }
                    let logs = if show_logs { service::log_tail(node.clone()) } else { web::no_logs() };
                    let until = super::requested(shutdown.clone());
                    let served = tokio::spawn(web::serve(listener, node.clone(), logs, until)).await;
                    let Err(panicked) = served else { return };
                    error!("the page failed, starting it again: {panicked}");
                }
                Err(refused) if has_changed => warn!("{refused}"),
                Err(_) => {}
            }
            tokio::select! {
                () = tokio::time::sleep(PAGE_RETRY_INTERVAL) => {}
                () = super::requested(shutdown.clone()) => return,
            }
            bound = address.bind().await;
        }
    }
}
