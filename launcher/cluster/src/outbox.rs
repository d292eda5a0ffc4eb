//! Delivers messages exactly once and in order, across lost connections.

use std::collections::VecDeque;

/// Messages sent but not yet acknowledged, and the count of messages received from the other side.
#[derive(Debug)]
pub struct Outbox<T> {
    sent: u64,
    received: u64,
    waiting: VecDeque<(u64, T)>,
}

impl<T> Default for Outbox<T> {
    fn default() -> Self {
        Self { sent: 0, received: 0, waiting: VecDeque::new() }
    }
}

impl<T> Outbox<T> {
    /// Keeps a message until it is acknowledged. Returns its number; numbers start at 1.
    pub fn push(&mut self, message: T) -> u64 {
        self.sent += 1;
        self.waiting.push_back((self.sent, message));
        self.sent
    }

    /// Drops the messages up to this number, which the other side has received.
    pub fn acknowledge(&mut self, number: u64) {
        while self.waiting.front().is_some_and(|(own, _)| *own <= number) {
            self.waiting.pop_front();
        }
    }

    /// Returns whether the message with this number is the next one expected. If not, it is a duplicate, or comes too
    /// early and will be sent again.
    pub fn accept(&mut self, number: u64) -> bool {
        let is_next = number == self.received + 1;
        self.received += u64::from(is_next);
        is_next
    }

    /// Returns the number of the last message received.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// Returns the messages to send again on a new connection.
    pub fn waiting(&self) -> impl Iterator<Item = &(u64, T)> {
        self.waiting.iter()
    }

    /// Returns whether all messages have been acknowledged.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn message_that_comes_again_or_too_early_is_not_accepted() {
        let mut receiver = Outbox::<()>::default();
        assert_eq!(
            [1, 1, 3, 2, 1, 3].map(|number| receiver.accept(number)),
            [true, false, false, true, false, true]
        );
    }

    proptest! {
        /// Connections are lost after any number of messages, in both directions.
        #[test]
        fn messages_arrive_once_and_in_order(losses in prop::collection::vec((0usize..6, 0usize..6), 1..40)) {
            let (mut sender, mut receiver) = (Outbox::default(), Outbox::<()>::default());
            let (mut next, mut arrived) = (0, Vec::new());
            for (new, delivered) in losses {
                // A new connection: the receiver says what it has.
                sender.acknowledge(receiver.received());
                for _ in 0..new {
                    sender.push(next);
                    next += 1;
                }
                for (number, message) in sender.waiting().take(delivered) {
                    if receiver.accept(*number) {
                        arrived.push(*message);
                    }
                }
            }
            sender.acknowledge(receiver.received());
            arrived.extend(sender.waiting().map(|(_, message)| *message));
            prop_assert_eq!(arrived, (0..next).collect::<Vec<i32>>());
        }
    }
}
