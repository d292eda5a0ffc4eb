//! Attention: which way it goes for a shape, and its launches.
//!
//! Of short sequences and narrow heads, our own kernels whose blocks keep a whole head, and turn queries and keys by their
//! positions in passing. Otherwise cuDNN's where it has some (see `cudnn`), otherwise our own in tiles (`path`), both behind a
//! kernel that turns `qkv` in place.

mod path;

use std::rc::Rc;

use super::cudnn::{AttentionPlan, Cudnn, Direction, Operands};
use super::kernels::{Launch, args};
use super::{CudaBackend, THREADS, expect};
use crate::DType;
use crate::backend::{Backend, EngineError, Result};
use crate::shapes::AttentionShape;
use crate::tensor::Slice;
use path::Kernel;
pub(super) use path::Path;

/// How the log calls the kernels whose blocks keep a whole head.
const WHOLE: &str = "own kernels for whole heads";

impl CudaBackend {
    /// [`Backend::attention_fwd`].
    pub(super) fn attention_forward(
        &self,
        s: AttentionShape,
        qkv: Slice<'_>,
        rope: Option<Slice<'_>>,
        out: Slice<'_>,
        lse: Slice<'_>,
    ) -> Result<()> {
        let rows = s.batch * s.seq;
        self.act(qkv, rows * s.qkv_width());
        self.act(out, rows * s.heads * s.width);
        expect(lse, DType::F32, rows * s.heads);
        if let Some(table) = rope {
            expect(table, DType::F32, s.seq * s.width);
        }
        let path = self.kernels.attention(s.width);
        if path.keeps_whole(s) {
            self.fallback.took(Direction::Forward.operation(), s, WHOLE, None);
            let args = args![qkv, rope, out, lse, s.seq, s.heads, s.scale()];
            let launch = path.launch(Kernel::FwdWhole, s);
            // SAFETY: checked above.
            return unsafe { self.kernels.launch_attention("attention_fwd_whole", s.width, launch, args) };
        }
        if let Some(table) = rope {
            self.turn(s, qkv, table, 1.0)?;
        }
        if let Some(plan) = self.cudnn_plan(s, Direction::Forward) {
            let [qkv, out, lse] = [qkv, out, lse].map(Slice::address);
            let operands = Operands { qkv, out, lse, dout: 0, dqkv: 0 };
            // SAFETY: checked above.
            return unsafe { self.cudnn_execute(&plan, Direction::Forward, &operands) };
        }
        let args = args![qkv, out, lse, s.seq, s.heads, s.kv_heads, s.scale()];
        // SAFETY: checked above.
        unsafe { self.kernels.launch_attention("attention_fwd", s.width, path.launch(Kernel::Fwd, s), args) }
    }

    /// [`Backend::attention_bwd`].
    #[expect(clippy::too_many_arguments, reason = "a backward takes what its forward took, made and gets")]
    pub(super) fn attention_backward(
        &self,
        s: AttentionShape,
        qkv: Slice<'_>,
        rope: Option<Slice<'_>>,
        out: Slice<'_>,
        dout: Slice<'_>,
        lse: Slice<'_>,
        dqkv: Slice<'_>,
    ) -> Result<()> {
        let rows = s.batch * s.seq;
        [qkv, dqkv].into_iter().for_each(|x| self.act(x, rows * s.qkv_width()));
        [out, dout].into_iter().for_each(|x| self.act(x, rows * s.heads * s.width));
        expect(lse, DType::F32, rows * s.heads);
        if let Some(table) = rope {
            expect(table, DType::F32, s.seq * s.width);
        }
        let path = self.kernels.attention(s.width);
        if path.keeps_whole(s) {
            self.fallback.took(Direction::Backward.operation(), s, WHOLE, None);
            let args = args![qkv, rope, out, dout, lse, dqkv, s.seq, s.heads, s.scale()];
            let launch = path.launch(Kernel::BwdWhole, s);
            // SAFETY: checked above; each block writes its head's parts of dqkv.
            return unsafe { self.kernels.launch_attention("attention_bwd_whole", s.width, launch, args) };
        }
        if let Some(plan) = self.cudnn_plan(s, Direction::Backward) {
            let [qkv, out, lse, dout, dqkv] = [qkv, out, lse, dout, dqkv].map(Slice::address);
            let operands = Operands { qkv, out, lse, dout, dqkv };
            // SAFETY: checked above.
            unsafe { self.cudnn_execute(&plan, Direction::Backward, &operands) }?;
        } else {
            self.backward_in_tiles(path, s, qkv, out, dout, lse, dqkv)?;
        }
        rope.map_or(Ok(()), |table| self.turn(s, dqkv, table, -1.0))
    }

