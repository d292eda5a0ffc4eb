#![expect(clippy::single_range_in_vec_init, reason = "lists of one range are intended")]

use super::*;
use proptest::prelude::*;

/// Plans one bucket per parameter.
fn plan(sizes: &[usize]) -> Plan {
    Plan::new(&ends(sizes), usize::MAX, 1, 1, 1)
}

/// Plans buckets of up to `cap` elements, each with several parameters or a part of one.
fn cut_plan(sizes: &[usize], cap: usize) -> Plan {
    Plan::new(&ends(sizes), 1, 1, cap, cap)
}

fn ends(sizes: &[usize]) -> Vec<usize> {
    let end = |end: &mut usize, size: &usize| {
        *end += size;
        Some(*end)
    };
    sizes.iter().scan(0, end).collect()
}

/// Returns the parts of a pass down an arena and up again; parts end at `cuts`.
fn down_and_up(cuts: &[usize]) -> Vec<Range<usize>> {
    let up = cuts.windows(2).map(|cut| cut[0]..cut[1]);
    up.clone().rev().chain(up).collect()
}

#[test]
fn blocks_of_equal_size_take_turns_in_two_slots() {
    let plan = plan(&[10; 6]);
    let parts = down_and_up(&[10, 20, 30, 40, 50, 60]);
    let slots = Slots::shared(&plan, &parts, &[0..10]);
    assert_eq!(slots.len(), 30);
    let places = [10..20, 20..30, 30..40, 40..50, 55..57, 0..10].map(|elements| slots.place(&elements));
    assert_eq!(places, [0..10, 10..20, 0..10, 10..20, 5..7, 20..30]);
    assert_eq!(slots.kept().cloned().collect::<Vec<_>>(), [0..10]);
}

#[test]
fn next_part_is_gathered_while_one_is_computed() {
    let plan = plan(&[10; 4]);
    let parts = [30..40, 20..30, 10..20, 0..10, 0..10, 10..20];
    let slots = Slots::shared(&plan, &parts, &[]);
    assert_eq!(slots.len(), 20);
    let turn = |now: &[Range<usize>], waits, later: &[Range<usize>]| Turn {
        now: now.to_vec(),
        waits,
        later: later.iter().map(|bucket| vec![bucket.clone()]).collect(),
    };
    assert_eq!(
        slots.gathers(&parts, 1, false),
        [
            turn(&[30..40], 1, &[20..30]),
            turn(&[], 1, &[10..20]),
            turn(&[], 1, &[0..10]),
            turn(&[], 1, &[]),
            turn(&[], 0, &[]),
            turn(&[], 0, &[]),
        ]
    );
    let not_ahead = slots.gathers(&parts[..2], 0, false);
    assert_eq!(not_ahead, [turn(&[30..40], 1, &[]), turn(&[20..30], 1, &[])]);
}

#[test]
fn whole_arena_is_gathered_at_once_and_awaited_part_by_part() {
    let plan = plan(&[10; 3]);
    let slots = Slots::whole(&plan);
    assert_eq!(slots.len(), 30);
    assert_eq!(slots.place(&(12..19)), 12..19);
    let parts = [15..30, 5..20, 0..3];
    let turns = slots.gathers(&parts, parts.len(), false);
    assert_eq!(turns[0], Turn { now: vec![20..30, 10..20], waits: 2, later: vec![vec![0..10]] });
    assert_eq!(turns[1..].iter().map(|turn| turn.waits).collect::<Vec<_>>(), [1, 0]);
    assert!(slots.gathers(&parts, parts.len(), true).iter().all(|turn| *turn == Turn::default()));
    assert!(slots.writes(&parts).iter().all(|write| write.waits == 0));
}

#[test]
fn part_is_written_when_its_memory_was_reduced() {
    let plan = plan(&[10; 5]);
    let parts = [0..10, 10..20, 20..30, 30..40, 40..50];
    let slots = Slots::shared(&plan, &parts, &[0..10]);
    assert_eq!(slots.len(), 30);
    // Bucket 3 takes the memory of bucket 1, which is the second one to be reduced; bucket 4 takes that of bucket 2.
    let writes = slots.writes(&parts);
    assert_eq!(writes.iter().map(|write| write.waits).collect::<Vec<_>>(), [0, 0, 0, 2, 1]);
    assert_eq!(writes[3].buckets, [30..40]);
}

