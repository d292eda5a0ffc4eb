//! The rules of `XLAUNCH_FAIL`: `place@rank:step=action`, separated by `;`. Pure.
//!
//! ```text
//! backward@1:7/0=crash      rank 1, step 7, first attempt only
//! forward@*:*=slow(20)      every rank, every step, every attempt
//! ```
//! Steps are numbered from 1; places outside steps have step 0.

use super::Place;

/// Names and descriptions of places. `docs/fail-points.md` has the same table.
pub(super) const PLACES: [(Place, &str, &str); 18] = [
    (Place::Start, "start", "the process has started; step 0"),
    (Place::Join, "join", "before the rank joins the rendezvous; step 0"),
    (Place::Session, "session", "all ranks have joined, and heartbeats have begun; step 0"),
    (Place::Resume, "resume", "before the state of a checkpoint is taken over; step 0"),
    (Place::Data, "data", "before a micro-step waits for its batch"),
    (Place::Forward, "forward", "before the forward pass of a micro-step"),
    (Place::Reduce, "reduce", "in the backward pass, before the all-reduce of a bucket is started"),
    (Place::Backward, "backward", "in the backward pass, each time that all-reduces of buckets were started"),
    (
        Place::AllReduce,
        "all_reduce",
        "after the backward pass, before the rank waits for the reduced gradients",
    ),
    (Place::Optimizer, "optimizer", "before the update of the parameters"),
    (Place::ReadBack, "read_back", "before the results of the step are read back"),
    (Place::Parameters, "parameters", "the parameters after the step; only `corrupt` applies to them"),
    (
        Place::Evaluation,
        "evaluation",
        "the rank has evaluated its batches, and the losses are not yet all-reduced",
    ),
    (Place::Snapshot, "snapshot", "the state was copied to host memory, and the save has not begun"),
    (Place::SaveWrite, "save_write", "before bytes are written to a file of a checkpoint"),
    (Place::SaveSync, "save_sync", "before a file of a checkpoint is synced"),
    (Place::SaveCommit, "save_commit", "before rank 0 renames a checkpoint that all ranks have written"),
    (Place::SaveDelete, "save_delete", "before rank 0 deletes an old checkpoint"),
];

const SYNTAX: &str = "expected `place@rank:step=action` or `place@rank:step/attempt=action`";
const ACTIONS: &str = "`crash`, `hang`, `slow(milliseconds)`, `exit(code)`, `skip`, `corrupt`, `corrupt(bit)` or \
    `errno(number)`";
/// Minimum similarity for suggesting another name.
const MIN_PLACE_SIMILARITY: f64 = 0.5;

/// Action at a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// The process sends SIGKILL to itself.
    Crash,
    /// The thread sleeps forever; heartbeats continue.
    Hang,
    /// The thread sleeps for this many milliseconds.
    Slow(u64),
    /// The process exits with this code.
    Exit(u8),
    /// The operation is skipped.
    Skip,
    /// A bit of the parameters is flipped: for number `n`, bit `n % 32` of element `n / 32`.
    Corrupt(u64),
    /// The file operation fails with this errno.
    Errno(i32),
}

/// One rule. `None` stands for `*`: any rank, step or attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Rule {
    pub(super) text: String,
    pub(super) place: Place,
    pub(super) rank: Option<u32>,
    pub(super) step: Option<u64>,
    pub(super) attempt: Option<u32>,
    pub(super) action: Action,
}

impl Rule {
    /// Returns whether the rule applies to this rank in this attempt.
    pub(super) fn applies_to(&self, rank: u32, attempt: u32) -> bool {
        self.rank.is_none_or(|only| only == rank) && self.attempt.is_none_or(|only| only == attempt)
    }

    /// Returns whether the rule applies to this place in this step.
    pub(super) fn is_reached(&self, place: Place, step: u64) -> bool {
        self.place == place && self.step.is_none_or(|only| only == step)
    }
}

/// Parses the rules of a variable. The error says what is wrong with it.
pub(super) fn parse(value: &str) -> Result<Vec<Rule>, String> {
    let rules = value.split(';').map(str::trim).filter(|rule| !rule.is_empty());
    rules.map(|rule| parse_rule(rule).map_err(|problem| format!("`{rule}`: {problem}"))).collect()
}

