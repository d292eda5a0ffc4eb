//! Standard input of workers: a terminal with job control, pipes and files; output on a terminal; descriptors and
//! limits that they inherit.

use std::process::Command;

use serde_json::json;
use xlaunch_tests::{Job, Launch, Output, Process, requirements, xlaunch_path};

xlaunch_harness::tests! {
    piped_input_reaches_rank_0_alone,
    report_begins_on_a_new_line_after_an_unfinished_one,
    inherited_descriptors_are_closed_unless_an_argument_names_them,
    more_workers_start_than_the_soft_limit_of_open_files_allows;
    needs requirements::python3:
    prompt_of_rank_0_is_answered_on_a_terminal,
    preloaded_worker_is_answered_on_a_terminal,
    only_shown_rank_gets_the_terminal,
    stdout_of_a_single_shown_rank_is_a_terminal_like_xlaunchs_own,
    single_rank_gets_the_new_size_of_the_terminal_with_one_signal,
    line_at_a_prompt_of_a_single_rank_can_be_edited_and_recalled,
    terminal_is_usable_after_a_worker_is_killed_while_it_reads_keys,
    ctrl_c_at_a_prompt_reaches_every_rank_once,
    ctrl_z_at_a_prompt_suspends_the_job_until_fg,
    worker_that_suspends_itself_on_a_terminal_suspends_the_job,
    ctrl_z_has_no_effect_without_a_shell_that_could_continue_the_job,
    background_job_is_suspended_when_its_script_reads,
    shell_of_a_single_rank_controls_its_jobs,
    suspended_job_says_how_to_continue_it_and_ends_at_the_first_kill,
    end_of_a_progress_bar_precedes_what_is_printed_after_it,
    background_job_whose_script_does_not_read_is_not_suspended,
    password_is_read_without_echo_in_any_rank,
    ranks_that_ask_at_the_same_time_are_all_answered,
    prompt_in_a_nested_launch_is_answered,
    terminal_is_usable_after_the_launcher_is_killed_at_a_prompt,
    training_prints_plain_lines_on_a_terminal_that_cannot_redraw_them,
    top_shows_running_launches_without_a_daemon;
    needs requirements::pager:
    pager_of_a_single_rank_reads_keys;
}

const ASK: &str = "
import os
if os.environ['RANK'] == '0':
    print('hello', input('name? '))
";

fn expect(text: &str) -> serde_json::Value {
    json!(["expect", text])
}

fn send(keys: &str) -> serde_json::Value {
    json!(["send", keys])
}

