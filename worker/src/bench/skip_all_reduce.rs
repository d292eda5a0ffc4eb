//! A collective that skips the communication of gradients and weights. For benchmarks and dry runs only: the replicas
//! drift apart.
//!
//! A training step with [`except_small`](SkipAllReduce::except_small) takes as long as the computation of its slowest
//! rank; a complete step takes longer by the communication that backward does not hide. With
//! [`all`](SkipAllReduce::all) every rank takes as long as its own computation; the difference between the two is the
//! time spent waiting for the slowest rank.
//!
//! A benchmark does gather the weights in its first step and keeps them. Without that, the memory of sharded weights
//! would hold zeros, and multiplying matrices of zeros takes less power, and so less time.

use xlaunch_comm::{AbortHandle, Collective, Result};
use xlaunch_engine::DType;
use xlaunch_pool::Lease;
use xlaunch_proto::v1::StepCommunication;

use crate::train::SMALL_ALL_REDUCE_BYTES;

/// Wraps a collective. Reduce-scatter, all-gather and all-reduces above a size do nothing.
#[derive(Debug)]
pub(crate) struct SkipAllReduce {
    inner: Box<dyn Collective>,
    /// Size of the largest all-reduce that is not skipped.
    max_bytes: usize,
    /// Gathers still run, because the first step's small all-reduce has not happened yet.
    gathers: bool,
    /// An operation was started and not yet waited for. Otherwise waits do nothing: during a capture, CUDA refuses to
    /// wait for an event from outside it.
    started: bool,
}

impl SkipAllReduce {
    /// Creates the collective of a benchmark.
    pub(crate) fn down_to(
        communication: StepCommunication,
        inner: Box<dyn Collective>,
    ) -> Box<dyn Collective> {
        match communication {
            StepCommunication::Unspecified | StepCommunication::Full => inner,
            StepCommunication::SmallAllReduce => Box::new(Self::except_small(inner).after_first_gathers()),
            StepCommunication::None => Box::new(Self::all(inner).after_first_gathers()),
        }
    }

    /// Skips every all-reduce.
    pub(crate) fn all(inner: Box<dyn Collective>) -> Self {
        Self::above(0, inner)
    }

    /// Skips everything except the small all-reduce at the end of a step.
    pub(crate) fn except_small(inner: Box<dyn Collective>) -> Self {
        Self::above(SMALL_ALL_REDUCE_BYTES, inner)
    }

    fn above(max_bytes: usize, inner: Box<dyn Collective>) -> Self {
        Self { inner, max_bytes, gathers: false, started: false }
    }

    fn after_first_gathers(self) -> Self {
        Self { gathers: true, ..self }
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

    fn all_reduce(&mut self, buckets: Vec<Lease>, dtype: DType) -> Result<()> {
        let bytes: usize = buckets.iter().map(Lease::bytes).sum();
        self.gathers &= bytes > SMALL_ALL_REDUCE_BYTES;
        if bytes > self.max_bytes {
            return self.inner.check();
        }
        self.started = true;
        self.inner.all_reduce(buckets, dtype)
    }

    fn reduce_scatter(&mut self, _: Vec<[Lease; 2]>, _: DType) -> Result<()> {
        self.inner.check()
    }

    fn all_gather(&mut self, buckets: Vec<[Lease; 2]>) -> Result<()> {
        if !self.gathers {
            return self.inner.check();
        }
        self.started = true;
        self.inner.all_gather(buckets)
    }

    fn wait_scatter(&mut self) -> Result<()> {
        Ok(())
    }

    fn wait_gather(&mut self) -> Result<()> {
        if self.gathers { self.inner.wait_gather() } else { self.inner.check() }
    }

    fn broadcast(&mut self, elements: Lease, root: usize) -> Result<()> {
        self.started = true;
        self.inner.broadcast(elements, root)
    }

    fn wait_all(&mut self) -> Result<()> {
        if std::mem::take(&mut self.started) { self.inner.wait_all() } else { self.inner.check() }
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

    use xlaunch_engine::{Backend, PoolMode, Tensor};

    use super::*;
    use crate::model::BackendHandle;

    /// Records its calls.
    #[derive(Debug)]
    struct Recorder(Arc<Mutex<Vec<String>>>);

    impl Recorder {
        #[expect(clippy::unnecessary_wraps, reason = "the trait's methods return results")]
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

        fn all_reduce(&mut self, buckets: Vec<Lease>, _: DType) -> Result<()> {
            self.record(format!("all-reduce {}", buckets.iter().map(Lease::bytes).sum::<usize>()))
        }

        fn reduce_scatter(&mut self, _: Vec<[Lease; 2]>, _: DType) -> Result<()> {
            self.record("reduce-scatter")
        }

        fn all_gather(&mut self, _: Vec<[Lease; 2]>) -> Result<()> {
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

    /// Returns the calls that reach the collective in two steps with a sharded optimizer.
    fn calls_of_two_steps(skip: impl FnOnce(Box<dyn Collective>) -> Box<dyn Collective>) -> [Vec<String>; 2] {
        let backend = BackendHandle::new(Backend::cpu(1, PoolMode::Off));
        let tensor = backend.alloc(DType::F32, 1024).unwrap();
        let calls = Arc::new(Mutex::new(Vec::new()));
        let mut skip = skip(Box::new(Recorder(calls.clone())));
        [(); 2].map(|()| {
            run_step(&tensor, &mut *skip);
            std::mem::take(&mut *calls.lock().unwrap())
        })
    }

    fn run_step(tensor: &Tensor, skip: &mut dyn Collective) {
        skip.all_gather(vec![[tensor.lend(0..512), tensor.lend(512..1024)]]).unwrap();
        skip.wait_gather().unwrap();
        skip.all_reduce(vec![tensor.lend(0..512)], DType::F32).unwrap();
        skip.reduce_scatter(vec![[tensor.lend(0..512), tensor.lend(512..1024)]], DType::F32).unwrap();
        skip.wait_scatter().unwrap();
        skip.wait_all().unwrap();
        skip.all_reduce(vec![tensor.lend(0..4)], DType::F32).unwrap();
        skip.wait_all().unwrap();
    }

    #[test]
    fn only_started_operations_are_waited_for() {
        let none = [const { Vec::<String>::new() }; 2];
        assert_eq!(calls_of_two_steps(|inner| Box::new(SkipAllReduce::all(inner))), none);
        let small = ["all-reduce 16", "wait for all"];
        assert_eq!(calls_of_two_steps(|inner| Box::new(SkipAllReduce::except_small(inner))), [small; 2]);
    }

    #[test]
    fn benchmark_gathers_weights_once() {
        let calls_of = |communication| {
            calls_of_two_steps(|inner| SkipAllReduce::down_to(communication, inner))
                .map(|calls| calls.join(", "))
        };
        let gather = "all-gather, wait for a gather, wait for all";
        assert_eq!(calls_of(StepCommunication::None), [gather, ""]);
        let small = "all-reduce 16, wait for all";
        assert_eq!(calls_of(StepCommunication::SmallAllReduce), [&format!("{gather}, {small}"), small]);
    }
}
