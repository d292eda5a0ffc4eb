//! Length of functions.

use std::path::Path;

use syn::visit::Visit;
use syn::{Block, Signature};

use crate::syntax::{Module, is_test};
use crate::violation::Violation;

/// Maximum number of lines from the signature to the closing brace.
const MAX_FUNCTION_LINES: usize = 80;

pub(super) fn check(modules: &[Module]) -> Vec<Violation> {
    let mut violations = Vec::new();
    for module in modules {
        let mut functions = Functions { file: &module.file, violations: &mut violations };
        module.items.iter().for_each(|item| functions.visit_item(item));
    }
    violations
}

struct Functions<'a> {
    file: &'a Path,
    violations: &'a mut Vec<Violation>,
}

impl Functions<'_> {
    fn measure(&mut self, signature: &Signature, body: &Block) {
        let first = signature.fn_token.span.start().line;
        let lines = body.brace_token.span.close().end().line - first + 1;
        if lines > MAX_FUNCTION_LINES {
            let name = &signature.ident;
            self.violations.push(Violation::new(self.file, first, format!("`{name}` has {lines} lines")));
        }
    }
}

impl<'ast> Visit<'ast> for Functions<'_> {
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.measure(&item.sig, &item.block);
        syn::visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if !is_test(&item.attrs) {
            self.measure(&item.sig, &item.block);
            syn::visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        if let Some(body) = &item.default {
            self.measure(&item.sig, body);
        }
        syn::visit::visit_trait_item_fn(self, item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::syntax::tests::parse;

    /// Returns a function of this many lines.
    fn function(name: &str, lines: usize) -> String {
        format!("fn {name}() {{{}}}\n", "\n".repeat(lines - 1))
    }

    #[test]
    fn functions_above_the_limit_are_reported_wherever_they_are() {
        let text = format!(
            "{}{}struct S;\nimpl S {{ {} }}\ntrait T {{ {} }}\n#[cfg(test)] mod tests {{ {} }}",
            function("fits", 80),
            function("long", 81),
            function("method", 82),
            function("provided", 83),
            function("in_a_test", 99)
        );
        let found: Vec<String> =
            check(&parse(&[("src/lib.rs", &text)])).into_iter().map(|v| v.message).collect();
        assert_eq!(found, ["`long` has 81 lines", "`method` has 82 lines", "`provided` has 83 lines"]);
    }
}
