//! The learning rate as a pure function of the step.

use xlaunch_spec::job::{Schedule, TrainSection};

/// Returns the learning rate of step `step` (from 0): linear warm-up up to `lr`, then the schedule.
#[expect(clippy::cast_precision_loss, reason = "step counts are far below 2^53")]
pub(crate) fn learning_rate(train: &TrainSection, step: u64) -> f64 {
    let warmup = train.warmup_steps();
    if step < warmup {
        return train.lr * (step + 1) as f64 / warmup as f64;
    }
    match train.schedule {
        Schedule::Constant => train.lr,
        Schedule::Wsd => {
            let (left, decay) = (train.steps.saturating_sub(step), train.decay_steps());
            // Falls from 1 at the first step of the decay to 1 / decay at the last step.
            let factor = if left < decay { left as f64 / decay as f64 } else { 1.0 };
            train.lr * (train.min_lr_ratio + (1.0 - train.min_lr_ratio) * factor)
        }
        Schedule::Cosine => {
            let length = train.steps.saturating_sub(warmup).max(1);
            let progress = ((step - warmup) as f64 / length as f64).min(1.0);
            let cosine = 0.5 * (1.0 + (std::f64::consts::PI * progress).cos());
            train.lr * (train.min_lr_ratio + (1.0 - train.min_lr_ratio) * cosine)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn train(schedule: Schedule) -> TrainSection {
        TrainSection {
            steps: 100,
            warmup: Some(10),
            lr: 1.0,
            min_lr_ratio: 0.1,
            schedule,
            ..Default::default()
        }
    }

    #[test]
    fn warm_up_rises_to_lr_and_cosine_decays_to_the_minimum() {
        let train = train(Schedule::Cosine);
        let rates: Vec<f64> = (0..100).map(|step| learning_rate(&train, step)).collect();
        assert!((rates[0] - 0.1).abs() < 1e-12 && (rates[9] - 1.0).abs() < 1e-12 && rates[10] == 1.0);
        assert!(rates[10..].windows(2).all(|pair| pair[1] < pair[0]));
        assert!((rates[99] - 0.1).abs() < 1e-3, "{}", rates[99]);
        assert!((learning_rate(&train, 10_000) - 0.1).abs() < 1e-12);
    }

    #[test]
    fn wsd_is_constant_until_the_linear_decay_of_the_last_steps() {
        let train = TrainSection { decay_steps: Some(40), ..train(Schedule::Wsd) };
        let rates: Vec<f64> = (0..100).map(|step| learning_rate(&train, step)).collect();
        assert!((rates[0] - 0.1).abs() < 1e-12, "warm-up");
        assert!(rates[9..=60].iter().all(|rate| (rate - 1.0).abs() < 1e-12), "{rates:?}");
        let drops: Vec<f64> = rates[60..].windows(2).map(|pair| pair[0] - pair[1]).collect();
        assert!(drops.iter().all(|drop| (drop - 0.9 / 40.0).abs() < 1e-12), "{drops:?}");
        assert!((rates[99] - (0.1 + 0.9 / 40.0)).abs() < 1e-12 && learning_rate(&train, 100) == 0.1);
        // The default is the last fifth of the run, but not more than the steps after the warm-up.
        let default = TrainSection { decay_steps: None, ..train.clone() };
        assert!(learning_rate(&default, 80) == 1.0 && learning_rate(&default, 81) < 1.0);
        let short = TrainSection { warmup: Some(95), ..default };
        assert!(learning_rate(&short, 95) == 1.0 && learning_rate(&short, 96) < 1.0);
    }

    #[test]
    fn constant_schedule_stays_at_lr_and_warm_up_is_optional() {
        assert_eq!(learning_rate(&train(Schedule::Constant), 99), 1.0);
        let train = TrainSection { warmup: Some(0), ..train(Schedule::Cosine) };
        assert_eq!(learning_rate(&train, 0), 1.0);
    }
}
