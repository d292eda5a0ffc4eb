//! Searches on networks that are slow, cut or half broken, under a simulated clock.

use std::collections::BTreeMap;

use super::*;

/// Reaction of an address to a connection.
#[derive(Clone, Copy)]
enum Behaviour {
    Refuses,
    /// Drops packets: TCP gives up after 3 s.
    Filtered,
    /// Accepts, but never answers: given up after 10 s.
    Silent,
    /// Belongs to another user, or has another token.
    WrongToken,
    OtherJob,
    /// The coordinator: connected after four round trips.
    Coordinator,
}

/// A network, and the effects of a search on it.
struct World {
    search: Search,
    start: Instant,
    now: Instant,
    urgency: Urgency,
    round_trip: Duration,
    /// Time that a lookup takes, and the addresses it finds; it fails if there are none.
    lookup: (Duration, Vec<&'static str>),
    behaviours: BTreeMap<SocketAddr, Behaviour>,
    pending: Vec<(Instant, Event)>,
}

#[derive(Clone, Copy)]
enum Event {
    Resolved,
    Reached(AttemptId),
    Ended(AttemptId, Behaviour),
}

fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

impl World {
    fn new(ports: &[u16], addresses: &[&'static str], behaviours: &[(&str, Behaviour)]) -> Self {
        let start = Instant::now();
        let endpoint = Endpoint { host: "h0".into(), ports: ports.to_vec() };
        Self {
            search: Search::new(endpoint, start),
            start,
            now: start,
            urgency: Urgency::Joining,
            round_trip: ms(1),
            lookup: (ms(1), addresses.to_vec()),
            behaviours: behaviours.iter().map(|(address, it)| (address.parse().unwrap(), *it)).collect(),
            pending: Vec::new(),
        }
    }

    fn elapsed(&self) -> Duration {
        self.now - self.start
    }

    fn schedule(&mut self, after: Duration, event: Event) {
        self.pending.push((self.now + after, event));
    }

    fn act(&mut self, action: Action) {
        let (round_trip, id, address) = match action {
            Action::Resolve => return self.schedule(self.lookup.0, Event::Resolved),
            Action::Try(id, address) => (self.round_trip, id, address),
        };
        let behaviour = self.behaviours.get(&address).copied().unwrap_or(Behaviour::Refuses);
        if !matches!(behaviour, Behaviour::Refuses | Behaviour::Filtered) {
            self.schedule(round_trip, Event::Reached(id));
        }
        let end = match behaviour {
            Behaviour::Refuses => round_trip,
            Behaviour::Filtered => ms(3000),
            Behaviour::Silent => ms(10_000),
            Behaviour::WrongToken | Behaviour::OtherJob => 2 * round_trip,
            Behaviour::Coordinator => 4 * round_trip,
        };
        self.schedule(end, Event::Ended(id, behaviour));
    }

    /// Runs until there is a connection, or until the limit.
    fn dial(&mut self, limit: Duration) -> Option<Duration> {
        let (begin, end) = (self.now, self.now + limit);
        while self.now <= end {
            for action in self.search.poll(self.urgency, self.now) {
                self.act(action);
            }
            let events = self.pending.iter().map(|(at, _)| *at);
            let next = events.chain(self.search.deadline(self.urgency)).min().filter(|next| *next <= end);
            self.now = next.map_or(end, |next| next.max(self.now));
            next?;
            let (due, rest) =
                std::mem::take(&mut self.pending).into_iter().partition(|(at, _)| *at <= self.now);
            self.pending = rest;
            for (_, event) in due {
                if self.happens(event) {
                    self.pending.clear();
                    return Some(self.now - begin);
                }
            }
        }
        None
    }

    fn happens(&mut self, event: Event) -> bool {
        let now = self.now;
        match event {
            Event::Resolved => {
                let found = self.lookup.1.iter().map(|text| format!("{text}:0").parse().unwrap());
                let found: Vec<SocketAddr> = found.collect();
                self.search.resolved(Ok(found), now);
            }
            Event::Reached(id) => self.search.reached(id, now),
            Event::Ended(id, behaviour) => {
                let reason = match behaviour {
                    Behaviour::Coordinator => {
                        self.search.connected(id, now);
                        return true;
                    }
                    Behaviour::Refuses => Reason::Refused,
                    Behaviour::Filtered => Reason::NoAnswer,
                    Behaviour::Silent => Reason::Stalled,
                    Behaviour::WrongToken => Reason::WrongToken,
                    Behaviour::OtherJob => Reason::OtherJob,
                };
                self.search.failed(id, reason, now);
            }
        }
        false
    }

    /// Loses the connection while workers are alive.
    fn lose(&mut self) {
        self.pending.clear();
        self.search.restart(self.now);
        self.urgency = Urgency::Working;
    }
}

/// Time within which a lost connection has to be replaced, with the default lease of 12 s.
const LEASE: Duration = Duration::from_millis(9500);

#[test]
fn lost_connection_is_restored_on_a_slow_network_with_slow_or_no_name_resolution() {
    for (lookup, addresses) in [(ms(1200), &["10.0.0.1"][..]), (ms(30_000), &[]), (ms(10), &[])] {
        let mut world = World::new(&[29400], &["10.0.0.1"], &[("10.0.0.1:29400", Behaviour::Coordinator)]);
        world.round_trip = ms(600);
        assert!(world.dial(LEASE).is_some());
        world.lookup = (lookup, addresses.to_vec());
        world.lose();
        let time = world.dial(LEASE).unwrap();
        assert!(time <= ms(100) + 4 * ms(600), "{time:?} with lookups of {lookup:?}");
    }
}

#[test]
fn port_that_worked_is_tried_before_those_of_other_processes() {
    let ports: Vec<u16> = (1..=16).collect();
    let behaviours = [("10.0.0.1:1", Behaviour::Silent), ("10.0.0.1:16", Behaviour::Coordinator)];
    let mut world = World::new(&ports, &["10.0.0.1"], &behaviours);
    world.round_trip = ms(300);
    // The silent process on the first port delays the others by 2 s, not by 10 s.
    let first = world.dial(LEASE).unwrap();
    assert!(first < ms(8000), "{first:?}");
    world.lose();
    assert!(world.dial(LEASE).unwrap() <= ms(100) + 4 * ms(300));
}

#[test]
fn restored_network_is_used_within_a_second() {
    let mut world = World::new(&[1], &["10.0.0.1"], &[("10.0.0.1:1", Behaviour::Coordinator)]);
    assert!(world.dial(LEASE).is_some());
    world.lose();
    let address = "10.0.0.1:1".parse().unwrap();
    world.behaviours.insert(address, Behaviour::Filtered);
    assert_eq!(world.dial(ms(7000)), None);
    world.behaviours.insert(address, Behaviour::Coordinator);
    let time = world.dial(LEASE).unwrap();
    assert!(time <= ms(1100), "{time:?}");
}

#[test]
fn address_family_that_is_filtered_does_not_delay_the_other() {
    let behaviours = [("[fd77::1]:1", Behaviour::Filtered), ("10.0.0.1:1", Behaviour::Coordinator)];
    let mut world = World::new(&[1], &["[fd77::1]", "[fd77::2]", "10.0.0.1"], &behaviours);
    let time = world.dial(LEASE).unwrap();
    assert!(time < ms(300), "{time:?}");
}

#[test]
fn name_that_resolves_late_or_wrongly_at_first_is_asked_again() {
    for wrong in [&[][..], &["10.0.0.9"]] {
        let mut world = World::new(&[1], wrong, &[("10.0.0.1:1", Behaviour::Coordinator)]);
        assert_eq!(world.dial(ms(5000)), None);
        world.lookup.1 = vec!["10.0.0.1"];
        assert!(world.dial(ms(2500)).is_some(), "{wrong:?}");
    }
}

#[test]
fn most_specific_failure_is_reported_regardless_of_its_port() {
    let ports: Vec<u16> = (1..=16).collect();
    let mut world = World::new(&ports, &["10.0.0.1"], &[("10.0.0.1:3", Behaviour::OtherJob)]);
    assert_eq!(world.dial(ms(4000)), None);
    let problem = world.search.problem(world.now);
    assert!(
        problem.starts_with("failed to connect to the coordinator at h0:3: the coordinator of another job"),
        "{problem}"
    );
    assert!(world.search.take_final_error().is_none());
    // This job's coordinator refuses this node: that is final, although 15 ports refuse connections.
    world.behaviours.insert("10.0.0.1:7".parse().unwrap(), Behaviour::WrongToken);
    assert_eq!(world.dial(ms(2000)), None);
    let error = world.search.take_final_error().unwrap().to_string();
    assert!(error.contains("h0:7: its token differs"), "{error}");
}

#[test]
fn cause_of_a_wait_is_reported_from_the_beginning() {
    let mut world = World::new(&[29400], &[], &[]);
    world.lookup.0 = ms(30_000);
    assert_eq!(world.dial(ms(4000)), None);
    assert!(
        world
            .search
            .problem(world.start + ms(4000))
            .contains("h0:29400: the name does not resolve (no answer for 4 s)")
    );
    world.lookup.0 = ms(1);
    let mut world = World::new(&[29400], &["10.0.0.1"], &[("10.0.0.1:29400", Behaviour::Filtered)]);
    assert_eq!(world.dial(ms(4000)), None);
    assert!(
        world.search.problem(world.now).contains("no answer within 3 s; check the address and firewalls")
    );
}

#[test]
fn coordinator_is_gone_once_its_address_refuses_even_without_names() {
    let mut world = World::new(&[1, 2], &["10.0.0.1"], &[("10.0.0.1:2", Behaviour::Coordinator)]);
    assert!(world.dial(LEASE).is_some() && !world.search.is_gone());
    world.lose();
    world.lookup = (ms(30_000), Vec::new());
    world.behaviours.insert("10.0.0.1:2".parse().unwrap(), Behaviour::Filtered);
    assert_eq!(world.dial(ms(1500)), None);
    assert!(!world.search.is_gone());
    world.behaviours.insert("10.0.0.1:2".parse().unwrap(), Behaviour::Refuses);
    assert_eq!(world.dial(ms(4000)), None);
    assert!(world.search.is_gone());
    assert!(world.elapsed() < ms(20_000));
}

#[test]
fn attempts_are_bounded_however_long_the_coordinator_is_silent() {
    let behaviours: Vec<(String, Behaviour)> =
        (1..=16).map(|port| (format!("10.0.0.1:{port}"), Behaviour::Silent)).collect();
    let behaviours: Vec<(&str, Behaviour)> = behaviours.iter().map(|(at, it)| (at.as_str(), *it)).collect();
    let ports: Vec<u16> = (1..=16).collect();
    let mut world = World::new(&ports, &["10.0.0.1"], &behaviours);
    world.urgency = Urgency::Working;
    world.search.known = Some("10.0.0.1:1".parse().unwrap());
    for _ in 0..60 {
        assert_eq!(world.dial(ms(1000)), None);
        let attempts: usize = world.search.candidates.iter().map(|it| it.attempts.len()).sum();
        assert!(attempts <= 16 + 6, "{attempts}");
    }
}
