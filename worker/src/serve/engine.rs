//! The thread that owns the model: runs steps of the batch, and passes on their results.

use std::collections::HashMap;
use std::sync::mpsc::Receiver;

use tokio::sync::mpsc::UnboundedSender;
use xlaunch_spec::refusal::Refusal;

use super::{Command, Output, Request, Service};
use crate::generate::{Batch, GenerateError, Prefill};
use crate::model::decode::MAX_SLOTS;
use crate::pretrained::Source;

/// A request of a client.
#[derive(Debug)]
pub struct Job {
    /// Its prompt fits the model.
    pub request: Request,
    /// Number of the text among those that the client waits for.
    pub index: usize,
    /// Receives the results. The request is cancelled when the other end is dropped.
    pub outputs: UnboundedSender<(usize, Output)>,
}

/// Loads the model, and computes jobs until the other end of `jobs` is dropped. `ready` is called once the model is
/// loaded, with the number of texts that are computed at the same time. `note` receives lines for the user.
///
/// # Errors
/// If the model cannot be loaded, or the device fails.
pub fn run(
    command: &Command,
    source: &Source,
    service: &Service,
    jobs: &Receiver<Job>,
    note: &mut dyn FnMut(&str),
    interrupted: &dyn Fn() -> bool,
    ready: impl FnOnce(usize),
) -> Result<(), Refusal> {
    let (_, model) = source.load_on(command.target, false, note, interrupted)?;
    let batch = Batch::new(&model, &service.settings, MAX_SLOTS, service.context, Prefill::Separate)?;
    ready(batch.slots());
    Ok(Engine { batch, jobs, clients: HashMap::new(), next: 0 }.run()?)
}

struct Engine<'a> {
    batch: Batch<'a>,
    jobs: &'a Receiver<Job>,
    /// The clients of unfinished requests, by the number of the request.
    clients: HashMap<usize, Client>,
    /// Number of the next request.
    next: usize,
}

struct Client {
    index: usize,
    outputs: UnboundedSender<(usize, Output)>,
}

impl Engine<'_> {
    fn run(&mut self) -> Result<(), GenerateError> {
        loop {
            if self.batch.is_idle() {
                let Ok(job) = self.jobs.recv() else { return Ok(()) };
                self.submit(job);
            }
            while let Ok(job) = self.jobs.try_recv() {
                self.submit(job);
            }
            self.cancel_abandoned();
            self.advance()?;
        }
    }

    fn submit(&mut self, Job { request, index, outputs }: Job) {
        self.batch.submit(self.next, request);
        self.clients.insert(self.next, Client { index, outputs });
        self.next += 1;
    }

    /// Removes the requests of clients that have gone away.
    fn cancel_abandoned(&mut self) {
        let batch = &mut self.batch;
        self.clients.retain(|number, client| {
            let abandoned = client.outputs.is_closed();
            if abandoned {
                batch.cancel(*number);
            }
            !abandoned
        });
    }

    /// Runs steps until a text ends, or a client arrives or leaves.
    fn advance(&mut self) -> Result<(), GenerateError> {
        let (mut arrived, mut ended) = (None, Vec::new());
        let (jobs, clients) = (self.jobs, &self.clients);
        let mut pause = || {
            arrived = jobs.try_recv().ok();
            arrived.is_some() || clients.values().any(|client| client.outputs.is_closed())
        };
        self.batch.advance(&mut pause, &mut |number, output| {
            if matches!(output, Output::Finished(_) | Output::NotFinite) {
                ended.push(number);
            }
            if let Some(Client { index, outputs }) = clients.get(&number) {
                // An error means that the client has gone away; its request is cancelled before the next step.
                let _ = outputs.send((*index, output));
            }
        })?;
        ended.iter().for_each(|number| drop(self.clients.remove(number)));
        arrived.into_iter().for_each(|job| self.submit(job));
        Ok(())
    }
}
