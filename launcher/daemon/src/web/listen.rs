//! Where the page is served: `web.listen` of `daemon.toml`.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener, UnixStream};

/// Of a socket: its owner and its group may connect.
const MODE: u32 = 0o660;

/// An address that the node alone reaches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    /// Loopback: every user of the node reaches it.
    Tcp(SocketAddr),
    /// A unix socket of mode 0660.
    Unix(PathBuf),
}

impl Listen {
    /// Reads `IP:PORT`, which must be loopback, or `unix:/PATH`.
    ///
    /// # Errors
    /// In words, for whoever wrote it.
    pub fn parse(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            let path = PathBuf::from(path);
            return match path.is_absolute() {
                true => Ok(Self::Unix(path)),
                false => Err(format!(
                    "{text:?}: the path of a socket begins with a slash, as in unix:/run/xlaunch/web.sock"
                )),
            };
        }
        let address: SocketAddr = text
            .parse()
            .map_err(|_| format!("{text:?} is neither IP:PORT, such as 127.0.0.1:9470, nor unix:/PATH"))?;
        if !address.ip().is_loopback() {
            return Err(format!(
                "{text:?} can be reached from other hosts, and the page asks nobody who they are; \
                 listen on 127.0.0.1, [::1] or unix:/PATH, and let a proxy or ssh lead there"
            ));
        }
        if address.port() == 0 {
            return Err(format!("{text:?} has no port that anybody could know"));
        }
        Ok(Self::Tcp(address))
    }
}

/// One that listens.
#[derive(Debug)]
pub(super) enum Listener {
    Tcp(TcpListener),
    Unix { listener: UnixListener, _path: Socket },
}

/// A connection of either kind.
pub(super) trait Stream: AsyncRead + AsyncWrite + AsFd + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + AsFd + Send + Unpin> Stream for T {}

impl Listener {
    /// Listens; a socket that an earlier daemon left behind is replaced.
    pub(super) async fn bind(listen: &Listen) -> io::Result<Self> {
        match listen {
            Listen::Tcp(address) => {
                let listener = TcpListener::bind(address).await;
                listener.map(Self::Tcp).map_err(|error| named(&error, &address.to_string()))
            }
            Listen::Unix(path) => {
                let listener = bind_socket(path).await;
                let named = listener.map_err(|error| named(&error, &path.display().to_string()));
                named.map(|listener| Self::Unix { listener, _path: Socket(path.clone()) })
            }
        }
    }

    /// Waits for a connection.
    pub(super) async fn accept(&self) -> io::Result<Box<dyn Stream>> {
        match self {
            Self::Tcp(listener) => {
                let (stream, _) = listener.accept().await?;
                // Answers are small and whole: nothing is to wait for more.
                stream.set_nodelay(true)?;
                Ok(Box::new(stream))
            }
            Self::Unix { listener, .. } => Ok(Box::new(listener.accept().await?.0)),
        }
    }

    /// Whether requests may name any host: no page of another site can open a unix socket.
    pub(super) fn any_host(&self) -> bool {
        matches!(self, Self::Unix { .. })
    }
}

async fn bind_socket(path: &Path) -> io::Result<UnixListener> {
    let is_socket = fs_err::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
    if is_socket {
        match UnixStream::connect(path).await {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs_err::remove_file(path)?,
            _ => return Err(io::Error::new(io::ErrorKind::AddrInUse, "another process listens there")),
        }
    }
    let listener = UnixListener::bind(path)?;
    fs_err::set_permissions(path, std::fs::Permissions::from_mode(MODE))?;
    Ok(listener)
}

fn named(error: &io::Error, what: &str) -> io::Error {
    io::Error::new(error.kind(), format!("the page cannot be served on {what} ([web] listen): {error}"))
}

/// The path of a socket, which goes when nobody listens any more.
#[derive(Debug)]
pub(super) struct Socket(PathBuf);

impl Drop for Socket {
    fn drop(&mut self) {
        // One that stays is replaced by the next daemon.
        let _ = std::fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_that_other_hosts_reach_are_refused() {
        for good in ["127.0.0.1:9470", "127.8.9.1:1", "[::1]:9470"] {
            assert_eq!(Listen::parse(good), Ok(Listen::Tcp(good.parse().unwrap())), "{good}");
        }
        assert_eq!(Listen::parse("unix:/run/x.sock"), Ok(Listen::Unix("/run/x.sock".into())));
        for (bad, why) in [
            ("0.0.0.0:9470", "other hosts"),
            ("192.168.1.4:9470", "other hosts"),
            ("[::]:9470", "other hosts"),
            ("127.0.0.1:0", "port"),
            ("localhost:9470", "neither"),
            ("9470", "neither"),
            ("", "neither"),
            ("unix:web.sock", "slash"),
        ] {
            let error = Listen::parse(bad).unwrap_err();
            assert!(error.contains(why), "{bad}: {error}");
        }
    }

    #[tokio::test]
    async fn a_socket_is_of_its_group_and_replaces_a_dead_one_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("web.sock");
        let listen = Listen::Unix(path.clone());
        let mode = || fs_err::metadata(&path).unwrap().permissions().mode() & 0o777;
        // As a killed daemon leaves it: a path that nobody listens on.
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let listener = Listener::bind(&listen).await.unwrap();
        assert_eq!(mode(), MODE);
        let error = Listener::bind(&listen).await.unwrap_err().to_string();
        assert!(error.contains("another process") && error.contains("web.sock"), "{error}");
        drop(listener);
        assert!(!path.exists());
        fs_err::write(&path, "precious").unwrap();
        Listener::bind(&listen).await.unwrap_err();
        assert_eq!(fs_err::read_to_string(&path).unwrap(), "precious");
    }
}
