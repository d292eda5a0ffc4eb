//! A model of size-class lists, the usual first design of a caching pool: multiples of 512 bytes up to 1 MiB, powers of
//! two above.

use std::collections::HashMap;

use super::Model;
use xlaunch_pool::backing::GRANULE;

/// Number of free blocks of each class. Blocks are never split or merged.
#[derive(Default)]
pub(super) struct SizeClasses {
    free: HashMap<u64, u64>,
    mapped: u64,
}

impl Model for SizeClasses {
    /// Serves a request. The token is the class: the blocks of a class are interchangeable.
    fn alloc(&mut self, bytes: u64, _: bool) -> u64 {
        const LARGE: u64 = 1 << 20;
        let class =
            if bytes <= LARGE { bytes.max(1).next_multiple_of(GRANULE) } else { bytes.next_power_of_two() };
        match self.free.get_mut(&class) {
            Some(count) if *count > 0 => *count -= 1,
            _ => self.mapped += class,
        }
        class
    }

    fn free(&mut self, class: u64) {
        *self.free.entry(class).or_default() += 1;
    }

    fn mapped(&self) -> u64 {
        self.mapped
    }
}
