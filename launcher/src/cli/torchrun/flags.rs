//! The table of flags, which drives the parser and `--help`.
//!
//! Names are spelled with dashes; underscores are accepted too. Most of torchrun's flags can also be set by an
//! environment variable, `PET_<NAME>`.

use xlaunch_host::naming::nearest;

use super::MIN_SIMILARITY;

/// A flag of the command line.
#[derive(Debug)]
pub(super) struct Flag {
    /// Name without the leading dashes.
    pub(super) name: &'static str,
    pub(super) short: Option<char>,
    pub(super) takes: Takes,
    /// True if torchrun has this flag: its abbreviations must keep their meaning here.
    pub(super) of_torchrun: bool,
    /// True if `PET_<NAME>` supplies the value when the command line does not.
    pub(super) in_environment: bool,
    /// The reason if the flag is not supported.
    pub(super) refused: Option<&'static str>,
    /// One line of `--help`.
    pub(super) help: &'static str,
}

/// The value of a flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Takes {
    Nothing,
    /// `--flag value` or `--flag=value`, with the value's name in `--help`.
    Value(&'static str),
    /// `--flag` or `--flag=value`.
    Optional(&'static str),
}

use Takes::{Nothing, Optional, Value};

impl Flag {
    const fn short(mut self, letter: char) -> Self {
        self.short = Some(letter);
        self
    }

    const fn only_on_the_command_line(mut self) -> Self {
        self.in_environment = false;
        self
    }

    const fn also_in_environment(mut self) -> Self {
        self.in_environment = true;
        self
    }

    const fn refused(mut self, why: &'static str) -> Self {
        self.refused = Some(why);
        self
    }

    /// Returns the environment variable for this flag.
    pub(super) fn variable(&self) -> Option<String> {
        self.in_environment.then(|| format!("PET_{}", self.name.to_uppercase().replace('-', "_")))
    }
}

const fn torchrun(name: &'static str, takes: Takes, help: &'static str) -> Flag {
    Flag { name, short: None, takes, of_torchrun: true, in_environment: true, refused: None, help }
}

const fn xlaunch(name: &'static str, takes: Takes, help: &'static str) -> Flag {
    Flag { of_torchrun: false, in_environment: false, ..torchrun(name, takes, help) }
}

/// Flags of accelerate, DeepSpeed and mpirun, with those that correspond to them.
const OF_OTHER_LAUNCHERS: [(&str, &str); 10] = [
    ("num-processes", "nproc-per-node"),
    ("num-gpus", "nproc-per-node"),
    ("gpus", "nproc-per-node"),
    ("np", "nproc-per-node"),
    ("n", "nproc-per-node"),
    ("num-machines", "nnodes"),
    ("num-nodes", "nnodes"),
    ("machine-rank", "node-rank"),
    ("main-process-port", "rdzv-endpoint"),
    ("H", "hosts"),
];

/// Former names, accepted for one release with a warning: (old, new).
const RENAMED: [(&str, &str); 1] = [("silence", "stall-timeout")];

const SEVERAL_NODES: &str = "Several nodes";

/// Flags, grouped under the headings of `--help`.
#[rustfmt::skip] // A line for each flag.
pub(super) static GROUPS: &[(&str, &[Flag])] = &[
    ("Workers", &[
        torchrun("nproc-per-node", Value("N"), "number [1], or gpu, cpu (cores), auto (GPUs, else cores)"),
        torchrun("module", Nothing, "launch a Python module").short('m'),
        torchrun("no-python", Nothing, "launch a program without Python, like --"),
        torchrun("run-path", Nothing, "launch a script with runpy.run_path"),
        xlaunch("preload", Value("MODULES"), "import modules such as torch once, and fork the workers")
            .also_in_environment(),
        torchrun("role", Value("NAME"), "ROLE_NAME of the workers, prefix of their output [default]"),
        torchrun("virtual-local-rank", Nothing, "LOCAL_RANK 0 and one visible GPU for every worker"),
        torchrun("numa-binding", Value("TO"), "bind workers to node, socket, exclusive or core-complex")
            .only_on_the_command_line(),
    ]),
    ("Failures", &[
        torchrun("max-restarts", Value("N"), "restarts of the whole group after a failure [0]"),
        xlaunch("no-restart-codes", Value("CODES"), "never restart after these exit codes, such as 2,78"),
        xlaunch("requeue-codes", Value("CODES"), "exit codes that mean preempted: no restart, exit with 75"),
        torchrun("shutdown-timeout", Value("SECONDS"), "time between SIGTERM and SIGKILL [30]"),
        torchrun("signals-to-handle", Value("NAMES"), "signals to shut down on [SIGTERM,SIGINT,SIGHUP,SIGQUIT]"),
        xlaunch("propagate-exit-code", Nothing, "exit with the exit code of the failed worker, not 1"),
        xlaunch("stall-timeout", Value("SECONDS"), "report ranks without output and CPU time [300]"),
        xlaunch("hang-timeout", Value("SECONDS"), "end ranks whose heartbeats stop; 0 never [adapts, at least 60]"),
        xlaunch("flight-recorder", Nothing, "turn on PyTorch's flight recorder; dump it when a rank hangs"),
    ]),
    ("Output", &[
        torchrun("log-dir", Value("DIR"), "directory for log files"),
        torchrun("redirects", Value("STREAMS"), "write to files: 0 none, 1 stdout, 2 stderr, 3 both, or 0:1,1:2")
            .short('r'),
        torchrun("tee", Value("STREAMS"), "write to files and to the console; values as for -r").short('t'),
        torchrun("log-line-prefix-template", Value("TEXT"),
            "line prefix: ${role_name}, ${local_rank}, ${rank}, ${hostname}"),
        torchrun("local-ranks-filter", Value("RANKS"), "show only these ranks on the console, such as 0,1"),
        torchrun("duplicate-stdout-filters", Value("WORDS"),
            "copy lines that contain one of these, such as loss,step"),
        torchrun("duplicate-stderr-filters", Value("WORDS"), "the same for stderr; write a comma as ,,"),
        xlaunch("log-rotate", Value("SIZE"), "rotate log files at SIZE, such as 64M; one old file is kept"),
    ]),
    (SEVERAL_NODES, &[
        torchrun("nnodes", Value("N|MIN:MAX"), "number of nodes [1, or the cluster's: Slurm, LSF, PBS]"),
        torchrun("node-rank", Value("N"), "rank of this node [the cluster's, else 0]"),
        torchrun("rdzv-backend", Value("NAME"), "static, or c10d, where nodes may join and leave [static]"),
        torchrun("rdzv-endpoint", Value("HOST:PORT"), "the nodes' coordinator; on one node MASTER_ADDR, MASTER_PORT"),
        torchrun("master-addr", Value("HOST"), "the same for static; on one node MASTER_ADDR"),
        torchrun("master-port", Value("PORT"), "[29500; on one node a free port]"),
        torchrun("rdzv-id", Value("ID"), "TORCHELASTIC_RUN_ID, equal on all nodes [random]"),
        torchrun("rdzv-conf", Value("KEYS"), "join_timeout=600,keep_alive_interval=1,... or is_host=1"),
        torchrun("local-addr", Value("HOST"), "address at which other nodes reach this one"),
        xlaunch("interface", Value("NAME"), "network interface for nodes and workers, such as eth0"),
        xlaunch("token-file", Value("PATH"), "the job's token; or XLAUNCH_TOKEN, or munge under Slurm"),
        xlaunch("rdzv-insecure", Nothing, "no token and plain TCP, for a trusted network"),
        torchrun("standalone", Nothing, "one node: ignore --rdzv-*, --master-* and the cluster"),
    ]),
    ("Several hosts over ssh", &[
        xlaunch("hosts", Value("LIST"), "start on these hosts, with slots as workers: a,b:4"),
        xlaunch("hostfile", Value("FILE"), "the same, a line per host: HOST, HOST slots=N or HOST:N"),
        xlaunch("ssh", Value("COMMAND"), "ssh client and its options [ssh -o BatchMode=yes ...]"),
        xlaunch("export", Value("NAME"), "environment variable to send to the hosts; may be repeated"),
    ]),
    ("Accepted without effect", &[
        torchrun("monitor-interval", Value("SECONDS"), "exits are noticed immediately"),
        torchrun("start-method", Value("NAME"), "workers are always spawned"),
        torchrun("event-log-handler", Value("NAME"), "see `xlaunch status` instead"),
    ]),
    ("Refused", &[
        torchrun("logs-specs", Value("NAME"), "Python plug-ins; only `default` is accepted")
            .only_on_the_command_line(),
        torchrun("print-completion", Value("SHELL"), "`xlaunch gen completions` prints a script")
            .only_on_the_command_line().refused("`xlaunch gen completions` prints a script"),
    ]),
    ("Training configurations (these, several nodes, --nproc, --max-restarts, --shutdown-timeout)", &[
        xlaunch("set", Value("SECTION.KEY=VALUE"), "override a key; may be repeated"),
        xlaunch("resume", Optional("PATH"), "resume from the job's newest checkpoint, or from PATH"),
        xlaunch("resume-changed", Nothing, "resume even if data, batch, seed or order have changed"),
        xlaunch("overwrite", Nothing, "start afresh in a directory with checkpoints"),
        xlaunch("dry-run", Nothing, "check the job and print the memory it needs; start nothing"),
    ]),
    ("Help", &[
        torchrun("help", Nothing, "print help").only_on_the_command_line().short('h'),
        xlaunch("version", Nothing, "print the version").short('V'),
    ]),
];

/// Flags that only training configurations take.
pub(super) const TRAINING: [&str; 5] = ["set", "resume", "resume-changed", "overwrite", "dry-run"];

/// Returns the flags for launches on several nodes: those under that heading.
pub(super) fn several_nodes() -> impl Iterator<Item = &'static str> {
    let group = GROUPS.iter().filter(|(heading, _)| *heading == SEVERAL_NODES);
    group.flat_map(|(_, flags)| flags.iter().map(|flag| flag.name))
}

