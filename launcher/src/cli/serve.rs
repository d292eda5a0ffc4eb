//! `xlaunch serve`: a trained model behind an API like OpenAI's.
//!
//! ```text
//! clients --> serve (HTTP, runtime) --jobs--> thread of the model
//!                 SIGINT, SIGTERM --> both end
//! ```

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use clap::Args;
use clap::builder::UnknownArgumentValueParser;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;
use xlaunch_cluster::net::{Token, TokenError};
use xlaunch_host::network::resolve;
use xlaunch_proto::env;
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::refusal::Refusal;
use xlaunch_worker::serve::{self as model, Command};

use super::generate::{AdapterOption, DeviceOptions};
use super::output::{QueryError, print, print_note};
use crate::serve::{Access, Served, serve};

/// Time for the step of the model that is in progress when the server ends.
const LAST_STEP_TIMEOUT: Duration = Duration::from_secs(5);

/// Options of `xlaunch serve`.
#[derive(Debug, Args)]
#[command(
    after_help = "Exit codes: 130 after SIGINT, 143 after SIGTERM; otherwise as for `xlaunch generate`."
)]
pub(super) struct Serve {
    /// A checkpoint, a model in Hugging Face's layout, or a directory of checkpoints or of a run (uses the newest valid
    /// checkpoint); also the name of the model for clients
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    #[command(flatten)]
    adapter: AdapterOption,
    /// Address, or name of this host, to listen on; port 0 takes a free port. An address that other hosts can reach
    /// needs a token
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:8000")]
    listen: Listen,
    #[arg(long = "host", hide = true, value_parser = UnknownArgumentValueParser::suggest_arg("--listen"))]
    _host: Option<String>,
    #[arg(long = "port", hide = true, value_parser = UnknownArgumentValueParser::suggest_arg("--listen"))]
    _port: Option<String>,
    /// File with a secret of at least 16 bytes, which clients send as their API key [env: XLAUNCH_SERVE_TOKEN, the
    /// secret itself]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Tokenizer to use instead of the model's own: `bytes`, `gpt2` or a tokenizer.json
    #[arg(long, value_name = "TOKENIZER")]
    tokenizer: Option<String>,
    /// Maximum number of tokens of a text and its prompt; a lower one needs less memory per text, so that more texts
    /// are computed at a time; default: the model's context
    #[arg(long, value_name = "TOKENS")]
    context: Option<usize>,
    #[command(flatten)]
    device: DeviceOptions,
}

/// The value of `--listen`.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Listen {
    Address(SocketAddr),
    Name(String, u16),
}

impl FromStr for Listen {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Ok(address) = text.parse() {
            return Ok(Self::Address(address));
        }
        let name =
            text.rsplit_once(':').filter(|(host, _)| !host.is_empty() && !host.contains([':', '[', ']']));
        let name = name.and_then(|(host, port)| Some(Self::Name(host.into(), port.parse().ok()?)));
        name.ok_or("expected HOST:PORT, such as 127.0.0.1:8000, localhost:8000 or [::1]:8000")
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => address.fmt(f),
            Self::Name(host, port) => write!(f, "{host}:{port}"),
        }
    }
}

impl Listen {
    /// Returns the addresses, those of IPv4 first: not every client that names `localhost` tries IPv6 as well.
    async fn addresses(&self) -> Result<Vec<SocketAddr>, Refusal> {
        let (host, port) = match self {
            Self::Address(address) => return Ok(vec![*address]),
            Self::Name(host, port) => (host, *port),
        };
        let found = resolve(host).await.map_err(|error| {
            let message = format!("failed to resolve {host}: {error}; name another host with --listen");
            Refusal::new(ExitCode::Usage, message)
        })?;
        let mut addresses: Vec<SocketAddr> = found.into_iter().map(|ip| SocketAddr::new(ip, port)).collect();
        addresses.sort_by_key(SocketAddr::is_ipv6);
        Ok(addresses)
    }
}

pub(super) async fn run(options: Serve) -> Result<ExitCode, QueryError> {
    let internal = |error: std::io::Error| Refusal::new(ExitCode::Internal, error.to_string());
    let mut terminated = signal(SignalKind::terminate()).map_err(internal)?;
    let mut interrupted = signal(SignalKind::interrupt()).map_err(internal)?;
    let addresses = options.listen.addresses().await?;
    let access = access(&options, &addresses)?;
    // Completion in a shell adds a slash to the name of a directory.
    let name = options.model.components().as_path().display().to_string();
    let command = Command {
        model: options.model,
        adapter: options.adapter.path()?,
        tokenizer: options.tokenizer,
        context: options.context,
        target: options.device.target(),
    };
    let (source, service) = command.open(&mut print_note)?;
    let service = Arc::new(service);
    let (listener, address) = listen(&options.listen, &addresses).await?;
    let (jobs, requests) = channel();
    let (loaded, ready) = oneshot::channel();
    let stop = Arc::new(AtomicBool::new(false));
    let mut engine = tokio::task::spawn_blocking({
        let (service, stop) = (service.clone(), stop.clone());
        move || {
            let is_stopped = || stop.load(Ordering::Relaxed);
            // An error means that the command is ending.
            let ready = |texts| _ = loaded.send(texts);
            model::run(&command, &source, &service, &requests, &mut print_note, &is_stopped, ready)
        }
    });
    let server = async {
        // An error means that the model was not loaded, which the engine's thread reports.
        let Ok(texts) = ready.await else { return std::future::pending().await };
        let context = service.context;
        print_note(&format!(
            "xlaunch: serving {name}: context of {context} tokens, up to {texts} texts at a time"
        ));
        // The server is of use even if stdout is closed.
        let _ = print(format!("http://{address}/v1\n").as_bytes());
        serve(listener, Served { service, name, jobs, access }).await;
    };
    let exit = tokio::select! {
        ended = &mut engine => return ended_early(ended),
        () = server => ExitCode::Internal,
        _ = terminated.recv() => ExitCode::Stopped,
        _ = interrupted.recv() => ExitCode::Signal(2),
    };
    stop.store(true, Ordering::Relaxed);
    // All clients are gone now, so the thread ends after its current step. A longer step ends with the process.
    let _ = tokio::time::timeout(LAST_STEP_TIMEOUT, engine).await;
    Ok(exit)
}

