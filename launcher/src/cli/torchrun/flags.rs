//! The table of flags: everything that the parser and `--help` know of them.
//!
//! Names are in their dash spelling; underscores are taken as dashes. A flag of torchrun's that it reads from the environment
//! too is called `PET_<NAME>` there.

/// One flag.
#[derive(Debug)]
pub(super) struct Flag {
    /// Without the two dashes in front.
    pub(super) name: &'static str,
    /// The letter behind one dash.
    pub(super) short: Option<char>,
    /// What follows it.
    pub(super) takes: Takes,
    /// Whether torchrun knows it, so that a prefix means what it means there.
    pub(super) of_torchrun: bool,
    /// Whether `PET_<NAME>` is its value where the command line has none.
    pub(super) in_environment: bool,
    /// Why it is not accepted.
    pub(super) refused: Option<&'static str>,
    /// One line for people.
    pub(super) help: &'static str,
}

/// What follows a flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Takes {
    Nothing,
    /// `--flag value` or `--flag=value`, called this in `--help`.
    Value(&'static str),
    /// `--flag` or `--flag=value`.
    Optional(&'static str),
}

use Takes::{Nothing, Optional, Value};

impl Flag {
    const fn torchrun(name: &'static str, takes: Takes, help: &'static str) -> Self {
        Self { name, short: None, takes, of_torchrun: true, in_environment: true, refused: None, help }
    }

    const fn xlaunch(name: &'static str, takes: Takes, help: &'static str) -> Self {
        Self { of_torchrun: false, in_environment: false, ..Self::torchrun(name, takes, help) }
    }

    const fn short(mut self, letter: char) -> Self {
        self.short = Some(letter);
        self
    }

    const fn only_on_the_command_line(mut self) -> Self {
        self.in_environment = false;
        self
    }

    const fn refused(mut self, why: &'static str) -> Self {
        self.refused = Some(why);
        self
    }

    /// The variable that stands for it.
    pub(super) fn variable(&self) -> Option<String> {
        self.in_environment.then(|| format!("PET_{}", self.name.to_uppercase().replace('-', "_")))
    }
}

/// Flags under the headings of `--help`.
pub(super) static GROUPS: &[(&str, &[Flag])] = &[
    (
        "Workers",
        &[
            Flag::torchrun(
                "nproc-per-node",
                Value("N"),
                "workers [1]; auto: GPUs, or cores without; gpu; cpu: cores",
            ),
            Flag::torchrun("module", Nothing, "what is started is a Python module").short('m'),
            Flag::torchrun("no-python", Nothing, "what is started is a program, as behind --"),
            Flag::torchrun("run-path", Nothing, "what is started is a script for Python's runpy"),
            Flag::torchrun("role", Value("NAME"), "name of the workers in ROLE_NAME and before their lines"),
            Flag::torchrun("virtual-local-rank", Nothing, "show each worker its GPU only, as LOCAL_RANK 0"),
            Flag::torchrun("numa-binding", Value("TO"), "cores: node, socket, exclusive or core-complex")
                .only_on_the_command_line(),
        ],
    ),
    (
        "Failures",
        &[
            Flag::torchrun(
                "max-restarts",
                Value("N"),
                "start the workers again so often after a failure [0]",
            ),
            Flag::xlaunch("no-restart-codes", Value("CODES"), "exit codes that are final, such as 2,78"),
            Flag::torchrun("shutdown-timeout", Value("SECONDS"), "from SIGTERM to SIGKILL [30]"),
            Flag::torchrun(
                "signals-to-handle",
                Value("NAMES"),
                "that end the job [SIGTERM,SIGINT,SIGHUP,SIGQUIT]",
            ),
            Flag::xlaunch("propagate-exit-code", Nothing, "exit with the failed worker's code instead of 1"),
            Flag::xlaunch(
                "stall-timeout",
                Value("SECONDS"),
                "point out ranks that do nothing for so long [300]",
            ),
        ],
    ),
    (
        "Output",
        &[
            Flag::torchrun("log-dir", Value("DIR"), "keep log files below DIR"),
            Flag::torchrun(
                "redirects",
                Value("STREAMS"),
                "to files only: 0 none, 1 stdout, 2 stderr, 3 both, or 0:1,1:2",
            )
            .short('r'),
            Flag::torchrun("tee", Value("STREAMS"), "to files and to the console, as for -r").short('t'),
            Flag::torchrun(
                "log-line-prefix-template",
                Value("TEXT"),
                "of ${role_name}, ${local_rank}, ${rank}, ${hostname}",
            ),
            Flag::torchrun(
                "local-ranks-filter",
                Value("RANKS"),
                "show only these on the console, such as 0,1",
            ),
            Flag::torchrun(
                "duplicate-stdout-filters",
                Value("WORDS"),
                "copy lines with any of these, such as loss,step",
            ),
            Flag::torchrun("duplicate-stderr-filters", Value("WORDS"), "the same for stderr; ,, is a comma"),
            Flag::xlaunch(
                "log-rotate",
                Value("SIZE"),
                "keep log files below SIZE, such as 64M, and one older",
            ),
        ],
    ),
    (
        "Rendezvous (on one node)",
        &[
            Flag::torchrun("standalone", Nothing, "ignore --rdzv-* and --master-*; a free port is found"),
            Flag::torchrun("master-addr", Value("HOST"), "MASTER_ADDR [127.0.0.1]"),
            Flag::torchrun("master-port", Value("PORT"), "MASTER_PORT [a free one]"),
            Flag::torchrun("rdzv-endpoint", Value("HOST:PORT"), "the same two in one"),
            Flag::torchrun("rdzv-id", Value("ID"), "TORCHELASTIC_RUN_ID [random]"),
            Flag::torchrun("rdzv-backend", Value("NAME"), "static or c10d, which are one here"),
            Flag::torchrun("local-addr", Value("HOST"), "MASTER_ADDR where no other flag gives one"),
            Flag::torchrun("nnodes", Value("N"), "1 or 1:1"),
            Flag::torchrun("node-rank", Value("N"), "0"),
        ],
    ),
    (
        "Accepted without effect",
        &[
            Flag::torchrun("monitor-interval", Value("SECONDS"), "exits are noticed at once"),
            Flag::torchrun("rdzv-conf", Value("KEYS"), "one node has nobody to wait for"),
            Flag::torchrun("start-method", Value("NAME"), "commands are always spawned"),
            Flag::torchrun("event-log-handler", Value("NAME"), "`xlaunch status` tells what happens"),
        ],
    ),
    (
        "Refused",
        &[
            Flag::torchrun("logs-specs", Value("NAME"), "any but default: a plug-in in Python")
                .only_on_the_command_line(),
            Flag::torchrun("print-completion", Value("SHELL"), "`xlaunch gen completions` prints a script")
                .only_on_the_command_line()
                .refused("`xlaunch gen completions` prints a script"),
        ],
    ),
    (
        "Training configurations (with these, --nproc, --max-restarts and --shutdown-timeout)",
        &[
            Flag::xlaunch("set", Value("SECTION.KEY=VALUE"), "override a key; may be repeated"),
            Flag::xlaunch("resume", Optional("PATH"), "from the newest checkpoint of this job, or from PATH"),
        ],
    ),
    (
        "Help",
        &[
            Flag::torchrun("help", Nothing, "this text").only_on_the_command_line().short('h'),
            Flag::xlaunch("version", Nothing, "the version"),
        ],
    ),
];

/// All of them.
pub(super) fn all() -> impl Iterator<Item = &'static Flag> {
    GROUPS.iter().flat_map(|(_, flags)| flags.iter())
}

