//! Tests of connecting among foreign connections, over both kinds of sockets.

use std::io::{Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::super::greeting::{ANSWER_BYTES, CHALLENGE_BYTES, PROOF_BYTES};
use super::*;

const LOCALHOST: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

/// Returns the host and port of a TCP address.
fn host(address: &str) -> &str {
    address.strip_prefix("tcp:").unwrap()
}

fn tcp_pair() -> (RingListener, RingListener) {
    let bind = |rank| RingListener::bind_tcp(LOCALHOST, rank).unwrap();
    (bind(0), bind(1))
}

/// Connects a ring of these two ranks and finalizes it.
fn connect_pair(listeners: (RingListener, RingListener)) {
    let addresses = [&listeners.0, &listeners.1].map(|listener| listener.address().to_owned());
    let finalized = on_listeners(vec![listeners.0, listeners.1], &addresses, |ring| ring.finalize());
    assert!(finalized.into_iter().all(|result| result.is_ok()));
}

/// Returns the error of rank 0 of 2 if the next rank is at this address.
fn error_of_rank_0(listener: RingListener, next_address: &str, timeout: Duration) -> String {
    let place = RingPlace { rank: 0, world: 2, next_address, key: &KEY };
    Ring::connect(listener, &place, timeout).unwrap_err().to_string()
}

#[test]
fn ring_works_over_both_families_of_addresses() {
    for ip in [LOCALHOST, IpAddr::V6(std::net::Ipv6Addr::LOCALHOST)] {
        let listeners: Vec<_> = (0..3).map(|rank| RingListener::bind_tcp(ip, rank).unwrap()).collect();
        let addresses: Vec<_> = listeners.iter().map(|listener| listener.address().to_owned()).collect();
        assert!(addresses[0].starts_with(if ip.is_ipv6() { "tcp:[::1]:" } else { "tcp:127.0.0.1:" }));
        check_all_reduce_over(listeners, &addresses, &[0, 1, 1001]);
    }
}

#[test]
fn two_nodes_of_two_ranks_give_the_bits_of_one_node_of_four() {
    // `expected` is the result of four ranks on unix sockets; see `all_reduce_gives_the_same_bits_on_all_ranks`.
    let dir = tempfile::tempdir().unwrap();
    let bind = |rank| match rank % 2 {
        0 => RingListener::bind_tcp(LOCALHOST, rank).unwrap(),
        _ => RingListener::bind(dir.path(), rank).unwrap(),
    };
    let listeners: Vec<_> = (0..4).map(bind).collect();
    let addresses: Vec<_> = listeners.iter().map(|listener| listener.address().to_owned()).collect();
    check_all_reduce_over(listeners, &addresses, &[0, 1, 3, 64, 100_003]);
}

#[test]
fn rank_with_another_key_is_refused_by_both_neighbours() {
    let (ours, theirs) = tcp_pair();
    let (our_address, their_address) = (ours.address().to_owned(), theirs.address().to_owned());
    let timeout = Duration::from_millis(500);
    let (error, other) = std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let place = RingPlace { rank: 1, world: 2, next_address: &our_address, key: &[8; 32] };
            Ring::connect(theirs, &place, timeout).unwrap_err().to_string()
        });
        (error_of_rank_0(ours, &their_address, timeout), other.join().unwrap())
    });
    assert!(error.contains("rank 1") && error.contains("another key"), "{error}");
    assert!(other.contains("rank 0") && other.contains("another key"), "{other}");
}

#[test]
fn listener_that_cannot_prove_itself_is_refused() {
    let foreign = TcpListener::bind((LOCALHOST, 0)).unwrap();
    let address = format!("tcp:{}", foreign.local_addr().unwrap());
    // Sends a challenge, and an invalid proof, as it cannot know the key. Later connections get no answer.
    let impostor = std::thread::spawn(move || {
        let (mut socket, _) = foreign.accept().unwrap();
        socket.write_all(&super::super::greeting::challenge(&[3; 32])).unwrap();
        socket.read_exact(&mut [0; ANSWER_BYTES]).unwrap();
        socket.write_all(&[0; PROOF_BYTES]).unwrap();
        foreign
    });
    let (ours, _) = tcp_pair();
    let error = error_of_rank_0(ours, &address, Duration::from_millis(500));
    assert!(error.contains("rank 1") && error.contains("does not have the key"), "{error}");
    drop(impostor.join().unwrap());
}