/// The thread of the model ends first only if something has failed.
fn ended_early(ended: Result<Result<(), Refusal>, tokio::task::JoinError>) -> Result<ExitCode, QueryError> {
    match ended {
        Ok(Ok(())) => Ok(ExitCode::Internal),
        Ok(Err(refusal)) => Err(refusal.into()),
        Err(error) => {
            Err(Refusal::new(ExitCode::Internal, format!("the computation failed: {error}")).into())
        }
    }
}

/// Returns the rules of access to a server at one of `addresses`.
fn access(options: &Serve, addresses: &[SocketAddr]) -> Result<Access, Refusal> {
    let refused = |error: TokenError| Refusal::new(error.exit_code(), error.to_string());
    let token = match &options.token_file {
        Some(path) => Some(Token::read(path).map_err(refused)?),
        None => Token::from_variable(env::SERVE_TOKEN).map_err(refused)?,
    };
    // HTTP clients cannot send any other token, such as one that ends with a carriage return.
    if token.as_ref().is_some_and(|token| !token.expose().iter().all(u8::is_ascii_graphic)) {
        let message = "the token has spaces, line ends or other characters that clients cannot send as an API key; \
                       make one with `openssl rand -hex 32`";
        return Err(Refusal::new(ExitCode::Usage, message));
    }
    let is_loopback = check_reach(&options.listen, addresses, token.is_some())?;
    Ok(Access { is_loopback, token: token.map(Arc::new) })
}

/// Returns whether only this host can reach all addresses. Without a token, others are refused.
fn check_reach(name: &Listen, addresses: &[SocketAddr], has_token: bool) -> Result<bool, Refusal> {
    let is_loopback = addresses.iter().all(|address| address.ip().is_loopback());
    if has_token || is_loopback {
        return Ok(is_loopback);
    }
    let message = format!(
        "other hosts can reach {name}, so clients need a token: --token-file FILE or {}, at least 16 bytes; `openssl \
         rand -hex 32` makes one",
        env::SERVE_TOKEN
    );
    Err(Refusal::new(ExitCode::Usage, message))
}

/// Listens on the first of `addresses` that can be used. `name` is what they are the addresses of.
async fn listen(name: &Listen, addresses: &[SocketAddr]) -> Result<(TcpListener, SocketAddr), Refusal> {
    let failed = |error: std::io::Error| {
        let message = format!("failed to listen on {name}: {error}; choose another with --listen");
        Refusal::new(ExitCode::Usage, message)
    };
    let listener = TcpListener::bind(addresses).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    Ok((listener, address))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_of_other_servers_lead_to_the_own_one() {
        #[derive(Debug, clap::Parser)]
        struct Line {
            #[command(flatten)]
            serve: Serve,
        }
        for option in ["--port=80", "--host=::"] {
            let error = <Line as clap::Parser>::try_parse_from(["serve", "model", option]).unwrap_err();
            assert!(error.to_string().contains("a similar argument exists: '--listen'"), "{error}");
        }
        let line = <Line as clap::Parser>::try_parse_from(["serve", "model"]).unwrap();
        assert_eq!(line.serve.listen.to_string(), "127.0.0.1:8000");
    }

    #[tokio::test]
    async fn server_listens_on_addresses_and_names() {
        let parsed = |text: &str| text.parse::<Listen>();
        for text in ["127.0.0.1:0", "[::1]:8000", "0.0.0.0:80"] {
            assert_eq!(parsed(text), Ok(Listen::Address(text.parse().unwrap())));
        }
        let name = parsed("localhost:8000").unwrap();
        assert_eq!(name.to_string(), "localhost:8000");
        let addresses = name.addresses().await.unwrap();
        assert!(addresses.iter().all(|it| it.ip().is_loopback() && it.port() == 8000), "{addresses:?}");
        assert!(!addresses.is_empty() && addresses.is_sorted_by_key(SocketAddr::is_ipv6), "{addresses:?}");
        for refused in
            [":8000", "8000", "localhost", "localhost:", "localhost:65536", "::1:8000", "[::1]", ""]
        {
            assert!(parsed(refused).unwrap_err().starts_with("expected HOST:PORT"), "{refused}");
        }
    }

    #[test]
    fn name_with_an_address_that_other_hosts_reach_needs_a_token() {
        let addresses = ["127.0.0.1:80", "192.0.2.1:80"].map(|address| address.parse().unwrap());
        let name = Listen::Name("host".into(), 80);
        assert_eq!(check_reach(&name, &addresses[..1], false), Ok(true));
        assert!(check_reach(&name, &addresses, false).is_err());
        assert_eq!(check_reach(&name, &addresses, true), Ok(false));
    }
}
