//! A collective that skips the communication of gradients and weights, but not that of activations. It is for
//! benchmarks and dry runs only, as the replicas drift apart.
//!
//! A training step with [`except_small`](SkipAllReduce::except_small) takes as long as the computation of its slowest
//! rank; a complete step additionally takes the communication time that backward does not hide. With
//! [`all`](SkipAllReduce::all) every rank takes as long as its own computation; the difference between the two is the
//! time spent waiting for the slowest rank.
//!
//! A benchmark does gather the weights in its first step and keeps them. Without that, the memory of sharded weights
//! would hold zeros, and multiplying matrices of zeros takes less power, and so less time.

use xlaunch_comm::{AbortHandle, Among, Collective, Exchange, Operation, Result, Wait};
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

    fn divide(&mut self, size: usize) -> Result<()> {
        self.inner.divide(size)
    }

    fn start_among(&mut self, among: Among, operation: Operation) -> Result<()> {
        let runs = match &operation {
            Operation::AllReduce { buckets, .. } => {
                let bytes: usize = buckets.iter().map(Lease::bytes).sum();
                self.gathers &= bytes > SMALL_ALL_REDUCE_BYTES;
                bytes <= self.max_bytes
            }
            Operation::ReduceScatter { .. } => false,
            Operation::AllGather { .. } => self.gathers,
            Operation::Broadcast { .. } => true,
        };
        if !runs {
            return self.inner.check();
        }
        self.started = true;
        self.inner.start_among(among, operation)
    }

    fn exchange(&mut self, exchange: Exchange) -> Result<()> {
        self.inner.exchange(exchange)
    }

    fn wait(&mut self, wait: Wait) -> Result<()> {
        let waits = match wait {
            Wait::OldestScatter => false,
            Wait::OldestGather => self.gathers,
            Wait::All => std::mem::take(&mut self.started),
        };
        if waits { self.inner.wait(wait) } else { self.inner.check() }
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

    use xlaunch_engine::{Backend, DType, PoolMode, Tensor};

    use super::*;
    use crate::model::BackendHandle;

    /// Records its calls.
    #[derive(Debug)]
    struct Recorder(Arc<Mutex<Vec<String>>>);

    impl Recorder {
        #[expect(clippy::unnecessary_wraps, reason = "the trait's methods return results")]
        fn record(&self, call: String) -> Result<()> {
            self.0.lock().unwrap().push(call);
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

        fn divide(&mut self, _: usize) -> Result<()> {
            Ok(())
        }

        fn exchange(&mut self, _: Exchange) -> Result<()> {
            Ok(())
        }

        fn start_among(&mut self, _: Among, operation: Operation) -> Result<()> {
            self.record(match operation {
                Operation::AllReduce { buckets, .. } => {
                    format!("all-reduce {}", buckets.iter().map(Lease::bytes).sum::<usize>())
                }
                Operation::ReduceScatter { .. } => "reduce-scatter".into(),
                Operation::AllGather { .. } => "all-gather".into(),
                Operation::Broadcast { .. } => "broadcast".into(),
            })
        }

        fn wait(&mut self, wait: Wait) -> Result<()> {
            self.record(format!("wait for {wait:?}"))
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
        let (half, dtype) = (|| tensor.lend(0..512), DType::F32);
        let pair = || vec![[half(), tensor.lend(512..1024)]];
        skip.start(Operation::AllGather { buckets: pair() }).unwrap();
        skip.wait(Wait::OldestGather).unwrap();
        skip.start(Operation::AllReduce { buckets: vec![half()], dtype }).unwrap();
        skip.start(Operation::ReduceScatter { buckets: pair(), dtype }).unwrap();
        skip.wait(Wait::OldestScatter).unwrap();
        skip.wait(Wait::All).unwrap();
        skip.run(Operation::AllReduce { buckets: vec![tensor.lend(0..4)], dtype }).unwrap();
    }

    #[test]
    fn only_started_operations_are_waited_for() {
        let none = [const { Vec::<String>::new() }; 2];
        assert_eq!(calls_of_two_steps(|inner| Box::new(SkipAllReduce::all(inner))), none);
        let small = ["all-reduce 16", "wait for All"];
        assert_eq!(calls_of_two_steps(|inner| Box::new(SkipAllReduce::except_small(inner))), [small; 2]);
    }

    #[test]
    fn benchmark_gathers_weights_once() {
        let calls_of = |communication| {
            calls_of_two_steps(|inner| SkipAllReduce::down_to(communication, inner))
                .map(|calls| calls.join(", "))
        };
        let gather = "all-gather, wait for OldestGather, wait for All";
        assert_eq!(calls_of(StepCommunication::None), [gather, ""]);
        let small = "all-reduce 16, wait for All";
        assert_eq!(calls_of(StepCommunication::SmallAllReduce), [&format!("{gather}, {small}"), small]);
    }
}