/// Runs a program on a terminal and returns everything that it displayed. See `terminal.py`.
fn on_terminal(launch: &Launch, steps: &[serde_json::Value], program: &[&str]) -> Output {
    let driver = launch.write("terminal.py", include_str!("terminal.py"));
    let mut command = launch.command::<&str>(&[]);
    let environment: Vec<_> =
        command.get_envs().map(|(name, value)| (name.to_owned(), value.map(ToOwned::to_owned))).collect();
    command = Command::new("python3");
    for (name, value) in environment {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    // No colours, and a shell without line editing.
    command.env("TERM", "dumb").env_remove("PROMPT_COMMAND");
    command.current_dir(launch.path()).arg(driver).arg(json!(steps).to_string()).args(program);
    Process::spawn(&mut command).wait()
}

/// Runs `xlaunch` on a terminal.
fn launch_on_terminal(launch: &Launch, steps: &[serde_json::Value], args: &[&str]) -> String {
    let run = on_terminal(launch, steps, &[&[xlaunch_path().to_str().unwrap()], args].concat());
    assert_eq!(run.code, 0, "{}{}", run.stdout, run.stderr);
    run.stdout
}

/// Runs steps in an interactive shell, in which `$X` is `xlaunch`.
fn in_shell(launch: &Launch, steps: &[serde_json::Value]) -> String {
    let begin = [expect("$ "), send(&format!("X={}\n", xlaunch_path().display())), expect("$ ")];
    let end = [send("\nexit 0\n")];
    let steps = [&begin, steps, &end].concat();
    // bash does not take root's prompt from the environment.
    launch.write("bashrc", "PS1='$ '\n");
    let run =
        on_terminal(launch, &steps, &["bash", "--noprofile", "--rcfile", "bashrc", "--noediting", "-i"]);
    assert_eq!(run.code, 0, "{}{}", run.stdout, run.stderr);
    run.stdout
}

fn prompt_of_rank_0_is_answered_on_a_terminal() {
    let launch = Launch::new();
    launch.write("ask.py", ASK);
    launch.write("debug.py", "x = 41\nbreakpoint()\nprint('after', x)\n");
    for ranks in ["1", "2"] {
        let steps = [expect("name? "), send("bob\n"), expect("hello bob")];
        launch_on_terminal(&launch, &steps, &["--nproc-per-node", ranks, "ask.py"]);
        let mut steps =
            vec![expect("(Pdb) "), send("p x\n"), expect("41"), expect("(Pdb) "), send("x = 7\n")];
        if ranks == "1" {
            steps.extend([expect("(Pdb) "), send("c\n"), expect("after 7")]);
            launch_on_terminal(&launch, &steps, &["debug.py"]);
        }
    }
}

fn preloaded_worker_is_answered_on_a_terminal() {
    let launch = Launch::new();
    launch.write("ask.py", &format!("{ASK}    import sys; print('again', sys.stdin.readline())"));
    let steps = [expect("name? "), send("bob\n"), expect("hello bob"), send("ann\n"), expect("again ann")];
    launch_on_terminal(&launch, &steps, &["--preload", "json", "--nproc-per-node", "2", "ask.py"]);
}

fn only_shown_rank_gets_the_terminal() {
    let launch = Launch::new();
    launch.write("ask.py", &ASK.replace("'0'", "'1'"));
    let steps = [expect("name? "), send("bob\n"), expect("hello bob")];
    launch_on_terminal(&launch, &steps, &["--nproc-per-node", "2", "--local-ranks-filter", "1", "ask.py"]);
}

fn stdout_of_a_single_shown_rank_is_a_terminal_like_xlaunchs_own() {
    let launch = Launch::new();
    let about = "import os\nprint('stdout:', os.get_terminal_size(1) if os.isatty(1) else 'no terminal')\n";
    launch.write("about.py", about);
    let size = "os.terminal_size(columns=97, lines=33)";
    for (arguments, expected) in [
        ("--log-dir logs", size),
        ("--preload json", size),
        ("--nproc-per-node 2 --local-ranks-filter 1", size),
        ("--nproc-per-node 2", "no terminal"),
        ("-t 3 --log-dir teed", "no terminal"),
    ] {
        let run = format!("stty rows 33 cols 97; $X {arguments} about.py; echo code-$?\n");
        let steps = [send(&run), expect(&format!("stdout: {expected}\r\n")), expect("code-0")];
        in_shell(&launch, &steps);
    }
    in_shell(&launch, &[send("$X about.py >out; cat out\n"), expect("stdout: no terminal")]);
    let log = std::fs::read_dir(launch.path().join("logs")).unwrap().next().unwrap().unwrap();
    let log = std::fs::read_to_string(log.path().join("attempt_0/0/stdout.log")).unwrap();
    assert_eq!(log, format!("stdout: {size}\n"));
}

fn single_rank_gets_the_new_size_of_the_terminal_with_one_signal() {
    let launch = Launch::new();
    launch.write(
        "resize.py",
        "
import fcntl, os, signal, struct, termios, time
sizes = []
signal.signal(signal.SIGWINCH, lambda *_: sizes.append(tuple(os.get_terminal_size(1))))
with open('/dev/tty') as terminal:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack('4H', 11, 55, 0, 0))
while not sizes:
    time.sleep(0.01)
time.sleep(0.1)
print('sizes:', *sizes)
",
    );
    for arguments in ["", "--preload json "] {
        let run = format!("stty rows 33 cols 97; $X {arguments}resize.py; echo code-$?\n");
        in_shell(&launch, &[send(&run), expect("sizes: (55, 11)\r\n"), expect("code-0")]);
    }
}

