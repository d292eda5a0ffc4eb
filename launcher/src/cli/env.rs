//! `xlaunch env`: shows the cluster environment of this process, the settings that a launch without flags takes from
//! it, and the CUDA libraries that workers load. It never prints a token, and always exits with 0, since problems are
//! part of the answer.

use clap::Args;
use serde_json::{Value, json};
use xlaunch_host::devices::host_name;
use xlaunch_host::libraries::{File, Libraries, Selected};
use xlaunch_spec::exit::ExitCode;

use super::engine::{self, Allocation};
use super::output::{QueryError, print};
use super::torchrun::{self, Scope, Settings};
use crate::render::text::{columns, escape};

/// Options of `xlaunch env`.
#[derive(Debug, Args)]
pub(super) struct Env {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(options: &Env) -> Result<ExitCode, QueryError> {
    let found = engine::of_this_process();
    let mut settings = Settings::new();
    let scope = Scope::Nodes(&|| found.clone());
    let placed = torchrun::placement(&|name| std::env::var_os(name), scope, &mut settings);
    let problem = placed.as_ref().err();
    let warnings = placed.as_ref().ok().and_then(Option::as_ref).map_or(&[][..], |group| &group.warnings);
    let allocation = found.as_ref().ok().and_then(Option::as_ref);
    let libraries = Libraries::find(&|name| std::env::var_os(name));
    let answer = if options.json {
        format!("{:#}\n", as_json(allocation, &settings, &libraries, problem, warnings))
    } else {
        as_text(allocation, &settings, problem, warnings) + &libraries_text(&libraries)
    };
    print(answer.as_bytes())?;
    Ok(ExitCode::Done)
}

fn as_text(
    allocation: Option<&Allocation>,
    settings: &Settings,
    problem: Option<&String>,
    warnings: &[String],
) -> String {
    let mut out = format!("cluster environment: {}\n", allocation.map_or("none", |found| found.engine));
    for (name, value) in allocation.map_or(&[][..], |found| &found.variables) {
        out += &format!("  {name}={}\n", escape(value));
    }
    let row = |(name, setting): &(&str, engine::Sourced<String>)| {
        vec![(*name).to_owned(), setting.value.clone(), setting.source.clone()]
    };
    let rows: Vec<_> = settings.iter().map(row).collect();
    out += &format!("\n{}", columns(&["SETTING", "VALUE", "FROM"], &rows));
    warnings.iter().for_each(|warning| out += &format!("\nwarning: {}\n", escape(warning)));
    problem.iter().for_each(|problem| out += &format!("\nproblem: {}\n", escape(problem)));
    out
}

/// Returns a row per library, and one for each file that was passed over.
fn libraries_text(libraries: &Libraries) -> String {
    let version = |file: &File| file.version.as_ref().map_or_else(|| "-".into(), ToString::to_string);
    let path = |file: &File| escape(&file.path.to_string_lossy());
    let mut rows = Vec::new();
    for Selected { kind, file, others } in &libraries.selected {
        let name = kind.name().to_owned();
        rows.push(match file {
            Some(file) => vec![name, version(file), path(file), "selected".into()],
            None => vec![name, "-".into(), "-".into(), "not found".into()],
        });
        for (file, reason) in others {
            rows.push(vec![String::new(), version(file), path(file), format!("passed over: {reason}")]);
        }
    }
    format!("\n{}", columns(&["LIBRARY", "VERSION", "FILE", ""], &rows))
}

fn as_json(
    allocation: Option<&Allocation>,
    settings: &Settings,
    libraries: &Libraries,
    problem: Option<&String>,
    warnings: &[String],
) -> Value {
    let variable = |(name, value): &(&str, String)| ((*name).to_owned(), json!(value));
    let variables = |found: &Allocation| found.variables.iter().map(variable).collect::<Value>();
    let setting = |(name, found): &(&str, engine::Sourced<String>)| {
        let (value, source) = (&found.value, &found.source);
        json!({ "name": name, "value": value, "source": source })
    };
    json!({
        "host": host_name(),
        "engine": allocation.map(|found| json!({ "name": found.engine, "variables": variables(found) })),
        "settings": settings.iter().map(setting).collect::<Vec<_>>(),
        "libraries": libraries.to_json(),
        "warnings": warnings,
        "problem": problem,
    })
}
