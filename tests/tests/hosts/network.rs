//! The hosts themselves: properties that other tests rely on.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::Duration;

use xlaunch_tests::{Host, Hosts, Process, is_alive, requirements, wait_for};

use crate::ECHO;

xlaunch_harness::tests! {
    needs requirements::hosts:
    hosts_reach_each_other_by_name_and_by_address_of_both_families,
    names_can_be_made_to_resolve_late,
    host_that_is_cut_off_is_silent_until_healed,
    one_way_cut_drops_frames_in_one_direction,
    loss_drops_a_share_of_packets,
    reset_connections_end_with_an_error_and_new_ones_succeed,
    killed_host_falls_silent_leaves_no_process_and_boots_again,
    orphans_are_reaped_and_the_host_goes_on,
    signals_and_exit_codes_pass_through_the_namespaces,
    hosts_have_their_own_files_where_asked,
    networks_with_the_same_addresses_do_not_disturb_each_other,
    nothing_is_left_after_a_panic;
}

/// Starts the server on a host.
fn serve(host: &Host) -> Process {
    let server = Process::spawn_inside(host.command(ECHO).args(["serve", "[::]:7000"]));
    wait_for("the server", || server.stdout().contains("ready").then_some(()));
    server
}

/// Starts a client that exchanges a message every 50 ms.
fn connect(host: &Host, address: &str) -> Process {
    Process::spawn_inside(host.command(ECHO).args(["tcp", address]))
}

fn replies(client: &Process) -> usize {
    client.stdout().lines().filter(|line| line.starts_with("reply ")).count()
}

fn wait_for_replies(client: &Process) {
    let before = replies(client);
    wait_for("replies", || (replies(client) > before).then_some(()));
}

/// Sends datagrams. Returns how many came back, and how many the server has seen since it started.
fn send(host: &Host, address: &str, count: usize) -> (usize, usize) {
    let count = count.to_string();
    let output = Process::spawn_inside(host.command(ECHO).args(["udp", address, &count])).wait();
    let numbers = output.stdout.split(|c: char| !c.is_ascii_digit()).filter(|number| !number.is_empty());
    let numbers: Vec<usize> = numbers.map(|number| number.parse().unwrap()).collect();
    let [received, _, seen] = numbers[..] else { panic!("{output:?}") };
    (received, seen)
}

fn hosts_reach_each_other_by_name_and_by_address_of_both_families() {
    let hosts = Hosts::new(3);
    let _server = serve(&hosts[2]);
    for address in ["h2:7000", "h2-v4:7000", "h2-v6:7000", "10.77.0.12:7000", "[fd77::12]:7000"] {
        for from in [0, 1, 2] {
            wait_for_replies(&connect(&hosts[from], address));
        }
    }
    let name = Process::spawn_inside(hosts[1].command("uname").arg("-n")).wait();
    assert_eq!(name.stdout, "h1\n");
    assert_eq!(hosts[2].listeners(), ["[::]:7000".parse().unwrap()]);
    assert!(hosts[1].listeners().is_empty());
}

fn names_can_be_made_to_resolve_late() {
    let hosts = Hosts::new(2);
    let _server = serve(&hosts[1]);
    hosts[0].set_names("");
    let unknown = connect(&hosts[0], "h1:7000").wait();
    assert!(unknown.stdout.starts_with("error "), "{unknown:?}");
    hosts[0].set_names(&hosts.names());
    wait_for_replies(&connect(&hosts[0], "h1:7000"));
}

fn host_that_is_cut_off_is_silent_until_healed() {
    let hosts = Hosts::new(3);
    let _server = serve(&hosts[1]);
    let mut clients = [0, 2].map(|from| connect(&hosts[from], "h1:7000"));
    clients.iter().for_each(wait_for_replies);
    hosts[0].cut();
    std::thread::sleep(Duration::from_millis(200));
    let before = clients.each_ref().map(replies);
    std::thread::sleep(Duration::from_millis(1000));
    assert_eq!(replies(&clients[0]), before[0]);
    assert!(replies(&clients[1]) > before[1], "another host is cut off as well");
    assert!(clients[0].is_running(), "the cut was not silent: {}", clients[0].stdout());
    hosts[0].heal();
    wait_for_replies(&clients[0]);
}

