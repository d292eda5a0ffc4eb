//! Connects ring neighbours: each rank dials the next one and accepts the previous one at the same time.

use std::io::ErrorKind;
use std::panic::resume_unwind;
use std::time::{Duration, Instant};

use super::RingPlace;
use super::accept::accept;
use super::dial::Target;
use super::greeting::Greeting;
use super::listen::RingListener;
use super::wire::Socket;
use crate::collective::{CommError, Result};

/// Connects to the next rank and accepts the previous one. The connections are ready for transfers.
pub(super) fn neighbours(
    listener: &RingListener,
    place: &RingPlace<'_>,
    timeout: Duration,
) -> Result<(Socket, Socket)> {
    let RingPlace { rank, world, next_address, key } = *place;
    let (next, previous) = ((rank + 1) % world, (rank + world - 1) % world);
    let deadline = Instant::now() + timeout;
    let lost = |peer: usize, reason: String| CommError::PeerLost { peer, reason };
    let unreachable =
        |error: std::io::Error| lost(next, format!("failed to connect to {next_address}: {error}"));

    let target = Target::parse(next_address).map_err(unreachable)?;
    // If each rank greeted one neighbour after the other, the ranks would wait for each other.
    let (dialled, accepted) = std::thread::scope(|scope| {
        let dialling = std::thread::Builder::new()
            .name("ring dial".into())
            .spawn_scoped(scope, || target.dial(&Greeting { key, world, dialling: rank }, deadline))?;
        let accepted = accept(listener, &Greeting { key, world, dialling: previous }, deadline);
        Ok((dialling.join().unwrap_or_else(|panic| resume_unwind(panic)), accepted))
    })
    .map_err(|error: std::io::Error| lost(rank, format!("failed to start a thread: {error}")))?;
    let from_previous = accepted.map_err(|error| match error.kind() {
        ErrorKind::TimedOut => {
            lost(previous, format!("it did not connect within {} s", timeout.as_secs_f32()))
        }
        _ => lost(previous, format!("failed to accept its connection: {error}")),
    });
    // If both are missing, the error of the dialled one is more informative.
    let to_next = dialled.map_err(unreachable)?;
    let from_previous = from_previous?;
    for (peer, socket) in [(next, &to_next), (previous, &from_previous)] {
        socket.prepare().map_err(|error| lost(peer, error.to_string()))?;
    }
    Ok((to_next, from_previous))
}
