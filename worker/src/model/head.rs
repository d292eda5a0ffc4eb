//! The head: from the output of the final norm to logits, the loss and their gradients.
//!
//! Logits are the largest tensor of a model with a large vocabulary, and only the loss reads them. The loss and its
//! gradients are therefore computed in chunks of rows, so that the logits of only one chunk are in memory at a time. By
//! default, training has a single chunk with all rows.

use std::ops::Range;

use xlaunch_engine::{
    Accumulate, Cast, ClassifierShape, ColumnSum, DType, FusedClassifier, LinearBackwardInput,
    LinearBackwardWeight, LinearForward, LinearShape, Result, Scale, Slice, SoftCap, Sum, Tensor,
};

use super::Model;
use super::forward::{Activations, Output};
use super::gradient_arena::GradientArena;

/// Outputs for the gradients that are computed along with the loss.
#[derive(Clone, Copy, Debug)]
pub struct LossGradients<'a> {
    /// Factor by which the sum of all losses is scaled, (1,) F32; the gradients are those of the scaled sum.
    pub scale: Slice<'a>,
    /// Gradients of all parameters; the head's are written here.
    pub grads: GradientArena<'a>,
    /// Selects whether the gradients are added.
    pub acc: Accumulate,
    /// Further factors of the losses' gradients, (N,) F32.
    pub weights: Option<Slice<'a>>,
}

/// A chunk of logits with fewer rows than this makes matrix multiplications slow. Evaluation has no larger ones: their
/// memory would come on top of that of training.
pub const SMALLEST_CHUNK: usize = 2048;

impl Model {
    /// Computes the logits of `rows` of the pass, `[R, Vp]`.
    pub fn logits(&self, output: &Output<'_>, rows: Range<usize>) -> Result<Tensor> {
        let logits = self.unbounded_logits(output, rows)?;
        if let Some(cap) = self.logit_softcap() {
            self.backend.run(SoftCap { x: logits.all(), cap })?;
        }
        Ok(logits)
    }

    /// Computes logits before their soft cap, which the classifier applies itself.
    fn unbounded_logits(&self, output: &Output<'_>, rows: Range<usize>) -> Result<Tensor> {
        let shape = self.head_shape(rows.len());
        let logits = self.activation(shape.rows * shape.outputs)?;
        let x = output.last.y.slice(rows.start * shape.inputs..rows.end * shape.inputs);
        let (w, y) = (self.param(&self.layout.head), logits.all());
        let bias = self.layout.head_bias.as_ref().map(|bias| self.param(bias));
        self.backend.run(LinearForward { shape, x, w, bias, y })?;
        Ok(logits)
    }

    /// Writes the cross-entropy loss of every row to `losses` F32 `[N]`; 0 for ignored targets.
    pub fn loss(&self, output: &Output<'_>, targets: Slice<'_>, losses: Slice<'_>) -> Result<()> {
        for rows in self.chunks(output, SMALLEST_CHUNK) {
            let logits = self.unbounded_logits(output, rows.clone())?;
            self.classifier(&logits, rows, targets, losses, [None; 2])?;
        }
        Ok(())
    }

    /// Same as [`loss`](Self::loss), with the gradients of the head, unless it is frozen. Returns the gradient of the
    /// final norm's output.
    pub fn loss_and_gradients(
        &self,
        Activations { output, .. }: &Activations<'_>,
        targets: Slice<'_>,
        losses: Slice<'_>,
        LossGradients { scale, grads, acc, weights }: LossGradients<'_>,
    ) -> Result<Tensor> {
        let dim = self.shape.dim;
        let dy = self.activation(output.last.y.len())?;
        let dw = (!self.layout.is_frozen()).then(|| grads.slice(self.layout.head.clone()));
        let chunks = self.chunks(output, output.rows.count());
        // Every chunk adds to the gradient, which loses precision if the sum is rounded to Bf16 each time.
        let several = chunks.len() > 1 && acc == Accumulate::Overwrite;
        let rounded = dw.filter(|dw| dw.dtype() == DType::Bf16 && several);
        let exact = rounded.map(|dw| self.backend.alloc(DType::F32, dw.len())).transpose()?;
        let sum = exact.as_ref().map(Tensor::all).or(dw);
        for (number, rows) in chunks.enumerate() {
            let logits = self.unbounded_logits(output, rows.clone())?;
            self.classifier(&logits, rows.clone(), targets, losses, [Some(scale), weights])?;
            let (shape, dlogits) = (self.head_shape(rows.len()), logits.all());
            let elements = rows.start * dim..rows.end * dim;
            let (w, dx) = (self.param(&self.layout.head), dy.slice(elements.clone()));
            self.backend.run(LinearBackwardInput { shape, dy: dlogits, w, dx })?;
            let Some(dw) = sum else { continue };
            let acc = if number == 0 { acc } else { Accumulate::Add };
            let x = output.last.y.slice(elements);
            self.backend.run(LinearBackwardWeight { shape, dy: dlogits, x, dw, acc })?;
            if let Some(bias) = &self.layout.head_bias {
                let (rows, cols, out) = (shape.rows, shape.outputs, grads.slice(bias.clone()));
                self.backend.run(ColumnSum { rows, cols, x: dlogits, out, acc })?;
            }
        }
        if let Some((exact, dw)) = exact.zip(dw) {
            self.backend.run(Cast { x: exact.all(), y: dw })?;
        }
        Ok(dy)
    }

    /// Writes (or adds) `scale * sum(losses)` to `out[0]`.
    pub fn scaled_loss(
        &self,
        losses: &Tensor,
        scale: Slice<'_>,
        out: Slice<'_>,
        acc: Accumulate,
    ) -> Result<()> {
        self.backend.run(Sum { x: losses.all(), scale: Scale::Memory(scale), out, acc })
    }

    /// Computes the losses of a chunk's rows. With a factor, overwrites the logits with their gradients.
    fn classifier(
        &self,
        logits: &Tensor,
        rows: Range<usize>,
        targets: Slice<'_>,
        losses: Slice<'_>,
        [grad_scale, weights]: [Option<Slice<'_>>; 2],
    ) -> Result<()> {
        let (vocab, padded) = (self.shape.vocab, self.shape.padded_vocab());
        self.backend.run(FusedClassifier {
            shape: ClassifierShape { rows: rows.len(), vocab, padded },
            logits: logits.all(),
            targets: targets.slice(rows.clone()),
            losses: losses.slice(rows.clone()),
            grad_scale,
            weights: weights.map(|weights| weights.slice(rows)),
            softcap: self.logit_softcap(),
        })
    }

    /// Splits the rows of the pass into chunks of `train.classifier_chunk`, or of `default` rows if that is 0.
    fn chunks(
        &self,
        output: &Output<'_>,
        default: usize,
    ) -> impl ExactSizeIterator<Item = Range<usize>> + use<> {
        let rows = output.rows.count();
        let most = if self.memory.classifier_chunk == 0 { default } else { self.memory.classifier_chunk };
        (0..rows.div_ceil(most)).map(move |chunk| chunk * most..rows.min((chunk + 1) * most))
    }

    fn head_shape(&self, rows: usize) -> LinearShape {
        LinearShape { rows, inputs: self.shape.dim, outputs: self.shape.padded_vocab() }
    }
}
