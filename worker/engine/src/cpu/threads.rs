//! The threads of one back end.

use rayon::{ThreadPool, ThreadPoolBuilder};

/// A thread pool of a fixed size. The thread that makes it is one of them where possible, so that with one thread
/// nothing is ever handed over.
#[derive(Debug)]
pub(super) struct Threads {
    pool: Option<ThreadPool>,
    count: usize,
}

impl Threads {
    /// `count` threads, at least one. Where the system gives none, everything runs on the caller's.
    pub(super) fn new(count: usize) -> Self {
        let count = count.max(1);
        let builder = || ThreadPoolBuilder::new().num_threads(count).thread_name(|i| format!("cpu-{i}"));
        // A thread can belong to one pool only: a second back end on it gets threads of its own.
        let pool = builder().use_current_thread().build().or_else(|_| builder().build()).ok();
        let count = if pool.is_some() { count } else { 1 };
        Self { pool, count }
    }

    /// How many threads share the work.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Runs `f`, whose parallel iterators use these threads.
    pub(super) fn run<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        match &self.pool {
            Some(pool) => pool.install(f),
            None => f(),
        }
    }
}
