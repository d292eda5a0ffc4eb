//! The options of `xlaunch submit` that control when a job runs and what it reserves.

use std::time::Duration;

use clap::Args;
use xlaunch_proto::convert::node::MAX_ARRAY_JOBS;
use xlaunch_proto::v1::{self, Dependency, DependencyCondition, SubmitRequest, WarningSignal};
use xlaunch_spec::command::Signal;
use xlaunch_spec::quantities::{parse_bytes, parse_range, parse_time};

use super::choice::whole;
use super::job_list::MAX_RANGE;

/// Default number of seconds before the time limit at which the signal is sent.
const DEFAULT_WARNING_SECONDS: u64 = 60;

#[derive(Debug, Default, Args)]
pub(super) struct Scheduling {
    /// Do not start the job before `xlaunch release`
    #[arg(long)]
    hold: bool,
    /// Time limit, after which the job is stopped: 30m, 4h, 1h30m, 2d, HH:MM:SS or D-HH:MM:SS
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    time: Option<Duration>,
    /// Signal to send to the workers before the time limit [default of SECONDS: 60]
    #[arg(long, value_name = "SIGNAL[@SECONDS]", value_parser = parse_warning)]
    signal: Option<WarningSignal>,
    /// Memory to reserve, such as 32G [default: a GPU job's share of the node, none for a CPU job]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    mem: Option<u64>,
    /// Cores to reserve [default: a GPU job's share of the node, one per worker for a CPU job]
    #[arg(long, value_name = "N", value_parser = whole(1..=u32::MAX))]
    cpus: Option<u32>,
    /// Start after these jobs or ranges (12-21) have ended: ok (done; the default), any, or fail; may be repeated
    #[arg(long, value_name = "JOB[:ok|any|fail],...", value_delimiter = ',', value_parser = parse_dependencies)]
    after: Vec<Vec<Dependency>>,
    /// Submit one job per index, such as 0-9, 0-9:3 (every third) or 0,3,7-9; with %N, at most N of them run at a time
    #[arg(long, value_name = "INDICES[%N]", value_parser = parse_array, conflicts_with = "wait")]
    array: Option<Array>,
    /// Queue the job again if it is lost, for example in a reboot; training resumes from its newest checkpoint
    #[arg(long)]
    requeue: bool,
}

/// The indices of an array, and the number of its jobs that may run at a time (0: all).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Array {
    indices: Vec<u32>,
    parallel: u32,
}

impl Scheduling {
    /// Returns a request with these options.
    pub(super) fn request(&self) -> SubmitRequest {
        let Array { indices, parallel } = self.array.clone().unwrap_or_default();
        let scheduling = v1::Scheduling {
            time_limit_seconds: self.time.map(|time| time.as_secs()),
            warning: self.signal,
            memory_bytes: self.mem,
            cpus: self.cpus,
            after: self.after.concat(),
            requeue: self.requeue,
        };
        SubmitRequest {
            held: self.hold,
            array_indices: indices,
            array_parallel: parallel,
            scheduling: Some(scheduling),
            ..SubmitRequest::default()
        }
    }
}

fn parse_warning(text: &str) -> Result<WarningSignal, String> {
    let invalid = || {
        format!(
            "`{text}` is not a signal and a time before the limit; expected one such as USR1@60, SIGUSR1 or 10@30"
        )
    };
    let (name, seconds) = text.split_once('@').map_or((text, None), |(name, rest)| (name, Some(rest)));
    let seconds_before = match seconds {
        Some(seconds) => seconds.parse().ok().filter(|seconds| *seconds > 0).ok_or_else(invalid)?,
        None => DEFAULT_WARNING_SECONDS,
    };
    let upper = name.to_ascii_uppercase();
    let long = if upper.starts_with("SIG") { upper } else { format!("SIG{upper}") };
    let named = Signal::parse(&long).map(|signal| signal as i32);
    let signal = named.or_else(|| name.parse().ok().filter(|number| *number > 0)).ok_or_else(invalid)?;
    Ok(WarningSignal { signal, seconds_before })
}

