//! Attention on a GPU: selects the variant for a shape, and launches it.
//!
//! Short sequences with narrow heads run on our own kernels, whose blocks keep a whole head and which also apply the
//! rotary embedding. For everything else, a separate kernel first rotates `qkv` in place. Then the first of these runs:
//! our own kernels for compute capability 9.0, where they are faster than cuDNN's; cuDNN's, if it has some; our own for
//! compute capability 9.0, which are about as fast, if they support the shape; or our own tiled kernels.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::thread::JoinHandle;

use cudarc::driver::CudaFunction;
use xlaunch_pool::DType;

use super::cudnn::{AttentionPlan, CudnnAttention, Direction, Operands, Prepared};
use super::hopper::{self, QueryGradients};
use super::variant::{DELTA, Kernel, OwnKernels};
use super::{AttentionBackward, AttentionForward, AttentionShape};
use crate::cuda::cudnn::sequence_problem;
use crate::cuda::hopper::HopperKernel;
use crate::cuda::{Arg, Gpu, Launch, Macro, Source, args, expect};
use crate::error::{EngineError, Result};
use crate::ops::Documents;
use crate::ops::rope::{self, Rotation};
use crate::tensor::Slice;

/// Name in the log of the kernels whose blocks keep a whole head.
const WHOLE_HEAD: &str = "own kernels for whole heads";

/// A variant that a test forces, for shapes that it supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionVariant {
    /// Our own tiled kernels for any GPU.
    Portable,
    /// Our own kernels for compute capability 9.0, with this form of backward.
    Hopper(QueryGradients),
}

/// The variant that computes one direction of a shape, except for whole heads.
enum Selected {
    Hopper(&'static hopper::Kernels),
    Cudnn(Rc<AttentionPlan>),
    Portable,
}

/// State of attention that is kept between calls.
#[derive(Debug, Default)]
pub(crate) struct Attention {
    /// Our own kernels by head width, kind of scores, and name, compiled on first use.
    functions: RefCell<HashMap<(OwnKernels, &'static str), CudaFunction>>,
    /// cuDNN, opened on first use, or the reason why it is not used.
    cudnn: OnceCell<std::result::Result<CudnnAttention, String>>,
    preparing: RefCell<Option<JoinHandle<std::result::Result<Prepared, String>>>>,
    forced: Cell<Option<AttentionVariant>>,
}

impl Drop for Attention {
    /// The process must not exit while a thread is inside the library.
    fn drop(&mut self) {
        // If the thread panicked, the panic was printed already.
        let _ = self.preparing.take().map(JoinHandle::join);
    }
}

impl Attention {
    /// Starts to open cuDNN and to build its plans for a shape, if they will be used. Otherwise the first step would
    /// wait for that, up to several seconds.
    pub(crate) fn prepare(&self, gpu: &Gpu, s: AttentionShape) {
        let s = plain(s);
        if own_kernels(gpu, s).keeps_whole_head(s)
            || not_cudnn(gpu, s).is_some()
            || self.cudnn.get().is_some()
        {
            return;
        }
        let stream = gpu.device.stream.clone();
        let prepare = move || {
            let bound = stream.context().bind_to_thread().map_err(|error| error.to_string());
            bound.and_then(|()| Prepared::new(&stream, s))
        };
        // If the thread cannot be started, the first use does the work.
        let thread = std::thread::Builder::new().name("cudnn".into()).spawn(prepare);
        *self.preparing.borrow_mut() = thread.ok();
    }

    /// Returns the sources of our own kernels that compute this shape where cuDNN is installed, with their macros.
    pub(crate) fn sources(gpu: &Gpu, s: AttentionShape) -> Vec<(Source, Vec<Macro>)> {
        let s = plain(s);
        let (own, is_used) = (own_kernels(gpu, s), not_cudnn(gpu, s).is_some());
        let is_faster = |direction| hopper::is_faster_than_cudnn(s, direction);
        match hopper::select(gpu, s) {
            _ if own.keeps_whole_head(s) => vec![own.source()],
            Some(kernels) if is_used || is_faster(Direction::Forward) || is_faster(Direction::Backward) => {
                kernels.all().map(HopperKernel::compilation).collect()
            }
            None if is_used => vec![own.source()],
            _ => Vec::new(),
        }
    }

