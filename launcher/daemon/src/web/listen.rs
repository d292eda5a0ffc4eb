//! The listening address of the page, `web.listen` in `daemon.toml`. Only this node can reach it.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener, UnixStream};

use crate::trusted_path;
use xlaunch_host::net::http::Accept;

/// Mode of a unix socket, which lets its owner and group connect.
const SOCKET_MODE: u32 = 0o660;

/// An address that only this node can reach.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Listen {
    /// A loopback address. Every user of the node can connect.
    Tcp(SocketAddr),
    /// A unix socket with mode 0660.
    Unix(PathBuf),
}

impl Listen {
    /// Describes the texts that [`parse`](Self::parse) accepts.
    pub(crate) const EXPECTED: &str =
        "a loopback address with a port, such as \"127.0.0.1:9470\", or \"unix:/PATH\"";

    /// Parses `web.listen`. An error describes the problem of the text.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            return if Path::new(path).is_absolute() {
                Ok(Self::Unix(path.into()))
            } else {
                Err(format!("\"{path}\" is a relative path"))
            };
        }
        match text.parse::<SocketAddr>() {
            Ok(address) if !address.ip().is_loopback() => {
                Err(format!("other hosts can connect to {address}, and the page has no authentication"))
            }
            Ok(address) if address.port() == 0 => Err("port 0 is not a fixed port".into()),
            Ok(address) => Ok(Self::Tcp(address)),
            Err(_) => Err(format!("\"{text}\" is not a valid address")),
        }
    }
}

/// A bound listener.
#[derive(Debug)]
pub(crate) enum Listener {
    Tcp(TcpListener),
    Unix { listener: UnixListener, _file: SocketFile },
}

pub(crate) trait Stream: AsyncRead + AsyncWrite + AsFd + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + AsFd + Send + Unpin> Stream for T {}

impl Listener {
    /// Binds the address. The unix socket of a dead daemon is replaced.
    pub(crate) async fn bind(listen: &Listen) -> io::Result<Self> {
        match listen {
            Listen::Tcp(address) => {
                let listener = TcpListener::bind(address).await;
                listener.map(Self::Tcp).map_err(|error| failed(&error, &address.to_string()))
            }
            Listen::Unix(path) => {
                let listener = bind_socket(path).await;
                let listener = listener.map_err(|error| failed(&error, &path.display().to_string()))?;
                Ok(Self::Unix { listener, _file: SocketFile(path.clone()) })
            }
        }
    }

    /// Wraps a listener that systemd has bound.
    pub(crate) fn passed(listener: &std::net::TcpListener) -> io::Result<Self> {
        listener.try_clone().and_then(TcpListener::from_std).map(Self::Tcp)
    }

    /// Returns whether requests may have any `Host`, which is so for a unix socket: a page of another site cannot
    /// connect to it.
    pub(super) fn any_host(&self) -> bool {
        matches!(self, Self::Unix { .. })
    }
}

impl Accept for Listener {
    type Stream = Box<dyn Stream>;

    async fn accept(&self) -> io::Result<Self::Stream> {
        match self {
            Self::Tcp(listener) => Ok(Box::new(Accept::accept(listener).await?)),
            Self::Unix { listener, .. } => Ok(Box::new(listener.accept().await?.0)),
        }
    }
}

async fn bind_socket(path: &Path) -> io::Result<UnixListener> {
    trusted_path::check_parent(path)?;
    let is_socket = fs_err::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
    if is_socket {
        match UnixStream::connect(path).await {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs_err::remove_file(path)?,
            _ => return Err(io::Error::new(io::ErrorKind::AddrInUse, "another process listens on it")),
        }
    }
    let listener = UnixListener::bind(path)?;
    fs_err::set_permissions(path, std::fs::Permissions::from_mode(SOCKET_MODE))?;
    Ok(listener)
}

fn failed(error: &io::Error, address: &str) -> io::Error {
    let message =
        format!("failed to serve the page on {address}: {error}; set web.listen to another address");
    io::Error::new(error.kind(), message)
}

/// Removes the file of the socket when dropped.
#[derive(Debug)]
pub(crate) struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        // If this fails, the next daemon replaces the file.
        let _ = std::fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_reachable_from_other_hosts_is_refused() {
        for good in ["127.0.0.1:9470", "127.8.9.1:1", "[::1]:9470"] {
            assert_eq!(Listen::parse(good), Ok(Listen::Tcp(good.parse().unwrap())), "{good}");
        }
        assert_eq!(Listen::parse("unix:/run/x.sock"), Ok(Listen::Unix("/run/x.sock".into())));
        for (bad, why) in [
            ("0.0.0.0:9470", "other hosts"),
            ("192.168.1.4:9470", "other hosts"),
            ("[::]:9470", "other hosts"),
            ("127.0.0.1:0", "port"),
            ("localhost:9470", "not a valid address"),
            ("9470", "not a valid address"),
            ("", "not a valid address"),
            ("unix:web.sock", "relative"),
        ] {
            let error = Listen::parse(bad).unwrap_err();
            assert!(error.contains(why), "{bad}: {error}");
        }
    }

    #[tokio::test]
    async fn socket_is_open_to_its_group_and_replaces_only_that_of_a_dead_daemon() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("web.sock");
        let listen = Listen::Unix(path.clone());
        let mode = || fs_err::metadata(&path).unwrap().permissions().mode() & 0o777;
        // A file on which no process listens, like the socket of a killed daemon.
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let listener = Listener::bind(&listen).await.unwrap();
        assert_eq!(mode(), SOCKET_MODE);
        let error = Listener::bind(&listen).await.unwrap_err().to_string();
        assert!(error.contains("another process") && error.contains("web.sock"), "{error}");
        drop(listener);
        assert!(!path.exists());
        fs_err::write(&path, "precious").unwrap();
        Listener::bind(&listen).await.unwrap_err();
        assert_eq!(fs_err::read_to_string(&path).unwrap(), "precious");
    }
}
