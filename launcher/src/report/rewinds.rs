//! Repeated steps. After a restart, a run writes the steps since its checkpoint again, and a run that continues another
//! one may begin before the end of that run. The last value of a step counts, and lines after the step to which a run
//! went back are discarded.

/// The lines at which a sequence goes back to an earlier step. Lines and steps both increase: an earlier entry whose
/// step is not below that of a later entry is dropped, because the later entry decides about all lines before both.
#[derive(Debug, Default)]
pub(crate) struct Rewinds {
    /// Line number of each first line after going back, and its step.
    at: Vec<(u64, u64)>,
    last_step: Option<u64>,
    /// Number of times that the sequence went back.
    pub(crate) count: u64,
}

impl Rewinds {
    /// Adds the next step of the sequence and its line.
    pub(crate) fn add(&mut self, line: u64, step: u64) {
        if self.last_step.replace(step).is_some_and(|last| step <= last) {
            self.count += 1;
            while self.at.pop_if(|(_, other)| *other >= step).is_some() {}
            self.at.push((line, step));
        }
    }

    /// Returns whether a line with this step is part of the final curve.
    pub(crate) fn keeps(&self, line: u64, step: u64) -> bool {
        let after = self.at.partition_point(|(other, _)| *other <= line);
        self.at.get(after).is_none_or(|(_, first)| step < *first)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn kept(steps: &[u64]) -> Vec<usize> {
        let mut rewinds = Rewinds::default();
        (0..).zip(steps).for_each(|(line, step)| rewinds.add(line, *step));
        let lines = 0..steps.len();
        lines.filter(|line| rewinds.keeps(*line as u64, steps[*line])).collect()
    }

    #[test]
    fn last_value_of_a_repeated_step_counts() {
        assert_eq!(kept(&[1, 2, 3, 4, 3, 4, 5]), [0, 1, 4, 5, 6]);
        // The second restart goes back further than the first.
        assert_eq!(kept(&[1, 2, 3, 4, 4, 5, 2, 3]), [0, 6, 7]);
        // The second restart goes back less far than the first.
        assert_eq!(kept(&[1, 2, 3, 2, 3, 4, 4, 5]), [0, 3, 4, 6, 7]);
        // The run ends before it reaches the old steps again.
        assert_eq!(kept(&[10, 20, 30, 40, 20]), [0, 4]);
    }

    proptest! {
        #[test]
        fn curve_rises_and_equals_that_of_replaying_the_lines(steps in prop::collection::vec(0_u64..20, 0..60)) {
            let mut curve: Vec<usize> = Vec::new();
            for (line, step) in steps.iter().enumerate() {
                curve.retain(|other| steps[*other] < *step);
                curve.push(line);
            }
            prop_assert_eq!(kept(&steps), curve);
        }
    }
}
