//! The order of training data: maps sequence k of the run to a window of the tokens.

use crate::random::mix;

/// Windows of T tokens plus one, the last target. Within an epoch no window is drawn twice.
#[derive(Clone, Debug)]
pub struct Order {
    seq: u64,
    windows: u64,
    /// Largest offset of an epoch's windows that keeps the last window within the tokens.
    max_shift: u64,
    /// `None` means file order.
    seed: Option<u64>,
}

impl Order {
    /// Creates the windows over `tokens` tokens, of which there are at least `seq + 1`. Without a seed they are in file
    /// order.
    pub fn new(tokens: u64, seq: usize, seed: Option<u64>) -> Self {
        let seq = seq as u64;
        let windows = ((tokens - 1) / seq).max(1);
        // With one window less, each epoch can cut the text at a different offset, so that sequences differ between
        // epochs.
        let (windows, max_shift) = match seed {
            Some(_) if windows >= 8 => (windows - 1, seq - 1),
            _ => (windows, 0),
        };
        Self { seq, windows, max_shift, seed }
    }

    /// Returns the position of the first token of sequence `k`.
    pub fn position(&self, k: u64) -> u64 {
        let (epoch, index) = (k / self.windows, k % self.windows);
        let Some(seed) = self.seed else { return index * self.seq };
        let key = mix(seed ^ mix(epoch));
        let shift = if self.max_shift == 0 { 0 } else { key % (self.max_shift + 1) };
        shift + permute(index, self.windows, key) * self.seq
    }

    /// Returns the number of windows per epoch.
    pub fn windows(&self) -> u64 {
        self.windows
    }
}

/// Bijection of `0..count` selected by `key`: a four-round Feistel network on the smallest even number of bits that can
/// hold `count`, applied until the result is in range ("cycle walking", Black and Rogaway, 2002).
pub(super) fn permute(index: u64, count: u64, key: u64) -> u64 {
    let bits = (64 - (count - 1).leading_zeros()).max(2).div_ceil(2);
    let mask = (1 << bits) - 1;
    let mut value = index;
    loop {
        let (mut left, mut right) = (value >> bits, value & mask);
        for round in 0..4 {
            (left, right) = (right, left ^ (mix(right ^ key.rotate_left(16 * round)) & mask));
        }
        value = left << bits | right;
        if value < count {
            return value;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn an_epoch_visits_every_window_once() {
        for tokens in [100u64, 1000, 12_345] {
            let order = Order::new(tokens, 7, Some(3));
            let seen: BTreeSet<u64> = (0..order.windows()).map(|k| order.position(k)).collect();
            assert_eq!(seen.len() as u64, order.windows());
            assert!(seen.iter().all(|position| position + 7 < tokens));
            let next: BTreeSet<u64> =
                (order.windows()..2 * order.windows()).map(|k| order.position(k)).collect();
            assert!(next.iter().all(|position| position + 7 < tokens));
            assert_ne!(seen, next, "the next epoch cuts the text at another offset");
        }
    }

    #[test]
    fn order_depends_on_the_seed_only() {
        let positions = |seed| -> Vec<u64> {
            let order = Order::new(10_000, 16, seed);
            (0..50).map(|k| order.position(k)).collect()
        };
        assert_eq!(positions(Some(1)), positions(Some(1)));
        assert_ne!(positions(Some(1)), positions(Some(2)));
        assert_eq!(positions(None)[..3], [0, 16, 32]);
    }

    #[test]
    fn data_of_one_window_works() {
        let order = Order::new(17, 16, Some(5));
        assert_eq!((order.position(0), order.position(9)), (0, 0));
    }
}
