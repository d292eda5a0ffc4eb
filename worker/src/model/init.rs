//! Initial weights: a pure function of (seed, parameter name, position). They are the same on every device and rank, in
//! every layout, and for any number of threads.

use std::convert::Infallible;
use std::sync::{Mutex, PoisonError};

use rayon::ThreadPool;
use rayon::prelude::*;

use super::layout::{Init, Parameters, Part};
use crate::random::{Random, stream};

/// Generates the initial values on these threads. `sink` receives the offset in the arena and the values of one part at
/// a time, in any order; values outside all parts are zero. An error returned by `sink` ends the generation.
pub fn generate<E: Send>(
    layout: &Parameters,
    seed: u64,
    threads: &ThreadPool,
    sink: impl Fn(usize, Vec<f32>) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let fill = |Part { param, first, len }: Part<'_>| {
        let mut random = stream(seed, &param.name);
        random.skip(first as u64);
        let values = match param.init {
            Init::Zeros => return Ok(()),
            Init::Ones => vec![1.0; len],
            Init::Uniform(bound) => {
                #[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is intended")]
                let value = |random: &mut Random| (2.0 * random.uniform() - 1.0) as f32 * bound;
                (0..len).map(|_| value(&mut random)).collect()
            }
            Init::Normal(deviation) => {
                let mut values = vec![0.0; len];
                random.fill_normal(&mut values, deviation);
                values
            }
        };
        sink(param.range.start + first, values)
    };
    threads.install(|| layout.parts().into_par_iter().try_for_each(fill))
}

/// Returns the whole parameter arena with its initial values.
pub fn weights(layout: &Parameters, seed: u64, threads: &ThreadPool) -> Vec<f32> {
    let arena = Mutex::new(vec![0.0; layout.len]);
    let Ok(()) = generate(layout, seed, threads, |at, values| {
        let mut arena = arena.lock().unwrap_or_else(PoisonError::into_inner);
        arena[at..at + values.len()].copy_from_slice(&values);
        Ok::<_, Infallible>(())
    });
    arena.into_inner().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::layout::Layout;
    use rayon::ThreadPoolBuilder;
    use xlaunch_spec::model::{ModelSection, PRESETS};

    fn threads(count: usize) -> ThreadPool {
        ThreadPoolBuilder::new().num_threads(count).build().unwrap()
    }

    #[test]
    fn weights_have_the_configured_deviation_and_depend_on_the_seed() {
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
    fn weights_do_not_depend_on_parts_and_threads() {
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
            let mut values = vec![0.0; param.stored().len()];
            stream(3, &param.name).fill_normal(&mut values, deviation);
            assert_eq!(arena[param.stored()], values, "{}", param.name);
        }
        assert!(layout.params.iter().any(|param| param.stored().len() > 600_000), "more than two parts");
    }

    #[test]
    fn generation_ends_with_an_error_of_the_sink() {
        let layout = Layout::new(&PRESETS[0].1);
        let taken = std::sync::atomic::AtomicUsize::new(0);
        let sink = |_, _| match taken.fetch_add(1, std::sync::atomic::Ordering::Relaxed) {
            0..2 => Ok(()),
            _ => Err("enough"),
        };
        assert_eq!(generate(&layout, 1, &threads(1), sink), Err("enough"));
        assert_eq!(taken.into_inner(), 3);
    }

    #[test]
    fn parameters_of_equal_shape_get_different_values() {
        let layout = Layout::new(&PRESETS[0].1);
        let arena = weights(&layout, 1, &threads(1));
        let first = |block: usize| arena[layout.blocks[block].qkv.weight.start];
        assert_ne!(first(0), first(1));
    }
}
