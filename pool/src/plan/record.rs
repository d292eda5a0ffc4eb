//! What a step asked for, in order: the material of a plan, and what tells two steps apart.

use super::pack::Life;

/// One request or one return of a recorded step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    Alloc {
        granules: u32,
        /// Whether its lifetime on one stream is all there is to know of it.
        plain: bool,
    },
    Free {
        /// Which of the step's requests ends.
        ordinal: u32,
    },
}

/// The requests of one step, with their lifetimes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Recording {
    events: Vec<Event>,
    requests: u32,
    /// Requests whose memory a second stream used.
    shared: Vec<u32>,
}

/// A request of a recorded step as a plan needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Planned {
    pub(crate) granules: u32,
    /// Nothing if the request outlived the step or is not for one stream alone: it is served as ever.
    pub(crate) life: Option<Life>,
}

impl Recording {
    /// Notes a request and gives it its number.
    pub(crate) fn alloc(&mut self, granules: u32, plain: bool) -> u32 {
        self.events.push(Event::Alloc { granules, plain });
        self.requests += 1;
        self.requests - 1
    }

    /// Notes that a request of this step ended.
    pub(crate) fn free(&mut self, ordinal: u32) {
        self.events.push(Event::Free { ordinal });
    }

    /// Notes that a second stream uses the request's memory.
    pub(crate) fn share(&mut self, ordinal: u32) {
        if !self.shared.contains(&ordinal) {
            self.shared.push(ordinal);
        }
    }

    /// All requests in order.
    pub(crate) fn requests(&self) -> Vec<Planned> {
        let mut requests = Vec::with_capacity(self.requests as usize);
        let mut births = Vec::with_capacity(self.requests as usize);
        for (event, at) in self.events.iter().zip(0..) {
            match *event {
                Event::Alloc { granules, plain } => {
                    births.push((at, plain));
                    requests.push(Planned { granules, life: None });
                }
                Event::Free { ordinal } => {
                    let (birth, plain) = births[ordinal as usize];
                    let request = &mut requests[ordinal as usize];
                    if plain && !self.shared.contains(&ordinal) {
                        request.life = Some(Life { granules: request.granules, birth, death: at });
                    }
                }
            }
        }
        requests
    }
}
