//! The reference of training configurations: Markdown tables from the JSON schema, whose descriptions are the doc
//! comments of the types.

use std::fmt::Write;

use serde_json::Value;
use xlaunch_spec::job::JobSpec;

/// Returns a table per section with a row per key, in the order in which the types declare them.
pub(super) fn tables(schema: &Value) -> String {
    // The schema sorts by name, but the serialised defaults keep the order of declaration.
    let declared = JobSpec::default().to_json();
    let declared = String::from_utf8_lossy(&declared);
    let mut out = String::new();
    for section in in_order(&schema["properties"], &declared) {
        let definition = resolve(schema, &schema["properties"][section]);
        // Doc comments of sections start with their name, such as "`[model]`: a preset ...".
        let about = text(definition).split_once(": ").map(|(_, about)| capitalized(about));
        let _ = write!(out, "### `[{section}]`\n\n{}", about.map(|about| about + "\n\n").unwrap_or_default());
        out += "| Key | Type | Default | Description |\n| --- | --- | --- | --- |\n";
        let start = declared.find(&format!("\"{section}\":")).unwrap_or_default();
        for key in in_order(&definition["properties"], &declared[start..]) {
            out += &row(schema, section, key, &definition["properties"][key]);
        }
        out.push('\n');
    }
    out.truncate(out.trim_end().len());
    out + "\n"
}

/// Names of the properties, ordered by their first occurrence as a key in `declared`.
fn in_order<'a>(properties: &'a Value, declared: &str) -> Vec<&'a str> {
    let mut names: Vec<&str> =
        properties.as_object().into_iter().flatten().map(|(name, _)| &**name).collect();
    names.sort_by_key(|name| declared.find(&format!("\"{name}\":")));
    names
}

fn row(schema: &Value, section: &str, key: &str, property: &Value) -> String {
    let target = resolve(schema, property);
    let mut description = text(property);
    if let Some(variants) = target["oneOf"].as_array() {
        for variant in variants {
            let _ = write!(description, "<br>`{}`: {}", form(variant), text(variant));
        }
    }
    let default = match &property["default"] {
        Value::Null => "none".to_owned(),
        value => format!("`{value}`"),
    };
    format!("| `{section}.{key}` | {} | {default} | {description} |\n", type_name(target))
}

/// Returns the value of a variant or, if it is a table, its tag and its other keys.
fn form(variant: &Value) -> String {
    let Some(keys) = variant["properties"].as_object() else { return variant["const"].to_string() };
    let tag = keys.iter().filter(|(_, value)| value.get("const").is_some());
    let tag = tag.map(|(key, value)| format!("{key} = {}", value["const"]));
    let others = keys.iter().filter(|(_, value)| value.get("const").is_none());
    tag.chain(others.map(|(key, _)| key.clone())).collect::<Vec<_>>().join(", ")
}

/// Returns the definition of a section or an enumeration, if the property refers to one, or the property itself.
fn resolve<'a>(schema: &'a Value, property: &'a Value) -> &'a Value {
    let reference = property["$ref"].as_str().or_else(|| property["anyOf"][0]["$ref"].as_str());
    match reference.and_then(|path| path.rsplit('/').next()) {
        Some(name) => &schema["$defs"][name],
        None => property,
    }
}

fn type_name(property: &Value) -> String {
    if let Some(variants) = property["oneOf"].as_array() {
        let is_table = variants.iter().any(|variant| variant["properties"].is_object());
        return if is_table { "table" } else { "string" }.into();
    }
    if let Some(forms) = property["anyOf"].as_array() {
        return forms.iter().map(type_name).collect::<Vec<_>>().join(" or ");
    }
    // An optional key has two types, of which the second is null.
    let name = property["type"].as_str().or_else(|| property["type"][0].as_str()).unwrap_or("any");
    match name {
        "array" => format!("list of {}s", type_name(&property["items"])),
        "object" => "table".into(),
        name => name.into(),
    }
}

/// Returns a doc comment as one line of a table, without rustdoc's links.
fn text(of: &Value) -> String {
    let text = of["description"].as_str().unwrap_or_default();
    text.replace('\n', " ").replace("[`", "`").replace("`]", "`").replace('|', "\\|")
}

fn capitalized(text: &str) -> String {
    let mut rest = text.chars();
    rest.next().map(|first| first.to_uppercase().chain(rest).collect()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/configuration.md");
    const START: &str = "<!-- generated: xlaunch gen config-docs -->\n";
    const END: &str = "<!-- end generated -->";

    /// Run with `UPDATE_DOCS=1` to update the page.
    #[test]
    fn documentation_is_up_to_date() {
        let page = fs_err::read_to_string(PAGE).unwrap();
        let (before, rest) = page.split_once(START).unwrap();
        let (_, after) = rest.split_once(END).unwrap();
        let expected = format!("{before}{START}\n{}\n{END}{after}", tables(&super::super::schema()));
        if std::env::var_os("UPDATE_DOCS").is_some() {
            fs_err::write(PAGE, &expected).unwrap();
        } else {
            assert!(
                page == expected,
                "docs/configuration.md is out of date: UPDATE_DOCS=1 cargo test -p xlaunch documentation"
            );
        }
    }

    #[test]
    fn tables_list_keys_in_declared_order_with_type_default_and_variants() {
        let tables = tables(&super::super::schema());
        let sections: Vec<_> = tables.lines().filter(|line| line.starts_with("### ")).collect();
        assert_eq!(sections[..3], ["### `[job]`", "### `[launch]`", "### `[model]`"]);
        let row = |key: &str| {
            let start = format!("| `{key}` | ");
            tables
                .lines()
                .find(|line| line.starts_with(&start))
                .unwrap_or_else(|| panic!("no {key}: {tables}"))
        };
        assert!(row("train.steps").starts_with("| `train.steps` | integer | `1000` | "));
        assert!(
            row("data.train").contains("| string or list of strings or list of tables | `[\"**/*.txt\",")
        );
        assert!(row("launch.nproc").contains("| integer | none | "));
        let precision = row("engine.precision");
        assert!(
            precision.contains("| string | none | ") && precision.contains("<br>`\"tf32\"`: "),
            "{precision}"
        );
        let scaling = row("model.rope_scaling");
        assert!(
            scaling.contains("| table | none | ")
                && scaling.contains("<br>`rope_type = \"linear\", factor`: "),
            "{scaling}"
        );
        assert!(tables.find("`train.steps`") < tables.find("`train.batch`"));
        assert!(
            tables.lines().all(|line| !line.starts_with('|') || line.matches(" | ").count() == 3),
            "{tables}"
        );
    }
}
