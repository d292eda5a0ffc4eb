//! Offline placement of buffers with known lifetimes: computes offsets such that buffers that live at the same time do
//! not overlap, in as few bytes as a bounded search finds. The problem (dynamic storage allocation) is NP-hard; on
//! training steps, greedy orders come within one or two percent of the lower bound.

use std::time::{Duration, Instant};

/// A buffer to place. It lives from event `birth` until before event `death`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Life {
    /// Size in granules.
    pub granules: u32,
    /// Number of the event that allocates it.
    pub birth: u32,
    /// Number of the event that frees it; greater than `birth`.
    pub death: u32,
}

impl Life {
    fn overlaps(&self, other: &Self) -> bool {
        self.birth < other.death && other.birth < self.death
    }
}

/// A placement of buffers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packing {
    /// First granule of each buffer, in the order given.
    pub offsets: Vec<u32>,
    /// Total size in granules.
    pub granules: u32,
}

/// Maximum number of local search steps. On a machine that completes them in time, equal inputs give equal results.
const MAX_SEARCH_STEPS: u32 = 2000;

/// Returns a lower bound for any placement, in granules: the largest total size that is live at any time.
pub fn lower_bound(lives: &[Life]) -> u32 {
    let mut changes: Vec<(u32, bool, u32)> = lives
        .iter()
        .flat_map(|life| [(life.birth, true, life.granules), (life.death, false, life.granules)])
        .collect();
    // At the same event, deaths precede births: false sorts before true.
    changes.sort_unstable();
    let (mut live, mut most) = (0, 0);
    for (_, born, granules) in changes {
        live = if born { live + granules } else { live - granules };
        most = most.max(live);
    }
    most
}

/// Places all buffers: takes the best of four greedy orders, and improves it by local search for at most `time`.
pub fn pack(lives: &[Life], time: Duration) -> Packing {
    let deadline = Instant::now() + time;
    let bound = lower_bound(lives);
    let life = |index: &usize| lives[*index];
    let length = |life: Life| u64::from(life.death - life.birth);
    // The four orders: largest size first, largest product of size and lifetime, earliest, longest-lived.
    let orders: [&dyn Fn(Life) -> (u64, u64); 4] = [
        &|life| (u64::MAX - u64::from(life.granules), u64::from(life.birth)),
        &|life| (u64::MAX - u64::from(life.granules) * length(life), u64::from(life.birth)),
        &|life| (u64::from(life.birth), u64::MAX - u64::from(life.granules)),
        &|life| (u64::MAX - length(life), u64::MAX - u64::from(life.granules)),
    ];
    let mut best: Option<(Packing, Vec<usize>)> = None;
    for key in orders {
        let mut order: Vec<usize> = (0..lives.len()).collect();
        order.sort_by_key(|index| (key(life(index)), *index));
        let packing = place(lives, &order);
        if best.as_ref().is_none_or(|(best, _)| packing.granules < best.granules) {
            best = Some((packing, order));
        }
    }
    let Some((mut best, mut order)) = best else { unreachable!("there are four orders") };
    // xorshift64: reproducible, and good enough to pick candidates.
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    for _ in 0..MAX_SEARCH_STEPS {
        if best.granules == bound || lives.len() < 2 || Instant::now() >= deadline {
            break;
        }
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let mut other = order.clone();
        move_top_buffer_forward(&mut other, &best, lives, random);
        let packing = place(lives, &other);
        if packing.granules <= best.granules {
            (best, order) = (packing, other);
        }
    }
    best
}

/// Moves one of the buffers that end at the top of the packing to an earlier position of the order.
fn move_top_buffer_forward(order: &mut Vec<usize>, packing: &Packing, lives: &[Life], random: u64) {
    let top = |index: &usize| packing.offsets[*index] + lives[*index].granules == packing.granules;
    let candidates: Vec<usize> = (0..order.len()).filter(|at| top(&order[*at])).collect();
    let at = candidates[(random % candidates.len() as u64) as usize];
    let to = ((random >> 32) % (at as u64 + 1)) as usize;
    let index = order.remove(at);
    order.insert(to, index);
}

/// Places buffers in this order, each at the lowest offset that is free during its whole life.
fn place(lives: &[Life], order: &[usize]) -> Packing {
    let mut offsets = vec![0; lives.len()];
    // Placed buffers in order of offset.
    let mut placed: Vec<(u32, usize)> = Vec::with_capacity(lives.len());
    let mut granules = 0;
    for index in order.iter().copied() {
        let life = lives[index];
        let mut offset = 0;
        for (start, other) in &placed {
            if *start >= offset + life.granules {
                break;
            }
            if lives[*other].overlaps(&life) {
                offset = offset.max(start + lives[*other].granules);
            }
        }
        offsets[index] = offset;
        granules = granules.max(offset + life.granules);
        let at = placed.partition_point(|(start, _)| *start < offset);
        placed.insert(at, (offset, index));
    }
    Packing { offsets, granules }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn life(granules: u32, birth: u32, death: u32) -> Life {
        Life { granules, birth, death }
    }

    #[test]
    fn disjoint_lifetimes_share_an_offset() {
        let lives = [life(10, 0, 2), life(10, 2, 4), life(10, 4, 6)];
        assert_eq!(pack(&lives, Duration::ZERO).granules, 10);
    }

    #[test]
    fn local_search_reaches_bound_that_greedy_orders_miss() {
        // The bound is 8; each of the four greedy orders needs 9 or more.
        let lives =
            [life(3, 0, 4), life(2, 0, 2), life(3, 1, 3), life(3, 3, 7), life(5, 4, 6), life(2, 2, 5)];
        let packing = pack(&lives, Duration::from_secs(10));
        assert_eq!(packing.granules, lower_bound(&lives));
    }

    proptest! {
        #[test]
        fn live_buffers_never_overlap(raw in prop::collection::vec((1_u32..50, 0_u32..40, 1_u32..20), 0..60)) {
            let lives: Vec<Life> = raw.iter().map(|(g, b, l)| life(*g, *b, b + l)).collect();
            let packing = pack(&lives, Duration::from_millis(5));
            prop_assert!(packing.granules >= lower_bound(&lives));
            for (i, a) in lives.iter().enumerate() {
                prop_assert!(packing.offsets[i] + a.granules <= packing.granules);
                for (j, b) in lives.iter().enumerate().skip(i + 1) {
                    let apart = packing.offsets[i] + a.granules <= packing.offsets[j]
                        || packing.offsets[j] + b.granules <= packing.offsets[i];
                    prop_assert!(apart || !a.overlaps(b));
                }
            }
        }
    }
}
