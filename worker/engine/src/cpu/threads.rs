//! The thread pool of one back end.

use rayon::{ThreadPool, ThreadPoolBuilder};

/// A thread pool of a fixed size. If possible, the thread that creates the pool is one of its threads, so that with one
/// thread no work is ever handed over.
#[derive(Debug)]
pub struct Threads {
    pool: Option<ThreadPool>,
    count: usize,
}

impl Threads {
    /// Starts `count` threads, at least one. If the system cannot start threads, everything runs on the caller's
    /// thread, in a pool of its own: rayon panics if it cannot start its global pool.
    pub(crate) fn new(count: usize) -> Self {
        let count = count.max(1);
        let builder = || ThreadPoolBuilder::new().num_threads(count).thread_name(|i| format!("cpu-{i}"));
        // A thread can belong to only one rayon pool: a second back end on the same thread starts threads of its own.
        let pool = builder().use_current_thread().build().or_else(|_| builder().build());
        let pool =
            pool.or_else(|_| ThreadPoolBuilder::new().num_threads(1).use_current_thread().build()).ok();
        let count = pool.as_ref().map_or(1, ThreadPool::current_num_threads);
        Self { pool, count }
    }

    /// Number of threads, including the caller's.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Runs `f` so that its parallel iterators use these threads.
    pub(crate) fn run<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        match &self.pool {
            Some(pool) => pool.install(f),
            None => f(),
        }
    }
}
