//! The list of what a binary contains (SBOM), in the format of CycloneDX 1.6.
//!
//! It lists the crates that are linked into the binary, from the metadata of cargo, with the checksums of Cargo.lock.
//! Build scripts, procedural macros and their dependencies are left out, as they run only during the build. Features
//! are those of the whole workspace, so a few listed crates may not be needed by the binary.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde_json::{Value, json};

use super::binary::Binary;
use super::release::Release;
use crate::Error;
use crate::workspace::{cargo, output};

/// Writes the list.
pub(super) fn write(release: &Release, binary: &Binary) -> Result<PathBuf, Error> {
    let mut metadata = cargo(&release.root);
    let triple = binary.platform.triple();
    metadata.args(["metadata", "--format-version", "1", "--locked", "--filter-platform", triple]);
    let metadata = serde_json::from_str(&output(&mut metadata)?)?;
    let lock: toml::Table = std::fs::read_to_string(release.root.join("Cargo.lock"))?.parse()?;
    let list = list(&metadata, &checksums(&lock)).ok_or("the metadata of cargo has no crate xlaunch")?;
    let made = release.dist.join(format!("xlaunch-{}-{triple}.cdx.json", release.version));
    std::fs::write(&made, serde_json::to_string_pretty(&list)? + "\n")?;
    Ok(made)
}

/// Checksums of crates, by name and version.
fn checksums(lock: &toml::Table) -> BTreeMap<(String, String), String> {
    let packages = lock.get("package").and_then(toml::Value::as_array).map_or(&[][..], Vec::as_slice);
    let checksum = |package: &toml::Value| {
        let text = |key| package.get(key).and_then(toml::Value::as_str).map(str::to_owned);
        Some(((text("name")?, text("version")?), text("checksum")?))
    };
    packages.iter().filter_map(checksum).collect()
}

fn list(metadata: &Value, checksums: &BTreeMap<(String, String), String>) -> Option<Value> {
    let packages: BTreeMap<&str, &Value> =
        array(&metadata["packages"]).iter().filter_map(|it| Some((it["id"].as_str()?, it))).collect();
    let nodes: BTreeMap<&str, &Value> =
        array(&metadata["resolve"]["nodes"]).iter().filter_map(|it| Some((it["id"].as_str()?, it))).collect();
    let root = *packages.iter().find(|(_, package)| package["name"] == "xlaunch")?.0;
    let linked = |id: &str| {
        let normal =
            |dependency: &&Value| array(&dependency["dep_kinds"]).iter().any(|it| it["kind"].is_null());
        let of_node = nodes.get(id).map_or(&[][..], |node| array(&node["deps"]));
        let ids = of_node.iter().filter(normal).filter_map(|dependency| dependency["pkg"].as_str());
        ids.filter(|id| packages.get(id).is_some_and(|package| !is_macro(package))).collect::<BTreeSet<_>>()
    };
    let mut reached = BTreeMap::new();
    let mut waiting = vec![root];
    while let Some(id) = waiting.pop() {
        if !reached.contains_key(id) {
            let needs = linked(id);
            waiting.extend(needs.iter().copied());
            reached.insert(id, needs);
        }
    }
    let url = |id: &str| packages.get(id).map(|package| purl(package)).unwrap_or_default();
    let mut dependencies: Vec<(String, BTreeSet<String>)> =
        reached.iter().map(|(id, needs)| (url(id), needs.iter().map(|id| url(id)).collect())).collect();
    dependencies.sort();
    let mut components: Vec<&Value> =
        reached.keys().filter(|id| **id != root).filter_map(|id| packages.get(id).copied()).collect();
    components.sort_by_key(|package| purl(package));
    Some(json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": { "component": component(packages.get(root)?, "application", checksums) },
        "components": components.iter().map(|it| component(it, "library", checksums)).collect::<Vec<_>>(),
        "dependencies": dependencies
            .iter()
            .map(|(url, needs)| json!({ "ref": url, "dependsOn": needs }))
            .collect::<Vec<_>>(),
    }))
}

fn is_macro(package: &Value) -> bool {
    array(&package["targets"])
        .iter()
        .any(|target| array(&target["kind"]).iter().any(|kind| kind == "proc-macro"))
}

/// The URL that identifies a crate.
fn purl(package: &Value) -> String {
    let text = |key: &str| package[key].as_str().unwrap_or_default();
    format!("pkg:cargo/{}@{}", text("name"), text("version"))
}

fn component(package: &Value, kind: &str, checksums: &BTreeMap<(String, String), String>) -> Value {
    let text = |key: &str| package[key].as_str().unwrap_or_default();
    let (name, version) = (text("name"), text("version"));
    let mut component = json!({
        "type": kind, "bom-ref": purl(package), "name": name, "version": version, "purl": purl(package),
    });
    if let Some(license) = package["license"].as_str() {
        // An older way to write OR.
        let expression = license.replace(" / ", " OR ").replace('/', " OR ");
        component["licenses"] = json!([{ "expression": expression }]);
    }
    if let Some(checksum) = checksums.get(&(name.to_owned(), version.to_owned())) {
        component["hashes"] = json!([{ "alg": "SHA-256", "content": checksum }]);
    }
    component
}

fn array(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linked_crates_are_listed_with_licenses_and_checksums_and_others_are_not() {
        let package = |name: &str, kind: &str| {
            json!({ "id": name, "name": name, "version": "1.0.0", "license": "MIT/Apache-2.0",
                "targets": [{ "kind": [kind] }] })
        };
        let dependency = |name: &str, kind: Value| json!({ "pkg": name, "dep_kinds": [{ "kind": kind }] });
        let node = |name: &str, deps: &[Value]| json!({ "id": name, "deps": deps });
        let metadata = json!({
            "packages": [package("xlaunch", "bin"), package("a", "lib"), package("b", "lib"),
                package("m", "proc-macro"), package("tool", "lib"), package("unused", "lib")],
            "resolve": { "nodes": [
                node("xlaunch", &[dependency("a", Value::Null), dependency("m", Value::Null),
                    dependency("tool", json!("build"))]),
                node("a", &[dependency("b", Value::Null)]), node("b", &[]), node("m", &[]), node("tool", &[]),
                node("unused", &[]),
            ] },
        });
        let lock = "[[package]]\nname = \"a\"\nversion = \"1.0.0\"\nchecksum = \"00ff\"\n".parse().unwrap();
        let list = list(&metadata, &checksums(&lock)).unwrap();
        let names: Vec<_> =
            array(&list["components"]).iter().map(|it| it["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["a", "b"]);
        assert_eq!(list["metadata"]["component"]["name"], "xlaunch");
        assert_eq!(list["components"][0]["hashes"][0]["content"], "00ff");
        assert_eq!(list["components"][1]["licenses"][0]["expression"], "MIT OR Apache-2.0");
        let needs = json!({ "ref": "pkg:cargo/xlaunch@1.0.0", "dependsOn": ["pkg:cargo/a@1.0.0"] });
        assert!(array(&list["dependencies"]).contains(&needs), "{list}");
    }
}
