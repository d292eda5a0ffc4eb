//! A unix socket's connection as gRPC servers take it, with what is known of its other end.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tonic::transport::server::Connected;

/// A connection; what it holds goes when it is closed.
#[derive(Debug)]
pub(crate) struct Connection<P, H> {
    /// First, so that it is dropped first.
    pub(crate) _held: H,
    stream: UnixStream,
    pub(crate) peer: P,
}

impl<P, H> Connection<P, H> {
    /// Who calls by it is told `peer`.
    pub(crate) fn new(stream: UnixStream, peer: P, held: H) -> Self {
        Self { _held: held, stream, peer }
    }
}

impl<P: Clone + Send + Sync + 'static, H> Connected for Connection<P, H> {
    type ConnectInfo = P;

    fn connect_info(&self) -> P {
        self.peer.clone()
    }
}

impl<P: Unpin, H: Unpin> AsyncRead for Connection<P, H> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<P: Unpin, H: Unpin> AsyncWrite for Connection<P, H> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
