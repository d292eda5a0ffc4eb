//! Embedding on one thread, in token order: several tokens may share a row of the gradient.

use super::{EmbedBackward, EmbedForward};
use crate::cpu::Access;
use crate::ops::Documents;

pub(crate) fn forward(args: EmbedForward<'_>) {
    let (a, s) = (Access::new("embed_forward"), args.shape);
    let rows = s.batch * s.seq;
    let wpe = args.wpe.map(|wpe| a.read(wpe, wpe.len()));
    let wte = a.read(args.wte, args.wte.len());
    let positions = args.positions.map(|positions| a.read_i32(positions, rows));
    let bounds = Documents::read(args.documents, &a, rows, s.seq);
    let (tokens, out) = (a.read_i32(args.tokens, rows), a.write(args.out, rows * s.cols));
    for (n, (out, token)) in out.chunks_exact_mut(s.cols).zip(tokens).enumerate() {
        out.copy_from_slice(&wte[index(*token) * s.cols..][..s.cols]);
        if let Some(wpe) = wpe {
            let (row, at) = (n / s.seq, n % s.seq);
            let position = positions.map_or(at - bounds.first(row, at), |positions| index(positions[n]));
            let position = &wpe[position * s.cols..][..s.cols];
            out.iter_mut().zip(position).for_each(|(out, position)| *out += position);
        }
    }
}

pub(crate) fn backward(args: EmbedBackward<'_>) {
    let (a, s) = (Access::new("embed_backward"), args.shape);
    let rows = s.batch * s.seq;
    let mut dwpe = args.dwpe.map(|dwpe| a.write(dwpe, dwpe.len()));
    let dwte = a.write(args.dwte, args.dwte.len());
    let (tokens, dout) = (a.read_i32(args.tokens, rows), a.read(args.dout, rows * s.cols));
    let bounds = Documents::read(args.documents, &a, rows, s.seq);
    for (n, (dout, token)) in dout.chunks_exact(s.cols).zip(tokens).enumerate() {
        let row = &mut dwte[index(*token) * s.cols..][..s.cols];
        row.iter_mut().zip(dout).for_each(|(sum, dout)| *sum += dout);
        if let Some(dwpe) = &mut dwpe {
            let (row, at) = (n / s.seq, n % s.seq);
            let position = &mut dwpe[(at - bounds.first(row, at)) * s.cols..][..s.cols];
            position.iter_mut().zip(dout).for_each(|(sum, dout)| *sum += dout);
        }
    }
}

/// Converts an id to an index. The caller has checked the ids; a negative one would fail the bounds check.
fn index(token: i32) -> usize {
    usize::try_from(token).unwrap_or(usize::MAX / (1 << 24))
}