    pub(crate) fn forward(&self, gpu: &Gpu, a: AttentionForward<'_>) -> Result<()> {
        let AttentionForward { shape: s, qkv, rope, documents, out, lse } = a;
        let s = plain(s);
        let rows = s.batch * s.seq;
        gpu.expect_act(qkv, rows * s.qkv_width());
        gpu.expect_act(out, rows * s.heads * s.width);
        expect(lse, DType::F32, rows * s.heads);
        expect_table(s, rope);
        expect_documents(s, documents);
        let own = own_kernels(gpu, s);
        if own.keeps_whole_head(s) {
            gpu.variants.selected(Direction::Forward.operation(), s, WHOLE_HEAD, None);
            let args = args![qkv, rope, out, lse, s.seq, s.heads, s.scale()];
            // SAFETY: checked above.
            return unsafe { self.launch(gpu, s, Kernel::FwdWholeHead, args) };
        }
        if let Some(table) = rope {
            rope::cuda(gpu, s, qkv, table, documents, Rotation::Forward)?;
        }
        match self.select(gpu, s, Direction::Forward) {
            // SAFETY: checked above.
            Selected::Hopper(kernels) => unsafe { hopper::forward(gpu, kernels, s, a) },
            Selected::Cudnn(plan) => {
                let [qkv, out, lse] = [qkv, out, lse].map(Slice::address);
                let operands = Operands { qkv, out, lse, dout: 0, dqkv: 0 };
                // SAFETY: checked above.
                unsafe { self.run_cudnn(gpu, s, (&plan, Direction::Forward), &operands) }
            }
            Selected::Portable => {
                let first_keys = documents.map(|documents| documents.first);
                let sizes = args![s.seq, s.heads, s.kv_heads, s.scale(), s.window(), s.softcap()];
                let args = &[&args![qkv, out, lse, first_keys][..], sizes].concat();
                // SAFETY: checked above.
                unsafe { self.launch(gpu, s, Kernel::Fwd, args) }
            }
        }
    }

    pub(crate) fn backward(&self, gpu: &Gpu, a: AttentionBackward<'_>) -> Result<()> {
        let AttentionBackward { shape: s, qkv, rope, documents, out, dout, lse, dqkv } = a;
        let s = plain(s);
        let rows = s.batch * s.seq;
        [qkv, dqkv].into_iter().for_each(|x| gpu.expect_act(x, rows * s.qkv_width()));
        [out, dout].into_iter().for_each(|x| gpu.expect_act(x, rows * s.heads * s.width));
        expect(lse, DType::F32, rows * s.heads);
        expect_table(s, rope);
        expect_documents(s, documents);
        if own_kernels(gpu, s).keeps_whole_head(s) {
            gpu.variants.selected(Direction::Backward.operation(), s, WHOLE_HEAD, None);
            let args = args![qkv, rope, out, dout, lse, dqkv, s.seq, s.heads, s.scale()];
            // SAFETY: checked above; each block writes its own head's parts of dqkv.
            return unsafe { self.launch(gpu, s, Kernel::BwdWholeHead, args) };
        }
        match self.select(gpu, s, Direction::Backward) {
            Selected::Hopper(kernels) => {
                let form = self.query_gradients(gpu, s);
                // SAFETY: checked above.
                unsafe { hopper::backward(gpu, kernels, (s, form), a) }
            }
            Selected::Cudnn(plan) => {
                let [qkv, out, lse, dout, dqkv] = [qkv, out, lse, dout, dqkv].map(Slice::address);
                let operands = Operands { qkv, out, lse, dout, dqkv };
                // SAFETY: checked above.
                unsafe { self.run_cudnn(gpu, s, (&plan, Direction::Backward), &operands) }
            }
            Selected::Portable => self.backward_in_tiles(gpu, a),
        }?;
        rope.map_or(Ok(()), |table| rope::cuda(gpu, s, dqkv, table, documents, Rotation::Back))
    }

