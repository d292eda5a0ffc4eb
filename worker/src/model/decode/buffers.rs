//! The buffers of a pass, and the tokens that it reads.

use xlaunch_engine::{CachedAttentionShape, DType, EngineError, Result, Tensor};
use xlaunch_spec::model::QkNorm;

use crate::model::expert_buffers::ExpertBuffers;
use crate::model::{Model, Rows, attention_options};

/// The next token of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Slot of the sequence.
    pub slot: usize,
    /// Number of tokens before this one.
    pub position: usize,
    /// Id of the token, below the vocabulary size.
    pub token: u32,
}

/// Inputs and activations of a pass of up to `rows` rows.
#[derive(Debug)]
pub(super) struct Buffers {
    pub(super) tokens: Tensor,
    pub(super) slots: Tensor,
    pub(super) positions: Tensor,
    /// The residual stream, before and after an addition.
    pub(super) x: [Tensor; 2],
    pub(super) y: Tensor,
    pub(super) stats: Tensor,
    pub(super) qkv: Tensor,
    /// `qkv` with normalised queries and keys; empty if the model does not normalise them.
    pub(super) normed: Tensor,
    pub(super) att: Tensor,
    pub(super) branch: Tensor,
    pub(super) h: Tensor,
    pub(super) a: Tensor,
    pub(super) partials: Tensor,
    pub(super) counters: Tensor,
    /// Inputs of the adapters' second matrices; empty without adapters.
    pub(super) z: Tensor,
    /// `None` without experts.
    pub(super) experts: Option<ExpertBuffers>,
}

impl Buffers {
    pub(super) fn new(model: &Model, rows: usize, slots: usize, capacity: usize) -> Result<Self> {
        let (shape, backend) = (&model.shape, &model.backend);
        let attention = attention_shape(model, 0, slots, capacity);
        let act = |cols: usize| backend.alloc(backend.activation_dtype(), rows * cols);
        let ints = |len: usize| {
            let tensor = backend.alloc(DType::I32, len)?;
            backend.zero(tensor.all())?;
            Ok::<Tensor, EngineError>(tensor)
        };
        let partials = (1..=rows).map(|rows| CachedAttentionShape { rows, ..attention }.partials()).max();

        let stats = model.norm_shape(Rows::new(rows, 1)).stats();
        Ok(Self {
            tokens: ints(rows)?,
            slots: ints(rows)?,
            positions: ints(rows)?,
            x: [act(shape.dim)?, act(shape.dim)?],
            y: act(shape.dim)?,
            stats: backend.alloc(DType::F32, stats)?,
            qkv: act(shape.qkv_width())?,
            normed: act(if shape.qk_norm == QkNorm::None { 0 } else { shape.qkv_width() })?,
            att: act(shape.attention_width())?,
            branch: act(shape.dim)?,
            h: act(shape.ffn_inputs().max(shape.shared_inputs()))?,
            a: act(shape.ffn.max(shape.shared_width()))?,
            partials: backend.alloc(DType::F32, partials.unwrap_or(0))?,
            counters: ints(rows * shape.heads)?,
            z: act(model.widest_adapter())?,
            experts: (shape.experts > 0).then(|| ExpertBuffers::new(model, rows)).transpose()?,
        })
    }

    pub(super) fn write(&self, model: &Model, rows: &[Row]) -> Result<()> {
        let write = |tensor: &Tensor, value: fn(&Row) -> usize| {
            let values: Vec<i32> = rows.iter().map(|row| id(value(row))).collect();
            model.backend.write_i32(tensor.slice(0..rows.len()), &values)
        };
        write(&self.tokens, |row| row.token as usize)?;
        write(&self.slots, |row| row.slot)?;
        write(&self.positions, |row| row.position)
    }
}

/// Returns the rows of a prompt in a slot.
pub(super) fn prompt_rows(slot: usize, tokens: &[u32]) -> impl Iterator<Item = Row> {
    tokens.iter().enumerate().map(move |(position, token)| Row { slot, position, token: *token })
}

pub(super) fn attention_shape(
    model: &Model,
    block: usize,
    slots: usize,
    capacity: usize,
) -> CachedAttentionShape {
    let shape = &model.shape;
    let (heads, kv_heads, width) = (shape.heads, shape.kv_heads, shape.head_width());
    let options = attention_options(shape, block);
    CachedAttentionShape { rows: 0, heads, kv_heads, width, slots, capacity, options }
}

/// Converts a number of the model to an id; all of them are below 2^31.
pub(super) fn id(number: usize) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}