fn parse_rule(text: &str) -> Result<Rule, String> {
    let (location, action) = text.split_once('=').ok_or(SYNTAX)?;
    let (place, when) = location.split_once('@').ok_or(SYNTAX)?;
    let (rank, steps) = when.split_once(':').ok_or(SYNTAX)?;
    let (step, attempt) = match steps.split_once('/') {
        Some((step, attempt)) => (step, Some(attempt)),
        None => (steps, None),
    };
    let rule = Rule {
        text: text.into(),
        place: parse_place(place)?,
        rank: number_or_any("rank", rank)?,
        step: number_or_any("step", step)?,
        attempt: attempt.map_or(Ok(None), |attempt| number_or_any("attempt", attempt))?,
        action: parse_action(action)?,
    };
    let is_save =
        matches!(rule.place, Place::SaveWrite | Place::SaveSync | Place::SaveCommit | Place::SaveDelete);
    match rule.action {
        Action::Corrupt(_) if rule.place != Place::Parameters => {
            Err("`corrupt` applies to the place `parameters` only".into())
        }
        Action::Skip if rule.place != Place::Reduce => {
            Err("`skip` applies to the place `reduce` only".into())
        }
        Action::Errno(_) if !is_save => Err("`errno` applies to places that begin with `save_` only".into()),
        Action::Corrupt(_) | Action::Errno(_) => Ok(rule),
        _ if rule.place == Place::Parameters => {
            Err("only `corrupt` applies to the place `parameters`".into())
        }
        _ => Ok(rule),
    }
}

fn parse_place(name: &str) -> Result<Place, String> {
    if let Some((place, ..)) = PLACES.iter().find(|(_, known, _)| *known == name) {
        return Ok(*place);
    }
    let similarities = PLACES.iter().map(|(_, known, _)| (*known, strsim::jaro_winkler(name, known)));
    let nearest = similarities.max_by(|a, b| a.1.total_cmp(&b.1));
    Err(match nearest.filter(|(_, similarity)| *similarity > MIN_PLACE_SIMILARITY) {
        Some((nearest, _)) => format!("unknown place `{name}`; did you mean `{nearest}`?"),
        None => {
            let names: Vec<String> = PLACES.iter().map(|(_, known, _)| format!("`{known}`")).collect();
            format!("unknown place `{name}`; expected one of {}", names.join(", "))
        }
    })
}

fn number_or_any<T: std::str::FromStr>(what: &str, text: &str) -> Result<Option<T>, String> {
    match text {
        "*" => Ok(None),
        _ => match text.parse() {
            Ok(number) => Ok(Some(number)),
            Err(_) => Err(format!("the {what} is `{text}`, not a number or `*`")),
        },
    }
}

fn parse_action(text: &str) -> Result<Action, String> {
    let unknown = || format!("unknown action `{text}`; expected {ACTIONS}");
    let (name, argument) = match text.split_once('(') {
        None => (text, None),
        Some((name, rest)) => (name, Some(rest.strip_suffix(')').ok_or_else(unknown)?)),
    };
    Ok(match (name, argument) {
        ("crash", None) => Action::Crash,
        ("skip", None) => Action::Skip,
        ("hang", None) => Action::Hang,
        ("slow", Some(argument)) => Action::Slow(number(name, argument)?),
        ("exit", Some(argument)) => Action::Exit(number(name, argument)?),
        ("corrupt", None) => Action::Corrupt(0),
        ("corrupt", Some(argument)) => Action::Corrupt(number(name, argument)?),
        ("errno", Some(argument)) => match number(name, argument)? {
            errno @ 1..=4095 => Action::Errno(errno),
            other => return Err(format!("`errno({other})` is not an error number, 1 to 4095")),
        },
        _ => return Err(unknown()),
    })
}

