//! Import circles between the top-level modules of a crate, and between its files.
//!
//! An edge `a -> b` is any path in `a` that names an item of `b`: imports, types, calls, and paths in macro arguments.
//! A name that a module re-exports counts for the module that defines it. Items that the root itself defines belong to
//! the node `crate`. Between files, a module may use the items of the modules that contain it, as in
//! `use super::Shared`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use proc_macro2::{Ident, TokenStream, TokenTree};
use syn::visit::Visit;
use syn::{Item, UseTree, Visibility};

use crate::syntax::{Module, is_test};
use crate::violation::Violation;

/// Node for the items defined in the crate's root file.
const ROOT: &str = "crate";

/// Path of a module or an item below the crate's root.
type ItemPath = Vec<String>;
/// The position at which an edge was first seen.
type Edges = BTreeMap<(String, String), (PathBuf, usize)>;
/// Names that modules re-export, with the paths behind them.
type Exports = BTreeMap<(ItemPath, String), ItemPath>;

pub(super) fn check(modules: &[Module]) -> Vec<Violation> {
    let known: BTreeMap<&[String], &PathBuf> =
        modules.iter().map(|module| (&module.path[..], &module.file)).collect();
    let exports = exports(modules, &known);
    let top = |path: &[String]| path.first().map_or(ROOT, String::as_str).to_owned();
    let (mut between_modules, mut between_files) = (Edges::new(), Edges::new());
    for module in modules {
        let mut references = References { module, found: Vec::new() };
        for item in &module.items {
            // Re-exports of the root are its interface; the root does not use them itself.
            let is_export =
                |item: &Item| matches!(item, Item::Use(item) if !matches!(item.vis, Visibility::Inherited));
            if !(module.path.is_empty() && is_export(item)) {
                references.visit_item(item);
            }
        }
        for (path, names) in references.found {
            let target = defining(path, &known, &exports);
            let place = || (module.file.clone(), line_of(module, &names));
            if !target.is_empty() || !module.path.is_empty() {
                let edge = (top(&module.path), top(&target));
                if edge.0 != edge.1 {
                    between_modules.entry(edge).or_insert_with(place);
                }
            }
            let contains = target.starts_with(&module.path) || module.path.starts_with(&target);
            if let Some(file) = known.get(&target[..]).filter(|file| !contains && ***file != module.file) {
                let edge = (module.file.display().to_string(), file.display().to_string());
                between_files.entry(edge).or_insert_with(place);
            }
        }
    }
    circles(&between_modules).into_iter().chain(circles(&between_files)).collect()
}

/// Returns the module that defines the item with this path.
fn defining(mut path: ItemPath, known: &BTreeMap<&[String], &PathBuf>, exports: &Exports) -> ItemPath {
    loop {
        let length = (0..=path.len()).rev().find(|length| known.contains_key(&path[..*length])).unwrap_or(0);
        let rest = path.split_off(length);
        match rest.first().and_then(|name| exports.get(&(path.clone(), name.clone()))) {
            Some(next) => path = next.clone(),
            None => return path,
        }
    }
}

fn exports(modules: &[Module], known: &BTreeMap<&[String], &PathBuf>) -> Exports {
    let mut exports = Exports::new();
    for module in modules {
        for item in &module.items {
            let Item::Use(item) = item else { continue };
            if matches!(item.vis, Visibility::Inherited) {
                continue;
            }
            leaves(&item.tree, &mut Vec::new(), &mut |path, name| {
                let names: Vec<String> = path.iter().map(ToString::to_string).collect();
                let child = [&module.path[..], &names[..1.min(names.len())]].concat();
                let target = absolute(module, &names).or_else(|| {
                    known.contains_key(&child[..]).then(|| [&module.path[..], &names[..]].concat())
                });
                if let Some(target) = target.filter(|target| target[..] != child[..]) {
                    exports.insert((module.path.clone(), name.to_string()), target);
                }
            });
        }
    }
    exports
}

