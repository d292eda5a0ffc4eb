//! A collective that skips the communication of gradients and weights, for benchmarks and dry runs only: replicas drift
//! apart.
//!
//! A training step with [`except_small`](SkipAllReduce::except_small) takes as long as its slowest rank computes; what
//! a complete one takes longer is the communication that backward does not hide. With [`all`](SkipAllReduce::all)
//! every rank takes as long as it computes itself; what the other takes longer is waiting for the slowest rank.

use xlaunch_comm::{AbortHandle, Collective, Result};
use xlaunch_engine::DType;
use xlaunch_pool::Lease;
use xlaunch_proto::v1::StepCommunication;

use crate::train::SMALL_ALL_REDUCE_BYTES;

/// Wraps a collective. Reduce-scatter, all-gather and all-reduces above a size do nothing.
#[derive(Debug)]
pub(crate) struct SkipAllReduce {
    inner: Box<dyn Collective>,
    /// The largest all-reduce that is not skipped.
    max_bytes: usize,
    /// Something was started that has not been waited for. Without it there is nothing to wait for: during a capture,
    /// CUDA refuses to wait for an event from outside of it.
    started: bool,
}

impl SkipAllReduce {
    /// The collective of a benchmark.
    pub(crate) fn down_to(
        communication: StepCommunication,
        inner: Box<dyn Collective>,
    ) -> Box<dyn Collective> {
        match communication {
            StepCommunication::Unspecified | StepCommunication::Full => inner,
            StepCommunication::SmallAllReduce => Box::new(Self::except_small(inner)),
            StepCommunication::None => Box::new(Self::all(inner)),
        }
    }

    /// Skips every all-reduce.
    pub(crate) fn all(inner: Box<dyn Collective>) -> Self {
        Self { inner, max_bytes: 0, started: false }
    }

    /// Skips all but the small all-reduce with which a step ends.
    pub(crate) fn except_small(inner: Box<dyn Collective>) -> Self {
        Self { inner, max_bytes: SMALL_ALL_REDUCE_BYTES, started: false }
    }
}

impl Collective for SkipAllReduce {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn register(&mut self, memory: Lease) -> Result<bool> {
        self.inner.register(memory)
    }

    fn all_reduce(&mut self, elements: Lease, dtype: DType) -> Result<()> {
        if elements.bytes() > self.max_bytes {
            return self.inner.check();
        }
        self.started = true;
        self.inner.all_reduce(elements, dtype)
    }

    fn reduce_scatter(&mut self, _: Lease, _: Lease, _: DType) -> Result<()> {
        self.inner.check()
    }

    fn all_gather(&mut self, _: Lease, _: Lease) -> Result<()> {
        self.inner.check()
    }

    fn wait_scatter(&mut self) -> Result<()> {
        Ok(())
    }

    fn wait_gather(&mut self) -> Result<()> {
        self.inner.check()
    }

    fn broadcast(&mut self, elements: Lease, root: usize) -> Result<()> {
        self.started = true;
        self.inner.broadcast(elements, root)
    }

    fn wait_all(&mut self) -> Result<()> {
        match std::mem::take(&mut self.started) {
            true => self.inner.wait_all(),
            false => self.inner.check(),
        }
    }

    fn check(&self) -> Result<()> {
        self.inner.check()
    }

    fn abort_handle(&self) -> AbortHandle {
        self.inner.abort_handle()
    }

    fn finalize(self: Box<Self>) -> Result<()> {
        self.inner.finalize()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use xlaunch_engine::{CpuBackend, PoolMode};

    use super::*;
    use crate::model::BackendHandle;

    /// Records its calls.
    #[derive(Debug)]
    struct Recorder(Arc<Mutex<Vec<String>>>);

    impl Recorder {
        #[expect(clippy::unnecessary_wraps, reason = "what the trait's methods return")]
        fn record(&self, call: impl Into<String>) -> Result<()> {
            self.0.lock().unwrap().push(call.into());
            Ok(())
        }
    }

    impl Collective for Recorder {
        fn rank(&self) -> usize {
            0
        }

        fn world_size(&self) -> usize {
            2
        }

        fn register(&mut self, _: Lease) -> Result<bool> {
            Ok(false)
        }

        fn all_reduce(&mut self, elements: Lease, _: DType) -> Result<()> {
            self.record(format!("all-reduce {}", elements.bytes()))
        }

        fn reduce_scatter(&mut self, _: Lease, _: Lease, _: DType) -> Result<()> {
            self.record("reduce-scatter")
        }

        fn all_gather(&mut self, _: Lease, _: Lease) -> Result<()> {
            self.record("all-gather")
        }

        fn wait_scatter(&mut self) -> Result<()> {
            self.record("wait for a scatter")
        }

        fn wait_gather(&mut self) -> Result<()> {
            self.record("wait for a gather")
        }

        fn broadcast(&mut self, _: Lease, _: usize) -> Result<()> {
            self.record("broadcast")
        }

        fn wait_all(&mut self) -> Result<()> {
            self.record("wait for all")
        }

        fn check(&self) -> Result<()> {
            Ok(())
        }

        fn abort_handle(&self) -> AbortHandle {
            AbortHandle::new(|| {})
        }

        fn finalize(self: Box<Self>) -> Result<()> {
            Ok(())
        }
    }

    /// The calls that reach the collective in a step with a sharded optimizer.
    fn calls_of_a_step(skip: fn(Box<dyn Collective>) -> SkipAllReduce) -> Vec<String> {
        let backend = BackendHandle::new(CpuBackend::new(1, PoolMode::Off));
        let tensor = backend.alloc(DType::F32, 1024).unwrap();
        let calls = Arc::new(Mutex::new(Vec::new()));
        let mut skip = skip(Box::new(Recorder(calls.clone())));
        skip.all_gather(tensor.lend(0..512), tensor.lend(512..1024)).unwrap();
        skip.wait_gather().unwrap();
        skip.all_reduce(tensor.lend(0..512), DType::F32).unwrap();
        skip.reduce_scatter(tensor.lend(0..512), tensor.lend(512..1024), DType::F32).unwrap();
        skip.wait_scatter().unwrap();
        skip.wait_all().unwrap();
        skip.all_reduce(tensor.lend(0..4), DType::F32).unwrap();
        skip.wait_all().unwrap();
        calls.lock().unwrap().clone()
    }

    #[test]
    fn only_what_was_started_is_waited_for() {
        assert_eq!(calls_of_a_step(SkipAllReduce::all), Vec::<String>::new());
        assert_eq!(calls_of_a_step(SkipAllReduce::except_small), ["all-reduce 16", "wait for all"]);
    }
}
