//! Records that a run leaves about itself, and `xlaunch report`: its figures and its page match `metrics.jsonl`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::process::Signal;
use serde_json::{Value, json};
use xlaunch_proto::metrics::METRICS;
use xlaunch_tests::{Job, Output, Process, children, process_name, requirements, send_signal, wait_for};

xlaunch_harness::tests! {
    environment_describes_the_run_and_outlives_a_restart,
    continued_run_is_reported_as_one_curve,
    run_in_progress_is_reported_without_its_last_line,
    report_replaces_reports_only;
    needs requirements::browser:
    browser_shows_the_values_of_metrics_jsonl;
}

/// Steps and values by key.
type Curves = BTreeMap<String, Vec<(u64, Value)>>;

fn report(job: &Job, args: &[&str]) -> Output {
    Process::spawn(&mut job.command(&[&["report"], args].concat())).wait()
}

/// Returns the output of `xlaunch report --json` for these runs.
fn figures(job: &Job, runs: &[&str]) -> Vec<Value> {
    let output = report(job, &[&["--json"], runs].concat());
    assert_eq!(output.code, 0, "{}", output.stderr);
    let value: Value = serde_json::from_str(&output.stdout).unwrap();
    value["runs"].as_array().unwrap().clone()
}

fn read(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Returns the points of these files of metrics; later points replace earlier ones.
fn curves(files: &[PathBuf]) -> Curves {
    let mut curves = Curves::new();
    for file in files {
        let text = std::fs::read_to_string(file).unwrap();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let first = lines[0]["_step"].as_u64().unwrap();
        curves.values_mut().for_each(|points| points.retain(|(step, _)| *step < first));
        for line in lines {
            let charts = METRICS.iter().filter(|metric| metric.chart.is_some());
            for key in charts.map(|metric| metric.key).filter(|key| line.get(key).is_some()) {
                let point = (line["_step"].as_u64().unwrap(), line[key].clone());
                curves.entry(key.to_owned()).or_default().push(point);
            }
        }
    }
    curves
}

/// Trains eight steps, and continues at step 6 up to step 12. Returns both runs' directories.
fn continued(job: &Job) -> [PathBuf; 2] {
    let eval = ["--set", "train.eval_every=2", "--set", "checkpoint.every=6"];
    job.run_ok(&eval);
    let first = job.run_dir();
    let checkpoint = first.join("checkpoints/step-00000006").display().to_string();
    job.run_ok(&[&eval[..], &["--set", "train.steps=12", &format!("--resume={checkpoint}")]].concat());
    [first, job.run_dir()]
}

fn environment_describes_the_run_and_outlives_a_restart() {
    let job = Job::new();
    let args =
        ["--nproc", "2", "--max-restarts", "3", "--set", "train.steps=3000", "--set", "checkpoint.every=50"];
    let launch = job.spawn(&args);
    let path = wait_for("the environment", || {
        let path = job.run_dir().join("environment.json");
        path.is_file().then_some(path)
    });
    let before = std::fs::read(&path).unwrap();
    wait_for("steps", || {
        let text = std::fs::read_to_string(job.run_dir().join("metrics.jsonl")).unwrap_or_default();
        (text.lines().count() > 100).then_some(())
    });
    // The reaper has a different name.
    let mut workers = children(launch.pid());
    workers.retain(|pid| process_name(*pid) == process_name(launch.pid()));
    assert_eq!(workers.len(), 2);
    send_signal(workers[1], Signal::KILL);
    let output = launch.wait();
    assert_eq!(output.code, 0, "{}", output.stderr);
    assert_eq!(std::fs::read(&path).unwrap(), before, "written again");

    let environment = read(&path);
    assert_eq!((&environment["version"], &environment["world_size"]), (&json!(1), &json!(2)));
    assert_eq!((&environment["device"], &environment["continues"]), (&json!("cpu"), &Value::Null));
    assert_eq!(environment["run"], json!(job.run_dir().file_name().unwrap().to_str().unwrap()));
    assert!(
        environment["command_line"].as_str().unwrap().ends_with("checkpoint.every=50"),
        "{environment:#}"
    );
    let data = &environment["data"];
    let text_bytes = std::fs::metadata(job.path().join("text/a.txt")).unwrap().len();
    let tokens = |split: &str| data[split]["tokens"].as_u64().unwrap();
    assert_eq!(tokens("train") + tokens("validation"), text_bytes);
    assert_eq!(data["train"]["hash"].as_str().map(str::len), Some(32), "{data}");

    let summary = read(&job.run_dir().join("summary.json"));
    assert_eq!((&summary["exit_code"], &summary["attempts"]), (&json!(0), &json!(2)));
    assert!(summary["accounting"]["useful_percent"].as_f64().unwrap() > 0.0, "{summary:#}");
    let figures = &figures(&job, &["runs/train"])[0];
    assert_eq!((&figures["steps"], &figures["environment"]), (&json!(3000), &environment));
    assert_eq!(figures["useful_percent"], summary["accounting"]["useful_percent"]);
}

fn continued_run_is_reported_as_one_curve() {
    let job = Job::new();
    let runs = continued(&job);
    let environment = read(&runs[1].join("environment.json"));
    let parent = runs[0].file_name().unwrap().to_str().unwrap();
    assert_eq!(
        (&environment["continues"]["run"], &environment["continues"]["step"]),
        (&json!(parent), &json!(6))
    );

    let expected = curves(&runs.clone().map(|run| run.join("metrics.jsonl")));
    assert_eq!(expected["train/loss"].len(), 12);
    let figures = &figures(&job, &["runs/train"])[0];
    assert_eq!((&figures["steps"], &figures["notes"]), (&json!(12), &json!([])));
    // Each step has four sequences of 32 tokens.
    assert_eq!(figures["tokens"], json!(12.0 * 4.0 * 32.0));
    for (key, name) in [("train/loss", "loss"), ("val/loss", "val_loss")] {
        let points = &expected[key];
        let number = |(_, value): &(u64, Value)| value.as_f64().unwrap();
        let best = points.iter().min_by(|a, b| number(a).total_cmp(&number(b))).unwrap();
        assert_eq!(
            figures[name],
            json!({ "last": points.last().unwrap().1, "best": best.1, "best_step": best.0 })
        );
    }
    let mut speeds: Vec<f64> =
        expected["perf/tokens_per_second"].iter().map(|(_, speed)| speed.as_f64().unwrap()).collect();
    speeds.sort_by(f64::total_cmp);
    assert_eq!(figures["tokens_per_second"], json!(speeds[6]));
    // There is no peak rate for a CPU.
    assert_eq!(figures["mfu"], Value::Null);
}

fn run_in_progress_is_reported_without_its_last_line() {
    let job = Job::new();
    job.run_ok(&[]);
    let run = job.run_dir();
    let metrics = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    std::fs::write(run.join("metrics.jsonl"), &metrics[..metrics.len() - 20]).unwrap();
    std::fs::remove_file(run.join("summary.json")).unwrap();
    let figures = &figures(&job, &["runs/train"])[0];
    assert_eq!((&figures["steps"], &figures["exit_code"]), (&json!(7), &Value::Null));
    assert_eq!(figures["notes"], json!([]));
    // A line that is broken in the middle is a different case.
    std::fs::write(run.join("metrics.jsonl"), metrics.replacen("_step", "step", 1)).unwrap();
    let output = report(&job, &["runs/train", "--output", "a.html"]);
    assert_eq!((output.code, output.stdout.as_str()), (0, "a.html\n"), "{}", output.stderr);
    assert!(
        output.stderr.contains("note: ") && output.stderr.contains("1 line is broken"),
        "{}",
        output.stderr
    );
}

fn report_replaces_reports_only() {
    let job = Job::new();
    job.run_ok(&["--set", "train.steps=2"]);
    assert_eq!(report(&job, &["runs/train"]).code, 0);
    assert_eq!(report(&job, &["runs/train"]).code, 0, "it replaces a report");
    let shown = report(&job, &["runs/train", "--output", "-"]);
    let page = std::fs::read_to_string(job.path().join("report.html")).unwrap();
    assert_eq!((shown.code, shown.stdout), (0, page), "{}", shown.stderr);
    let before = std::fs::read(job.path().join("train.toml")).unwrap();
    let refused = report(&job, &["runs/train", "--output", "train.toml"]);
    assert!(refused.code == 2 && refused.stderr.contains("is not a report"), "{}", refused.stderr);
    assert_eq!(std::fs::read(job.path().join("train.toml")).unwrap(), before);
    let refused = report(&job, &["text"]);
    assert!(refused.code == 2 && refused.stderr.contains("no run in text"), "{}", refused.stderr);
    let refused = report(&job, &["runs/train"; 9]);
    assert!(refused.code == 2 && refused.stderr.contains("at most 8"), "{}", refused.stderr);
}

/// Markup and script that must not have an effect, regardless of where they are shown.
const HOSTILE: &str =
    "</script><script>window.executed = 1</script><img src=x onerror=window.executed=1>\u{2028}\u{202e}\"'&";

/// The variable `XLAUNCH_TEST_PICTURES` names a directory for screenshots.
fn browser_shows_the_values_of_metrics_jsonl() {
    let job = Job::new();
    let runs = continued(&job);
    // A run with another configuration, hostile texts, and values that are not finite.
    job.run_ok(&["--set", "train.lr=1e-3", "--set", "train.steps=10"]);
    let hostile = job.path().join("runs/train/<img src=x onerror=window.executed=1>");
    std::fs::rename(job.run_dir(), &hostile).unwrap();
    for name in ["job.json", "environment.json"] {
        let mut value = read(&hostile.join(name));
        value["job"] = json!({ "name": HOSTILE, HOSTILE: 1 });
        value["command_line"] = json!(HOSTILE);
        std::fs::write(hostile.join(name), value.to_string()).unwrap();
    }
    let sample = json!({ "_step": 5, "prompt": HOSTILE, "text": format!("{HOSTILE}\nsecond line") });
    std::fs::write(hostile.join("samples.jsonl"), format!("{sample}\n{{}}\n")).unwrap();
    let metrics = std::fs::read_to_string(hostile.join("metrics.jsonl")).unwrap();
    let mut lines: Vec<Value> = metrics.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    (lines[3]["train/loss"], lines[3]["train/grad_norm"]) = (Value::Null, Value::Null);
    let with_gap: String = lines.iter().map(|line| format!("{line}\n")).collect();
    std::fs::write(hostile.join("metrics.jsonl"), with_gap).unwrap();

    let expected = [
        curves(&runs.clone().map(|run| run.join("metrics.jsonl"))),
        curves(&[hostile.join("metrics.jsonl")]),
    ];
    let (page, values) = (job.path().join("report.html"), job.path().join("expected.json"));
    std::fs::write(&values, json!(expected).to_string()).unwrap();
    let written = report(&job, &[runs[1].to_str().unwrap(), hostile.to_str().unwrap()]);
    assert_eq!(written.code, 0, "{}", written.stderr);
    let mut check = Command::new("node");
    check.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/web/report.mjs")).arg(page).arg(values);
    check.args(std::env::var_os("XLAUNCH_TEST_PICTURES"));
    let output = check.stdin(Stdio::null()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.lines().count() >= 12 && text.lines().all(|line| line.starts_with("ok ")), "{text}");
}