/// Resolves a path that begins with `crate`, `self` or `super`. Any other path names an external crate, an imported
/// name or a module below this one.
fn absolute(module: &Module, names: &[String]) -> Option<ItemPath> {
    let mut base = module.path.clone();
    let below = match names.first()?.as_str() {
        "crate" => {
            base.clear();
            &names[1..]
        }
        "self" => &names[1..],
        "super" => {
            let ups = names.iter().take_while(|name| *name == "super").count();
            base.truncate(base.len().saturating_sub(ups));
            &names[ups..]
        }
        _ => return None,
    };
    base.extend(below.iter().cloned());
    Some(base)
}

/// Calls `leaf` with the path of each name that a `use` imports, and the name under which it is imported.
fn leaves(tree: &UseTree, prefix: &mut Vec<Ident>, leaf: &mut impl FnMut(&[Ident], &Ident)) {
    match tree {
        UseTree::Path(path) => {
            prefix.push(path.ident.clone());
            leaves(&path.tree, prefix, leaf);
            prefix.pop();
        }
        UseTree::Name(name) => leaf(&with(prefix, &name.ident), &name.ident),
        UseTree::Rename(rename) => leaf(&with(prefix, &rename.ident), &rename.rename),
        UseTree::Glob(_) => {
            if let Some(last) = prefix.last().cloned() {
                leaf(prefix, &last);
            }
        }
        UseTree::Group(group) => group.items.iter().for_each(|tree| leaves(tree, prefix, leaf)),
    }
}

fn with(prefix: &[Ident], last: &Ident) -> Vec<Ident> {
    prefix.iter().chain([last]).cloned().collect()
}

/// Returns the line of a path as it is written. The names of `use super::{a, b}` are apart from each other.
fn line_of(module: &Module, names: &[String]) -> usize {
    let mut lines = (1..=names.len()).rev().map(|length| module.line_of(&names[..length].join("::")));
    lines.find(|line| *line > 0).unwrap_or(0)
}

/// Collects paths below the crate's root, and how they are written.
struct References<'a> {
    module: &'a Module,
    found: Vec<(ItemPath, Vec<String>)>,
}

impl References<'_> {
    fn add(&mut self, path: &[Ident]) {
        let names: Vec<String> = path.iter().map(ToString::to_string).collect();
        if let Some(path) = absolute(self.module, &names) {
            self.found.push((path, names));
        }
    }

    fn add_tokens(&mut self, tokens: TokenStream) {
        let mut path: Vec<Ident> = Vec::new();
        // Number of colons since the last name of the path.
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Punct(punct) if punct.as_char() == ':' && !path.is_empty() => colons += 1,
                TokenTree::Ident(ident) if colons == 2 || path.is_empty() => {
                    path.push(ident);
                    colons = 0;
                }
                other => {
                    self.add(&std::mem::take(&mut path));
                    colons = 0;
                    match other {
                        TokenTree::Ident(ident) => path.push(ident),
                        TokenTree::Group(group) => self.add_tokens(group.stream()),
                        _ => {}
                    }
                }
            }
        }
        self.add(&path);
    }
}

impl<'ast> Visit<'ast> for References<'_> {
    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        leaves(&item.tree, &mut Vec::new(), &mut |path, _| self.add(path));
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let idents: Vec<Ident> = path.segments.iter().map(|segment| segment.ident.clone()).collect();
        if idents.len() > 1 {
            self.add(&idents);
        }
        syn::visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, item: &'ast syn::Macro) {
        self.visit_path(&item.path);
        self.add_tokens(item.tokens.clone());
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if !is_test(&item.attrs) {
            syn::visit::visit_impl_item_fn(self, item);
        }
    }
}