fn pager_of_a_single_rank_reads_keys() {
    let launch = Launch::new();
    let steps = [
        send("stty rows 10; $X -- sh -c 'seq 1 200 | TERM=xterm less'; echo code-$?\n"),
        expect("9"),
        send("G"),
        expect("200"),
        send("q"),
        expect("code-0"),
    ];
    in_shell(&launch, &steps);
}

fn line_at_a_prompt_of_a_single_rank_can_be_edited_and_recalled() {
    let launch = Launch::new();
    launch.write("debug.py", "breakpoint()\nprint('after')\n");
    let (backspace, previous) = ("\u{7f}", "\u{10}");
    let steps = [
        expect("(Pdb) "),
        send(&format!("p 40+3{backspace}1\n")),
        expect("\n41"),
        expect("(Pdb) "),
        send(&format!("{previous}1\n")),
        expect("\n51"),
        expect("(Pdb) "),
        send("c\n"),
        expect("after"),
    ];
    launch_on_terminal(&launch, &steps, &["debug.py"]);
}

fn shell_of_a_single_rank_controls_its_jobs() {
    let launch = Launch::new();
    let steps = [
        send("PS1='outer$ '; $X -- bash --norc -i; echo code-$?\n"),
        send("PS1='inner> '\n"),
        expect("inner> "),
        send("echo $((40 + 2))\n"),
        expect("42\r\n"),
        send("sh -c \"echo be''gun; exec sleep 1000\"\n"),
        expect("begun"),
        send("\u{3}"),
        expect("inner> "),
        send("cat\n"),
        send("a line\n"),
        expect("a line\r\n"),
        send("\u{1a}"),
        expect("Stopped"),
        send("kill -9 %1; exec false\n"),
        expect("code-1"),
        expect("outer$ "),
    ];
    in_shell(&launch, &steps);
}

fn terminal_is_usable_after_a_worker_is_killed_while_it_reads_keys() {
    let launch = Launch::new();
    launch.write("keys.py", "import os, tty\ntty.setraw(0)\nos.kill(os.getpid(), 9)\n");
    let run = "$X keys.py; stty -a | grep -q -- '-icanon' || echo lines-$((1+1))\n";
    in_shell(&launch, &[send(run), expect("SIGKILL"), expect("lines-2")]);
}

fn ctrl_c_at_a_prompt_reaches_every_rank_once() {
    let launch = Launch::new();
    launch.write(
        "count.py",
        "
import os, signal, sys, time
count, rank = 0, os.environ['RANK']
def interrupted(*_):
    global count
    count += 1
signal.signal(signal.SIGINT, interrupted)
open('ready' + rank, 'w').close()
def wait_for_both(name):
    while not all(os.path.exists(name + rank) for rank in '01'):
        time.sleep(0.01)
wait_for_both('ready')
if rank == '0':
    input('name? ')
while count == 0:
    time.sleep(0.01)
open('interrupted' + rank, 'w').close()
wait_for_both('interrupted')
print('rank', rank, 'count', count)
",
    );
    // This includes the moment in which rank 0 has the terminal.
    for _ in 0..5 {
        for name in ["ready0", "ready1", "interrupted0", "interrupted1"] {
            let _ = std::fs::remove_file(launch.path().join(name));
        }
        let steps = [
            send("$X --nproc-per-node 2 count.py; echo code-$?\n"),
            expect("name? "),
            send("\u{3}"),
            send("bob\n"),
            expect("count 1"),
            expect("count 1"),
            expect("code-130"),
        ];
        in_shell(&launch, &steps);
    }
}

