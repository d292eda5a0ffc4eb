//! The keys of a configuration, derived from its defaults.

use serde::Serialize;
use serde_json::Value;
use xlaunch_spec::job::JobSpec;

use xlaunch_host::naming;

pub use xlaunch_spec::job::RENAMED_KEYS;

pub(super) fn renamed_warning(old: &str, new: &str) -> String {
    format!("`{old}` was renamed to `{new}`; the old name will be removed in the next release")
}

/// Returns every key of a job's configuration as `section.key`.
pub(super) fn all() -> Vec<String> {
    of(&JobSpec::default())
}

/// Returns every key as `section.key`. Optional keys are null in the serialized defaults, so none is missing.
pub fn of(defaults: &impl Serialize) -> Vec<String> {
    let Ok(Value::Object(sections)) = serde_json::to_value(defaults) else { return Vec::new() };
    let keys = sections.iter().filter_map(|(section, keys)| Some((section, keys.as_object()?)));
    keys.flat_map(|(section, keys)| keys.keys().map(move |key| format!("{section}.{key}"))).collect()
}

/// The environment variable of a key: `train.lr` is `XLAUNCH_TRAIN_LR`.
pub(super) fn variable(key: &str) -> String {
    format!("XLAUNCH_{}", key.replace('.', "_").to_uppercase())
}

/// Returns the key that a variable of this name sets. The key need not exist: `XLAUNCH_TRAIN_LRR` sets `train.lrr`.
/// `None` if the name does not start with that of a section.
pub(super) fn of_variable(name: &str, known: &[String]) -> Option<String> {
    if let Some(key) = known.iter().find(|key| variable(key) == name) {
        return Some(key.clone());
    }
    let (section, key) = name.strip_prefix("XLAUNCH_")?.split_once('_')?;
    let key = format!("{}.{}", section.to_lowercase(), key.to_lowercase());
    known.iter().any(|known| known.split('.').next() == key.split('.').next()).then_some(key)
}

/// Keys that are elsewhere, each with an explanation.
const ELSEWHERE: [(&str, &str); 1] = [(
    "muon",
    "Muon's keys are in a section of their own, `[muon]`; `train.optimizer = \"muon\"` selects it",
)];

/// Returns "did you mean" for an unknown key, or an example of a known one.
pub(super) fn nearest(key: &str, known: &[String]) -> String {
    let name = |key: &str| key.rsplit('.').next().unwrap_or_default().to_owned();
    let wanted = name(key);
    if let Some((_, note)) = ELSEWHERE.iter().find(|(key, _)| *key == wanted) {
        return (*note).into();
    }
    // The name is right, but the section is wrong. If several sections have the key, suggest the general one.
    let same_name = known.iter().filter(|other| name(other) == wanted);
    if let Some(other) = same_name.min_by_key(|other| !other.starts_with("train.")) {
        return format!("did you mean `{other}`?");
    }
    match naming::nearest(key, known.iter().map(String::as_str)) {
        Some((best, similarity)) if similarity > 0.85 => format!("did you mean `{best}`?"),
        Some((best, _)) => format!("a known key, such as `{best}`"),
        None => String::new(),
    }
}

/// Returns "did you mean" for an unknown section, or the list of all sections.
pub(super) fn nearest_section(section: &str, known: &[String]) -> String {
    let mut sections: Vec<&str> = known.iter().filter_map(|key| Some(key.split_once('.')?.0)).collect();
    sections.dedup();
    match naming::nearest(section, sections.iter().copied()) {
        Some((best, similarity)) if similarity > 0.7 => format!("did you mean `[{best}]`?"),
        _ => format!("the sections are [{}]", sections.join("], [")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn required_and_optional_keys_are_known() {
        let known = all();
        for key in
            ["train.lr", "muon.lr", "launch.nproc", "model.kv_heads", "checkpoint.init", "engine.precision"]
        {
            assert!(known.iter().any(|known| known == key), "{key}");
        }
        assert_eq!(nearest("train.lrr", &known), "did you mean `train.lr`?");
        assert_eq!(nearest("train.seed", &known), "did you mean `job.seed`?");
        assert!(nearest("train.muon", &known).contains("`[muon]`"));
        assert_eq!(nearest_section("modle", &known), "did you mean `[model]`?");
    }

    #[test]
    fn renamed_keys_lead_to_known_keys_of_the_same_section() {
        let known = all();
        for (old, new) in RENAMED_KEYS {
            assert!(known.iter().any(|key| key == new) && known.iter().all(|key| key != old), "{old}");
            assert_eq!(old.split_once('.').unwrap().0, new.split_once('.').unwrap().0);
        }
    }

    #[test]
    fn configuration_page_describes_every_key_and_no_other() {
        let page = include_str!("../../../../docs/configuration.md");
        let row = |line: &'static str| line.strip_prefix("| `")?.split('`').next();
        let mut described: Vec<&str> = page.lines().filter_map(row).collect();
        described.sort_unstable();
        let mut known = all();
        known.sort();
        assert_eq!(described, known);
    }
}
