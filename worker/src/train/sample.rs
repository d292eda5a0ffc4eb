//! Samples text from a byte-level model.

use xlaunch_engine::DType;
use xlaunch_proto::v1::Phase;

use super::trace;
use crate::error::Result;
use crate::model::{BackendHandle, Model, Rows};
use crate::phase;
use crate::random::Random;

/// Softmax temperature. Below 1 it favours likely bytes.
const TEMPERATURE: f64 = 0.8;

/// Returns `prompt` followed by `count` bytes sampled from the model. Invalid UTF-8, and control characters other than
/// newline and tab, are replaced by `\u{fffd}`, so that a sample cannot send escape sequences to a terminal.
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
        // Attention is causal: padding after the last byte has no effect, so one shape serves every length.
        let context = &text[text.len().saturating_sub(seq)..];
        let mut window: Vec<i32> = context.iter().map(|byte| i32::from(*byte)).collect();
        window.resize(seq, 0);
        backend.write_i32(tokens.all(), &window)?;
        let acts = model.forward(rows, tokens.all())?;
        backend.read_f32(acts.logits(context.len() - 1, vocab), &mut logits)?;
        phase::advance();
        text.push(draw(&logits, random.uniform()));
    }
    Ok(sanitize(&text))
}

/// The byte at which the cumulative softmax reaches `uniform`.
fn draw(logits: &[f32], uniform: f64) -> u8 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f64> =
        logits.iter().map(|logit| (f64::from(logit - largest) / TEMPERATURE).exp()).collect();
    let mut remaining = uniform * weights.iter().sum::<f64>();
    let index = weights.iter().position(|weight| {
        remaining -= weight;
        remaining <= 0.0
    });
    u8::try_from(index.unwrap_or(0)).unwrap_or(0)
}

fn sanitize(text: &[u8]) -> String {
    let shown = |c: char| if c.is_control() && c != '\n' && c != '\t' { '\u{fffd}' } else { c };
    String::from_utf8_lossy(text).chars().map(shown).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draw_favours_likely_bytes_and_covers_the_whole_range() {
        let mut logits = vec![-50.0; 256];
        logits[b'x' as usize] = 50.0;
        assert_eq!(draw(&logits, 0.5), b'x');
        let flat = vec![0.0; 256];
        assert_eq!((draw(&flat, 1.0 / 512.0), draw(&flat, 0.999)), (0, 255));
    }

    #[test]
    fn sample_contains_no_control_characters_or_invalid_utf8() {
        assert_eq!(sanitize(b"a\x1b[2J\n\xff"), "a\u{fffd}[2J\n\u{fffd}");
    }
}