fn one_way_cut_drops_frames_in_one_direction() {
    let hosts = Hosts::new(2);
    let _server = serve(&hosts[1]);
    // This makes the server's host learn the address of the other interface.
    assert_eq!(send(&hosts[0], "10.77.0.11:7000", 1), (1, 1));
    hosts.cut_one_way(1, 0);
    assert_eq!(send(&hosts[0], "10.77.0.11:7000", 5).0, 0);
    hosts[0].heal();
    assert_eq!(send(&hosts[0], "10.77.0.11:7000", 1), (1, 7));
}

fn loss_drops_a_share_of_packets() {
    let hosts = Hosts::new(2);
    let _server = serve(&hosts[1]);
    // Outside this range one run in millions would fail: 10 % of 2,000 datagrams are lost, with sigma 13.
    let arrived = 1_730..1_870;
    // The addresses of the interfaces must be known: datagrams that wait for a lost reply about them are dropped.
    assert_eq!(send(&hosts[0], "10.77.0.11:7000", 1), (1, 1));
    hosts[1].loss(10);
    let (received, seen) = send(&hosts[0], "10.77.0.11:7000", 2_000);
    assert!(arrived.contains(&seen), "{seen} arrived");
    assert!(received < seen, "{received} of {seen} replies: none was lost on the way back");
    hosts[1].heal();
    // The last replies may have been lost, so the number of datagrams seen by the server is known only now.
    let (_, seen) = send(&hosts[0], "10.77.0.11:7000", 1);
    assert_eq!(send(&hosts[0], "10.77.0.11:7000", 100), (100, seen + 100));
}

fn reset_connections_end_with_an_error_and_new_ones_succeed() {
    let hosts = Hosts::new(3);
    let _server = serve(&hosts[1]);
    let _other_server = serve(&hosts[2]);
    let clients = ["10.77.0.11:7000", "[fd77::11]:7000"].map(|address| connect(&hosts[0], address));
    let unrelated = connect(&hosts[0], "h2:7000");
    clients.iter().chain([&unrelated]).for_each(wait_for_replies);
    hosts[1].reset_connections(Duration::from_millis(500));
    for client in clients {
        let output = client.wait();
        assert!(output.stdout.ends_with("error ConnectionReset\n"), "{output:?}");
    }
    wait_for_replies(&unrelated);
    wait_for_replies(&connect(&hosts[0], "10.77.0.11:7000"));
}

fn killed_host_falls_silent_leaves_no_process_and_boots_again() {
    let hosts = Hosts::new(2);
    let server = serve(&hosts[1]);
    let orphan = Process::spawn_inside(hosts[1].command("sh").args(["-c", "sleep 1000 & exec sleep 1001"]));
    wait_for("two processes", || (hosts[1].processes().len() == 3).then_some(()));
    let mut pids: Vec<u32> = hosts[1].processes().iter().map(|process| process.pid).collect();
    pids.push(hosts[1].init());
    assert!(pids.contains(&server.pid()) && pids.iter().all(|pid| is_alive(*pid)));

    let mut client = connect(&hosts[0], "10.77.0.11:7000");
    wait_for_replies(&client);
    hosts[1].kill();
    assert!(!pids.iter().any(|pid| is_alive(*pid)), "left: {pids:?}");
    assert!(hosts[1].processes().is_empty() && hosts[1].listeners().is_empty());
    assert_eq!([server.wait().code, orphan.wait().code], [137, 137]);
    std::thread::sleep(Duration::from_millis(500));
    assert!(client.is_running(), "the power cut was not silent: {}", client.stdout());

    hosts[1].boot();
    assert!(hosts[1].processes().is_empty());
    let _server = serve(&hosts[1]);
    wait_for_replies(&connect(&hosts[0], "10.77.0.11:7000"));
}