/// Waits until a job in the background is suspended because its script reads.
fn suspended() -> [serde_json::Value; 3] {
    [
        expect("suspended, continue with `fg`"),
        // The line is printed before xlaunch stops.
        send("until jobs | grep Stopped; do sleep 0.1; done\n"),
        expect("Stopped  "),
    ]
}

/// Brings a suspended job to the foreground, and answers its prompt.
fn answered_in_foreground() -> [serde_json::Value; 4] {
    [send("fg\n"), expect("ask.py"), send("bob\n"), expect("hello bob")]
}

fn ctrl_z_at_a_prompt_suspends_the_job_until_fg() {
    let launch = Launch::new();
    launch.write("ask.py", ASK);
    let steps = [
        send("$X --nproc-per-node 2 ask.py\n"),
        expect("name? "),
        send("\u{1a}"),
        expect("Stopped"),
        send("echo shell-$((1+1))\n"),
        expect("shell-2"),
        send("bg\n"),
    ];
    in_shell(&launch, &[&steps[..], &suspended(), &answered_in_foreground()].concat());
}

/// Editors and debuggers do this when they read Ctrl-Z as a key.
const EDITOR: &str = "
import os, signal
if os.environ['RANK'] == '0':
    name = input('name? ')
    os.kill(0, signal.SIGTSTP)
    print('hello', name, input('again? '))
";

fn worker_that_suspends_itself_on_a_terminal_suspends_the_job() {
    let launch = Launch::new();
    launch.write("editor.py", EDITOR);
    let steps = [
        send("$X --nproc-per-node 2 editor.py\n"),
        expect("name? "),
        send("bob\n"),
        expect("Stopped"),
        send("echo shell-$((1+1))\n"),
        expect("shell-2"),
        send("fg\n"),
        expect("again? "),
        send("yes\n"),
        expect("hello bob yes"),
    ];
    in_shell(&launch, &steps);
}

/// The terminal's session begins with xlaunch, as in `docker run -it`.
fn ctrl_z_has_no_effect_without_a_shell_that_could_continue_the_job() {
    let launch = Launch::new();
    launch.write("ask.py", ASK);
    launch.write("editor.py", EDITOR);
    for (script, steps) in [
        ("ask.py", vec![expect("name? "), send("\u{1a}"), send("bob\n"), expect("hello bob")]),
        (
            "editor.py",
            vec![expect("name? "), send("bob\n"), expect("again? "), send("yes\n"), expect("hello bob yes")],
        ),
    ] {
        launch_on_terminal(&launch, &steps, &["--nproc-per-node", "2", script]);
    }
}

fn report_begins_on_a_new_line_after_an_unfinished_one() {
    let launch = Launch::new();
    for ranks in ["1", "2"] {
        let failing = ["--nproc-per-node", ranks, "--", "sh", "-c", "printf 50%% >&2; exit 3"];
        let run = launch.run(&failing);
        assert_eq!(run.code, 1, "{}", run.stderr);
        assert!(run.stderr.contains("50%\nxlaunch: the job failed\n"), "{}", run.stderr);
    }
    let run = launch.run(&["--", "sh", "-c", "printf 50%%; printf 50%% >&2"]);
    assert_eq!((run.stdout.as_str(), run.stderr.as_str()), ("50%", "50%"), "without a report");
}

fn background_job_is_suspended_when_its_script_reads() {
    let launch = Launch::new();
    launch.write("ask.py", ASK);
    let start = [send("$X --nproc-per-node 2 ask.py &\n")];
    in_shell(&launch, &[&start[..], &suspended(), &answered_in_foreground()].concat());
}

fn suspended_job_says_how_to_continue_it_and_ends_at_the_first_kill() {
    let launch = Launch::new();
    launch.write("ask.py", &format!("{ASK}else:\n    import time\n    time.sleep(60)\n"));
    // The worker's request for the terminal races with the signal.
    for _ in 0..4 {
        let start = [send("$X --nproc-per-node 2 ask.py &\n")];
        let end = [
            send("$X stop\n"),
            expect("is suspended: continue it with `fg` in its shell, or with `kill -CONT"),
            // `wait` alone may return the status of the job that was stopped.
            send("kill %%; while kill -0 $!; do sleep 0.1; done; wait $!; echo code-$?\n"),
            expect("code-143"),
        ];
        in_shell(&launch, &[&start[..], &suspended(), &end].concat());
    }
}

