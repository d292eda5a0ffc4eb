//! Floods of callers, under a simulated clock.

use super::*;

const AGENT: &str = "10.0.0.2";
const FLOOD: &str = "10.0.0.1";

/// Behaviour of the callers in a flood.
#[derive(Clone, Copy, PartialEq)]
enum Caller {
    Silent,
    /// Sends its first message and no more.
    Greets,
}

/// The listener's loop: accepts from the kernel's queue, and starts handshakes.
struct Listener {
    callers: Callers<Option<Caller>, ()>,
    /// Callers in order of arrival; an agent has no `Caller`.
    kernel: std::collections::VecDeque<(&'static str, Option<Caller>)>,
    now: Instant,
}

impl Listener {
    fn flooded(count: usize, caller: Caller) -> Self {
        let kernel = std::iter::repeat_n((FLOOD, Some(caller)), count).collect();
        Self { callers: Callers::new(), kernel, now: Instant::now() }
    }

    /// Advances by one step. Returns whether the agent's handshake has started.
    fn step(&mut self) -> bool {
        loop {
            while let Some(start) = self.callers.start(self.now) {
                let Some(caller) = start.connection else { return true };
                let greeted = Arc::new(AtomicBool::new(caller == Caller::Greets));
                self.callers.started(start.source, greeted, (), self.now);
            }
            if self.kernel.is_empty() || self.callers.accepts_at(self.now) > self.now {
                return false;
            }
            let (source, caller) = self.kernel.pop_front().unwrap();
            self.callers.accepted(source.parse().unwrap(), caller, self.now);
        }
    }

    /// Returns the time until the handshake of an agent that calls from `source` now starts.
    fn delay_of_agent(&mut self, source: &'static str) -> Duration {
        let start = self.now;
        self.kernel.push_back((source, None));
        while !self.step() {
            self.now += Duration::from_millis(10);
            assert!(self.now < start + Duration::from_secs(60), "the agent is kept out");
        }
        self.now - start
    }
}

#[test]
fn thousand_callers_with_an_incomplete_first_message_delay_an_agent_by_3_s_at_most() {
    for source in [AGENT, FLOOD] {
        let delay = Listener::flooded(1000, Caller::Silent).delay_of_agent(source);
        assert!(delay <= Duration::from_secs(3), "{source}: {delay:?}");
    }
}

#[test]
fn thousand_callers_that_stop_within_the_handshake_delay_an_agent_by_3_s_at_most() {
    for source in [AGENT, FLOOD] {
        let delay = Listener::flooded(1000, Caller::Greets).delay_of_agent(source);
        assert!(delay <= Duration::from_secs(3), "{source}: {delay:?}");
    }
}

#[test]
fn flood_that_was_there_before_does_not_delay_an_agent_of_another_source() {
    for caller in [Caller::Silent, Caller::Greets] {
        let mut listener = Listener::flooded(1000, caller);
        for _ in 0..1000 {
            listener.step();
            listener.now += Duration::from_millis(10);
        }
        assert_eq!(listener.delay_of_agent(AGENT), Duration::ZERO);
        assert!(listener.delay_of_agent(FLOOD) <= HANDSHAKE_GRACE);
    }
}

#[test]
fn flood_that_goes_on_does_not_keep_out_an_agent_of_another_source() {
    let mut listener = Listener::flooded(1000, Caller::Greets);
    listener.step();
    listener.kernel.clear();
    listener.kernel.push_back((AGENT, None));
    listener.kernel.extend(std::iter::repeat_n((FLOOD, Some(Caller::Greets)), 5000));
    let start = listener.now;
    while !listener.step() {
        listener.now += Duration::from_millis(10);
        assert!(listener.now < start + Duration::from_secs(2), "the agent is kept out");
    }
}

#[test]
fn agents_that_connect_at_once_are_not_dropped_while_handshakes_proceed() {
    let (mut callers, mut now) = (Callers::<(), ()>::new(), Instant::now());
    let (mut arrived, mut served) = (0, 0);
    while served < 2000 {
        while arrived < 2000 && callers.accepts_at(now) <= now {
            callers.accepted(AGENT.parse().unwrap(), (), now);
            arrived += 1;
        }
        while let Some(start) = callers.start(now) {
            assert_eq!(start.displaced, None);
            callers.started(start.source, Arc::default(), (), now);
            served += 1;
        }
        now += Duration::from_millis(50);
        callers.remove_finished(|_| true);
        assert!(callers.waiting.len() + served >= arrived, "a caller was dropped");
    }
}
