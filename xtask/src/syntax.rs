//! Parses the modules of a crate from its root file, like rustc, without test code.

use std::path::{Path, PathBuf};
use std::rc::Rc;

use syn::punctuated::Punctuated;
use syn::{Attribute, Expr, ExprLit, Item, Lit, Meta, Token};

use crate::Error;

/// One module. Nested inline modules are separate modules.
pub(crate) struct Module {
    /// Path below the crate's root; empty for the root.
    pub(crate) path: Vec<String>,
    pub(crate) file: PathBuf,
    /// Text of the file.
    text: Rc<str>,
    /// Items other than modules and test code.
    pub(crate) items: Vec<Item>,
}

impl Module {
    /// Returns the first line that has this text, or 0. The parser does not say on which line an item is: the feature
    /// `span-locations` of proc-macro2 would change its build for the dependencies of the launcher too.
    pub(crate) fn line_of(&self, text: &str) -> usize {
        (1..).zip(self.text.lines()).find(|(_, line)| line.contains(text)).map_or(0, |(number, _)| number)
    }
}

/// Reads a file of the repository.
pub(crate) type Read<'a> = &'a dyn Fn(&Path) -> Option<String>;

/// Parses the crate with this root file.
pub(crate) fn modules(entry: &Path, read: Read<'_>) -> Result<Vec<Module>, Error> {
    let mut modules = Vec::new();
    // The root file's modules are its siblings, regardless of its name.
    let children = entry.parent().unwrap_or(Path::new("")).to_path_buf();
    file(entry, &children, Vec::new(), read, &mut modules)?;
    Ok(modules)
}

fn file(
    path: &Path,
    children: &Path,
    module: Vec<String>,
    read: Read<'_>,
    modules: &mut Vec<Module>,
) -> Result<(), Error> {
    let text: Rc<str> = read(path).ok_or_else(|| format!("{}: no such file", path.display()))?.into();
    let parsed = syn::parse_file(&text).map_err(|error| format!("{}: {error}", path.display()))?;
    if is_test(&parsed.attrs) {
        return Ok(());
    }
    items(parsed.items, &File { path, text, read }, children, module, modules)
}

struct File<'a> {
    path: &'a Path,
    text: Rc<str>,
    read: Read<'a>,
}

fn items(
    all: Vec<Item>,
    source: &File<'_>,
    children: &Path,
    module: Vec<String>,
    modules: &mut Vec<Module>,
) -> Result<(), Error> {
    let File { path, text, read } = source;
    let mut kept = Vec::new();
    for item in all {
        if is_test(attributes(&item)) {
            continue;
        }
        let Item::Mod(inner) = item else {
            kept.push(item);
            continue;
        };
        // `mod r#gen;` is in `gen.rs`.
        let name = inner.ident.to_string().trim_start_matches("r#").to_owned();
        let mut inner_path = module.clone();
        inner_path.push(name.clone());
        let inner_children = children.join(&name);
        match inner.content {
            Some((_, content)) => items(content, source, &inner_children, inner_path, modules)?,
            None => {
                let sibling = children.join(format!("{name}.rs"));
                let found = match path_attribute(&inner.attrs) {
                    Some(name) => path.parent().unwrap_or(Path::new("")).join(name),
                    None if read(&sibling).is_some() => sibling,
                    None => inner_children.join("mod.rs"),
                };
                file(&found, &inner_children, inner_path, read, modules)?;
            }
        }
    }
    modules.push(Module { path: module, file: path.to_path_buf(), text: text.clone(), items: kept });
    Ok(())
}

/// Returns whether the attributes restrict the item to tests.
pub(crate) fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        if attribute.path().is_ident("test") {
            return true;
        }
        match &attribute.meta {
            Meta::List(list) if list.path.is_ident("cfg") => list
                .parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated)
                .is_ok_and(|conditions| conditions.iter().any(requires_test)),
            _ => false,
        }
    })
}

/// Returns whether a `cfg` condition is true only in builds of tests or fuzz targets: `test`, `feature = "fuzzing"`, or
/// `all(.., test, ..)`.
fn requires_test(condition: &Meta) -> bool {
    match condition {
        Meta::Path(path) => path.is_ident("test"),
        Meta::NameValue(pair) => {
            pair.path.is_ident("feature") && text(&pair.value).as_deref() == Some("fuzzing")
        }
        Meta::List(list) if list.path.is_ident("all") => list
            .parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated)
            .is_ok_and(|conditions| conditions.iter().any(requires_test)),
        _ => false,
    }
}

/// Returns the value of `#[path = "..."]`.
fn path_attribute(attributes: &[Attribute]) -> Option<String> {
    let attribute = attributes.iter().find(|attribute| attribute.path().is_ident("path"))?;
    text(&attribute.meta.require_name_value().ok()?.value)
}

/// Returns the value of a string literal.
fn text(value: &Expr) -> Option<String> {
    match value {
        Expr::Lit(ExprLit { lit: Lit::Str(text), .. }) => Some(text.value()),
        _ => None,
    }
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Parses the modules of a crate given as (file, text) pairs; the first one is its root.
    pub(crate) fn parse(files: &[(&str, &str)]) -> Vec<Module> {
        let read = |path: &Path| {
            files.iter().find(|(name, _)| Path::new(name) == path).map(|(_, text)| (*text).to_owned())
        };
        modules(Path::new(files[0].0), &read).unwrap()
    }

    #[test]
    fn modules_are_found_as_rustc_finds_them_and_test_code_is_left_out() {
        let modules = parse(&[
            (
                "src/lib.rs",
                "mod a; mod b { mod c; fn f() {} } #[path = \"odd.rs\"] mod d; #[cfg(test)] mod tests;",
            ),
            ("src/a/mod.rs", "mod inner; #[cfg(all(test, unix))] mod tests; #[test] fn t() {}"),
            (
                "src/a/inner.rs",
                "#[cfg(not(test))] fn kept() {} #[cfg(test)] fn dropped() {} \
                 #[cfg(feature = \"fuzzing\")] mod fuzz; #[cfg(feature = \"cuda\")] fn kept() {}",
            ),
            ("src/b/c.rs", ""),
            ("src/odd.rs", ""),
        ]);
        let found: Vec<_> = modules
            .iter()
            .map(|module| (module.path.join("::"), module.file.to_str().unwrap(), module.items.len()))
            .collect();
        assert_eq!(
            found,
            [
                ("a::inner".into(), "src/a/inner.rs", 2),
                ("a".into(), "src/a/mod.rs", 0),
                ("b::c".into(), "src/b/c.rs", 0),
                ("b".into(), "src/lib.rs", 1),
                ("d".into(), "src/odd.rs", 0),
                (String::new(), "src/lib.rs", 0),
            ]
        );
    }
}
