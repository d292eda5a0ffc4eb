//! Faults of the network between hosts, as a ruleset of `nft`. Pure.
//!
//! All rules are in one chain of the switch's bridge, through which every frame between two hosts passes: a host sees
//! silence, as with a broken cable or switch. Taking an interface down instead would be visible to the host, whose
//! kernel then retries differently (every 0.5 s instead of backing off).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// Frames that the switch drops. Hosts are numbers; host `N` is at the port `pN`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Faults {
    /// Hosts without any connection.
    pub(super) cut: BTreeSet<usize>,
    /// Pairs of hosts: frames from the first to the second are dropped.
    pub(super) one_way: BTreeSet<(usize, usize)>,
    /// Percentage of frames dropped at random in each direction, by host.
    pub(super) loss: BTreeMap<usize, u8>,
}

impl Faults {
    /// Removes all faults of a host.
    pub(super) fn heal(&mut self, host: usize) {
        self.cut.remove(&host);
        self.loss.remove(&host);
        self.one_way.retain(|(from, to)| *from != host && *to != host);
    }

    /// Returns the input of `nft -f`, which replaces all rules at once.
    pub(super) fn ruleset(&self) -> String {
        const CHAIN: &str = "bridge faults forward";
        let mut text = String::from(
            "table bridge faults { chain forward { type filter hook forward priority 0; policy accept; }; }\n\
            flush chain bridge faults forward\n",
        );
        let mut rule = |condition: String| {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "add rule {CHAIN} {condition} drop");
        };
        for host in &self.cut {
            rule(format!("iifname p{host}"));
            rule(format!("oifname p{host}"));
        }
        for (from, to) in &self.one_way {
            rule(format!("iifname p{from} oifname p{to}"));
        }
        for (host, percent) in &self.loss {
            for direction in ["iifname", "oifname"] {
                rule(format!("{direction} p{host} numgen random mod 100 < {percent}"));
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(faults: &Faults) -> Vec<String> {
        let text = faults.ruleset();
        let rules = text.lines().filter_map(|line| line.strip_prefix("add rule bridge faults forward "));
        rules.map(str::to_owned).collect()
    }

    #[test]
    fn each_fault_drops_its_frames_until_healed() {
        let mut faults = Faults::default();
        assert!(rules(&faults).is_empty());
        faults.cut.insert(2);
        faults.one_way.insert((0, 1));
        faults.loss.insert(1, 10);
        assert_eq!(
            rules(&faults),
            [
                "iifname p2 drop",
                "oifname p2 drop",
                "iifname p0 oifname p1 drop",
                "iifname p1 numgen random mod 100 < 10 drop",
                "oifname p1 numgen random mod 100 < 10 drop"
            ]
        );
        faults.heal(1);
        assert_eq!(rules(&faults), ["iifname p2 drop", "oifname p2 drop"]);
        faults.heal(2);
        assert_eq!(faults, Faults::default());
    }
}
