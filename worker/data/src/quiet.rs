//! Catches panics in libraries and turns them into errors, without printing them.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
}
static HOOK: Once = Once::new();

/// Returns the result of `work`; `None` if it panicked.
pub(crate) fn catch<T>(work: impl FnOnce() -> T) -> Option<T> {
    HOOK.call_once(|| {
        let print = take_hook();
        set_hook(Box::new(move |panic| {
            if !QUIET.get() {
                print(panic);
            }
        }));
    });
    let before = QUIET.replace(true);
    let result = catch_unwind(AssertUnwindSafe(work));
    QUIET.set(before);
    result.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(clippy::panic, reason = "the test")]
    fn panics_are_caught_and_later_ones_are_printed() {
        assert_eq!(catch(|| 1), Some(1));
        assert_eq!(catch(|| -> i32 { panic!("not printed") }), None);
        assert!(!QUIET.get());
    }
}
