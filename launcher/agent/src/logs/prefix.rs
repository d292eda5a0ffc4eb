//! Line prefixes on the console.
//!
//! | stream | prefix |
//! |---|---|
//! | with `tee` | the template, by default torchrun's `[${role_name}${local_rank}]:` |
//! | any, if none has `tee` and the user chose a template | the template |
//! | several ranks, on a terminal | `[N] `, in the rank's colour |
//! | several ranks, not on a terminal | none, so that programs that parse torchrun's output find the same lines |
//! | one rank | none, and bytes pass through unchanged |

use crate::template::fill;
use xlaunch_host::devices;

/// torchrun's default template.
const DEFAULT_TEMPLATE: &str = "[${role_name}${local_rank}]:";
/// ANSI foreground colours of the ranks. Red is reserved for errors.
const COLOURS: [u8; 10] = [36, 33, 35, 32, 34, 96, 93, 95, 92, 94];

/// The rank of a worker in the job, and on this node.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ranks {
    pub(super) rank: u32,
    pub(super) local_rank: u32,
}

/// Prefix settings that all ranks share.
#[derive(Debug)]
pub(super) struct Prefix {
    role: String,
    template: Option<String>,
    hostname: String,
    colours: bool,
}

impl Prefix {
    pub(super) fn new(role: &str, template: Option<&str>) -> Self {
        let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
        Self {
            role: role.into(),
            template: template.map(Into::into),
            hostname: devices::host_name(),
            colours: !(set("NO_COLOR") || dumb),
        }
    }

    /// Returns the prefix for one stream of a rank; `None` if its bytes pass through unchanged. `tee` says whether the
    /// stream is teed, and is `None` if no stream is.
    pub(super) fn of(
        &self,
        ranks: Ranks,
        tee: Option<bool>,
        several: bool,
        terminal: bool,
    ) -> Option<Vec<u8>> {
        if tee.unwrap_or(self.template.is_some()) {
            return Some(self.filled(ranks));
        }
        let rank = ranks.rank;
        several.then(|| match (terminal, self.colours) {
            (false, _) => Vec::new(),
            (true, false) => format!("[{rank}] ").into_bytes(),
            (true, true) => {
                let colour = COLOURS[rank as usize % COLOURS.len()];
                format!("\x1b[{colour}m[{rank}]\x1b[0m ").into_bytes()
            }
        })
    }

    /// Fills in the template for this rank.
    pub(super) fn filled(&self, Ranks { rank, local_rank }: Ranks) -> Vec<u8> {
        let template = self.template.as_deref().unwrap_or(DEFAULT_TEMPLATE);
        let [rank, local_rank] = [rank, local_rank].map(|number| number.to_string());
        let value = |name: &[u8]| match name {
            b"role_name" => Some(self.role.as_bytes()),
            b"local_rank" => Some(local_rank.as_bytes()),
            b"rank" => Some(rank.as_bytes()),
            b"hostname" => Some(self.hostname.as_bytes()),
            b"$" => Some(&b"$"[..]),
            _ => None,
        };
        fill(template.as_bytes(), value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prefix(template: Option<&str>, colours: bool) -> Prefix {
        let template = template.map(Into::into);
        Prefix { role: "default".into(), template, hostname: "node7".into(), colours }
    }

    fn ranks(rank: u32) -> Ranks {
        Ranks { rank, local_rank: rank }
    }

    #[test]
    fn prefix_depends_on_tee_terminal_and_number_of_ranks() {
        let form = |tee, several, terminal, colours| {
            let prefix = prefix(None, colours).of(ranks(3), tee, several, terminal);
            prefix.map(|bytes| String::from_utf8(bytes).unwrap())
        };
        assert_eq!(form(Some(true), true, true, true).unwrap(), "[default3]:");
        assert_eq!(form(Some(true), false, false, true).unwrap(), "[default3]:");
        for tee in [None, Some(false)] {
            assert_eq!(form(tee, true, true, true).unwrap(), "\x1b[32m[3]\x1b[0m ");
            assert_eq!(form(tee, true, true, false).unwrap(), "[3] ");
            assert_eq!(form(tee, true, false, true).unwrap(), "");
            assert_eq!(form(tee, false, true, true), None);
        }
    }

    #[test]
    fn template_is_filled_in_like_torchruns() {
        let filled = |template| String::from_utf8(prefix(Some(template), true).filled(ranks(2))).unwrap();
        assert_eq!(filled("${hostname}:${rank}: "), "node7:2: ");
        assert_eq!(filled("[$role_name/$local_rank]"), "[default/2]");
        assert_eq!(filled("$$${rank} ${unknown} $ ${open"), "$2 ${unknown} $ ${open");
        let on_second_node = Ranks { rank: 5, local_rank: 2 };
        let text = prefix(Some("${rank} is $local_rank: "), true).filled(on_second_node);
        assert_eq!(text, b"5 is 2: ");
        let of = |tee, several| prefix(Some("r${rank}|"), true).of(ranks(1), tee, several, false);
        assert_eq!(of(None, false).unwrap(), b"r1|");
        assert_eq!((of(Some(false), true).unwrap(), of(Some(false), false)), (vec![], None));
    }
}
