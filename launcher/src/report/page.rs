//! The report as HTML: tables as markup, curves as JSON that the page's script draws.

use std::collections::BTreeMap;
use std::fmt::Write;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use xlaunch_proto::metrics::{Chart, METRICS};
use xlaunch_spec::quantities::{count_text, rough_time_text};

use super::{Run, documents, reduce};
use crate::render::text;

/// Beginning of every report. Only a file that starts with it is replaced.
pub(crate) const MARK: &str = "<!doctype html>\n<!-- xlaunch report -->\n";
const STYLE: &str = include_str!("assets/report.css");
const SCRIPT: &str = include_str!("assets/report.js");
/// Text in place of a missing value.
const NONE: &str = "–";

/// Returns the page.
pub(crate) fn html(runs: &[Run]) -> String {
    let policy = format!(
        "default-src 'none'; script-src '{}'; style-src '{}'; base-uri 'none'; form-action 'none'",
        source_hash(SCRIPT),
        source_hash(STYLE)
    );
    let labels: Vec<&str> = runs.iter().map(|run| &*run.label).collect();
    let title = escape(&format!("Training report: {}", labels.join(", ")));
    let mut out = String::from(MARK);
    out += "<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n";
    out += &format!("<meta http-equiv=\"Content-Security-Policy\" content=\"{policy}\">\n");
    out += "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n";
    out += &format!("<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n");
    out += "<h1>Training report</h1>\n";
    out += &summary(runs);
    out += &notes(runs);
    out += "<section id=\"curves\" aria-label=\"Curves\">\n<noscript><p>The curves need JavaScript.</p></noscript>\n\
        </section>\n";
    out += &experts(runs);
    out += &samples(runs);
    let configs = runs.iter().map(|run| run.config.as_ref().map(documents::flatten));
    out += &comparison("configuration", "Configuration", runs, &configs.collect::<Vec<_>>(), &[]);
    out += &environments(runs);
    out += &format!("<p class=\"quiet\">xlaunch {}</p>\n</main>\n", escape(xlaunch_proto::VERSION));
    out += &format!("<script type=\"application/json\" id=\"data\">{}</script>\n", script_json(&data(runs)));
    out += &format!("<script>{SCRIPT}</script>\n</body>\n</html>\n");
    out
}

/// Returns the source expression with which a content security policy allows only this script or style.
fn source_hash(text: &str) -> String {
    format!("sha256-{}", BASE64.encode(Sha256::digest(text)))
}

/// Escapes text for use as content or as the value of a quoted attribute. Control characters are made visible.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text::escape(text).chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\'' => out += "&#39;",
            c => out.push(c),
        }
    }
    out
}

/// Returns JSON for a script element. `<` is escaped, because `</script` or `<!--` in a string would end or change the
/// element.
fn script_json(value: &Value) -> String {
    value.to_string().replace('<', "\\u003c")
}

/// Name and value of a row of the summary.
type SummaryRow<'a> = (&'a str, &'a dyn Fn(&Run) -> String);

fn summary(runs: &[Run]) -> String {
    let figure = |value: Option<f64>| value.map_or(NONE.into(), |value| format!("{value:.4}"));
    let best =
        |best: Option<(f64, u64)>| best.map_or(NONE.into(), |(value, at)| format!("{value:.4} at step {at}"));
    let percent = |value: Option<f64>| value.map_or(NONE.into(), |value| format!("{value:.1} %"));
    let seconds = |value: Option<f64>| value.map_or(NONE.into(), rough_time_text);
    let rows: [SummaryRow<'_>; 12] = [
        ("steps", &|run| run.curves.figures.steps.to_string()),
        ("tokens", &|run| count_text(run.curves.figures.tokens)),
        ("time in steps", &|run| rough_time_text(run.curves.figures.step_seconds)),
        ("wall time of the run", &|run| seconds(run.ended("/seconds"))),
        ("useful time", &|run| percent(run.ended("/accounting/useful_percent"))),
        ("final loss", &|run| figure(run.curves.figures.loss.last)),
        ("best loss", &|run| best(run.curves.figures.loss.best)),
        ("final validation loss", &|run| figure(run.curves.figures.val_loss.last)),
        ("best validation loss", &|run| best(run.curves.figures.val_loss.best)),
        ("best bits per byte", &|run| best(run.curves.figures.bits_per_byte.best)),
        ("median tok/s", &|run| run.curves.figures.tokens_per_second.map_or(NONE.into(), count_text)),
        ("median MFU", &|run| percent(run.curves.figures.mfu.map(|mfu| 100.0 * mfu))),
    ];
    let mut out = String::from("<section>\n<h2>Summary</h2>\n<div class=\"scroll\"><table id=\"summary\">\n");
    out += &heading("", runs);
    for (name, value) in rows {
        let values: Vec<String> = runs.iter().map(value).collect();
        if values.iter().any(|value| value != NONE) {
            out += &row(name, &values, false);
        }
    }
    out += "</table></div>\n";
    for (index, run) in runs.iter().enumerate() {
        out += &format!("<p class=\"quiet\">{} {}</p>\n", swatch(index), escape(&run.path));
    }
    out + "</section>\n"
}