fn number<T: std::str::FromStr>(action: &str, text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("`{action}({text})`: `{text}` is not a valid number"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(text: &str) -> Rule {
        let rules = parse(text).unwrap();
        assert_eq!(rules.len(), 1, "{text}");
        rules.into_iter().next().unwrap()
    }

    #[test]
    fn rules_have_place_rank_step_attempt_and_action() {
        let rule = one("backward@1:7/0=crash");
        let Rule { place, rank, step, attempt, action, .. } = rule;
        assert_eq!((place, action), (Place::Backward, Action::Crash));
        assert_eq!((rank, step, attempt), (Some(1), Some(7), Some(0)));
        let rule = one("save_write@*:*=errno(28)");
        assert_eq!((rule.rank, rule.step, rule.attempt), (None, None, None));
        assert_eq!(rule.action, Action::Errno(28));
        let rules =
            parse(" join@2:0=hang; ;data@0:3=slow(15);parameters@1:4=corrupt;parameters@1:*=corrupt(77)");
        let actions: Vec<Action> = rules.unwrap().iter().map(|rule| rule.action).collect();
        assert_eq!(actions, [Action::Hang, Action::Slow(15), Action::Corrupt(0), Action::Corrupt(77)]);
        assert_eq!(parse(""), Ok(Vec::new()));
    }

    #[test]
    fn rule_fires_at_its_rank_step_and_attempt_only() {
        let rule = one("forward@1:7/2=crash");
        assert!(rule.applies_to(1, 2));
        assert!(!rule.applies_to(0, 2) && !rule.applies_to(1, 1));
        assert!(rule.is_reached(Place::Forward, 7));
        assert!(!rule.is_reached(Place::Forward, 6) && !rule.is_reached(Place::Backward, 7));
        let any = one("forward@*:*=slow(1)");
        assert!(any.applies_to(5, 9) && any.is_reached(Place::Forward, 0));
    }

    #[test]
    fn errors_name_the_rule_and_what_is_wrong() {
        for (text, expected) in [
            ("forward", "`forward`: expected `place@rank:step=action`"),
            ("forward=crash", "expected `place@rank:step=action`"),
            ("forward@1=crash", "expected `place@rank:step=action`"),
            ("forwrd@1:2=crash", "unknown place `forwrd`; did you mean `forward`?"),
            ("save_comit@1:2=crash", "did you mean `save_commit`?"),
            ("q@1:2=crash", "unknown place `q`; expected one of `start`, `join`"),
            ("forward@x:2=crash", "the rank is `x`, not a number or `*`"),
            ("forward@-1:2=crash", "the rank is `-1`"),
            ("forward@1:two=crash", "the step is `two`"),
            ("forward@1:2/=crash", "the attempt is ``"),
            ("forward@1:2=explode", "unknown action `explode`; expected `crash`, `hang`"),
            ("forward@1:2=crash(3)", "unknown action `crash(3)`"),
            ("forward@1:2=slow", "unknown action `slow`"),
            ("forward@1:2=slow(5", "unknown action `slow(5`"),
            ("forward@1:2=slow(fast)", "`slow(fast)`: `fast` is not a valid number"),
            ("forward@1:2=exit(256)", "`256` is not a valid number"),
            ("save_write@1:2=errno(0)", "`errno(0)` is not an error number"),
            ("forward@1:2=errno(5)", "`errno` applies to places that begin with `save_` only"),
            ("forward@1:2=skip", "`skip` applies to the place `reduce` only"),
            ("forward@1:2=corrupt", "`corrupt` applies to the place `parameters` only"),
            ("parameters@1:2=crash", "only `corrupt` applies to the place `parameters`"),
            ("data@0:1=hang;forwrd@1:2=crash", "`forwrd@1:2=crash`: unknown place"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn documentation_lists_every_place() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/fail-points.md");
        let text = fs_err::read_to_string(path).unwrap();
        let table = text.split("| place |").nth(1).unwrap().split("\n\n").next().unwrap();
        let rows: Vec<&str> = table.lines().skip(2).collect();
        let expected: Vec<String> =
            PLACES.iter().map(|(_, name, place)| format!("| `{name}` | {place} |")).collect();
        assert_eq!(rows, expected);
        for action in ACTIONS.split('`').filter(|part| part.contains(char::is_alphabetic)) {
            let name = action.split('(').next().unwrap().trim();
            assert!(name == "or" || text.contains(&format!("`{name}")), "{name}");
        }
    }
}