    /// Computes backward with our own kernels. The caller has checked the operands.
    fn backward_in_tiles(&self, gpu: &Gpu, a: AttentionBackward<'_>) -> Result<()> {
        let AttentionBackward { qkv, documents, out, dout, lse, dqkv, .. } = a;
        let s = plain(a.shape);
        let rows = s.batch * s.seq * s.heads;
        let delta = gpu.alloc(DType::F32, rows)?;
        let delta_args = args![out, dout, delta.all(), s.batch, s.seq, s.heads];
        let sizes: &[Arg] = args![s.seq, s.heads, s.kv_heads, s.scale(), s.window(), s.softcap()];
        let args = |bounds: Option<Slice<'_>>| {
            [&args![qkv, dout, lse, delta.all(), dqkv, bounds][..], sizes].concat()
        };
        let query_args = args(documents.map(|documents| documents.first));
        let key_args = args(documents.map(|documents| documents.last));
        let own = own_kernels(gpu, s);
        let delta_launch = own.delta_launch(rows);
        // SAFETY: the caller has checked the operands; delta has one float per row and head; the others write disjoint
        // parts of dqkv.
        unsafe {
            self.launch_named(gpu, s, DELTA, delta_launch, delta_args)?;
            self.launch(gpu, s, Kernel::BwdQueries, &query_args)?;
            self.launch(gpu, s, Kernel::BwdKeys, &key_args)?;
            if own.has_separate_values() {
                self.launch(gpu, s, Kernel::BwdValues, &key_args)?;
            }
        }
        Ok(())
    }

    /// Enqueues one of our own kernels.
    ///
    /// # Safety
    /// Same as for [`Kernels::launch`](crate::cuda::Kernels::launch).
    unsafe fn launch(&self, gpu: &Gpu, s: AttentionShape, kernel: Kernel, args: &[Arg]) -> Result<()> {
        let launch = own_kernels(gpu, s).launch(kernel, s);
        // SAFETY: the caller's promise.
        unsafe { self.launch_named(gpu, s, kernel.name(), launch, args) }
    }

    /// # Safety
    /// Same as for [`launch`](Self::launch).
    unsafe fn launch_named(
        &self,
        gpu: &Gpu,
        s: AttentionShape,
        name: &'static str,
        launch: Launch,
        args: &[Arg],
    ) -> Result<()> {
        let loaded = self.functions.borrow().get(&(own_kernels(gpu, s), name)).cloned();
        let function = match loaded {
            Some(function) => function,
            None => self.load(gpu, s, name)?,
        };
        // SAFETY: the caller's promise.
        unsafe { gpu.kernels.launch_function(name, &function, launch, args) }
    }

    /// Compiles or loads all of our own kernels for this head width and kind of scores; returns the one with this name.
    fn load(&self, gpu: &Gpu, s: AttentionShape, name: &'static str) -> Result<CudaFunction> {
        let own = own_kernels(gpu, s);
        let (source, macros) = own.source();
        let (names, shared) = own.kernels();
        let loaded = gpu.kernels.load(source, &macros, &names)?;
        for kernel in shared {
            let function = loaded.get(kernel.name()).ok_or_else(|| EngineError::no_kernel(kernel.name()))?;
            gpu.kernels.allow_dynamic_shared(kernel.name(), function, own.shared(kernel))?;
        }
        let found = loaded.get(name).cloned().ok_or_else(|| EngineError::no_kernel(name))?;
        let loaded = loaded.into_iter().map(|(name, function)| ((own, name), function));
        self.functions.borrow_mut().extend(loaded);
        Ok(found)
    }

    /// Returns the library, which is opened on first use, or the reason why it is not used.
    fn cudnn(&self, gpu: &Gpu, s: AttentionShape) -> std::result::Result<&CudnnAttention, String> {
        if let Some(reason) = not_cudnn(gpu, s) {
            return Err(reason);
        }
        let open = || match self.preparing.take().map(JoinHandle::join) {
            Some(Ok(prepared)) => prepared.map(CudnnAttention::from),
            _ => CudnnAttention::open(&gpu.device.stream),
        };
        self.cudnn.get_or_init(open).as_ref().map_err(Clone::clone)
    }

    /// Makes later calls use this variant for all shapes that it supports; `None` restores the selection.
    pub(crate) fn force(&self, variant: Option<AttentionVariant>) {
        self.forced.set(variant);
    }