fn notes(runs: &[Run]) -> String {
    let items: String =
        super::notes(runs).iter().map(|note| format!("<li>{}</li>\n", escape(note))).collect();
    if items.is_empty() {
        items
    } else {
        format!("<section>\n<h2>Notes</h2>\n<ul id=\"notes\">\n{items}</ul>\n</section>\n")
    }
}

/// Returns the loads of experts as a row of cells per block, which are more opaque the more choices an expert has.
fn experts(runs: &[Run]) -> String {
    let mut out = String::new();
    for (index, run) in runs.iter().enumerate() {
        let Some((step, blocks)) = &run.curves.expert_loads else { continue };
        let most = blocks.values().flatten().copied().fold(f64::MIN_POSITIVE, f64::max);
        let (rows, columns) = (blocks.len(), blocks.values().map(Vec::len).max().unwrap_or(0));
        let _ = writeln!(
            out,
            "<h3>{} {}</h3>\n<p class=\"quiet\">step {step}; a row per block and a column per expert; largest share: \
             {:.1} % of the choices of a block</p>\n<svg class=\"loads c{index}\" viewBox=\"0 0 {columns} {rows}\" \
             preserveAspectRatio=\"none\" role=\"img\" aria-label=\"Loads of experts\">",
            swatch(index),
            escape(&run.label),
            100.0 * most
        );
        for (row, (block, shares)) in blocks.iter().enumerate() {
            for (expert, share) in shares.iter().enumerate() {
                let (opacity, percent) = ((share / most).clamp(0.0, 1.0), 100.0 * share);
                let _ = write!(
                    out,
                    "<rect x=\"{expert}\" y=\"{row}\" width=\"1\" height=\"1\" fill-opacity=\"{opacity:.2}\">\
                     <title>block {block}, expert {expert}: {percent:.1} %</title></rect>"
                );
            }
        }
        out += "</svg>\n";
    }
    if out.is_empty() {
        out
    } else {
        format!("<section id=\"experts\">\n<h2>Loads of experts</h2>\n{out}</section>\n")
    }
}

fn samples(runs: &[Run]) -> String {
    let mut out = String::new();
    for (index, run) in runs.iter().enumerate().filter(|(_, run)| !run.samples.is_empty()) {
        out += &format!("<h3>{} {}</h3>\n", swatch(index), escape(&run.label));
        for (at, sample) in run.samples.iter().rev().enumerate() {
            let open = if at == 0 { " open" } else { "" };
            let text = |text: &str| text.split('\n').map(escape).collect::<Vec<_>>().join("\n");
            let _ = writeln!(
                out,
                "<details{open}><summary>step {}</summary><pre><b>{}</b>{}</pre></details>",
                sample.step,
                text(&sample.prompt),
                text(&sample.text)
            );
        }
    }
    if out.is_empty() {
        out
    } else {
        format!("<section id=\"samples\">\n<h2>Samples</h2>\n{out}</section>\n")
    }
}

fn environments(runs: &[Run]) -> String {
    let of_run = |run: &Run| run.environment.as_ref().map(documents::environment);
    let rows: Vec<_> = runs.iter().map(of_run).collect();
    let mut order: Vec<&str> = Vec::new();
    for (name, _) in rows.iter().flatten().flatten() {
        if !order.contains(name) {
            order.push(name);
        }
    }
    let keyed = |rows: &Vec<(&str, String)>| {
        rows.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect()
    };
    let values: Vec<Option<BTreeMap<String, String>>> =
        rows.iter().map(|rows| rows.as_ref().map(keyed)).collect();
    comparison("environment", "Environment", runs, &values, &order)
}