#[test]
fn parameter_that_is_cut_is_stored_in_one_piece() {
    let plan = cut_plan(&[20; 4], 10);
    assert_eq!(plan.buckets().len(), 8);
    let slots = Slots::shared(&plan, &down_and_up(&[0, 20, 40, 60, 80]), &[]);
    assert_eq!(slots.len(), 40);
    let places = [0..20, 20..40, 40..60, 60..80, 45..52, 70..80].map(|elements| slots.place(&elements));
    assert_eq!(places, [0..20, 20..40, 0..20, 20..40, 5..12, 30..40]);
    // The buckets of a cut parameter are separate operations; the gathers of one part are started together.
    let turns = slots.gathers(&[40..60, 20..40, 0..20], 1, false);
    assert_eq!(turns[0], Turn { now: vec![50..60, 40..50], waits: 2, later: vec![vec![30..40, 20..30]] });
    assert_eq!(turns[1], Turn { now: vec![], waits: 2, later: vec![vec![10..20, 0..10]] });
    let writes = slots.writes(&[0..20, 20..40, 40..60]);
    assert_eq!(writes[2], Write { waits: 2, buckets: vec![40..50, 50..60] });
}

#[test]
#[should_panic(expected = "is not in")]
fn elements_of_two_buckets_have_no_place() {
    let _ = Slots::whole(&plan(&[10, 10])).place(&(5..15));
}

proptest! {
    /// For any sizes of buckets and parts, a part finds its buckets in memory, those of a parameter in one piece, and
    /// neither a gather nor a later part overwrites data that is still needed.
    #[test]
    fn buckets_are_there_when_they_are_needed(
        sizes in prop::collection::vec(1usize..40, 3..40),
        cuts in prop::collection::btree_set(0usize..800, 2..12),
        kept in 0usize..800,
        ahead in 0usize..2,
        kept_present: bool,
        cap in prop::option::of(1usize..40),
    ) {
        let (plan, total) = (
            cap.map_or_else(|| plan(&sizes), |cap| cut_plan(&sizes, cap)),
            sizes.iter().sum::<usize>(),
        );
        let mut cuts: Vec<usize> = cuts.into_iter().filter(|cut| *cut < total).collect();
        cuts.push(total);
        cuts.insert(0, 0);
        cuts.dedup();
        let parts = down_and_up(&cuts);
        let kept = kept.min(total - 1)..(kept + 5).min(total);
        let slots = Slots::shared(&plan, &parts, std::slice::from_ref(&kept));
        prop_assert!(slots.len() <= total);
        for (end, size) in ends(&sizes).iter().zip(&sizes) {
            let parameter = end - size..*end;
            let place = slots.place(&parameter);
            for element in 0..*size {
                let at = parameter.start + element;
                let bucket = slots.needed(&(at..at + 1)).start;
                let at = slots.slot(bucket).start + at - plan.buckets()[bucket].start;
                prop_assert_eq!(at, place.start + element);
            }
        }

        // The bucket that each element of the tensor belongs to.
        let mut memory = vec![usize::MAX; slots.len()];
        let bucket_at = |range: &Range<usize>| slots.needed(range).start;
        let store = |memory: &mut Vec<usize>, bucket: usize| memory[slots.slot(bucket)].fill(bucket);
        if kept_present {
            slots.kept().for_each(|range| store(&mut memory, bucket_at(range)));
        }
        let mut under_way = std::collections::VecDeque::new();
        for (part, turn) in parts.iter().zip(slots.gathers(&parts, ahead, kept_present)) {
            under_way.extend(turn.now.iter().map(bucket_at));
            for bucket in under_way.drain(..turn.waits) {
                store(&mut memory, bucket);
            }
            under_way.extend(turn.later.iter().flatten().map(bucket_at));
            for bucket in slots.needed(part) {
                prop_assert!(memory[slots.slot(bucket)].iter().all(|found| *found == bucket));
                prop_assert!(under_way.iter().all(|other| !overlaps(&slots.slot(*other), &slots.slot(bucket))));
            }
        }

        let up = &parts[parts.len() / 2..];
        let (mut written, mut reduced, mut memory) = (0, 0, vec![usize::MAX; slots.len()]);
        for (part, write) in up.iter().zip(slots.writes(up)) {
            reduced += write.waits;
            prop_assert!(plan.buckets()[..reduced].iter().all(|bucket| bucket.end <= part.start));
            prop_assert_eq!(write.buckets.len(), slots.needed(part).end - written.max(slots.needed(part).start));
            for bucket in write.buckets.iter().map(bucket_at) {
                let old = &memory[slots.slot(bucket)];
                prop_assert!(old.iter().all(|old| *old == usize::MAX || *old < reduced));
                store(&mut memory, bucket);
            }
            written = slots.needed(part).end;
        }
    }
}
