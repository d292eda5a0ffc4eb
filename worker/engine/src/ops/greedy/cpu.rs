//! Greedy decoding on one thread.

use super::Greedy;
use crate::cpu::Access;

#[expect(clippy::cast_precision_loss, reason = "ids are below 2^24")]
pub(crate) fn run(args: Greedy<'_>) {
    let a = Access::new("greedy");
    let (tokens, positions) = (a.write_i32(args.tokens, args.rows), a.write_i32(args.positions, args.rows));
    let (logits, ids) = (a.read(args.logits, args.logits.len()), a.write(args.ids, args.rows));
    let last = i32::try_from(args.last).unwrap_or(i32::MAX);
    for (n, logits) in logits.chunks_exact(logits.len() / args.rows).enumerate() {
        let (mut best, mut largest) = (None, f32::NEG_INFINITY);
        for (id, logit) in logits[..args.vocab].iter().enumerate() {
            if *logit > largest {
                (best, largest) = (Some(id), *logit);
            }
        }
        ids[n] = best.map_or(-1.0, |id| id as f32);
        tokens[n] = best.and_then(|id| i32::try_from(id).ok()).unwrap_or(0);
        positions[n] = (positions[n] + 1).min(last);
    }
}
