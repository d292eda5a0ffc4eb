//! An ssh client for tests that runs the command on this machine: `fake_ssh HOST COMMAND`.
//!
//! - Like ssh, it forwards standard input until it ends, and when it is killed, the command continues.
//! - The command gets its own home directory and `HOSTNAME`, and none of the other variables.
//! - Hosts share this machine and its addresses, so a launch on several hosts needs `--rdzv-endpoint 127.0.0.1:PORT`.
//! - The name of a host selects its failure: `unknown` has no known key, `denied` refuses the user, `old` has another
//!   version, `bare` has no xlaunch, `apart` has no such directory, `deaf` gets no standard input, `mute` never
//!   answers. `chatty` has a login script that prints a line. `booting` refuses connections until the file `up` exists.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "an ssh client prints")]

use std::error::Error;
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

fn main() -> Result<(), Box<dyn Error>> {
    let [_, host, command] = std::env::args().collect::<Vec<_>>().try_into().map_err(|_| "HOST COMMAND")?;
    let end = |text: &str, code| -> ! {
        eprintln!("{text}");
        std::process::exit(code)
    };
    match host.as_str() {
        "unknown" => end("No ED25519 host key is known for unknown.\r\nHost key verification failed.\r", 255),
        "denied" => end("ada@denied: Permission denied (publickey).\r", 255),
        "old" => {
            println!("xlaunch-remote 0.0.1");
            std::io::stdin().read_to_end(&mut Vec::new())?;
            return Ok(());
        }
        "bare" => end("sh: 1: exec: xlaunch: not found", 127),
        "mute" => std::thread::sleep(Duration::from_secs(1000)),
        "booting" if !std::path::Path::new("up").exists() => {
            end("ssh: connect to host booting port 22: Connection refused\r", 255)
        }
        "chatty" => println!("Welcome to chatty!"),
        _ => {}
    }
    let mut shell = Command::new("sh");
    shell.args(["-c", &command]).stdin(Stdio::piped()).env_clear().env("HOME", "/").env("HOSTNAME", &host);
    shell.env("XDG_RUNTIME_DIR", std::env::var_os("XDG_RUNTIME_DIR").unwrap_or_default());
    let mut shell = shell.spawn()?;
    let mut input = shell.stdin.take().ok_or("no pipe")?;
    std::thread::spawn(move || -> std::io::Result<()> {
        if host == "deaf" {
            return Ok(());
        }
        let mut description: Value = read_description()?;
        if host == "apart" {
            description["directory"] = serde_json::json!({ "Unix": b"/no/such/directory" });
        }
        let json = serde_json::to_vec(&description)?;
        let length = u32::try_from(json.len()).map_err(std::io::Error::other)?;
        input.write_all(&length.to_be_bytes())?;
        input.write_all(&json)?;
        let mut byte = [0];
        while std::io::stdin().read(&mut byte)? == 1 {
            input.write_all(&byte)?;
        }
        Ok(())
    });
    std::process::exit(shell.wait()?.code().unwrap_or(255))
}

fn read_description() -> std::io::Result<Value> {
    let mut stdin = std::io::stdin();
    let mut length = [0; 4];
    stdin.read_exact(&mut length)?;
    let mut json = Vec::new();
    stdin.take(u32::from_be_bytes(length).into()).read_to_end(&mut json)?;
    Ok(serde_json::from_slice(&json)?)
}