fn orphans_are_reaped_and_the_host_goes_on() {
    let hosts = Hosts::new(1);
    let dir = tempfile::tempdir().unwrap();
    let go = dir.path().join("go");
    let orphan =
        format!("(while [ ! -e {} ]; do sleep 0.1; done; exit 3) > /dev/null 2>&1 & echo $!", go.display());
    let output = Process::spawn_inside(hosts[0].command("sh").args(["-c", &orphan])).wait();
    let entry = format!("/proc/{}/root/proc/{}", hosts[0].init(), output.stdout.trim());
    assert!(Path::new(&entry).exists(), "{entry}");
    std::fs::write(&go, "").unwrap();
    wait_for("the orphan to be reaped", || (!Path::new(&entry).exists()).then_some(()));
    std::thread::sleep(Duration::from_millis(100));
    assert!(hosts[0].command("true").status().unwrap().success());
}

fn signals_and_exit_codes_pass_through_the_namespaces() {
    let hosts = Hosts::new(1);
    let script = "trap 'echo terminated; exit 7' TERM; echo waiting; while :; do sleep 0.05; done";
    let process = Process::spawn_inside(hosts[0].command("sh").args(["-c", script]));
    wait_for("the script", || process.stdout().contains("waiting").then_some(()));
    process.signal(rustix::process::Signal::TERM);
    let output = process.wait();
    assert_eq!((output.code, &*output.stdout), (7, "waiting\nterminated\n"));
}

fn hosts_have_their_own_files_where_asked() {
    let hosts = Hosts::new(2);
    let dir = hosts.path().join("runs");
    std::fs::create_dir(&dir).unwrap();
    let own = hosts[1].make_private(&dir);
    for (index, file) in [(0, dir.join("a")), (1, own.join("a"))] {
        let touch = hosts[index].command_in(&dir, "touch").arg("a").status().unwrap();
        assert!(touch.success() && file.exists(), "{}", file.display());
        std::fs::remove_file(file).unwrap();
    }
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0);
    // Files that are separate for user sessions on every host.
    for path in ["/run/user/0/a", "/run/tmp/a", "/dev/shm/xlaunch-test"] {
        assert!(hosts[0].command("touch").arg(path).status().unwrap().success());
        assert!(!hosts[1].command("test").args(["-e", path]).status().unwrap().success(), "{path}");
        assert!(!Path::new(path).exists(), "{path}");
    }
}

fn networks_with_the_same_addresses_do_not_disturb_each_other() {
    let (one, other) = (Hosts::new(2), Hosts::new(2));
    let _servers = [&one, &other].map(|hosts| serve(&hosts[1]));
    let clients = [&one, &other].map(|hosts| connect(&hosts[0], "10.77.0.11:7000"));
    clients.iter().for_each(wait_for_replies);
    one[1].kill();
    wait_for_replies(&clients[1]);
    drop(one);
    wait_for_replies(&clients[1]);
}

fn nothing_is_left_after_a_panic() {
    let mut left = None;
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let hosts = Hosts::new(2);
        let server = serve(&hosts[1]);
        // This includes processes that their parent knows nothing about.
        let daemon = "setsid sleep 1000 > /dev/null 2>&1 & exit 0";
        assert!(hosts[0].command("sh").args(["-c", daemon]).status().unwrap().success());
        let sleeping =
            wait_for("the daemon", || hosts[0].processes().iter().find(|p| p.name == "sleep").cloned());
        let pids = [server.pid(), sleeping.pid, hosts[0].init(), hosts[1].init()];
        left = Some((pids, hosts.path().to_owned()));
        std::panic::resume_unwind(Box::new("a failed test"));
    }));
    assert!(panicked.is_err());
    let (pids, dir) = left.unwrap();
    assert!(!pids.iter().any(|pid| is_alive(*pid)), "left: {pids:?}");
    assert!(!dir.exists());
}
