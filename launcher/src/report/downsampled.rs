//! A bounded, evenly spaced selection of the items of a sequence.

/// Keeps every 2^n-th item. When there are too many, every second one is removed, and n increases.
#[derive(Debug)]
pub(crate) struct Downsampled<T> {
    items: Vec<T>,
    most: usize,
    interval: u64,
    seen: u64,
}

impl<T> Downsampled<T> {
    pub(crate) fn new(most: usize) -> Self {
        Self { items: Vec::new(), most, interval: 1, seen: 0 }
    }

    pub(crate) fn add(&mut self, item: T) {
        if self.seen.is_multiple_of(self.interval) {
            self.items.push(item);
        }
        self.seen += 1;
        if self.items.len() > self.most {
            let mut keep = false;
            self.items.retain(|_| {
                keep = !keep;
                keep
            });
            self.interval *= 2;
        }
    }

    /// Returns the kept items in order.
    pub(crate) fn into_items(self) -> Vec<T> {
        self.items
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_stay_evenly_spaced() {
        let thinned = |count: u64| {
            let mut thinned = Downsampled::new(4);
            (0..count).for_each(|item| thinned.add(item));
            thinned.into_items()
        };
        assert_eq!(thinned(4), [0, 1, 2, 3]);
        assert_eq!(thinned(5), [0, 2, 4]);
        assert_eq!(thinned(17), [0, 8, 16]);
        assert!(thinned(1_000_003).len() <= 4);
    }
}
