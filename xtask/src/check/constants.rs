//! Names of constants: each is defined once per crate, so that a name has one meaning.

use std::collections::BTreeMap;

use quote::ToTokens;
use syn::visit::Visit;

use crate::syntax::Module;
use crate::violation::Violation;

/// Names with the same meaning in every module: the kernels of an operation.
const SAME_ROLE: [&str; 1] = ["KERNELS"];

struct Constant<'a> {
    module: &'a Module,
    value: String,
}

pub(super) fn check(modules: &[Module]) -> Vec<Violation> {
    let mut constants = BTreeMap::new();
    for module in modules {
        let mut visitor = Constants { module, found: &mut constants };
        module.items.iter().for_each(|item| visitor.visit_item(item));
    }
    let mut violations = Vec::new();
    for (name, definitions) in &constants {
        if definitions.len() > 1 && !SAME_ROLE.contains(&name.as_str()) {
            let line = |module: &Module| module.line_of(&format!("const {name}:"));
            let places: Vec<String> = definitions
                .iter()
                .map(|Constant { module, value }| {
                    format!("{value} ({}:{})", module.file.display(), line(module))
                })
                .collect();
            let message = format!("`{name}` is defined {} times: {}", places.len(), places.join(", "));
            let first = definitions[0].module;
            violations.push(Violation::new(&first.file, line(first), message));
        }
    }
    violations
}

/// Collects constants of modules and functions. Associated constants are excluded: the type's name distinguishes them.
struct Constants<'a, 'b> {
    module: &'a Module,
    found: &'b mut BTreeMap<String, Vec<Constant<'a>>>,
}

impl<'ast> Visit<'ast> for Constants<'_, '_> {
    fn visit_item_const(&mut self, item: &'ast syn::ItemConst) {
        let name = item.ident.to_string();
        if name != "_" {
            let value = item.expr.to_token_stream().to_string();
            let value = if value.chars().count() > 40 { "..".into() } else { value };
            self.found.entry(name).or_default().push(Constant { module: self.module, value });
        }
        syn::visit::visit_item_const(self, item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::syntax::tests::parse;

    fn messages(files: &[(&str, &str)]) -> Vec<String> {
        check(&parse(files)).into_iter().map(|violation| violation.message).collect()
    }

    #[test]
    fn a_name_with_two_definitions_is_reported() {
        let found = messages(&[
            ("src/lib.rs", "mod a; const LIMIT: u32 = 1; const _: () = (); const _: () = ();"),
            ("src/a.rs", "fn f() {\nconst LIMIT: u32 = 2; } #[cfg(test)] const LIMIT: u32 = 3;"),
        ]);
        assert_eq!(found, ["`LIMIT` is defined 2 times: 2 (src/a.rs:2), 1 (src/lib.rs:1)"]);
    }

    #[test]
    fn associated_constants_may_share_a_name() {
        let text = "struct A; struct B; impl A { const SIZE: u8 = 1; } impl B { const SIZE: u8 = 2; }";
        assert!(messages(&[("src/lib.rs", text)]).is_empty());
    }
}