/// Returns a table with the values of all runs side by side. Rows in which runs differ are marked and come first; equal
/// rows are collapsed. `order` is the order of the keys; without it, they are sorted.
fn comparison(
    id: &str,
    title: &str,
    runs: &[Run],
    values: &[Option<BTreeMap<String, String>>],
    order: &[&str],
) -> String {
    let mut keys: Vec<&str> =
        values.iter().flatten().flat_map(|values| values.keys().map(|key| &**key)).collect();
    keys.sort_by_key(|key| (order.iter().position(|other| other == key), *key));
    keys.dedup();
    if keys.is_empty() {
        return String::new();
    }
    let (mut differing, mut equal, mut equal_count) = (String::new(), String::new(), 0);
    for key in keys {
        let value = |values: &Option<BTreeMap<String, String>>| values.as_ref()?.get(key).cloned();
        let cells: Vec<Option<String>> = values.iter().map(value).collect();
        // A run without the file does not count as different.
        let known = cells.iter().zip(values).filter(|(_, values)| values.is_some()).map(|(cell, _)| cell);
        let differs = known.clone().any(|cell| Some(cell) != known.clone().next());
        let cells: Vec<String> = cells.into_iter().map(|cell| cell.unwrap_or_else(|| NONE.into())).collect();
        if differs {
            differing += &row(key, &cells, true)
        } else {
            equal += &row(key, &cells, false);
            equal_count += 1;
        }
    }
    let table =
        |rows: &str| format!("<div class=\"scroll\"><table>\n{}{rows}</table></div>\n", heading("key", runs));
    let mut out = format!("<section id=\"{id}\">\n<h2>{title}</h2>\n");
    if !differing.is_empty() {
        out += &table(&differing);
    }
    if equal_count > 0 {
        let what = if runs.len() > 1 { "equal in all runs" } else { "values" };
        let open = if id == "environment" { " open" } else { "" };
        out +=
            &format!("<details{open}><summary>{equal_count} {what}</summary>{}</details>\n", table(&equal));
    }
    out + "</section>\n"
}

/// Returns the first row of a table, with a column per run.
fn heading(first: &str, runs: &[Run]) -> String {
    let column = |(index, run): (usize, &Run)| {
        format!("<th scope=\"col\">{} {}</th>", swatch(index), escape(&run.label))
    };
    let columns: String = runs.iter().enumerate().map(column).collect();
    format!("<thead><tr><th scope=\"col\">{first}</th>{columns}</tr></thead>\n")
}

fn row(name: &str, values: &[String], differs: bool) -> String {
    let cells: String = values.iter().map(|value| format!("<td>{}</td>", escape(value))).collect();
    let (class, mark) =
        if differs { (" class=\"differs\"", "<span aria-label=\"differs\">≠</span> ") } else { ("", "") };
    format!("<tr{class}><th scope=\"row\">{mark}{}</th>{cells}</tr>\n", escape(name))
}

/// Returns a sample of a run's line: its colour and dashes.
fn swatch(index: usize) -> String {
    format!(
        "<svg class=\"swatch c{index}\" viewBox=\"0 0 28 8\" aria-hidden=\"true\"><path d=\"M0 4H28\"/></svg>"
    )
}

/// Returns the curves for the script.
fn data(runs: &[Run]) -> Value {
    let curve = |index: usize, run: &Run, at: usize, marks: bool| {
        let points = Some(&run.curves.points[at]).filter(|points| !points.is_empty())?;
        let (steps, values): (Vec<u64>, Vec<Value>) =
            points.iter().map(|(step, value)| (*step, short(*value))).unzip();
        let key = METRICS[at].key;
        Some(json!({ "run": index, "key": key, "marks": marks, "steps": steps, "values": values }))
    };
    let metrics = METRICS.iter().enumerate().filter_map(|(at, metric)| Some((at, metric.chart?)));
    let metrics: Vec<(usize, Chart)> = metrics.collect();
    let chart = |metrics: &[(usize, Chart)]| {
        let Chart { id, title, unit } = metrics[0].1;
        // The values of the second metric are drawn with marks.
        let curves = metrics.iter().enumerate().flat_map(|(nth, (at, _))| {
            runs.iter().enumerate().filter_map(move |(index, run)| curve(index, run, *at, nth > 0))
        });
        let curves: Vec<Value> = curves.collect();
        (!curves.is_empty()).then(|| json!({ "id": id, "title": title, "unit": unit, "curves": curves }))
    };
    let charts: Vec<Value> = metrics.chunk_by(|a, b| a.1.id == b.1.id).filter_map(chart).collect();
    let labels: Vec<String> = runs.iter().map(|run| text::escape(&run.label)).collect();
    json!({ "runs": labels, "charts": charts, "most_points": reduce::MAX_POINTS })
}

