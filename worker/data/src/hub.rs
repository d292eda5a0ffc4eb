//! Names of models on the Hugging Face Hub. This program downloads nothing, but recognises a name that was given in
//! place of a path.

use std::path::Path;

/// Says that a path does not exist and, if it ends like a name on the hub (`OWNER/MODEL`) and its parent does not exist
/// either, which command would download that model.
pub fn missing(path: &Path) -> String {
    let plain = |name: &&str| {
        let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        !name.is_empty() && !name.starts_with('.') && name.chars().all(allowed)
    };
    let name = |path: &Path| path.file_name().and_then(|name| name.to_str()).map(str::to_owned);
    let parent = path.parent().filter(|parent| !parent.exists());
    let owner = parent.and_then(name).filter(|owner| plain(&&**owner));
    let model = name(path).filter(|model| plain(&&**model));
    match owner.zip(model) {
        Some((owner, model)) => {
            let path = path.display().to_string();
            // An address, such as https://huggingface.co/OWNER/MODEL, is not a directory.
            let dir = if path.contains("://") { &model } else { &path };
            format!(
                "it does not exist; if {owner}/{model} is a model on Hugging Face's hub, download it first: `hf \
                 download {owner}/{model} --local-dir {dir}`"
            )
        }
        None => "it does not exist".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_hub_get_the_command_that_downloads_them() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["Qwen/Qwen3-0.6B", "HuggingFaceTB/SmolLM2-135M"] {
            let path = dir.path().join(name);
            let command = format!("`hf download {name} --local-dir {}`", path.display());
            assert!(missing(&path).contains(&command), "{}", missing(&path));
        }
        assert!(missing(Path::new("Qwen/Qwen3-0.6B")).contains("--local-dir Qwen/Qwen3-0.6B`"));
        let address = missing(Path::new("https://huggingface.co/Qwen/Qwen3-0.6B"));
        assert!(address.contains("`hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B`"), "{address}");
        // A directory of models exists, or the name cannot be one on the hub.
        for other in ["model", "runs/../model", "a b/c", ".cache/x"] {
            let path = dir.path().join(other);
            assert_eq!(missing(&path), "it does not exist", "{other}");
        }
    }
}
