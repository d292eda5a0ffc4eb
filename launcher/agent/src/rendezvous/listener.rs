//! The agent's socket, and which processes may connect to it.
//!
//! Only processes of the agent's own user and of root may. Workers, which are children of this process, keep their
//! connections; the number of other clients is limited, and the oldest connection is closed when there are too many, so
//! that clients that hang or never send anything cannot keep others out.

use std::io;
use std::path::Path;

use tokio::net::{UnixListener, UnixStream};
use tokio_stream::wrappers::ReceiverStream;
use xlaunch_proto::net::{self, Connection, Connections, Credentials, Limits};

use crate::process::Process;

/// Simultaneous connections of clients. Each takes two descriptors, of which a process often has no more than 1024.
const MAX_CLIENTS: usize = 128;

/// Listens on `socket`, which only this user (and root) may open.
pub(super) fn bind(socket: &Path) -> io::Result<ReceiverStream<io::Result<Connection<UnixStream>>>> {
    use std::os::unix::fs::PermissionsExt;
    let listener = UnixListener::bind(socket)?;
    fs_err::set_permissions(socket, std::fs::Permissions::from_mode(0o600))?;
    let limits =
        Limits { per_user: MAX_CLIENTS, total: MAX_CLIENTS, first_call_timeout: None, close_busy: true };
    Ok(net::accept(listener, Connections::new(limits), identify))
}

fn identify(stream: &UnixStream) -> io::Result<Option<Credentials>> {
    let peer = net::peer_credentials(stream)?;
    let own = rustix::process::getuid().as_raw();
    if peer.uid != own && peer.uid != 0 {
        return Ok(None);
    }
    let is_worker =
        peer.pid.and_then(Process::read).is_some_and(|caller| caller.parent == std::process::id());
    Ok(Some(Credentials { exempt: is_worker, ..peer }))
}