/// The flag of this name or unambiguous prefix of one, in either spelling.
pub(super) fn find(written: &str) -> Result<&'static Flag, String> {
    let name = written.replace('_', "-");
    if let Some(flag) = all().find(|flag| flag.name == name) {
        return Ok(flag);
    }
    let begins = |flag: &&Flag| flag.name.starts_with(&name);
    let mut candidates: Vec<_> = all().filter(|flag| flag.of_torchrun).filter(begins).collect();
    if candidates.is_empty() {
        candidates = all().filter(begins).collect();
    }
    match candidates.as_slice() {
        [flag] => Ok(flag),
        [] => Err(unknown(written, &name)),
        several => {
            let names: Vec<_> = several.iter().map(|flag| format!("--{}", flag.name)).collect();
            Err(format!("--{written} could be {}", names.join(", ")))
        }
    }
}

fn unknown(written: &str, name: &str) -> String {
    let near = all().map(|flag| (strsim::jaro_winkler(flag.name, name), flag.name));
    match near.filter(|(likeness, _)| *likeness > 0.8).max_by(|a, b| a.0.total_cmp(&b.0)) {
        Some((_, nearest)) => format!("unknown flag --{written}; is --{nearest} meant?"),
        None => format!("unknown flag --{written}; --help lists all"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_letters_are_unique_and_in_the_dash_spelling() {
        for flag in all() {
            assert_eq!(all().filter(|other| other.name == flag.name).count(), 1, "{}", flag.name);
            assert!(flag.name.bytes().all(|byte| byte == b'-' || byte.is_ascii_lowercase()), "{}", flag.name);
            let same = all().filter(|other| flag.short.is_some() && other.short == flag.short).count();
            assert!(same <= 1, "{}", flag.name);
        }
    }

    #[test]
    fn prefixes_mean_what_they_mean_to_torchrun() {
        let found = |written| find(written).map(|flag| flag.name);
        assert_eq!(found("nproc"), Ok("nproc-per-node"));
        assert_eq!(found("nproc_per_node"), Ok("nproc-per-node"));
        assert_eq!(found("redirect"), Ok("redirects"));
        // Each of these would be ambiguous with a flag of xlaunch's own.
        assert_eq!(found("no-"), Ok("no-python"));
        assert_eq!(found("re"), Ok("redirects"));
        assert_eq!(found("v"), Ok("virtual-local-rank"));
        assert_eq!(found("res"), Ok("resume"));
        assert_eq!(found("master"), Err("--master could be --master-addr, --master-port".into()));
        assert_eq!(
            found("max-restart-count"),
            Err("unknown flag --max-restart-count; is --max-restarts meant?".into())
        );
        assert_eq!(found("zzz"), Err("unknown flag --zzz; --help lists all".into()));
    }
}