#[test]
fn replayed_greeting_is_refused() {
    let (ours, theirs) = tcp_pair();
    // A recorder between rank 0 and rank 1: it keeps rank 0's messages, and sends them again on a separate connection.
    let recorder = TcpListener::bind((LOCALHOST, 0)).unwrap();
    let recorder_address = format!("tcp:{}", recorder.local_addr().unwrap());
    let (our_address, their_address) = (ours.address().to_owned(), theirs.address().to_owned());
    let replayed = std::thread::scope(|scope| {
        let recording = scope.spawn(|| {
            let (mut caller, _) = recorder.accept().unwrap();
            let mut listener = TcpStream::connect(host(&their_address)).unwrap();
            let (mut challenge, mut answer) = ([0; CHALLENGE_BYTES], [0; ANSWER_BYTES]);
            listener.read_exact(&mut challenge).unwrap();
            caller.write_all(&challenge).unwrap();
            caller.read_exact(&mut answer).unwrap();
            // The replay comes first, on a connection with another challenge.
            let mut replay = TcpStream::connect(host(&their_address)).unwrap();
            replay.set_read_timeout(Some(TIMEOUT)).unwrap();
            let mut other = [0; CHALLENGE_BYTES];
            replay.read_exact(&mut other).unwrap();
            assert_ne!(challenge, other);
            replay.write_all(&answer).unwrap();
            let refused = replay.read(&mut [0; PROOF_BYTES]);
            // The original still connects. The ring lives as long as the relay, which is long enough.
            listener.write_all(&answer).unwrap();
            let mut proof = [0; PROOF_BYTES];
            listener.read_exact(&mut proof).unwrap();
            caller.write_all(&proof).unwrap();
            (refused, caller, listener)
        });
        let rank_0 = scope.spawn(|| {
            let place = RingPlace { rank: 0, world: 2, next_address: &recorder_address, key: &KEY };
            Ring::connect(ours, &place, TIMEOUT).map(drop)
        });
        let place = RingPlace { rank: 1, world: 2, next_address: &our_address, key: &KEY };
        let rank_1 = Ring::connect(theirs, &place, TIMEOUT).map(drop);
        let (refused, ..) = recording.join().unwrap();
        assert!(rank_0.join().unwrap().is_ok() && rank_1.is_ok());
        refused
    });
    assert!(matches!(replayed, Ok(0) | Err(_)), "{replayed:?}");
    assert!(replayed.map_err(|error| error.kind()) != Err(std::io::ErrorKind::WouldBlock), "not answered");
}

#[test]
fn silent_and_talking_strangers_do_not_keep_a_neighbour_out() {
    let pair = tcp_pair();
    let strangers: Vec<TcpStream> = (0..8)
        .map(|index| {
            let mut stranger = TcpStream::connect(host(pair.0.address())).unwrap();
            stranger.write_all(&[0xff; ANSWER_BYTES][..index * 20 % ANSWER_BYTES]).unwrap();
            stranger
        })
        .collect();
    let start = Instant::now();
    connect_pair(pair);
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    drop(strangers);
}

#[test]
fn flood_of_strangers_does_not_keep_a_neighbour_out() {
    let pair = tcp_pair();
    let target = host(pair.0.address()).to_owned();
    let (stop, count) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // More connections at once than the listener and its backlog can hold.
            let mut open = std::collections::VecDeque::new();
            while !stop.load(Ordering::Relaxed) {
                let timeout = Duration::from_millis(100);
                let Ok(stranger) = TcpStream::connect_timeout(&target.parse().unwrap(), timeout) else {
                    continue;
                };
                count.fetch_add(1, Ordering::Relaxed);
                open.push_back(stranger);
                if open.len() > 400 {
                    open.pop_front();
                }
            }
        });
        while count.load(Ordering::Relaxed) < 100 {
            std::thread::sleep(Duration::from_millis(1));
        }
        connect_pair(pair);
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn missing_neighbours_are_named_at_the_timeout() {
    // Nothing listens at the address of rank 1.
    let (ours, theirs) = tcp_pair();
    let address = theirs.address().to_owned();
    drop(theirs);
    let start = Instant::now();
    let error = error_of_rank_0(ours, &address, Duration::from_millis(300));
    assert!(error.contains("rank 1") && error.contains(&address), "{error}");
    assert!(start.elapsed() >= Duration::from_millis(300), "it tries until the deadline");

    // The last rank listens, and rank 0 reaches rank 1, but the last rank never connects.
    let dir = tempfile::tempdir().unwrap();
    let (mut listeners, addresses) = listeners(3, false, dir.path());
    let (second, first) = (listeners.remove(1), listeners.remove(0));
    let (error, _) = std::thread::scope(|scope| {
        let connect = |listener, rank| {
            let place = place(rank, &addresses);
            Ring::connect(listener, &place, Duration::from_millis(300)).unwrap_err().to_string()
        };
        let second = scope.spawn(move || connect(second, 1));
        (connect(first, 0), second.join().unwrap())
    });
    assert!(error.contains("rank 2") && error.contains("did not connect within 0.3 s"), "{error}");
}

#[test]
fn dropped_packets_do_not_outlast_the_deadline() {
    // A network for documentation (RFC 5737), in which nothing answers. If it is unreachable, the error occurs at once
    // and is retried, with the same result.
    let start = Instant::now();
    let (ours, _) = tcp_pair();
    let error = error_of_rank_0(ours, "tcp:192.0.2.1:9", Duration::from_millis(500));
    assert!(error.contains("rank 1") && error.contains("192.0.2.1:9"), "{error}");
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

#[test]
fn invalid_address_fails_at_once() {
    let (ours, _) = tcp_pair();
    let start = Instant::now();
    let error = error_of_rank_0(ours, "nowhere", TIMEOUT);
    assert!(error.contains("`nowhere` is not a ring address"), "{error}");
    assert!(start.elapsed() < Duration::from_secs(10));
}

#[test]
fn neighbour_that_listens_late_is_found() {
    // Rank 1 listens, but answers no caller for some time.
    let (ours, theirs) = tcp_pair();
    let addresses = [&ours, &theirs].map(|listener| listener.address().to_owned());
    std::thread::scope(|scope| {
        let early = scope.spawn(|| Ring::connect(ours, &place(0, &addresses), TIMEOUT).map(Box::new));
        std::thread::sleep(Duration::from_millis(300));
        let late = Box::new(Ring::connect(theirs, &place(1, &addresses), TIMEOUT).unwrap());
        let early = scope.spawn(|| early.join().unwrap().unwrap().finalize());
        late.finalize().unwrap();
        early.join().unwrap().unwrap();
    });
}

#[test]
fn key_is_not_printed() {
    let address = ["unix:/r".to_owned(), "unix:/r1".to_owned()];
    assert!(!format!("{:?}", place(0, &address)).contains("7, 7"));
}
