//! The requests of a step, in order. They are the input of a plan, and the criterion by which two steps are compared.

use super::pack::Life;

/// A request or a free of a recorded step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    Alloc {
        granules: u32,
        /// True if the request is for general memory of the pool's first stream, which a plan can serve.
        plannable: bool,
    },
    Free {
        /// Index of the request whose buffer is freed.
        ordinal: u32,
    },
}

/// The requests of one step, with their lifetimes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Recording {
    events: Vec<Event>,
    requests: u32,
    /// Requests whose memory is also used by a second stream.
    shared: Vec<u32>,
}

/// A request of a recorded step, as input of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RecordedRequest {
    pub(crate) granules: u32,
    /// `None` if the plan must not serve the request, because its buffer outlived the step or was used by several
    /// streams.
    pub(crate) life: Option<Life>,
}

impl Recording {
    /// Records a request and returns its ordinal.
    pub(crate) fn alloc(&mut self, granules: u32, plannable: bool) -> u32 {
        self.events.push(Event::Alloc { granules, plannable });
        self.requests += 1;
        self.requests - 1
    }

    /// Records that the buffer of a request was freed.
    pub(crate) fn free(&mut self, ordinal: u32) {
        self.events.push(Event::Free { ordinal });
    }

    /// Records that a second stream uses the memory of a request.
    pub(crate) fn share(&mut self, ordinal: u32) {
        if !self.shared.contains(&ordinal) {
            self.shared.push(ordinal);
        }
    }

    /// Returns all requests in order.
    pub(crate) fn requests(&self) -> Vec<RecordedRequest> {
        let mut requests = Vec::with_capacity(self.requests as usize);
        let mut births = Vec::with_capacity(self.requests as usize);
        for (event, at) in self.events.iter().zip(0..) {
            match *event {
                Event::Alloc { granules, plannable } => {
                    births.push((at, plannable));
                    requests.push(RecordedRequest { granules, life: None });
                }
                Event::Free { ordinal } => {
                    let (birth, plannable) = births[ordinal as usize];
                    let request = &mut requests[ordinal as usize];
                    if plannable && !self.shared.contains(&ordinal) {
                        request.life = Some(Life { granules: request.granules, birth, death: at });
                    }
                }
            }
        }
        requests
    }
}
