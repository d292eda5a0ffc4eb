//! Proves to two neighbours that they belong to the same attempt of the same job. Pure.
//!
//! ```text
//! dialling rank                                              listening rank
//!               <-- challenge: protocol, nonce ------------
//!               --- answer: protocol, nonce, proof -------->  refuses the caller unless the proof is right
//!               <-- proof ---------------------------------
//! refuses the listener unless the proof is right
//! ```
//! A proof is the HMAC-SHA256, under the attempt's key, of the protocol, the prover's role, the world size, the
//! dialling rank and both nonces. Invariants:
//! - a recorded greeting proves nothing later, because both sides choose a new nonce for each connection;
//! - a proof cannot be sent back to its prover, because the roles differ, or be used by another rank;
//! - the listening rank computes nothing and reveals nothing before the caller has sent a whole answer.

use hmac::digest::KeyInit;
use hmac::{Hmac, Mac};
use sha2::Sha256;

/// Bytes of a nonce and of a proof.
pub(super) const NONCE_BYTES: usize = 32;
pub(super) const PROOF_BYTES: usize = 32;
pub(super) const CHALLENGE_BYTES: usize = PROTOCOL.len() + NONCE_BYTES;
pub(super) const ANSWER_BYTES: usize = PROTOCOL.len() + NONCE_BYTES + PROOF_BYTES;
/// First bytes of a challenge and of an answer: name and version of the protocol.
const PROTOCOL: &[u8; 8] = b"xlring\0\x03";

pub(super) type Nonce = [u8; NONCE_BYTES];

/// Role of the prover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Role {
    Dials = 1,
    Listens = 2,
}

/// Facts that both ranks of a connection know in advance.
#[derive(Clone, Copy)]
pub(super) struct Greeting<'a> {
    pub(super) key: &'a [u8; 32],
    pub(super) world: usize,
    /// The rank that dials; the next one listens.
    pub(super) dialling: usize,
}

/// Builds the first message of the listening rank.
pub(super) fn challenge(nonce: &Nonce) -> [u8; CHALLENGE_BYTES] {
    let mut bytes = [0; CHALLENGE_BYTES];
    let (protocol, rest) = bytes.split_at_mut(PROTOCOL.len());
    protocol.copy_from_slice(PROTOCOL);
    rest.copy_from_slice(nonce);
    bytes
}

/// Returns the nonce of a challenge; `None` if the listener is not a rank of a ring.
pub(super) fn parse_challenge(bytes: &[u8; CHALLENGE_BYTES]) -> Option<Nonce> {
    bytes.strip_prefix(PROTOCOL)?.try_into().ok()
}

impl Greeting<'_> {
    /// Builds the dialling rank's answer to a challenge.
    pub(super) fn answer(&self, challenged: &Nonce, own: &Nonce) -> [u8; ANSWER_BYTES] {
        let proof = self.mac(Role::Dials, challenged, own).finalize().into_bytes();
        let mut bytes = [0; ANSWER_BYTES];
        let parts = PROTOCOL.iter().chain(own).chain(&proof);
        bytes.iter_mut().zip(parts).for_each(|(byte, part)| *byte = *part);
        bytes
    }

    /// Returns the proof with which the listening rank ends the greeting; `None` if the answer does not come from the
    /// expected rank.
    pub(super) fn accept(
        &self,
        challenged: &Nonce,
        answer: &[u8; ANSWER_BYTES],
    ) -> Option<[u8; PROOF_BYTES]> {
        let (theirs, proof) = answer.strip_prefix(PROTOCOL)?.split_at_checked(NONCE_BYTES)?;
        let theirs: Nonce = theirs.try_into().ok()?;
        self.mac(Role::Dials, challenged, &theirs).verify_slice(proof).ok()?;
        Some(self.mac(Role::Listens, challenged, &theirs).finalize().into_bytes().into())
    }

    /// Returns whether the listening rank has proved its identity.
    pub(super) fn is_proved(&self, challenged: &Nonce, own: &Nonce, proof: &[u8; PROOF_BYTES]) -> bool {
        // This comparison takes constant time.
        self.mac(Role::Listens, challenged, own).verify_slice(proof).is_ok()
    }

    fn mac(&self, role: Role, listening: &Nonce, dialling: &Nonce) -> Hmac<Sha256> {
        // HMAC pads a key that is shorter than a block of the hash with zeros.
        let mut block = [0; 64];
        block[..self.key.len()].copy_from_slice(self.key);
        let mut mac = <Hmac<Sha256> as KeyInit>::new(&block.into());
        mac.update(PROTOCOL);
        mac.update(&[role as u8]);
        for number in [self.world, self.dialling] {
            mac.update(&(number as u64).to_le_bytes());
        }
        mac.update(listening);
        mac.update(dialling);
        mac
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GREETING: Greeting<'_> = Greeting { key: &[7; 32], world: 4, dialling: 1 };
    const LISTENING: Nonce = [1; 32];
    const DIALLING: Nonce = [2; 32];

    #[test]
    fn ranks_with_the_same_key_accept_each_other() {
        let challenged = parse_challenge(&challenge(&LISTENING)).unwrap();
        let answer = GREETING.answer(&challenged, &DIALLING);
        let proof = GREETING.accept(&LISTENING, &answer).unwrap();
        assert!(GREETING.is_proved(&challenged, &DIALLING, &proof));
    }

    #[test]
    fn another_key_rank_world_nonce_or_protocol_is_refused() {
        let answer = GREETING.answer(&LISTENING, &DIALLING);
        let others = [
            Greeting { key: &[8; 32], ..GREETING },
            Greeting { world: 5, ..GREETING },
            Greeting { dialling: 2, ..GREETING },
        ];
        for other in others {
            assert_eq!(other.accept(&LISTENING, &answer), None);
            let proof = other.accept(&LISTENING, &other.answer(&LISTENING, &DIALLING)).unwrap();
            assert!(!GREETING.is_proved(&LISTENING, &DIALLING, &proof));
        }
        assert_eq!(GREETING.accept(&[3; 32], &answer), None, "a recorded answer");
        let (mut protocol, mut nonce) = (answer, answer);
        (protocol[7], nonce[8]) = (2, 3);
        assert_eq!(
            (GREETING.accept(&LISTENING, &protocol), GREETING.accept(&LISTENING, &nonce)),
            (None, None)
        );
        assert_eq!(parse_challenge(&[0; CHALLENGE_BYTES]), None);
    }

    #[test]
    fn proof_cannot_be_sent_back_to_its_prover() {
        let answer = GREETING.answer(&LISTENING, &DIALLING);
        let own: [u8; PROOF_BYTES] = answer[ANSWER_BYTES - PROOF_BYTES..].try_into().unwrap();
        assert!(!GREETING.is_proved(&LISTENING, &DIALLING, &own));
    }
}
