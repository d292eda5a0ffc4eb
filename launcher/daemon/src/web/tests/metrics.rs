//! Tests of `/metrics`, and of the dashboard and alerts that query it.

use std::sync::Arc;

use serde_json::Value;
use xlaunch_proto::v1::{NodeJobState, StatusReply, StepReport};

use super::sample_node::{HOSTILE, job, sample_node};
use crate::web::metrics::{self, Format};
use xlaunch_host::clock::unix_ms;

/// Path of a file in `deploy/`.
fn deployed(name: &str) -> std::path::PathBuf {
    std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy")).join(name)
}

/// Returns the words of a text that have this prefix.
fn names(text: &str, prefix: &str) -> Vec<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with(prefix)).map(Into::into).collect()
}

#[test]
fn dashboard_and_alerts_use_exported_metrics_only() {
    let text = metrics::text(Arc::new(sample_node(unix_ms(), 800)), unix_ms(), Format::OpenMetrics).unwrap();
    let exported: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).collect();
    let has = |name: &String| exported.iter().any(|line| line.split(['{', ' ']).next() == Some(name));
    let rules = fs_err::read_to_string(deployed("prometheus/rules.yml")).unwrap();
    let expressions: String = rules.lines().filter(|line| line.trim_start().starts_with("expr:")).collect();
    let dashboard = fs_err::read_to_string(deployed("grafana/xlaunch.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&dashboard).unwrap();
    let mut asked = Vec::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().unwrap() {
            asked.push(target["expr"].as_str().unwrap());
        }
    }
    for variable in dashboard["templating"]["list"].as_array().unwrap() {
        asked.extend(variable["definition"].as_str());
    }
    let asked = names(&asked.join(" "), "xlaunch_");
    assert!(asked.len() > 15, "{asked:?}");
    for name in asked.iter().chain(&names(&expressions, "xlaunch_")) {
        assert!(has(name), "{name} is queried but not exported");
    }
    // Metrics of dcgm-exporter are not exported again.
    assert!(names(&text, "DCGM").is_empty());
}

#[test]
fn gauges_have_the_values_of_the_last_step_also_of_an_older_agent() {
    let mut view = sample_node(unix_ms(), 800);
    let mut edit = |change: &dyn Fn(&mut StatusReply)| {
        let job = Arc::make_mut(view.jobs.get_mut(&7).unwrap());
        change(Arc::make_mut(&mut job.status.as_mut().unwrap().0));
        metrics::text(Arc::new(view.clone()), unix_ms(), Format::OpenMetrics).unwrap()
    };
    let step =
        StepReport { loss: 2.5, tokens: 600, step_seconds: 0.5, pool_live_bytes: 17, ..Default::default() };
    let text = edit(&|status| {
        status.last_step = Some(step);
        status.ranks[1].last_step = Some(step);
    });
    for line in [
        "xlaunch_loss{job=\"7\"} 2.5",
        "xlaunch_tokens_per_second{job=\"7\"} 1200.0",
        "xlaunch_pool_live_bytes{job=\"7\",rank=\"1\"} 17.0",
    ] {
        assert!(text.lines().any(|other| other == line), "{line} is missing in {text}");
    }
    let text = edit(&|status| {
        (status.last_step, status.ranks[1].last_step) = (None, None);
        (status.loss, status.tokens_per_second, status.mfu) = (3.5, 400.0, Some(0.25));
        status.ranks[1].pool_live_bytes = 18;
    });
    for line in [
        "xlaunch_loss{job=\"7\"} 3.5",
        "xlaunch_tokens_per_second{job=\"7\"} 400.0",
        "xlaunch_mfu_ratio{job=\"7\"} 0.25",
        "xlaunch_pool_live_bytes{job=\"7\",rank=\"1\"} 18.0",
    ] {
        assert!(text.lines().any(|other| other == line), "{line} is missing in {text}");
    }
}

/// The page shows what this JSON contains.
#[test]
fn metrics_and_json_have_the_same_times() {
    let view = sample_node(unix_ms(), 800);
    let json = crate::web::api::job(&view.jobs[&7], unix_ms());
    let account = &json["status"]["accounting"];
    let text = metrics::text(Arc::new(view), unix_ms(), Format::OpenMetrics).unwrap();
    let exported = |kind: &str| -> f64 {
        let name = format!("xlaunch_time_seconds_total{{job=\"7\",kind=\"{kind}\"}} ");
        let value = text.lines().find_map(|line| line.strip_prefix(&name));
        value.unwrap_or_else(|| panic!("{name} is missing in {text}")).parse().unwrap()
    };
    let kinds = ["step", "repeated", "checkpoint", "evaluation", "start", "hang", "down"];
    assert_eq!(account["seconds"].as_object().unwrap().len(), kinds.len());
    let wall: f64 = kinds.iter().map(|kind| exported(kind)).sum();
    for kind in kinds {
        assert_eq!(account["seconds"][kind], exported(kind), "{kind}");
    }
    let useful = 100.0 * (exported("step") + exported("evaluation")) / wall;
    assert!((account["useful_percent"].as_f64().unwrap() - useful).abs() < 1e-9, "{account}");
    let counts = ["hangs", "replica_mismatches", "skipped_saves", "failed_saves"].map(|name| &account[name]);
    assert_eq!(counts, [&1.into(), &2.into(), &3.into(), &Value::from(4)]);
}