/// Returns one violation per set of modules that reach each other.
fn circles(edges: &Edges) -> Vec<Violation> {
    let nodes: BTreeSet<&String> = edges.keys().flat_map(|(from, to)| [from, to]).collect();
    let reach = |start: &String| {
        let (mut seen, mut open) = (BTreeSet::new(), vec![start]);
        while let Some(node) = open.pop() {
            let next = edges.keys().filter(|(from, _)| from == node).map(|(_, to)| to);
            open.extend(next.filter(|to| seen.insert((*to).clone())));
        }
        seen
    };
    let reached: BTreeMap<&String, BTreeSet<String>> =
        nodes.iter().map(|node| (*node, reach(node))).collect();
    let mut done = BTreeSet::new();
    let mut violations = Vec::new();
    for node in nodes {
        let circle: Vec<&String> =
            reached[node].iter().filter(|other| reached[other].contains(node)).collect();
        if circle.is_empty() || !done.insert(circle.clone()) {
            continue;
        }
        let inside: Vec<_> =
            edges.iter().filter(|((from, to), _)| circle.contains(&from) && circle.contains(&to)).collect();
        let shown: Vec<String> = inside
            .iter()
            .map(|((from, to), (file, line))| format!("{from} -> {to} ({}:{line})", file.display()))
            .collect();
        if let Some((_, (file, line))) = inside.first() {
            violations.push(Violation::new(file, *line, format!("import circle: {}", shown.join(", "))));
        }
    }
    violations
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::syntax::tests::parse;

    fn messages(files: &[(&str, &str)]) -> Vec<String> {
        check(&parse(files)).into_iter().map(|violation| violation.message).collect()
    }

    #[test]
    fn an_import_circle_is_reported_with_its_edges() {
        let found = messages(&[
            ("src/lib.rs", "mod a; mod b; mod c;"),
            ("src/a.rs", "use crate::b::B;\npub struct A(crate::c::C);"),
            ("src/b.rs", "pub struct B;\nfn f() { let _ = vec![super::a::A::new()]; }"),
            ("src/c.rs", "pub struct C;"),
        ]);
        assert_eq!(found[0], "import circle: a -> b (src/a.rs:1), b -> a (src/b.rs:2)");
    }

    #[test]
    fn imports_below_a_module_and_through_re_exports_of_the_root_count() {
        let found = messages(&[
            ("src/lib.rs", "mod a; mod b; pub use b::Thing;"),
            ("src/a/mod.rs", "mod inner;"),
            ("src/a/inner.rs", "use crate::Thing;"),
            ("src/b.rs", "use super::a::X; pub struct Thing;"),
        ]);
        assert_eq!(found, ["import circle: a -> b (src/a/inner.rs:1), b -> a (src/b.rs:1)"]);
    }

    #[test]
    fn items_of_the_root_that_use_their_users_are_a_circle() {
        let found = messages(&[
            ("src/lib.rs", "mod a; pub struct Shared; fn main() { crate::a::run() }"),
            ("src/a.rs", "use crate::Shared;"),
        ]);
        assert_eq!(found, ["import circle: a -> crate (src/a.rs:1), crate -> a (src/lib.rs:1)"]);
    }

    #[test]
    fn files_of_one_module_form_circles_but_use_the_items_of_their_parent() {
        let found = messages(&[
            ("src/lib.rs", "mod a;"),
            ("src/a/mod.rs", "mod b; mod c; pub use c::C; pub struct Shared; fn f() { b::g() }"),
            ("src/a/b.rs", "use super::{C, Shared}; pub struct B;"),
            ("src/a/c.rs", "use super::b::B; use super::Shared; pub struct C;"),
        ]);
        assert_eq!(
            found,
            [
                "import circle: src/a/b.rs -> src/a/c.rs (src/a/b.rs:1), src/a/c.rs -> src/a/b.rs (src/a/c.rs:1)"
            ]
        );
    }

    #[test]
    fn layers_and_test_imports_form_no_circle() {
        let found = messages(&[
            ("src/lib.rs", "mod a; mod b;"),
            ("src/a.rs", "use crate::b::B; use super::b;"),
            ("src/b.rs", "pub struct B; #[cfg(test)] mod tests { use crate::a::A; }"),
        ]);
        assert!(found.is_empty(), "{found:?}");
    }
}