fn parse_dependencies(text: &str) -> Result<Vec<Dependency>, String> {
    let invalid = || {
        format!(
            "`{text}` is not a dependency; expected a job number or a range of up to {MAX_RANGE}, alone or with \
             :ok, :any or :fail, such as 12:any or 12-21"
        )
    };
    let (jobs, condition) = text.split_once(':').unwrap_or((text, "ok"));
    let condition = match condition {
        "ok" => DependencyCondition::Ok,
        "any" => DependencyCondition::Any,
        "fail" => DependencyCondition::Fail,
        _ => return Err(invalid()),
    };
    let jobs = parse_range::<u64>(jobs).filter(|jobs| jobs.end() - jobs.start() < MAX_RANGE);
    let dependency = |job| Dependency { job, condition: condition.into(), met: None };
    Ok(jobs.ok_or_else(invalid)?.map(dependency).collect())
}

fn parse_array(text: &str) -> Result<Array, String> {
    let invalid =
        || format!("`{text}` is not an array; expected indices such as 0-9, 0-9:3, 0,3,7-9 or 0-9%2");
    let (list, parallel) = match text.split_once('%') {
        Some((list, parallel)) => {
            (list, parallel.parse::<u32>().ok().filter(|parallel| *parallel > 0).ok_or_else(invalid)?)
        }
        None => (text, 0),
    };
    let mut indices = Vec::new();
    for item in list.split(',') {
        let (range, step) = item.split_once(':').unwrap_or((item, "1"));
        let step = step.parse::<u32>().ok().filter(|step| *step > 0).ok_or_else(invalid)?;
        let range = parse_range::<u32>(range).ok_or_else(invalid)?;
        if indices.len() as u64 + u64::from((range.end() - range.start()) / step) >= MAX_ARRAY_JOBS as u64 {
            return Err(format!(
                "`{text}` has too many indices: at most {MAX_ARRAY_JOBS} jobs can be in an array"
            ));
        }
        indices.extend(range.step_by(usize::try_from(step).unwrap_or(usize::MAX)));
    }
    Ok(Array { indices, parallel })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signal_is_a_name_or_number_with_seconds() {
        for (text, signal, seconds) in [
            ("USR1@60", 10, 60),
            ("SIGUSR1", 10, 60),
            ("10@30", 10, 30),
            ("usr2@5", 12, 5),
            ("TERM@120", 15, 120),
        ] {
            let expected = WarningSignal { signal, seconds_before: seconds };
            assert_eq!(parse_warning(text), Ok(expected), "{text}");
        }
        for text in ["", "USR3", "USR1@", "USR1@0", "USR1@1m", "@60"] {
            assert!(parse_warning(text).unwrap_err().contains("USR1@60"), "{text}");
        }
    }

    #[test]
    fn dependencies_have_a_condition() {
        use DependencyCondition::{Any, Fail, Ok as Done};
        for (text, jobs, condition) in [
            ("12", 12..=12, Done),
            ("12:ok", 12..=12, Done),
            ("3:any", 3..=3, Any),
            ("4:fail", 4..=4, Fail),
            ("12-14:any", 12..=14, Any),
        ] {
            let expected = jobs.map(|job| Dependency { job, condition: condition.into(), met: None });
            assert_eq!(parse_dependencies(text), Ok(expected.collect()), "{text}");
        }
        for text in ["", "x", "12:", "12:okay", "-1", "13-12", "1-1001"] {
            assert!(parse_dependencies(text).unwrap_err().contains("12:any"), "{text}");
        }
    }

    #[test]
    fn array_is_a_list_of_indices_and_ranges() {
        let array = |text| parse_array(text).map(|array| (array.indices, array.parallel));
        assert_eq!(array("0-3"), Ok((vec![0, 1, 2, 3], 0)));
        assert_eq!(array("0,3,7-9%2"), Ok((vec![0, 3, 7, 8, 9], 2)));
        assert_eq!(array("5"), Ok((vec![5], 0)));
        assert_eq!(array("0-10:4,1-3:2%2"), Ok((vec![0, 4, 8, 1, 3], 2)));
        assert_eq!(array("0-9990:10").map(|it| it.0.len()), Ok(1000));
        assert!(array("0-10000:10").unwrap_err().contains("at most 1000"));
        assert_eq!(array("0-999").map(|it| it.0.len()), Ok(1000));
        for text in ["", "a", "3-1", "1,,2", "0-9%0", "0-9%", "-1", "0-9:0", "0-9:", "0:1-9"] {
            assert!(array(text).unwrap_err().contains("0,3,7-9"), "{text}");
        }
        assert!(array("0-1000").unwrap_err().contains("at most 1000"));
        assert!(array("0-4294967295").unwrap_err().contains("at most 1000"));
    }
}