#[test]
fn hostile_job_name_is_escaped_in_labels() {
    let mut view = sample_node(unix_ms(), 800);
    let long = format!("{HOSTILE}{}", "\u{1f600}\\\"\n".repeat(2000));
    view.jobs.insert(10, Arc::new(job(10, &long, NodeJobState::Queued)));
    let text = metrics::text(Arc::new(view), unix_ms(), Format::OpenMetrics).unwrap();
    let line = text.lines().find(|line| line.contains("job=\"9\"")).unwrap();
    let name = r#"name="<img src=x onerror=alert(1)>\"\n}\\ xlaunch_up 1 "#;
    assert!(line.contains(name) && line.ends_with("state=\"queued\"} 1.0"), "{line}");
    let line = text.lines().find(|line| line.contains("job=\"10\"")).unwrap();
    assert!(line.len() < 2000 && line.ends_with("state=\"queued\"} 1.0"), "{line}");
    assert!(!text.lines().any(|line| line.starts_with("}") || line.starts_with("xlaunch_up")), "{text}");
    assert!(text.ends_with("\n# EOF\n"));
}

/// In the text format 0.0.4, the comments and the samples of a counter have the same name.
#[test]
fn prometheus_format_has_the_samples_of_openmetrics_and_full_names_of_counters() {
    let (view, now) = (Arc::new(sample_node(unix_ms(), 800)), unix_ms());
    let text = |format| metrics::text(view.clone(), now, format).unwrap();
    let (plain, open) = (text(Format::Prometheus), text(Format::OpenMetrics));
    let samples = |text: &str| {
        let is_sample = |line: &&str| !line.starts_with('#') && !line.contains("_age_seconds{");
        text.lines().filter(is_sample).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(samples(&plain), samples(&open));
    let comment = "# TYPE xlaunch_tokens_total counter\nxlaunch_tokens_total{job=\"7\"} 26214400\n";
    assert!(plain.contains("# HELP xlaunch_tokens_total ") && plain.contains(comment), "{plain}");
    assert!(!plain.contains("# EOF") && open.contains("# TYPE xlaunch_tokens counter\n"), "{plain}");
}

#[test]
fn ended_jobs_are_exported_for_an_hour_without_throughput() {
    let now = unix_ms();
    let text = metrics::text(Arc::new(sample_node(now, 800)), now, Format::OpenMetrics).unwrap();
    let has = |sample: &str| text.lines().any(|line| line.starts_with(sample));
    for sample in [
        "xlaunch_jobs{state=\"lost\"} 1.0",
        "xlaunch_jobs_waiting_for_gpus 0.0",
        "xlaunch_job_info{job=\"7\",name=\"llama-28m\",user=\"grace\",kind=\"trainer\",state=\"running\"} 1.0",
        "xlaunch_job_info{job=\"8\",name=\"eval\",user=\"1002\",kind=\"command\",state=\"queued\"} 1.0",
        "xlaunch_step{job=\"7\"} 800.0",
        "xlaunch_step_duration_seconds_sum{job=\"7\"} 96.0",
        "xlaunch_step_duration_seconds_count{job=\"7\"} 800",
        "xlaunch_step_duration_seconds_bucket{le=\"0.1\",job=\"7\"} 0",
        "xlaunch_step_duration_seconds_bucket{le=\"+Inf\",job=\"7\"} 800",
        "xlaunch_tokens_total{job=\"7\"} 26214400",
        "xlaunch_allreduce_bytes_total{job=\"7\"} 107040000000",
        "xlaunch_tokens_per_second{job=\"7\"} 4",
        "xlaunch_mfu_ratio{job=\"7\"} 0.41",
        "xlaunch_worker_restarts_total{job=\"7\"} 1",
        "xlaunch_restarts_total{job=\"7\",cause=\"killed\"} 1",
        "xlaunch_hangs_total{job=\"7\"} 1",
        "xlaunch_replica_mismatches_total{job=\"7\"} 2",
        "xlaunch_skipped_checkpoints_total{job=\"7\"} 3",
        "xlaunch_failed_checkpoints_total{job=\"7\"} 4",
        "xlaunch_worker_up{job=\"7\",rank=\"3\"} 1.0",
        "xlaunch_worker_hint{job=\"7\",rank=\"2\"} 0.0",
        "xlaunch_worker_hint{job=\"7\",rank=\"3\"} 1.0",
        "xlaunch_pool_mapped_bytes{job=\"7\",rank=\"0\"} 3600000000.0",
        "xlaunch_gpu_job{UUID=\"GPU-5a1e0001-77d0-4c3f-9b52-0d3f5f1e2a00\",job=\"7\"} 1.0",
        "xlaunch_drained 0.0",
        "xlaunch_gpus_examined_total{result=\"passed\"} 12",
        "xlaunch_gpus_examined_total{result=\"failed\"} 1",
        // Job 6 failed ten minutes ago.
        "xlaunch_job_info{job=\"6\",name=\"gpt2-124m\",user=\"ada\",kind=\"trainer\",state=\"failed\"} 1.0",
        "xlaunch_loss{job=\"6\"} NaN",
    ] {
        assert!(has(sample), "{sample} is missing in {text}");
    }
    for sample in [
        // An ended job has no throughput, and one that ended a day ago is not exported.
        "xlaunch_tokens_per_second{job=\"6\"}",
        "xlaunch_step_duration_seconds_sum{job=\"6\"}",
        "xlaunch_job_status_age_seconds{job=\"6\"}",
        "xlaunch_job_info{job=\"3\"",
        "xlaunch_loss{job=\"8\"}",
        "xlaunch_gpu_job{UUID=\"GPU-5a1e0004",
    ] {
        assert!(!has(sample), "{sample} is in {text}");
    }
}
