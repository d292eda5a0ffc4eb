//! Sends and answers messages over TCP and UDP, to test connections between hosts.
//!
//! ```text
//! echo serve ADDRESS        # prints `ready`; answers on both
//! echo tcp ADDRESS          # connects, sends every 50 ms, prints `reply N` for each answer, or `error KIND`
//! echo udp ADDRESS COUNT    # sends datagrams, prints `received N of COUNT, seen M` (M: how many the server has seen)
//! ```

#![expect(clippy::print_stdout, reason = "results of a program for tests")]
#![expect(clippy::unwrap_used, reason = "a program for tests")]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Interval between two messages over TCP.
const INTERVAL: Duration = Duration::from_millis(50);
/// Time to wait for the last answer over UDP.
const LAST_REPLY_TIMEOUT: Duration = Duration::from_secs(2);
/// Size of receive buffers: that of thousands of datagrams, so that a busy machine drops none.
const RECEIVE_BUFFER: usize = 8 << 20;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["serve", address] => serve(address),
        ["tcp", address] => {
            if let Err(error) = send_over_tcp(address) {
                println!("error {:?}", error.kind());
            }
        }
        ["udp", address, count] => send_over_udp(address, count.parse().unwrap()),
        _ => panic!("usage: echo serve|tcp|udp ADDRESS [COUNT]"),
    }
}

fn bind(address: &str) -> UdpSocket {
    let socket = UdpSocket::bind(address).unwrap();
    rustix::net::sockopt::set_socket_recv_buffer_size_force(&socket, RECEIVE_BUFFER).unwrap();
    socket
}

fn serve(address: &str) {
    let listener = TcpListener::bind(address).unwrap();
    let socket = bind(address);
    println!("ready");
    std::thread::spawn(move || {
        let mut buffer = [0; 8];
        for seen in 1_u64.. {
            let (_, from) = socket.recv_from(&mut buffer).unwrap();
            // The sender may be unreachable.
            let _ = socket.send_to(&seen.to_le_bytes(), from);
        }
    });
    for stream in listener.incoming().flatten() {
        std::thread::spawn(move || std::io::copy(&mut &stream, &mut &stream));
    }
}

fn send_over_tcp(address: &str) -> std::io::Result<()> {
    let mut stream = TcpStream::connect(address)?;
    for number in 0_u64.. {
        stream.write_all(&number.to_le_bytes())?;
        let mut reply = [0; 8];
        stream.read_exact(&mut reply)?;
        println!("reply {}", u64::from_le_bytes(reply));
        std::thread::sleep(INTERVAL);
    }
    Ok(())
}

fn send_over_udp(address: &str, count: usize) {
    let socket = bind("[::]:0");
    let server: std::net::SocketAddr = address.parse().unwrap();
    let server = match server.ip() {
        std::net::IpAddr::V4(ip) => std::net::SocketAddr::new(ip.to_ipv6_mapped().into(), server.port()),
        std::net::IpAddr::V6(_) => server,
    };
    let receiver = socket.try_clone().unwrap();
    receiver.set_read_timeout(Some(LAST_REPLY_TIMEOUT)).unwrap();
    let all_sent = Arc::new(AtomicBool::new(false));
    let last = all_sent.clone();
    let replies = std::thread::spawn(move || {
        let (mut received, mut seen, mut buffer) = (0, 0, [0; 8]);
        while received < count {
            let is_last = last.load(Ordering::Acquire);
            if receiver.recv(&mut buffer).is_ok() {
                received += 1;
                seen = u64::from_le_bytes(buffer).max(seen);
            } else if is_last {
                break;
            }
        }
        (received, seen)
    });
    for _ in 0..count {
        // An unreachable host counts as a lost datagram.
        let _ = socket.send_to(&[0; 8], server);
        std::thread::sleep(Duration::from_micros(200));
    }
    all_sent.store(true, Ordering::Release);
    let (received, seen) = replies.join().unwrap();
    println!("received {received} of {count}, seen {seen}");
}
