//! Assignment of node ranks for arbitrary members with arbitrary histories.

use proptest::prelude::*;

use super::*;

/// A member: its last rank, the rank that it asks for, and whether it can take part.
type Given = (Option<u32>, Option<u32>, bool);

fn members() -> impl Strategy<Value = Vec<Given>> {
    let wish = prop::option::of(0u32..8);
    let last = prop::option::of(0u32..8);
    prop::collection::vec((last, wish, prop::bool::weighted(0.85)), 1..8).prop_map(|mut members| {
        // No two members had the same rank.
        let mut taken = std::collections::BTreeSet::new();
        for (last, ..) in &mut members {
            *last = last.filter(|rank| taken.insert(*rank));
        }
        members
    })
}

fn group(members: &[Given]) -> Group {
    let mut group = Group::new();
    for (id, (last, wish, available)) in (1..).zip(members) {
        let rules = GroupRules { fixed_ranks: false, ..rules(0) };
        group.greet(id, Greeting { node_rank: *wish, ..greeting(Some(id as u32), (8, 8), rules) });
        let now = group.now;
        let member = group.coordinator.members.get_mut(&id).unwrap();
        (member.node_rank, member.closed) = (*last, (!available).then_some(now));
    }
    group
}

proptest! {
    #[test]
    fn ranks_go_to_their_last_holders_then_to_members_that_ask_for_them(members in members(), most in 1usize..9) {
        let chosen = group(&members).coordinator.choose(most);
        let available = members.iter().filter(|(.., available)| *available).count();
        // Ranks are dense and unique, and as many as possible.
        prop_assert_eq!(chosen.len(), available.min(most));
        prop_assert_eq!(chosen.iter().collect::<std::collections::BTreeSet<_>>().len(), chosen.len());
        let of = |id: &MemberId| members[*id as usize - 1];
        prop_assert!(chosen.iter().all(|id| of(id).2));
        let survivors = members.iter().filter(|(last, _, available)| *available && last.is_some()).count();
        let kept = chosen.iter().filter(|id| of(id).0.is_some()).count();
        prop_assert_eq!(kept, survivors.min(most), "spares wait until a rank is free");
        for (rank, id) in (0..).zip(&chosen) {
            let is_free = |wanted: u32| (wanted as usize) < chosen.len() && wanted != rank;
            let holder = |wanted: u32| of(&chosen[wanted as usize]);
            match of(id) {
                // Ranks move down only if the group has become smaller.
                (Some(last), ..) => prop_assert!(!is_free(last), "{chosen:?}"),
                (None, Some(wish), _) if is_free(wish) => {
                    let (last, other, _) = holder(wish);
                    prop_assert!(last == Some(wish) || other == Some(wish), "{chosen:?}");
                }
                (None, ..) => {}
            }
        }
    }
}
