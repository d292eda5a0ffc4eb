//! The first bytes of HTTP/2 in both directions, exchanged before a connection counts as established.
//!
//! ```text
//! agent --PRI * HTTP/2.0...--> coordinator        (RFC 9113, 3.4)
//! agent <------SETTINGS------- coordinator
//! ```
//! A TLS 1.3 client finishes its handshake before the server has checked its key, and HTTP/2 libraries report a
//! connection before the server has answered. Waiting for the first frame distinguishes a refused token, a peer without
//! TLS and a foreign service at the time of connecting. On plain TCP, the preface is the only thing that a caller has
//! to know.
//!
//! [`Stream`] then replays these bytes to the HTTP/2 library: received bytes are read once more, and bytes already sent
//! are not sent twice.

use std::fmt;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tonic::transport::server::Connected;

use super::socket::Addresses;

const PREFACE: [u8; 24] = *b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Length (3 bytes), type, flags, stream id (4 bytes).
const FRAME_HEAD_BYTES: usize = 9;
const SETTINGS: u8 = 4;
/// An empty SETTINGS frame: the answer to a caller that sends anything but the preface.
const EMPTY_SETTINGS: [u8; FRAME_HEAD_BYTES] = [0, 0, 0, SETTINGS, 0, 0, 0, 0, 0];
/// First byte of a TLS alert, from a peer that expects TLS.
const TLS_ALERT: u8 = 21;
/// Maximum number of bytes read from a caller that has sent something else, so that closing does not cut off the
/// answer.
const MAX_DRAINED_BYTES: u64 = 16 << 10;

/// A connection, plain or TLS.
pub(super) trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// The reason why the first bytes were not those of HTTP/2.
#[derive(Debug, thiserror::Error)]
pub(super) enum PrefaceError {
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The peer expects TLS.
    #[error("the peer expects TLS")]
    WantsTls,
    /// The peer speaks another protocol.
    #[error("the peer speaks another protocol")]
    Foreign,
}

/// The agent's side: sends the preface and waits for the head of the first frame.
pub(super) async fn send(mut io: Box<dyn Io>, addresses: Addresses) -> Result<Stream, PrefaceError> {
    io.write_all(&PREFACE).await?;
    io.flush().await?;
    let mut head = [0; FRAME_HEAD_BYTES];
    let mut length = 0;
    while length < head.len() {
        match io.read(&mut head[length..]).await? {
            0 if length == 0 => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            0 => return Err(PrefaceError::Foreign),
            read => length += read,
        }
        if head[0] == TLS_ALERT {
            return Err(PrefaceError::WantsTls);
        }
    }
    let stream_zero = head[5..] == [0; 4];
    if head[3] != SETTINGS || !stream_zero {
        return Err(PrefaceError::Foreign);
    }
    Ok(Stream { io, received: head.to_vec(), sent: PREFACE.len(), addresses })
}

/// The coordinator's side: waits for the preface.
pub(super) async fn receive(mut io: Box<dyn Io>, addresses: Addresses) -> Result<Stream, PrefaceError> {
    let mut preface = [0; PREFACE.len()];
    io.read_exact(&mut preface).await?;
    if preface == PREFACE {
        return Ok(Stream { io, received: preface.to_vec(), sent: 0, addresses });
    }
    // From this, a TLS client learns that it called a server without TLS.
    io.write_all(&EMPTY_SETTINGS).await?;
    io.shutdown().await?;
    tokio::io::copy(&mut io.take(MAX_DRAINED_BYTES), &mut tokio::io::sink()).await?;
    Err(PrefaceError::Foreign)
}

/// An authenticated connection after the exchange of the first bytes.
pub struct Stream {
    io: Box<dyn Io>,
    /// Received bytes that are to be read again.
    received: Vec<u8>,
    /// Number of preface bytes that were sent already, but that the library has yet to write.
    sent: usize,
    addresses: Addresses,
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Stream").field(&self.addresses).finish()
    }
}

impl Connected for Stream {
    type ConnectInfo = Addresses;

    fn connect_info(&self) -> Addresses {
        self.addresses
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.received.is_empty() {
            return Pin::new(&mut self.io).poll_read(context, buffer);
        }
        let length = self.received.len().min(buffer.remaining());
        buffer.put_slice(&self.received[..length]);
        self.received.drain(..length);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.sent == 0 || bytes.is_empty() {
            return Pin::new(&mut self.io).poll_write(context, bytes);
        }
        let length = self.sent.min(bytes.len());
        let expected = &PREFACE[PREFACE.len() - self.sent..][..length];
        if bytes[..length] != *expected {
            return Poll::Ready(Err(io::ErrorKind::InvalidData.into()));
        }
        self.sent -= length;
        // The caller writes the rest of its buffer in the next call.
        Poll::Ready(Ok(length))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }
}
