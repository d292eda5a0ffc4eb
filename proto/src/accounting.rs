//! Break-down of a job's wall time, with the same names and shares in tables, JSON, metrics and on the page.

use crate::v1::Accounting;

/// Causes under which restarts are counted.
pub const RESTART_CAUSES: [&str; 10] =
    ["crash", "data", "error", "gpu", "hang", "killed", "peer", "rendezvous", "replicas", "save"];

impl Accounting {
    /// Returns the seconds of each kind, in the order of the tables.
    pub fn kinds(&self) -> [(&'static str, f64); 7] {
        [
            ("step", self.step_seconds),
            ("repeated", self.repeated_seconds),
            ("checkpoint", self.checkpoint_seconds),
            ("evaluation", self.evaluation_seconds),
            ("start", self.start_seconds),
            ("hang", self.hang_seconds),
            ("down", self.down_seconds),
        ]
    }

    /// Returns the wall time since the start of the job, in seconds.
    pub fn wall_seconds(&self) -> f64 {
        self.kinds().iter().map(|(_, seconds)| seconds).sum()
    }

    /// Returns the percentage of the wall time spent on evaluations and on steps that were not repetitions.
    pub fn useful_percent(&self) -> f64 {
        let wall = self.wall_seconds();
        if wall > 0.0 { 100.0 * (self.step_seconds + self.evaluation_seconds) / wall } else { 0.0 }
    }

    /// Returns whether an account from an untrusted source (for the daemon: a job's user) can be shown.
    pub fn is_sound(&self) -> bool {
        let causes: Vec<&str> = self.restarts.iter().map(|count| count.cause.as_str()).collect();
        self.kinds().iter().all(|(_, seconds)| seconds.is_finite() && *seconds >= 0.0)
            && causes.iter().all(|cause| RESTART_CAUSES.contains(cause))
            && causes.windows(2).all(|pair| pair[0] < pair[1])
    }

    /// Returns `useful time 98.2 %: step 310.2 s, start 4.1 s`, without the kinds that took no time.
    pub fn text(&self) -> String {
        let kinds = self.kinds();
        let taken = kinds.iter().filter(|(_, seconds)| *seconds >= 0.05);
        let taken: Vec<String> = taken.map(|(kind, seconds)| format!("{kind} {seconds:.1} s")).collect();
        let colon = if taken.is_empty() { "" } else { ": " };
        format!("useful time {:.1} %{colon}{}", self.useful_percent(), taken.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::v1::RestartCount;

    #[test]
    fn useful_time_is_that_of_new_steps_and_evaluations() {
        let account = Accounting {
            step_seconds: 95.0,
            evaluation_seconds: 3.2,
            repeated_seconds: 1.0,
            down_seconds: 0.8,
            ..Accounting::default()
        };
        let expected = "useful time 98.2 %: step 95.0 s, repeated 1.0 s, evaluation 3.2 s, down 0.8 s";
        assert_eq!(account.text(), expected);
        assert_eq!(Accounting::default().text(), "useful time 0.0 %");
    }

    #[test]
    fn account_with_impossible_times_or_unknown_causes_is_not_sound() {
        let count = |cause: &str| RestartCount { cause: cause.into(), restarts: 1 };
        let with = |causes: &[&str]| Accounting {
            restarts: causes.iter().map(|cause| count(cause)).collect(),
            ..Accounting::default()
        };
        assert!(with(&["gpu", "hang"]).is_sound());
        assert!(!with(&["hang", "gpu"]).is_sound() && !with(&["gpu", "gpu"]).is_sound());
        assert!(!with(&["\"} 1"]).is_sound());
        for seconds in [-1.0, f64::NAN, f64::INFINITY] {
            assert!(!Accounting { hang_seconds: seconds, ..Accounting::default() }.is_sound());
        }
    }
}
