//! ssh between hosts.

use xlaunch_tests::{Hosts, Process, Sshd, requirements};

xlaunch_harness::tests! {
    needs requirements::sshd:
    ssh_runs_commands_on_other_hosts;
}

fn ssh_runs_commands_on_other_hosts() {
    let hosts = Hosts::new(3);
    let sshd = Sshd::start(&hosts);
    for name in ["h1", "h2", "h2-v6", "10.77.0.12"] {
        let mut ssh = hosts[0].command("ssh");
        ssh.arg("-F").arg(sshd.config()).args([name, "uname -n; echo $XDG_RUNTIME_DIR $TMPDIR; exit 3"]);
        let output = Process::spawn_inside(&mut ssh).wait();
        let host = if name == "h1" { "h1" } else { "h2" };
        assert_eq!(output.stdout, format!("{host}\n/run/user/0 /run/tmp\n"), "{}", output.stderr);
        assert_eq!(output.code, 3);
    }
}
