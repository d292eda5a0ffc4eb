//! Initial weights: a pure function of (seed, parameter name, position), the same on every device, rank and layout.

use rayon::ThreadPool;
use rayon::prelude::*;
use xlaunch_proto::ids::Digest;

use super::layout::{Init, Layout, Piece};

/// The whole parameter arena with its initial values, the same from any number of threads.
pub fn weights(layout: &Layout, seed: u64, threads: &ThreadPool) -> Vec<f32> {
    let mut arena = vec![0.0; layout.len];
    let fill = |Piece { param, first, values }: Piece<'_>| match param.init {
        Init::Zeros => {}
        Init::Ones => values.fill(1.0),
        Init::Normal(deviation) => {
            let mut normal = Normal::at(seed, &param.name, first);
            values.fill_with(|| normal.next() * deviation);
        }
    };
    threads.install(|| layout.pieces(&mut arena).into_par_iter().for_each(fill));
    arena
}

/// Between the states of a stream.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// A stream of random 64-bit numbers: SplitMix64 (Steele, Lea and Flood, 2014).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The stream of this seed and purpose.
    pub fn new(seed: u64, purpose: &str) -> Self {
        let digest = Digest::of(&[&seed.to_le_bytes(), purpose.as_bytes()].concat());
        Self(digest.0.iter().take(8).fold(0, |state, byte| state << 8 | u64::from(*byte)))
    }

    /// Goes past so many numbers.
    fn skip(&mut self, numbers: u64) {
        self.0 = self.0.wrapping_add(STEP.wrapping_mul(numbers));
    }

    /// The next number.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        mix(self.0)
    }

    /// Uniform in (0, 1].
    #[expect(clippy::cast_precision_loss, reason = "53 bits are exact")]
    pub fn uniform(&mut self) -> f64 {
        ((self.bits() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }
}

/// SplitMix64's output function: a bijection that scatters neighbouring numbers.
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Normal numbers in pairs, by Box and Muller's transform.
struct Normal {
    random: Random,
    spare: Option<f32>,
}

impl Normal {
    /// From the number of this even position on: a pair takes two random numbers.
    fn at(seed: u64, name: &str, position: usize) -> Self {
        debug_assert!(position.is_multiple_of(2));
        let mut random = Random::new(seed, name);
        random.skip(position as u64);
        Self { random, spare: None }
    }

    #[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is meant")]
    fn next(&mut self) -> f32 {
        self.spare.take().unwrap_or_else(|| {
            let radius = (-2.0 * self.random.uniform().ln()).sqrt();
            let (sin, cos) = (std::f64::consts::TAU * self.random.uniform()).sin_cos();
            self.spare = Some((radius * sin) as f32);
            (radius * cos) as f32
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rayon::ThreadPoolBuilder;
    use xlaunch_proto::model::{ModelSection, PRESETS};

    fn threads(count: usize) -> ThreadPool {
        ThreadPoolBuilder::new().num_threads(count).build().unwrap()
    }

    #[test]
    fn weights_have_the_asked_spread_and_depend_on_the_seed() {
        let layout = Layout::new(&PRESETS[0].1);
        let arena = weights(&layout, 1, &threads(1));
        let wte = layout.params.iter().find(|param| param.name == "wte.weight").unwrap();
        let values = &arena[wte.stored()];
        let mean = values.iter().sum::<f32>() / values.len() as f32;
        let deviation = (values.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / values.len() as f32).sqrt();
        assert!(mean.abs() < 1e-3 && (deviation - 0.02).abs() < 1e-3, "{mean} {deviation}");
        assert_eq!(arena, weights(&layout, 1, &threads(3)));
        assert_ne!(arena, weights(&layout, 2, &threads(1)));
    }

    #[test]
    fn weights_are_the_same_stream_whatever_the_pieces_and_threads() {
        let section = ModelSection {
            layers: Some(1),
            dim: Some(32),
            heads: Some(2),
            vocab: Some(20_001),
            ..Default::default()
        };
        let layout = Layout::new(&section.resolve().unwrap());
        let arena = weights(&layout, 3, &threads(3));
        for param in &layout.params {
            let Init::Normal(deviation) = param.init else { continue };
            let mut normal = Normal::at(3, &param.name, 0);
            let values = &arena[param.stored()];
            assert!(values.iter().all(|value| *value == normal.next() * deviation), "{}", param.name);
        }
        assert!(layout.params.iter().any(|param| param.stored().len() > 600_000), "more than two pieces");
    }

    #[test]
    fn parameters_of_one_shape_differ() {
        let layout = Layout::new(&PRESETS[0].1);
        let arena = weights(&layout, 1, &threads(1));
        let first = |block: usize| arena[layout.blocks[block].qkv.weight.start];
        assert_ne!(first(0), first(1));
    }
}
