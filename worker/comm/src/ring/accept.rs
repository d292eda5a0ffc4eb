//! Accepts the previous rank among all processes that connect.
//!
//! One thread greets all callers in parallel, and no caller can delay the others: sockets are non-blocking, each has a
//! time limit, and their number is bounded. When there are too many, the oldest is dropped. This may affect the
//! previous rank, but it dials again until the deadline.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::greeting::{self, ANSWER_BYTES, Greeting, Nonce};
use super::listen::RingListener;
use super::wire::Socket;

/// Maximum number of callers that are greeted at the same time.
const MAX_CALLERS: usize = 128;
/// Maximum number of connections to accept before polling the earlier ones again.
const MAX_ACCEPTED_AT_ONCE: usize = 16;
/// Time for a caller to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Delay after the kernel has failed to accept, for example for lack of descriptors.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(10);

/// Waits until the dialling rank of `greeting` has connected and proved its identity.
pub(super) fn accept(
    listener: &RingListener,
    greeting: &Greeting<'_>,
    deadline: Instant,
) -> io::Result<Socket> {
    let mut callers: VecDeque<Caller> = VecDeque::new();
    loop {
        let now = Instant::now();
        if now >= deadline {
            return Err(ErrorKind::TimedOut.into());
        }
        while callers.front().is_some_and(|caller| caller.until <= now) {
            callers.pop_front();
        }
        let until = callers.front().map_or(deadline, |caller| caller.until.min(deadline));
        wait(listener, &callers, until - now)?;
        for _ in 0..MAX_ACCEPTED_AT_ONCE {
            match listener.accept() {
                Ok(socket) => {
                    if callers.len() == MAX_CALLERS {
                        callers.pop_front();
                    }
                    // A caller that has disconnected already is no loss.
                    callers.extend(Caller::challenge(socket, Instant::now() + ANSWER_TIMEOUT).ok());
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // The caller is a process of another user.
                Err(error) if error.kind() == ErrorKind::PermissionDenied => {}
                Err(_) => {
                    std::thread::sleep(ACCEPT_RETRY_DELAY);
                    break;
                }
            }
        }
        let mut undecided = VecDeque::with_capacity(callers.len());
        for mut caller in callers {
            match caller.read_answer() {
                Answer::Incomplete => undecided.push_back(caller),
                Answer::Complete => {
                    if let Some(socket) = caller.finish(greeting) {
                        return Ok(socket);
                    }
                }
                Answer::Gone => {}
            }
        }
        callers = undecided;
    }
}

/// Blocks until a caller connects or sends something, at most for this long.
fn wait(listener: &RingListener, callers: &VecDeque<Caller>, timeout: Duration) -> io::Result<()> {
    let mut fds = vec![PollFd::new(listener, PollFlags::IN)];
    fds.extend(callers.iter().map(|caller| PollFd::new(&caller.socket, PollFlags::IN)));
    let timeout = Timespec::try_from(timeout).map_err(io::Error::other)?;
    match poll(&mut fds, Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// A connection whose other end has not proved its identity yet.
struct Caller {
    socket: Socket,
    challenged: Nonce,
    answer: [u8; ANSWER_BYTES],
    received: usize,
    until: Instant,
}

enum Answer {
    Incomplete,
    Complete,
    Gone,
}

impl Caller {
    fn challenge(mut socket: Socket, until: Instant) -> io::Result<Self> {
        socket.set_nonblocking()?;
        let challenged = super::nonce()?;
        // The challenge fits into the empty buffer of a new connection.
        socket.write_all(&greeting::challenge(&challenged))?;
        Ok(Self { socket, challenged, answer: [0; ANSWER_BYTES], received: 0, until })
    }

    fn read_answer(&mut self) -> Answer {
        while self.received < ANSWER_BYTES {
            match self.socket.read(&mut self.answer[self.received..]) {
                Ok(0) => return Answer::Gone,
                Ok(count) => self.received += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Answer::Incomplete,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Answer::Gone,
            }
        }
        Answer::Complete
    }

    /// Returns the connection if its answer proves that the caller is the expected rank. The caller is then sent the
    /// proof that it needs.
    fn finish(mut self, greeting: &Greeting<'_>) -> Option<Socket> {
        let proof = greeting.accept(&self.challenged, &self.answer)?;
        self.socket.write_all(&proof).ok()?;
        Some(self.socket)
    }
}
