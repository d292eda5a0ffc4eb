//! The order in which the sources of a mixture take turns. Pure.
//!
//! Rows are divided into periods of [`PERIOD`] rows with the same order. A source with the share `p / PERIOD` has `p`
//! rows in each. Its row `j` of a period is released after `floor(j * PERIOD / p)` rows, and due as one of the first
//! `ceil((j + 1) * PERIOD / p)`. The released row that is due first is next. Every row is on time, because that is
//! possible: a schedule of fractions, which gives each source its share of every row, is on time, and then one of whole
//! rows exists as well (the windows of proportionate-fair scheduling; Baruah et al., 1996).
//!
//! Invariant: among the first `n` rows, each source has its share of `n`, rounded down or up.

/// Rows after which the order repeats. Shares are multiples of its inverse.
pub(super) const PERIOD: u32 = 10_000;

/// The source of each row.
#[derive(Debug)]
pub(super) struct Turns {
    /// Rows of each source in a period.
    parts: Vec<u32>,
    /// Source of each row of a period, and the number of its rows before that one.
    order: Vec<(u16, u32)>,
}

impl Turns {
    /// Rounds the shares of positive weights to multiples of 1 / [`PERIOD`], at least one.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "parts of a period")]
    pub(super) fn new(weights: &[f64]) -> Self {
        let total: f64 = weights.iter().sum();
        let exact = |weight: &f64| weight / total * f64::from(PERIOD);
        let mut parts: Vec<u32> = weights.iter().map(|weight| (exact(weight) as u32).max(1)).collect();
        // Largest remainders get the rest of the period. Sources that were raised to one part have negative ones.
        while let Some(rest) = PERIOD.checked_sub(parts.iter().sum()).filter(|rest| *rest > 0) {
            let mut order: Vec<usize> = (0..parts.len()).collect();
            let remainder = |at: usize| exact(&weights[at]) - f64::from(parts[at]);
            order.sort_by(|a, b| remainder(*b).total_cmp(&remainder(*a)));
            order.into_iter().take(rest as usize).for_each(|at| parts[at] += 1);
        }
        while parts.iter().sum::<u32>() > PERIOD {
            if let Some(largest) = parts.iter_mut().max() {
                *largest -= 1;
            }
        }
        let mut taken = vec![0_u32; parts.len()];
        let order = (0..u64::from(PERIOD)).map(|row| {
            let due = (0..parts.len()).filter_map(|at| {
                let (part, next) = (u64::from(parts[at]), u64::from(taken[at]));
                let period = u64::from(PERIOD);
                let released = next < part && next * period / part <= row;
                released.then(|| (((next + 1) * period).div_ceil(part), at))
            });
            let at = due.min().map_or(0, |(_, at)| at);
            taken[at] += 1;
            (at as u16, taken[at] - 1)
        });
        let order = order.collect();
        Self { parts, order }
    }

    /// Returns the source of row `k`, and the number of its rows before that one.
    pub(super) fn of(&self, k: u64) -> (usize, u64) {
        let (period, row) = (k / u64::from(PERIOD), k % u64::from(PERIOD));
        let (source, before) = self.order[usize::try_from(row).unwrap_or(0)];
        let source = usize::from(source);
        (source, period * u64::from(self.parts[source]) + u64::from(before))
    }

    /// Returns the number of rows of each source among the first `rows` rows.
    pub(super) fn counts(&self, rows: u64) -> Vec<u64> {
        let (periods, rest) = (rows / u64::from(PERIOD), rows % u64::from(PERIOD));
        let mut counts: Vec<u64> = self.parts.iter().map(|part| periods * u64::from(*part)).collect();
        let rest = usize::try_from(rest).unwrap_or(0);
        self.order[..rest].iter().for_each(|(source, _)| counts[usize::from(*source)] += 1);
        counts
    }

    /// Returns the rows of each source in a period.
    pub(super) fn parts(&self) -> &[u32] {
        &self.parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::mix;

    #[test]
    fn every_source_has_its_share_of_the_first_rows_rounded_down_or_up() {
        let period = u64::from(PERIOD);
        for count in 1..=8_u64 {
            for seed in 0..3 {
                #[expect(clippy::cast_precision_loss, reason = "random weights")]
                let weights: Vec<f64> =
                    (0..count).map(|at| 1.0 + (mix(seed * 100 + at) % 1000) as f64).collect();
                let turns = Turns::new(&weights);
                assert_eq!(turns.parts().iter().sum::<u32>(), PERIOD);
                let mut counts = vec![0; weights.len()];
                for k in 0..2 * period + 100 {
                    let (source, before) = turns.of(k);
                    assert_eq!(before, counts[source]);
                    counts[source] += 1;
                    let rows = k + 1;
                    for (count, part) in counts.iter().zip(turns.parts()) {
                        let share = rows * u64::from(*part);
                        assert!(
                            (share / period..=share.div_ceil(period)).contains(count),
                            "{weights:?}: {count} of {rows} for {part}"
                        );
                    }
                    if rows.is_multiple_of(997) {
                        assert_eq!(turns.counts(rows), counts);
                    }
                }
            }
        }
    }

    #[test]
    fn shares_are_rounded_to_parts_of_a_period_and_none_is_lost() {
        assert_eq!(Turns::new(&[0.7, 0.3]).parts(), [7000, 3000]);
        assert_eq!(Turns::new(&[7.0, 2.0, 1.0]).parts(), [7000, 2000, 1000]);
        assert_eq!(Turns::new(&[1.0, 1.0, 1.0]).parts(), [3334, 3333, 3333]);
        assert_eq!(Turns::new(&[1e9, 1.0, 1e-9]).parts(), [9998, 1, 1]);
        let first: Vec<usize> = (0..10).map(|k| Turns::new(&[0.7, 0.3]).of(k).0).collect();
        assert_eq!(first.iter().filter(|source| **source == 1).count(), 3, "{first:?}");
        assert!(first.windows(2).all(|pair| pair != [1, 1]), "turns are spread: {first:?}");
    }
}
