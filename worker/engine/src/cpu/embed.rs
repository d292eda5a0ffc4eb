//! Token and position embeddings.

use crate::shapes::EmbedShape;

pub(super) fn fwd(s: EmbedShape, tokens: &[i32], wte: &[f32], wpe: Option<&[f32]>, out: &mut [f32]) {
    for (n, (out, token)) in out.chunks_exact_mut(s.cols).zip(tokens).enumerate() {
        out.copy_from_slice(row(wte, *token, s.cols));
        if let Some(wpe) = wpe {
            let position = &wpe[n % s.seq * s.cols..][..s.cols];
            out.iter_mut().zip(position).for_each(|(out, position)| *out += position);
        }
    }
}

/// One thread, in token order: several tokens may share a row.
pub(super) fn bwd(
    s: EmbedShape,
    tokens: &[i32],
    dout: &[f32],
    dwte: &mut [f32],
    mut dwpe: Option<&mut [f32]>,
) {
    for (n, (dout, token)) in dout.chunks_exact(s.cols).zip(tokens).enumerate() {
        let start = index(*token) * s.cols;
        dwte[start..start + s.cols].iter_mut().zip(dout).for_each(|(sum, dout)| *sum += dout);
        if let Some(dwpe) = &mut dwpe {
            let position = &mut dwpe[n % s.seq * s.cols..][..s.cols];
            position.iter_mut().zip(dout).for_each(|(sum, dout)| *sum += dout);
        }
    }
}

fn row(table: &[f32], token: i32, cols: usize) -> &[f32] {
    &table[index(token) * cols..][..cols]
}

/// Ids were checked when they were read; a negative one would be out of bounds like any other wrong one.
fn index(token: i32) -> usize {
    usize::try_from(token).unwrap_or(usize::MAX / (1 << 24))
}
