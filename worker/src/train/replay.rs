//! Work that is the same in every step: enqueued operation by operation until its buffers have found their addresses, then
//! captured as a graph, and replayed in one call since.
//!
//! ```text
//! runs 1, 2: op by op, recorded by the pool --equal--> run 3: from the pool's plan, captured, launched --> run 4..: launched
//! ```
//! A graph holds addresses: those of persistent tensors, and of buffers in the pool's plan, which is pinned from then on. Work
//! whose buffers are not all in the plan is never captured. The same kernels run in the same order either way, so results
//! are the same bit for bit.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;

use xlaunch_engine::Capture;
use xlaunch_proto::spec::Exec;

use crate::error::{Result, WorkerError};
use crate::model::BackendHandle;

/// Work that is enqueued again and again, by kind: each has its plan and its graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Part {
    /// A micro-step: the first one of a step overwrites gradients, the last one sums them over ranks, and the optimizer's
    /// step follows.
    Train {
        /// Gradients are overwritten, not added to.
        first: bool,
        /// Gradients are summed over ranks, and parameters updated.
        last: bool,
    },
    /// The loss of one batch of held-out data.
    Evaluate,
}

impl Part {
    /// The pool's name for it.
    fn key(self) -> u64 {
        match self {
            Self::Train { first, last } => u64::from(first) | u64::from(last) << 1,
            Self::Evaluate => 4,
        }
    }
}

/// What was captured so far.
#[derive(Debug)]
pub(super) struct Replay {
    backend: BackendHandle,
    exec: Exec,
    graphs: RefCell<HashMap<Part, Capture>>,
    /// Launched once, and not to be launched again; the device may still work on them.
    spent: RefCell<Vec<Capture>>,
    one_by_one: Cell<bool>,
}

impl Replay {
    /// Nothing captured yet.
    pub(super) fn new(backend: &BackendHandle, exec: Exec) -> Self {
        let (graphs, spent) = (RefCell::default(), RefCell::default());
        Self { backend: backend.clone(), exec, graphs, spent, one_by_one: Cell::new(false) }
    }

    /// Runs `work`, or what was captured of it, as one step of the pool. What `work` enqueues is the same in every run
    /// of this part.
    pub(super) fn run(&self, part: Part, work: impl FnOnce() -> Result<()>) -> Result<()> {
        let graphs = self.exec == Exec::Graph && !self.one_by_one.get();
        if graphs && let Some(graph) = self.graphs.borrow().get(&part) {
            return Ok(graph.launch()?);
        }
        let pool = self.backend.pool();
        if graphs {
            pool.finish_planning();
        }
        let step = pool.step(part.key());
        if graphs && step.is_planned() {
            return self.capture(part, work);
        }
        work()
    }

    /// Captures `work`, whose step of the pool is planned, and launches it.
    fn capture(&self, part: Part, work: impl FnOnce() -> Result<()>) -> Result<()> {
        let pool = self.backend.pool();
        let misses = pool.stats().plan_misses;
        if !self.backend.begin_capture().map_err(WorkerError::Capture)? {
            return work();
        }
        let done = work();
        // Also after a failure: the stream would go on recording.
        let graph = self.backend.end_capture();
        done?;
        let graph = graph.map_err(WorkerError::Capture)?;
        graph.launch().map_err(WorkerError::Capture)?;
        // A buffer that is not in the plan is its own until the launch before this line, no longer.
        if pool.stats().plan_misses == misses {
            pool.pin_plans();
            self.graphs.borrow_mut().insert(part, graph);
        } else {
            self.spent.borrow_mut().push(graph);
        }
        Ok(())
    }

    /// Whether work is to run operation by operation, whatever was captured.
    pub(super) fn one_by_one(&self, one_by_one: bool) {
        self.one_by_one.set(one_by_one);
    }

    /// Gives all graphs up.
    pub(super) fn forget(&self) {
        self.graphs.borrow_mut().clear();
        self.spent.borrow_mut().clear();
    }
}