pub(super) fn all() -> impl Iterator<Item = &'static Flag> {
    GROUPS.iter().flat_map(|(_, flags)| flags.iter())
}

/// Returns the current name of a flag that was renamed.
pub(super) fn renamed(written: &str) -> Option<&'static str> {
    let name = written.replace('_', "-");
    RENAMED.iter().find(|(old, _)| *old == name).map(|(_, new)| *new)
}

/// Returns the flag with this name, former name, or unambiguous prefix of a name, in either spelling.
pub(super) fn find(written: &str) -> Result<&'static Flag, String> {
    let name = renamed(written).map_or_else(|| written.replace('_', "-"), str::to_owned);
    if let Some(flag) = all().find(|flag| flag.name == name) {
        return Ok(flag);
    }
    let has_prefix = |flag: &&Flag| flag.name.starts_with(&name);
    let mut candidates: Vec<_> = all().filter(|flag| flag.of_torchrun).filter(has_prefix).collect();
    if candidates.is_empty() {
        candidates = all().filter(has_prefix).collect();
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
    if name == "use-env" {
        // A flag of torch.distributed.launch.
        return format!("unknown flag --{written}: omit it, as LOCAL_RANK is always in the environment");
    }
    let similar = || {
        let (name, similarity) = nearest(name, all().map(|flag| flag.name))?;
        (similarity > MIN_SIMILARITY).then_some(name)
    };
    described(&format!("--{written}"), of_other_launchers(name).or_else(similar))
}

