//! Reduces a curve to a number of points that a page can show. It keeps the smallest and the largest value of each
//! interval of steps, so that spikes stay visible, and the first and the last value.

/// Maximum number of points of a reduced curve.
pub(crate) const MAX_POINTS: usize = 2000;
/// Number of intervals of a reduced curve. Each has two points; the first and the last point of the curve are added.
const BUCKETS: u64 = MAX_POINTS as u64 / 2 - 1;

/// A point: step and value; the value is `None` if it is not finite.
pub(crate) type Point = (u64, Option<f64>);

/// Collects the points of a curve, in increasing order of steps.
#[derive(Debug)]
pub(crate) struct Reducer {
    first_step: u64,
    /// Steps per bucket; 0 if all points are kept.
    width: u64,
    points: Vec<Point>,
    bucket: Bucket,
    last: Option<Point>,
}

/// The points of the current interval.
#[derive(Debug, Default)]
struct Bucket {
    index: u64,
    low: Option<(u64, f64)>,
    high: Option<(u64, f64)>,
    /// A step in the interval whose value is not finite.
    gap: Option<u64>,
}

impl Reducer {
    /// Creates a reducer for at most `count` points with steps from `first` to `last`.
    pub(crate) fn new(count: u64, first: u64, last: u64) -> Self {
        let width = if count <= MAX_POINTS as u64 { 0 } else { last.saturating_sub(first) / BUCKETS + 1 };
        Self { first_step: first, width, points: Vec::new(), bucket: Bucket::default(), last: None }
    }

    pub(crate) fn add(&mut self, step: u64, value: f64) {
        let value = Some(value).filter(|value| value.is_finite());
        if self.width == 0 {
            self.points.push((step, value));
            return;
        }
        let index = step.saturating_sub(self.first_step) / self.width;
        if index != self.bucket.index {
            self.bucket.finish(&mut self.points);
            self.bucket.index = index;
        }
        match value {
            Some(value) => {
                if self.last.is_none() {
                    self.points.push((step, Some(value)));
                }
                self.bucket.add(step, value);
                self.last = Some((step, Some(value)));
            }
            None => self.bucket.gap = Some(step),
        }
    }

    /// Returns the reduced curve.
    pub(crate) fn finish(mut self) -> Vec<Point> {
        self.bucket.finish(&mut self.points);
        // The first and the last point may also be extremes of their intervals.
        self.points.dedup_by_key(|(step, _)| *step);
        if let Some(last) = self.last {
            let at = self.points.partition_point(|(step, _)| *step < last.0);
            if self.points.get(at).is_none_or(|(step, _)| *step != last.0) {
                self.points.insert(at, last);
            }
        }
        self.points
    }
}

impl Bucket {
    fn add(&mut self, step: u64, value: f64) {
        if self.low.is_none_or(|(_, low)| value < low) {
            self.low = Some((step, value));
        }
        if self.high.is_none_or(|(_, high)| value > high) {
            self.high = Some((step, value));
        }
    }

    /// Appends the interval's points to `points`, and empties the interval.
    fn finish(&mut self, points: &mut Vec<Point>) {
        match (self.low.take(), self.high.take(), self.gap.take()) {
            (Some(low), Some(high), _) => {
                let (early, late) = if low.0 <= high.0 { (low, high) } else { (high, low) };
                points.extend([early, late].map(|(step, value)| (step, Some(value))));
                points.dedup_by_key(|(step, _)| *step);
            }
            (_, _, gap) => points.extend(gap.map(|step| (step, None))),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn reduced(points: &[(u64, f64)]) -> Vec<Point> {
        let (first, last) =
            (points.first().map_or(0, |point| point.0), points.last().map_or(0, |point| point.0));
        let mut reducer = Reducer::new(points.len() as u64, first, last);
        points.iter().for_each(|(step, value)| reducer.add(*step, *value));
        reducer.finish()
    }

    #[test]
    fn short_curves_are_kept_with_their_gaps() {
        assert_eq!(
            reduced(&[(1, 2.0), (2, f64::NAN), (5, 3.0)]),
            [(1, Some(2.0)), (2, None), (5, Some(3.0))]
        );
        assert_eq!(reduced(&[]), []);
    }

    #[test]
    fn spike_of_one_step_in_a_million_remains() {
        let spiked = |step: u64| if step == 654_321 { 99.0 } else { 1.0 / step as f64 };
        let points: Vec<_> = (1..=1_000_000).map(|step| (step, spiked(step))).collect();
        let reduced = reduced(&points);
        assert!(reduced.len() <= MAX_POINTS && reduced.contains(&(654_321, Some(99.0))), "{}", reduced.len());
        assert_eq!((reduced[0], reduced[reduced.len() - 1]), ((1, Some(1.0)), (1_000_000, Some(1e-6))));
    }

    #[test]
    fn interval_without_finite_values_is_a_gap() {
        let value = |step: u64| if (400_000..=500_000).contains(&step) { f64::NAN } else { 1.0 };
        let points: Vec<_> = (1..=1_000_000).map(|step| (step, value(step))).collect();
        let gaps = reduced(&points).iter().filter(|(_, value)| value.is_none()).count();
        assert!((90..=100).contains(&gaps), "{gaps}");
    }

    proptest! {
        #[test]
        fn extremes_and_ends_of_the_curve_remain(
            values in prop::collection::vec(prop_oneof![9 => -1e6..1e6, 1 => Just(f64::NAN)], 1..9000),
            start in 0_u64..5, stride in 1_u64..7,
        ) {
            let points: Vec<_> = (0..).zip(&values).map(|(at, value)| (start + at * stride, *value)).collect();
            let curve = reduced(&points);
            prop_assert!(curve.len() <= MAX_POINTS, "{} points", curve.len());
            prop_assert!(curve.windows(2).all(|pair| pair[0].0 < pair[1].0), "steps rise");
            let all: Vec<_> = points.iter().copied().filter(|point| point.1.is_finite()).collect();
            let kept: Vec<_> = curve.iter().filter_map(|(step, value)| Some((*step, (*value)?))).collect();
            let is_original = |point: &(u64, f64)| {
                all.binary_search_by_key(&point.0, |it| it.0).is_ok_and(|index| all[index] == *point)
            };
            prop_assert!(kept.iter().all(is_original), "points are those of the curve");
            prop_assert_eq!((kept.first(), kept.last()), (all.first(), all.last()));
            let extremes = |points: &[(u64, f64)]| {
                let values = points.iter().map(|point| point.1);
                (values.clone().fold(f64::INFINITY, f64::min), values.fold(f64::NEG_INFINITY, f64::max))
            };
            prop_assert_eq!(extremes(&kept), extremes(&all));
        }
    }
}
