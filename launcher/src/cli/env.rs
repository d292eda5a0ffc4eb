//! `xlaunch env`: shows the engine that started this process, and the settings that a launch without flags takes from
//! it. It never prints a token, and always exits with 0, as a problem is part of the answer.

use clap::Args;
use serde_json::{Value, json};
use xlaunch_agent::devices::host_name;
use xlaunch_proto::exit::ExitCode;

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
    let answer = if options.json {
        format!("{:#}\n", as_json(allocation, &settings, problem, warnings))
    } else {
        as_text(allocation, &settings, problem, warnings)
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
    let mut out = format!("engine: {}\n", allocation.map_or("none", |found| found.engine));
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

fn as_json(
    allocation: Option<&Allocation>,
    settings: &Settings,
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
        "warnings": warnings,
        "problem": problem,
    })
}
