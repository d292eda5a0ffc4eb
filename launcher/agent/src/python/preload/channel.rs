//! The protocol between the agent and the preloading process: JSON, preceded by its length in four bytes, big-endian.

use std::io::{self, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Maximum number of descriptors in a message.
const MAX_DESCRIPTORS: usize = 4;
/// Replies that claim to be longer than this are rejected.
const MAX_REPLY_BYTES: u32 = 1 << 20;

/// Sends a message with descriptors. Blocks while the other side does not read, up to the socket's write timeout.
pub(super) fn send(
    channel: &UnixStream,
    message: &impl Serialize,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let json = serde_json::to_vec(message)?;
    let length = u32::try_from(json.len()).map_err(|_| io::Error::other("a message of 4 GiB"))?;
    let message = [&length.to_be_bytes()[..], &json].concat();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::other("too many descriptors in a message"));
    }
    let sent = sendmsg(channel, &[IoSlice::new(&message)], &mut ancillary, SendFlags::NOSIGNAL)?;
    // The descriptors travel with the first byte.
    (&mut &*channel).write_all(&message[sent..])
}

/// Receives a message. Blocks up to the socket's read timeout.
pub(super) fn receive<T: DeserializeOwned>(mut channel: &UnixStream) -> io::Result<T> {
    let mut length = [0; 4];
    channel.read_exact(&mut length)?;
    let length = u32::from_be_bytes(length);
    if length > MAX_REPLY_BYTES {
        return Err(io::Error::other(format!("a reply of {length} bytes")));
    }
    let mut json = vec![0; length as usize];
    channel.read_exact(&mut json)?;
    Ok(serde_json::from_slice(&json)?)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn long_messages_arrive_whole() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let text = "x".repeat(900_000);
        let sent = text.clone();
        let sender = std::thread::spawn(move || send(&ours, &sent, &[std::io::stdin().as_fd()]));
        assert_eq!(receive::<String>(&theirs).unwrap(), text);
        sender.join().unwrap().unwrap();
        assert!(receive::<String>(&theirs).is_err(), "the end of the stream is no message");
    }

    #[test]
    fn absurd_length_is_refused() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (&ours).write_all(&[0xff; 8]).unwrap();
        assert!(receive::<String>(&theirs).unwrap_err().to_string().contains("4294967295"));
    }
}
