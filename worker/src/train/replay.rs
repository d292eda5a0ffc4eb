//! Replays work that is the same in every step. It is enqueued operation by operation until the pool gives its buffers
//! fixed addresses, then captured as a CUDA graph, and from then on launched in one call.
//!
//! ```text
//! runs 1, 2: op by op, recorded by the pool --equal--> run 3: planned, captured, launched --> run 4..: launched
//! ```
//! A graph contains addresses: those of persistent tensors, and of buffers in the pool's plan, which is pinned from
//! then on. A graph with a buffer outside the plan is launched only once.
//!
//! Invariant: with or without capture, the same kernels run in the same order, so results are bit-identical.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;

use xlaunch_engine::Capture;
use xlaunch_spec::job::Exec;

use crate::error::{Result, WorkerError};
use crate::model::BackendHandle;
use crate::phase;

/// The kinds of repeated work. Each has its own plan and graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Work {
    /// A micro-step of training.
    Train {
        /// True if this micro-step is the first of its step: gradients are overwritten instead of added to.
        first: bool,
        /// True if this micro-step is the last of its step: gradients are all-reduced, and the optimizer's step
        /// follows.
        last: bool,
    },
    /// The loss of one batch of held-out data.
    Evaluate,
}

impl Work {
    /// Key of the plan in the pool.
    fn key(self) -> u64 {
        match self {
            Self::Train { first, last } => u64::from(first) | u64::from(last) << 1,
            Self::Evaluate => 4,
        }
    }
}

/// The graphs captured so far.
#[derive(Debug)]
pub(super) struct Replay {
    backend: BackendHandle,
    exec: Exec,
    /// Captured graphs, with the number of collectives in each.
    graphs: RefCell<HashMap<Work, (Capture, u64)>>,
    /// Graphs that must not be launched again. They are kept alive because the device may still be executing them.
    retired: RefCell<Vec<Capture>>,
    /// True to enqueue operation by operation even if there is a graph.
    eager: Cell<bool>,
}

impl Replay {
    /// Starts without graphs.
    pub(super) fn new(backend: &BackendHandle, exec: Exec) -> Self {
        let (graphs, retired) = (RefCell::default(), RefCell::default());
        Self { backend: backend.clone(), exec, graphs, retired, eager: Cell::new(false) }
    }

    /// Runs `enqueue`, or launches the graph that was captured from it. `enqueue` must enqueue the same operations in
    /// every run of this kind of work.
    pub(super) fn run(&self, work: Work, enqueue: impl FnOnce() -> Result<()>) -> Result<()> {
        let graphs = self.exec == Exec::Graph && !self.eager.get();
        if graphs && let Some((graph, collectives)) = self.graphs.borrow().get(&work) {
            phase::add_collectives(*collectives);
            return Ok(graph.launch()?);
        }
        let pool = self.backend.pool();
        if graphs {
            pool.finish_planning();
        }
        let step = pool.step(work.key());
        if graphs && step.is_planned() {
            return self.capture(work, enqueue);
        }
        enqueue()
    }

    /// Captures work whose buffers the pool has planned, and launches it.
    fn capture(&self, work: Work, enqueue: impl FnOnce() -> Result<()>) -> Result<()> {
        let pool = self.backend.pool();
        let misses = pool.stats().plan_misses;
        if !self.backend.begin_capture().map_err(WorkerError::Capture)? {
            return enqueue();
        }
        let before = phase::collectives();
        let done = enqueue();
        let collectives = phase::collectives() - before;
        // End the capture even after an error: the stream would otherwise stay in capture mode.
        let graph = self.backend.end_capture();
        done?;
        let graph = graph.map_err(WorkerError::Capture)?;
        graph.launch().map_err(WorkerError::Capture)?;
        // A buffer outside the plan was valid only for the launch above: the pool may reuse its block.
        if pool.stats().plan_misses == misses {
            pool.pin_plans();
            self.graphs.borrow_mut().insert(work, (graph, collectives));
        } else {
            self.retired.borrow_mut().push(graph);
        }
        Ok(())
    }

    /// Switches between operation-by-operation execution and graphs.
    pub(super) fn set_eager(&self, eager: bool) {
        self.eager.set(eager);
    }

    /// Destroys all graphs.
    pub(super) fn drop_graphs(&self) {
        self.graphs.borrow_mut().clear();
        self.retired.borrow_mut().clear();
    }
}