    /// Backward by our own kernels, of operands that were checked.
    #[expect(clippy::too_many_arguments, reason = "a backward takes what its forward took, made and gets")]
    fn backward_in_tiles(
        &self,
        path: Path,
        s: AttentionShape,
        qkv: Slice<'_>,
        out: Slice<'_>,
        dout: Slice<'_>,
        lse: Slice<'_>,
        dqkv: Slice<'_>,
    ) -> Result<()> {
        let rows = s.batch * s.seq * s.heads;
        let delta = self.alloc(DType::F32, rows)?;
        let delta_args = args![out, dout, delta.all(), s.batch, s.seq, s.heads];
        let args = args![qkv, dout, lse, delta.all(), dqkv, s.seq, s.heads, s.kv_heads, s.scale()];
        let launch = |name, launch, args| {
            // SAFETY: the caller checked the operands; delta has one float per row and head; the last two kernels write disjoint
            // parts of dqkv.
            unsafe { self.kernels.launch_attention(name, s.width, launch, args) }
        };
        launch("attention_bwd_delta", path.delta_launch(rows), delta_args)?;
        launch("attention_bwd_queries", path.launch(Kernel::BwdQueries, s), args)?;
        launch("attention_bwd_keys", path.launch(Kernel::BwdKeys, s), args)
    }

    /// Turns the query and key heads of `qkv` by their positions, forward or (`direction` -1) back. Operands were checked.
    fn turn(&self, s: AttentionShape, qkv: Slice<'_>, table: Slice<'_>, direction: f32) -> Result<()> {
        let rows = s.batch * s.seq;
        let rotated = s.heads + s.kv_heads;
        let threads = rows * rotated * (s.width / 2).div_ceil(8);
        assert!(u32::try_from(threads).is_ok(), "{s:?} has more pairs than the kernel can count");
        let args = args![qkv, table, rows, s.seq, rotated, s.width, s.qkv_width(), direction];
        // SAFETY: the caller checked the operands; there is a thread for every eight pairs.
        unsafe { self.launch("rope", Launch::blocks(threads.div_ceil(THREADS as usize), THREADS), args) }
    }

    /// The library, opened here the first time; or why attention goes without it.
    fn cudnn(&self) -> std::result::Result<&Cudnn, String> {
        let open = || match (self.deterministic, self.activations) {
            (true, _) => Err("the run is to be deterministic".into()),
            (false, DType::Bf16) => Cudnn::open(&self.device.stream),
            (false, other) => Err(format!("activations are {}", other.name())),
        };
        self.cudnn.get_or_init(open).as_ref().map_err(Clone::clone)
    }

    /// cuDNN's plan, where it is the way to go.
    fn cudnn_plan(&self, s: AttentionShape, direction: Direction) -> Option<Rc<AttentionPlan>> {
        let plan = self.cudnn().and_then(|cudnn| cudnn.plan(s, direction));
        let own = match self.kernels.attention(s.width) {
            Path::Mma { .. } => "own kernels on matrix units",
            Path::Plain { .. } => "own kernels on plain units",
        };
        let (path, instead_of) = match &plan {
            Ok(_) => ("cuDNN", None),
            Err(reason) => (own, Some(("cuDNN", reason.as_str()))),
        };
        self.fallback.took(direction.operation(), s, path, instead_of);
        plan.ok()
    }

    /// Enqueues cuDNN's plan.
    ///
    /// # Safety
    /// The operands are addresses of what the operation of the plan's direction and shape has.
    unsafe fn cudnn_execute(
        &self,
        plan: &AttentionPlan,
        direction: Direction,
        operands: &Operands,
    ) -> Result<()> {
        let operation = direction.operation();
        let failed =
            |reason| EngineError::Cuda { what: format!("failed to enqueue cuDNN's {operation}"), reason };
        let cudnn = self.cudnn().map_err(failed)?;
        let scratch = self.alloc(DType::U8, plan.scratch)?;
        self.device.profiler.time(
            &self.device.stream,
            || format!("{operation} by cuDNN"),
            // SAFETY: the plan is of this library; the scratch memory is as large as it wants; the rest is the caller's
            // promise.
            || unsafe { cudnn.execute(plan, operands, scratch.all().address()) }.map_err(failed),
        )
    }
}

impl Direction {
    fn operation(self) -> &'static str {
        match self {
            Self::Forward => "attention_fwd",
            Self::Backward => "attention_bwd",
        }
    }
}