/// Draws a progress bar as tqdm does.
const BAR: &str = "
import sys, time
for i in range(21):
    sys.stderr.write(f'\\r{5 * i}%')
    time.sleep(0.01)
sys.stderr.write('\\r100%')
sys.stderr.write('\\n')
print('done')
";

fn end_of_a_progress_bar_precedes_what_is_printed_after_it() {
    let launch = Launch::new();
    launch.write("bar.py", BAR);
    for _ in 0..5 {
        let shown = launch_on_terminal(&launch, &[expect("done")], &["bar.py"]);
        let shown = shown.trim_end();
        assert!(shown.ends_with("100%\r\ndone") || shown.ends_with("100%\ndone"), "{shown:?}");
    }
}

fn background_job_whose_script_does_not_read_is_not_suspended() {
    let launch = Launch::new();
    let steps = [
        send("$X --nproc-per-node 2 -- echo not-reading & wait; echo code-$?\n"),
        expect("not-reading"),
        expect("not-reading"),
        expect("code-0"),
    ];
    in_shell(&launch, &steps);
}

fn password_is_read_without_echo_in_any_rank() {
    let launch = Launch::new();
    launch.write(
        "password.py",
        "
import getpass, os
if os.environ['RANK'] == '1':
    print('length', len(getpass.getpass('password? ')))
",
    );
    let steps = [expect("password? "), send("hidden\n"), expect("length 6")];
    let shown = launch_on_terminal(&launch, &steps, &["--nproc-per-node", "2", "password.py"]);
    assert!(!shown.contains("hidden"), "{shown}");
}

fn ranks_that_ask_at_the_same_time_are_all_answered() {
    let launch = Launch::new();
    // The terminal itself, as only rank 0 has xlaunch's input.
    launch.write(
        "both.py",
        "
print('name? ', flush=True)
with open('/dev/tty') as terminal:
    print('length', len(terminal.readline().strip()))
",
    );
    let answers = [
        expect("name? "),
        expect("name? "),
        send("ab\n"),
        expect("length 2"),
        send("abc\n"),
        expect("length 3"),
    ];
    // Each time, the ranks ask in another order.
    for _ in 0..2 {
        launch_on_terminal(&launch, &answers, &["--nproc-per-node", "2", "both.py"]);
        in_shell(&launch, &[&[send("$X --nproc-per-node 2 both.py\n")][..], &answers].concat());
    }
}

fn prompt_in_a_nested_launch_is_answered() {
    let launch = Launch::new();
    launch.write("ask.py", ASK);
    let answer = [expect("name? "), send("bob\n"), expect("hello bob")];
    let program = xlaunch_path();
    let program = program.to_str().unwrap();
    let shown = launch_on_terminal(&launch, &answer, &["--", program, "--nproc-per-node", "2", "ask.py"]);
    assert!(!shown.contains("suspended"), "{shown}");
    in_shell(&launch, &[&[send("$X -- $X --nproc-per-node 2 ask.py\n")][..], &answer].concat());
}

fn terminal_is_usable_after_the_launcher_is_killed_at_a_prompt() {
    let launch = Launch::new();
    // The shell of a script has no job control, and does not take the terminal back.
    launch.write(
        "killed.py",
        "
import os, signal, threading, time
open('pid', 'w').write(str(os.getpid()))
threading.Thread(target=lambda: (time.sleep(0.5), os.kill(os.getppid(), 9))).start()
input('name? ')
",
    );
    let steps = [
        // Until the worker is gone, it may read the answer.
        send(
            "export X; sh -c '$X killed.py; while kill -0 $(cat pid); do sleep 0.1; done; echo it-$((1+1)); \
             read line; echo got $line'\n",
        ),
        expect("Killed"),
        expect("it-2"),
        send("bob\n"),
        expect("got bob"),
    ];
    in_shell(&launch, &steps);
}

