//! Connections between the agents of a job and its coordinator: TCP, TLS 1.3 and authentication.
//!
//! ```text
//! agent        Dialer: resolve -> TCP ---> TLS --> munge --> HTTP/2 preface --> tonic channel
//!                                           |        |             |
//! coordinator  Listener: callers ---> TCP --'--------'-------------'--> stream of authenticated connections
//! ```
//! - [`token`]: the secret that the nodes of a job share, and the keys derived from it;
//! - `tls`: configurations of both sides, with raw public keys in place of certificates;
//! - `munge`: proof of the same user in place of a token, bound to the TLS channel;
//! - `preface`: the first bytes of HTTP/2 in both directions, which prove that both sides speak the same protocol;
//! - [`listener`]: accepts and authenticates; `callers` (pure) decides which of them are next;
//! - [`dialer`]: finds the coordinator; `search` (pure) decides which addresses are tried and when; [`connect`]: a
//!   single attempt, and the reason if it fails;
//! - [`xlaunch_host::network`]: addresses of this host;
//! - `socket`: options of TCP sockets.
//!
//! Invariants:
//! - both sides have authenticated each other on every stream that the listener yields and every channel that
//!   [`Dialer`] returns, unless the group is [`Security::Insecure`];
//! - unauthenticated callers are few, short-lived and cheap: at most 64 handshakes at once, each
//!   for at most [`listener::HANDSHAKE_TIMEOUT`];
//! - a token appears in no message, no `Debug` output and no description of a job.
//!
//! ```no_run
//! # use xlaunch_cluster::net::{self, Listener, Security, Token};
//! # use xlaunch_spec::command::Endpoint;
//! # async fn example(endpoint: Endpoint) -> Result<(), Box<dyn std::error::Error>> {
//! let token = Token::read("token".as_ref())?;
//! let security = Security::from_token(&token)?;
//! // The coordinator:
//! let listener = Listener::bind_host(&endpoint, security.clone()).await?;
//! let addresses = listener.addresses();
//! let server = tonic::transport::Server::builder(); // .add_service(...).serve_with_incoming(listener.incoming())
//! // An agent:
//! let mut dialer = net::Dialer::new(endpoint, security);
//! let connected = dialer.next(net::Urgency::Joining).await;
//! # Ok(())
//! # }
//! ```

mod callers;
pub mod connect;
pub mod dialer;
pub mod listener;
mod munge;
mod preface;
mod search;
mod socket;
mod tls;
pub mod token;

use std::sync::Arc;

pub use connect::unresolved;
pub use connect::{ConnectError, Connection};
pub use dialer::{Dialed, Dialer};
pub use listener::{ListenError, Listener};
pub use munge::MungeError;
pub use preface::Stream;
pub use search::Urgency;
pub use socket::Addresses;
pub use tls::TlsError;
pub use token::{TOKEN_VARIABLE, Token, TokenError};
pub use xlaunch_host::network::{AddressError, Location, Wish, advertised, locate, own_addresses};

use munge::Munge;
use tls::Tls;

/// Mutual authentication of agents and the coordinator, with the keys. Cheap to clone.
#[derive(Clone, Debug)]
pub enum Security {
    /// No authentication, over plain TCP.
    Insecure,
    /// Keys derived from the job's token.
    Token(Arc<Tls>),
    /// Munge credentials, over TLS with keys of this process.
    Munge(Arc<(Tls, Munge)>),
}

impl Security {
    /// Authenticates with keys derived from the job's token.
    ///
    /// # Errors
    /// Fails if the cryptographic library refuses the keys.
    pub fn from_token(token: &Token) -> Result<Self, TlsError> {
        Ok(Self::Token(Arc::new(Tls::from_token(token)?)))
    }

    /// Authenticates with munge, which must work on this host: a credential is made to find out.
    ///
    /// # Errors
    /// Fails if munge is not installed or not running, or if the system has no random numbers.
    pub async fn munge() -> Result<Self, MungeError> {
        let munge = Munge::installed();
        munge.check().await?;
        let tls = Tls::ephemeral().map_err(MungeError::Tls)?;
        Ok(Self::Munge(Arc::new((tls, munge))))
    }

    /// Returns the security of one job, for an endpoint with several ports of which coordinators of other jobs may
    /// occupy some. Plain TCP cannot tell jobs apart before they greet.
    #[must_use]
    pub fn for_job(&self, run_id: &str) -> Self {
        match self {
            Self::Insecure => Self::Insecure,
            Self::Token(tls) => Self::Token(Arc::new(tls.for_job(run_id))),
            Self::Munge(pair) => Self::Munge(Arc::new((pair.0.for_job(run_id), pair.1.clone()))),
        }
    }
}

#[cfg(test)]
mod tests;