/// Rounds a value to the digits of an f32, the precision of the workers' reports, which halves the size.
#[expect(clippy::cast_possible_truncation, reason = "that is its purpose")]
fn short(value: Option<f64>) -> Value {
    let digits = value.map(|value| (value as f32).to_string());
    digits.and_then(|digits| digits.parse::<f64>().ok()).map_or(Value::Null, Value::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::curves::Curves;
    use crate::report::documents::Sample;

    const HOSTILE: &str = "</script><script>alert(1)</script><!-- \" ' & \u{1b}[2J";

    fn run(label: &str, config: &Value) -> Run {
        let mut curves = Curves::default();
        curves.points[0] = vec![(1, Some(0.1)), (2, None)];
        let environment = Some(json!({ "host": { "name": label } }));
        Run { label: label.into(), config: Some(config.clone()), environment, curves, ..Run::default() }
    }

    #[test]
    fn texts_of_runs_are_content_only() {
        let mut hostile = run(HOSTILE, &json!({ HOSTILE: HOSTILE }));
        hostile.samples = vec![Sample { step: 1, prompt: HOSTILE.into(), text: HOSTILE.into() }];
        hostile.notes = vec![HOSTILE.into()];
        hostile.path = HOSTILE.into();
        let page = html(&[hostile]);
        // Only the page's own elements.
        assert_eq!((page.matches("<script").count(), page.matches("</script").count()), (2, 2));
        assert_eq!(page.matches("<!--").count(), 1);
        assert!(page.contains("&lt;/script&gt;&lt;script&gt;alert(1)") && !page.contains('\u{1b}'));
        // Label, title, configuration, sample and note, each once or more; and the data of the script.
        assert!(page.matches("&lt;script&gt;alert(1)").count() >= 8, "{page}");
        assert!(page.contains("\"\\u003c/script>\\u003cscript>alert(1)"), "{page}");
    }

    #[test]
    fn loads_of_experts_are_cells_with_their_shares() {
        let plain = run("a", &json!({}));
        assert!(!html(std::slice::from_ref(&plain)).contains("id=\"experts\""));
        let mut moe = run("b", &json!({}));
        moe.curves.expert_loads = Some((7, [(1, vec![0.8, 0.2]), (2, vec![0.4, 0.6])].into()));
        let page = html(&[plain, moe]);
        let section =
            page.split_once("<section id=\"experts\">").unwrap().1.split_once("</section>").unwrap().0;
        assert!(section.contains("step 7;") && section.contains("80.0 % of the choices"), "{section}");
        assert!(section.contains("<svg class=\"loads c1\" viewBox=\"0 0 2 2\""), "{section}");
        let cell = "<rect x=\"1\" y=\"0\" width=\"1\" height=\"1\" fill-opacity=\"0.25\">";
        assert!(section.contains(&format!("{cell}<title>block 1, expert 1: 20.0 %</title>")), "{section}");
    }

    #[test]
    fn policy_allows_the_pages_own_script_and_style_only() {
        // `printf %s 'alert(1)' | openssl dgst -sha256 -binary | base64`.
        assert_eq!(source_hash("alert(1)"), "sha256-bhHHL3z2vDgxUt0W3dWQOrprscmda2Y5pLsLg4GF+pI=");
        let page = html(&[run("a", &json!({}))]);
        let policy = page.lines().find(|line| line.contains("Content-Security-Policy")).unwrap();
        assert!(policy.contains("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
        for (start, end) in [("<style>", "</style>"), ("<script>", "</script>")] {
            let text = page.split_once(start).unwrap().1.split_once(end).unwrap().0;
            assert!(policy.contains(&source_hash(text)), "{policy}");
        }
        assert!(page.starts_with(MARK));
    }

    #[test]
    fn differences_are_marked_and_equal_values_can_be_opened() {
        let runs =
            [run("a", &json!({ "lr": 1, "seed": 7 })), run("b", &json!({ "lr": 2, "seed": 7, "new": true }))];
        let page = html(&runs);
        let section =
            page.split_once("<section id=\"configuration\">").unwrap().1.split_once("</section>").unwrap().0;
        let (differing, equal) = section.split_once("<details>").unwrap();
        let rows = |text: &str| text.matches("class=\"differs\"").count();
        assert_eq!((rows(differing), rows(equal)), (2, 0));
        assert!(differing.contains("</span> lr</th><td>1</td><td>2</td>"), "{differing}");
        assert!(differing.contains("</span> new</th><td>–</td><td>true</td>"), "{differing}");
        assert!(
            equal.contains("1 equal in all runs") && equal.contains(">seed</th><td>7</td><td>7</td>"),
            "{equal}"
        );
        // A run without a configuration, as older ones may be, differs in nothing.
        let runs = [Run { config: None, ..run("a", &Value::Null) }, run("b", &json!({ "seed": 7 }))];
        assert!(!html(&runs).contains("</span> seed"));
    }

    #[test]
    fn values_of_the_script_have_the_digits_of_an_f32() {
        let data = data(&[run("a", &json!({}))]);
        let curve = &data["charts"][0]["curves"][0];
        assert_eq!((&curve["steps"], &curve["values"]), (&json!([1, 2]), &json!([0.1, null])));
        assert_eq!(data["charts"].as_array().map(Vec::len), Some(1), "no empty charts");
        assert_eq!(short(Some(207_512.348_211_9)).to_string(), "207512.34");
    }
}
