//! Catches panics in libraries and turns them into errors, without printing them.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
}
static HOOK: Once = Once::new();

/// Returns the result of `work`, or the message with which it panicked.
pub(crate) fn catch<T>(work: impl FnOnce() -> T) -> Result<T, String> {
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
    result.map_err(|panic| message(&*panic))
}

fn message(panic: &(dyn Any + Send)) -> String {
    let formatted = panic.downcast_ref::<String>().map(String::as_str);
    formatted.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(clippy::panic, reason = "the test")]
    fn panics_are_caught_with_their_messages_and_later_ones_are_printed() {
        assert_eq!(catch(|| 1), Ok(1));
        assert_eq!(catch(|| -> i32 { panic!("not printed") }), Err("not printed".into()));
        let number = 2;
        assert_eq!(catch(|| -> i32 { panic!("number {number}") }), Err("number 2".into()));
        assert!(!QUIET.get());
    }
}