/// Returns the error about a flag of one letter, or several after one dash.
pub(super) fn unknown_letters(argument: &str) -> String {
    described(argument, of_other_launchers(argument.trim_start_matches('-')))
}

fn described(flag: &str, instead: Option<&str>) -> String {
    match instead {
        Some(instead) => format!("unknown flag {flag}; did you mean --{instead}?"),
        None => format!("unknown flag {flag}; see --help"),
    }
}

/// Returns the flag that corresponds to one of accelerate, DeepSpeed or mpirun.
fn of_other_launchers(name: &str) -> Option<&'static str> {
    OF_OTHER_LAUNCHERS.iter().find(|(other, _)| *other == name).map(|(_, own)| *own)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_letters_are_unique_and_spelled_with_dashes() {
        for flag in all() {
            assert_eq!(all().filter(|other| other.name == flag.name).count(), 1, "{}", flag.name);
            assert!(flag.name.bytes().all(|byte| byte == b'-' || byte.is_ascii_lowercase()), "{}", flag.name);
            let same = all().filter(|other| flag.short.is_some() && other.short == flag.short).count();
            assert!(same <= 1, "{}", flag.name);
        }
    }

    #[test]
    fn abbreviations_mean_the_same_as_in_torchrun() {
        let found = |written| find(written).map(|flag| flag.name);
        assert_eq!(found("nproc"), Ok("nproc-per-node"));
        assert_eq!(found("nproc_per_node"), Ok("nproc-per-node"));
        assert_eq!(found("redirect"), Ok("redirects"));
        // Each of these would be ambiguous if xlaunch's own flags counted.
        assert_eq!(found("no-"), Ok("no-python"));
        assert_eq!(found("re"), Ok("redirects"));
        assert_eq!(found("v"), Ok("virtual-local-rank"));
        assert_eq!(found("over"), Ok("overwrite"));
        assert_eq!(found("master"), Err("--master could be --master-addr, --master-port".into()));
        assert_eq!(
            found("max-restart-count"),
            Err("unknown flag --max-restart-count; did you mean --max-restarts?".into())
        );
        assert_eq!(found("zzz"), Err("unknown flag --zzz; see --help".into()));
        for (other, own) in OF_OTHER_LAUNCHERS {
            assert!(find(own).is_ok_and(|flag| flag.name == own), "{own}");
            // After two dashes, letters abbreviate names.
            let error = if other.len() > 2 { found(other).unwrap_err() } else { unknown_letters(other) };
            assert!(error.ends_with(&format!("{other}; did you mean --{own}?")), "{error}");
        }
        assert!(found("use_env").is_err_and(|error| error.starts_with("unknown flag --use_env: omit it")));
    }

    #[test]
    fn renamed_flag_is_accepted_but_not_abbreviated_or_listed() {
        for (old, new) in RENAMED {
            assert_eq!((find(old).map(|flag| flag.name), renamed(old)), (Ok(new), Some(new)));
            assert!(all().all(|flag| flag.name != old), "--help does not list {old}");
        }
        assert_eq!(renamed("stall-timeout"), None);
        assert!(find("silenc").is_err());
    }
}