fn training_prints_plain_lines_on_a_terminal_that_cannot_redraw_them() {
    let config = Job::new();
    let shown = launch_on_terminal(
        &Launch::new(),
        &[expect("step 8/8")],
        &[config.path().join("train.toml").to_str().unwrap()],
    );
    assert!(!shown.contains('\x1b'), "{shown}");
}

fn top_shows_running_launches_without_a_daemon() {
    let launch = Launch::new();
    let run = launch.spawn_shell(&[], 1, "echo ready >&2; exec sleep 1000");
    run.wait_for_stderr("ready");
    // A terminal without a size counts as one of 24 rows and 80 columns. A size may be nonsense.
    for size in ["rows 40 cols 120", "rows 0 cols 0", "rows 65535 cols 65535"] {
        let steps = [
            send(&format!("stty {size}; XLAUNCH_SOCKET=/nonexistent $X top\n")),
            // Spaces are not transmitted, as the screen is empty at first.
            expect("launches"),
            // The highlighted row of the launch.
            expect("sh-"),
            expect("running"),
            send("q"),
            expect("$ "),
        ];
        in_shell(&launch, &steps);
    }
}

fn piped_input_reaches_rank_0_alone() {
    let launch = Launch::new();
    launch.write("lines", "one\ntwo\n");
    let script = "cat | sed \"s/^/$RANK /\"; echo end $RANK";
    let shell = |input: &str| {
        let xlaunch = xlaunch_path().display();
        let line = format!("{input} {xlaunch} --nproc-per-node 2 -- sh -c '{script}'");
        let mut command = launch.command::<&str>(&[]);
        let mut wrapped = Command::new("sh");
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => wrapped.env(name, value),
                None => wrapped.env_remove(name),
            };
        }
        command = wrapped;
        command.current_dir(launch.path()).args(["-c", &line]);
        let run = Process::spawn(&mut command).wait();
        assert_eq!(run.code, 0, "{}", run.stderr);
        let mut lines: Vec<String> = run.stdout.lines().map(Into::into).collect();
        lines.sort();
        lines
    };
    for input in ["cat lines |", "<lines"] {
        assert_eq!(shell(input), ["0 one", "0 two", "end 0", "end 1"], "{input}");
    }
}

fn inherited_descriptors_are_closed_unless_an_argument_names_them() {
    let launch = Launch::with_program("bash");
    let xlaunch = xlaunch_path().display();
    let list = "ls /proc/self/fd | wc -l";
    // One redirection is to a descriptor of `ls` itself.
    for (line, expected) in [
        (format!("exec 7</dev/null; {xlaunch} -- sh -c '{list}'"), "4"),
        (format!("{xlaunch} -- sh -c 'cat $0' <(echo substituted)"), "substituted"),
    ] {
        let run = launch.run(&["-c", &line]);
        assert_eq!((run.code, run.stdout.trim()), (0, expected), "{line}: {}", run.stderr);
    }
}

fn more_workers_start_than_the_soft_limit_of_open_files_allows() {
    let launch = Launch::with_program("bash");
    let xlaunch = xlaunch_path().display();
    let line = format!("ulimit -Sn 64; {xlaunch} --nproc-per-node 24 -- sh -c 'ulimit -Sn'");
    let run = launch.run(&["-c", &line]);
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert_eq!(run.stdout.lines().collect::<Vec<_>>(), ["64"; 24]);
    let line = format!("ulimit -n 64; {xlaunch} --nproc-per-node 24 -- true");
    let run = launch.run(&["-c", &line]);
    assert!(run.code != 0 && run.stderr.contains("ulimit -Hn"), "{}", run.stderr);
}
