//! The connections of the page: so many at a time, none of which keeps another out.
//!
//! Where there are too many, the oldest that waits for a request goes, or the oldest of all. A new one has so the time of
//! [`MOST`] others to ask and be answered, however many hang or never speak; browsers open another without a word.

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use tokio::task::{AbortHandle, Id, JoinSet};
use tower::ServiceExt;

use super::listen::{Listener, Stream};

/// Connections at a time, of one descriptor each.
pub(super) const MOST: usize = 64;
/// From the end of an answer, or the beginning of a connection, to the end of the next request's head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes of a request's head.
const HEAD_BYTES: usize = 16 << 10;
/// Pause where a connection could not be taken, for lack of descriptors or memory.
const BREATH: Duration = Duration::from_millis(100);

/// Answers until `ended` is.
pub(super) async fn serve(listener: Listener, routes: Router, ended: impl Future<Output = ()>) {
    let mut ended = pin!(ended);
    let mut tasks = JoinSet::new();
    let mut open = Open::default();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok(stream) => {
                    open.make_room();
                    let busy = Arc::new(AtomicBool::new(false));
                    let task = tasks.spawn(answer(stream, routes.clone(), busy.clone()));
                    open.0.push(Connection { task, busy });
                    // It gets to read what has come before the next may take its place.
                    tokio::task::yield_now().await;
                }
                Err(_) => tokio::time::sleep(BREATH).await,
            },
            Some(closed) = tasks.join_next_with_id() => {
                open.remove(closed.map_or_else(|error| error.id(), |(id, ())| id));
            }
            () = &mut ended => return,
        }
    }
}

/// Answers the requests of one connection.
async fn answer(stream: Box<dyn Stream>, routes: Router, busy: Arc<AtomicBool>) {
    let service = tower::service_fn(move |request: Request<_>| {
        let (routes, busy) = (routes.clone(), busy.clone());
        async move {
            busy.store(true, Ordering::Relaxed);
            let response = routes.oneshot(request).await;
            busy.store(false, Ordering::Relaxed);
            response as Result<_, Infallible>
        }
    });
    let mut builder = Builder::new(TokioExecutor::new()).http1_only();
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT).max_buf_size(HEAD_BYTES);
    // What a caller does wrong is no concern of anybody else.
    let _ = builder.serve_connection(TokioIo::new(stream), TowerToHyperService::new(service)).await;
}

/// Those that are open, the oldest first.
#[derive(Debug, Default)]
struct Open(Vec<Connection>);

#[derive(Debug)]
struct Connection {
    task: AbortHandle,
    /// Whether a request of it is being answered.
    busy: Arc<AtomicBool>,
}

impl Open {
    /// Closes one where there is no room for another.
    fn make_room(&mut self) {
        if self.0.len() >= MOST {
            let idle = self.0.iter().position(|connection| !connection.busy.load(Ordering::Relaxed));
            self.0.remove(idle.unwrap_or(0)).task.abort();
        }
    }

    fn remove(&mut self, id: Id) {
        self.0.retain(|connection| connection.task.id() != id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_oldest_that_waits_goes_first() {
        let mut tasks = JoinSet::new();
        let mut open = Open::default();
        let mut add = |open: &mut Open, busy| {
            let task = tasks.spawn(std::future::pending::<()>());
            open.0.push(Connection { task: task.clone(), busy: Arc::new(AtomicBool::new(busy)) });
            task.id()
        };
        let ids: Vec<_> = (0..MOST - 1).map(|number| add(&mut open, number != 1)).collect();
        let left = |open: &Open| open.0.iter().map(|connection| connection.task.id()).collect::<Vec<_>>();
        open.make_room();
        assert_eq!(left(&open), ids, "there was room");
        let last = add(&mut open, true);
        open.make_room();
        assert_eq!(left(&open), [&ids[..1], &ids[2..], &[last]].concat());
        // All are being answered.
        add(&mut open, true);
        open.make_room();
        assert_eq!((open.0.len(), left(&open)[0]), (MOST - 1, ids[2]));
        open.remove(last);
        assert!(!left(&open).contains(&last));
        for _ in 0..2 {
            let closed = tasks.join_next().await.unwrap();
            assert!(closed.unwrap_err().is_cancelled());
        }
    }
}
