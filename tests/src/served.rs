//! `xlaunch serve` as a process, and requests to it.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;

use serde_json::Value;

use crate::{HANG_TIMEOUT, Process, wait_for};

/// A running server.
#[derive(Debug)]
pub struct Served {
    /// The process.
    pub process: Process,
    /// Address and port.
    pub address: String,
}

/// An answer.
#[derive(Debug)]
pub struct Answer {
    /// Status of HTTP.
    pub status: u16,
    /// All that follows the headers.
    pub body: String,
}

impl Answer {
    /// Returns the body as JSON.
    ///
    /// # Panics
    /// If it is not JSON.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Returns the error in the body.
    pub fn error(&self) -> Value {
        self.json()["error"].take()
    }
}

impl Served {
    /// Starts a command that serves on a port of its own, and waits until it is ready.
    ///
    /// # Panics
    /// If it exits.
    pub fn spawn(command: &mut Command) -> Self {
        let mut process = Process::spawn(command);
        let address = wait_for("the address of the server", || {
            assert!(process.is_running(), "{}", process.stderr());
            let line = process.stdout().lines().next()?.to_owned();
            Some(line.strip_prefix("http://")?.strip_suffix("/v1")?.to_owned())
        });
        Self { process, address }
    }

    /// Opens a connection.
    ///
    /// # Panics
    /// Here and below: if the server does not answer.
    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).expect("connect to the server");
        stream.set_read_timeout(Some(HANG_TIMEOUT)).expect("set a timeout");
        stream
    }

    /// Sends a request, and returns the connection.
    pub fn send(&self, method: &str, path: &str, headers: &str, body: &str) -> TcpStream {
        let mut stream = self.connect();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nConnection: close\r\nContent-Length: {}\r\n{headers}\r\n",
            body.len()
        );
        stream.write_all((head + body).as_bytes()).expect("send a request");
        stream
    }

    /// Sends a request with these headers, each with its line end.
    pub fn request(&self, method: &str, path: &str, headers: &str, body: &str) -> Answer {
        answer(self.send(method, path, headers, body))
    }

    pub fn get(&self, path: &str) -> Answer {
        self.request("GET", path, "Host: localhost\r\n", "")
    }

    pub fn post(&self, path: &str, body: &Value) -> Answer {
        let headers = "Host: localhost\r\nContent-Type: application/json\r\n";
        self.request("POST", path, headers, &body.to_string())
    }

    /// Returns the answer to a request that must succeed.
    pub fn post_ok(&self, path: &str, body: &Value) -> Value {
        let answer = self.post(path, body);
        assert_eq!(answer.status, 200, "{body}: {answer:?}");
        answer.json()
    }
}

/// Reads an answer to its end.
///
/// # Panics
/// If it is not HTTP.
pub fn answer(mut stream: TcpStream) -> Answer {
    let mut text = Vec::new();
    // A server that refuses a body closes the connection while the client still sends it.
    let _ = stream.read_to_end(&mut text);
    let text = String::from_utf8(text).expect("an answer in UTF-8");
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no headers: {text:?}"));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    Answer { status: status.expect("a status"), body: body.into() }
}