    /// Returns the form of backward for compute capability 9.0.
    fn query_gradients(&self, gpu: &Gpu, s: AttentionShape) -> QueryGradients {
        match self.forced.get() {
            Some(AttentionVariant::Hopper(form)) => form,
            _ if gpu.deterministic => QueryGradients::Separate,
            _ => hopper::faster_query_gradients(s),
        }
    }

    /// Selects the variant, and logs it.
    fn select(&self, gpu: &Gpu, s: AttentionShape, direction: Direction) -> Selected {
        match (self.forced.get(), hopper::select(gpu, s)) {
            (Some(AttentionVariant::Hopper(_)), Some(kernels)) => return Selected::Hopper(kernels),
            (Some(_), _) => return Selected::Portable,
            (None, _) => {}
        }
        let log = |variant, instead_of| gpu.variants.selected(direction.operation(), s, variant, instead_of);
        let hopper = hopper::select(gpu, s);
        if let Some(kernels) = hopper.filter(|_| hopper::is_faster_than_cudnn(s, direction)) {
            log(hopper::HOPPER_NAME, None);
            return Selected::Hopper(kernels);
        }
        let reason = match self.cudnn(gpu, s).and_then(|cudnn| cudnn.plan(s, direction)) {
            Ok(plan) => {
                log("cuDNN", None);
                return Selected::Cudnn(plan);
            }
            Err(reason) => reason,
        };
        if let Some(kernels) = hopper {
            // About as fast, so that a missing cuDNN is no reason for a warning.
            log(hopper::HOPPER_NAME, Some(("cuDNN", &reason)));
            return Selected::Hopper(kernels);
        }
        log(own_kernels(gpu, s).name(), Some(("cuDNN", &reason)));
        if not_cudnn(gpu, s).is_none()
            && let Some(reason) = self.cudnn(gpu, s).err().or_else(|| sequence_problem(s.seq))
        {
            gpu.variants.missing("attention takes about twice as long as with cuDNN", &reason);
        }
        Selected::Portable
    }

    /// Enqueues cuDNN's plan.
    ///
    /// # Safety
    /// The operands are the addresses of the operands of the plan's direction and shape.
    unsafe fn run_cudnn(
        &self,
        gpu: &Gpu,
        s: AttentionShape,
        (plan, direction): (&AttentionPlan, Direction),
        operands: &Operands,
    ) -> Result<()> {
        let operation = direction.operation();
        let failed =
            |reason| EngineError::Cuda { what: format!("failed to enqueue cuDNN's {operation}"), reason };
        let cudnn = self.cudnn(gpu, s).map_err(failed)?;
        let scratch = gpu.alloc(DType::U8, plan.scratch)?;
        gpu.device.profiler.time(
            &gpu.device.stream,
            || format!("{operation} by cuDNN"),
            // SAFETY: the plan is of this library; the scratch memory has the size it needs; the rest is the caller's
            // promise.
            || unsafe { cudnn.execute(plan, operands, scratch.all().address()) }.map_err(failed),
        )
    }
}

/// Returns the reason why cuDNN is not used on this GPU for these scores, if it is not.
fn not_cudnn(gpu: &Gpu, s: AttentionShape) -> Option<String> {
    match (gpu.deterministic, gpu.activations) {
        (true, _) => Some("the run is deterministic".into()),
        (false, DType::Bf16) if s.options.softcap.is_some() => Some("scores are capped".into()),
        (false, DType::Bf16) if s.options.documents => Some("rows hold several documents".into()),
        (false, DType::Bf16) => None,
        (false, other) => Some(format!("activations are {}", other.name())),
    }
}

/// Returns the shape without a window that hides nothing.
fn plain(s: AttentionShape) -> AttentionShape {
    AttentionShape { options: s.options.for_length(s.seq), ..s }
}

fn own_kernels(gpu: &Gpu, s: AttentionShape) -> OwnKernels {
    OwnKernels::select(gpu.precision, gpu.device.capability, s.width, s.options.into())
}

fn expect_documents(s: AttentionShape, documents: Option<Documents<'_>>) {
    assert_eq!(documents.is_some(), s.options.documents, "{s:?}");
    if let Some(documents) = documents {
        documents.check(s.batch * s.seq);
    }
}

fn expect_table(s: AttentionShape, rope: Option<Slice<'_>>) {
    if let Some(table) = rope {
        expect(table, DType::F32, s.seq * s.width);
    }
}
