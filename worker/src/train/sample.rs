//! Text sampled from a byte-level model.

use xlaunch_engine::DType;
use xlaunch_proto::v1::Phase;

use super::trace;
use crate::error::Result;
use crate::model::init::Random;
use crate::model::{BackendHandle, Model, Rows};

/// Below 1, likely bytes become likelier.
const TEMPERATURE: f64 = 0.8;

/// `count` bytes that the model finds likely after `prompt`, which comes first in the text. Bytes that are not UTF-8 or
/// are control characters other than newline and tab show as `\u{fffd}`.
pub fn sample(
    backend: &BackendHandle,
    model: &Model,
    prompt: &[u8],
    count: usize,
    seed: u64,
) -> Result<String> {
    let _span = trace::span(Phase::Sample);
    let (seq, vocab) = (model.shape.seq, model.shape.vocab.min(256));
    let rows = Rows { batch: 1, seq };
    let mut random = Random::new(seed, "sample");
    let mut text: Vec<u8> = if prompt.is_empty() { vec![b'\n'] } else { prompt.to_vec() };
    let tokens = backend.alloc(DType::I32, seq)?;
    let mut logits = vec![0.0; vocab];
    for _ in 0..count {
        // Attention is causal: what stands behind the last byte does not matter, so one shape serves every length.
        let context = &text[text.len().saturating_sub(seq)..];
        let mut window: Vec<i32> = context.iter().map(|byte| i32::from(*byte)).collect();
        window.resize(seq, 0);
        backend.write_i32(tokens.all(), &window)?;
        let acts = model.forward(rows, tokens.all())?;
        backend.read_f32(acts.logits(context.len() - 1, vocab), &mut logits)?;
        text.push(draw(&logits, random.uniform()));
    }
    Ok(readable(&text))
}

/// The byte at which the cumulated softmax passes `uniform`.
fn draw(logits: &[f32], uniform: f64) -> u8 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f64> =
        logits.iter().map(|logit| (f64::from(logit - largest) / TEMPERATURE).exp()).collect();
    let mut left = uniform * weights.iter().sum::<f64>();
    let index = weights.iter().position(|weight| {
        left -= weight;
        left <= 0.0
    });
    u8::try_from(index.unwrap_or(0)).unwrap_or(0)
}

fn readable(text: &[u8]) -> String {
    let shown = |c: char| if c.is_control() && c != '\n' && c != '\t' { '\u{fffd}' } else { c };
    String::from_utf8_lossy(text).chars().map(shown).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn likely_bytes_are_drawn_and_the_last_one_is_reachable() {
        let mut logits = vec![-50.0; 256];
        logits[b'x' as usize] = 50.0;
        assert_eq!(draw(&logits, 0.5), b'x');
        let flat = vec![0.0; 256];
        assert_eq!((draw(&flat, 1.0 / 512.0), draw(&flat, 0.999)), (0, 255));
    }

    #[test]
    fn control_characters_and_broken_utf8_cannot_reach_a_terminal() {
        assert_eq!(readable(b"a\x1b[2J\n\xff"), "a\u{fffd}[2J\n\u{fffd}");
    }
}
