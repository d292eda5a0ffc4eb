//! What submissions mean to the daemon, with the command line's parser.

use xlaunch_daemon::files::Description;
use xlaunch_daemon::commands::CommandError;
use xlaunch_daemon::state::Submitted;
use xlaunch_daemon::submission::resolve as resolve_with;
use xlaunch_proto::convert::node::{Submit, Work};
use xlaunch_proto::spec::{Device, JobSpec};

fn resolve(submission: Submit, uid: u32, gpus: u32) -> Result<(Submitted, Description), CommandError> {
    resolve_with(submission, uid, gpus, super::parse_submitted)
}

fn submission(work: Work, gpus: Option<u32>) -> Submit {
    Submit {
        request_id: "r".into(),
        version: String::new(),
        work_dir: "/w".into(),
        environment: Vec::new(),
        work,
        name: String::new(),
        priority: 0,
        gpus,
    }
}

fn command(line: &str) -> Work {
    Work::Command(line.split(' ').map(|word| word.as_bytes().to_vec()).collect())
}

fn trainer(device: Device, nproc: Option<u32>) -> Work {
    let mut spec = JobSpec::default();
    spec.job.name = "gpt".into();
    (spec.engine.device, spec.launch.nproc) = (device, nproc);
    Work::Trainer(Box::new(spec))
}

/// Workers and GPUs.
fn size(work: Work, wanted: Option<u32>, node: u32) -> (u32, u32) {
    let (submitted, description) = resolve(submission(work, wanted), 1, node).unwrap();
    assert_eq!(submitted.workers, description.workers);
    (submitted.workers, submitted.gpus)
}

fn refusal(work: Work, wanted: Option<u32>, node: u32) -> String {
    resolve(submission(work, wanted), 1, node).unwrap_err().to_string()
}

#[test]
fn a_worker_has_a_gpu_where_there_are_any() {
    assert_eq!(size(command("--nproc-per-node 2 train.py"), None, 8), (2, 2));
    assert_eq!(size(command("--nproc-per-node 2 train.py"), None, 0), (2, 0));
    assert_eq!(size(command("--nproc-per-node gpu train.py"), Some(4), 8), (4, 4));
    assert_eq!(size(command("train.py"), Some(0), 8), (1, 0));
    assert_eq!(size(trainer(Device::Auto, Some(3)), None, 8), (3, 3));
    assert_eq!(size(trainer(Device::Auto, None), Some(4), 8), (4, 4));
    assert_eq!(size(trainer(Device::Auto, None), None, 0), (1, 0));
    assert_eq!(size(trainer(Device::Cpu, Some(2)), None, 8), (2, 0));
}

#[test]
fn variables_of_the_job_count_as_they_will_for_its_agent() {
    let environment = vec![b"PET_NPROC_PER_NODE=3".to_vec()];
    let submission = Submit { environment, ..submission(command("train.py"), None) };
    assert_eq!(resolve(submission, 1, 8).unwrap().0.workers, 3);
}

#[test]
fn what_cannot_work_is_refused_in_words() {
    assert!(refusal(trainer(Device::Auto, Some(4)), Some(2), 8).contains("4 workers need one GPU each"));
    assert!(refusal(trainer(Device::Cuda, None), None, 0).contains("no GPU"));
    assert!(refusal(command("--nnproc 2 train.py"), None, 0).contains("--nnproc"));
    assert!(refusal(command("--log-dir /x train.py"), None, 0).contains("xlaunch logs"));
    assert!(refusal(command("train.toml"), None, 0).contains("description"));
    assert!(refusal(command("--help"), None, 0).contains("starts nothing"));
}

#[test]
fn a_job_is_called_what_its_user_says_or_after_what_it_runs() {
    let named = |name: &str| {
        let submission = Submit { name: name.into(), ..submission(command("-- /bin/true a"), None) };
        resolve(submission, 1, 0).unwrap().0
    };
    assert_eq!((named("").name.as_str(), named("../x\ny").name.as_str()), ("true", "_._x_y"));
    assert_eq!(named("").command_line, "/bin/true a");
}
