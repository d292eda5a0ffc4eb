//! TLS 1.3 between agents and the coordinator, with raw public keys (RFC 7250) in place of certificates: no names, no
//! validity periods, no chains, just one expected key per role.
//!
//! Sessions are never resumed and there is no early data. A handshake includes fresh random numbers from both sides, so
//! replaying a recorded one proves nothing.

use std::fmt;
use std::sync::Arc;

use ring::digest;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{AlwaysResolvesClientRawPublicKeys, Resumption};
use rustls::crypto::{
    CryptoProvider, WebPkiSupportedAlgorithms, ring as provider, verify_tls13_signature_with_raw_key,
};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{AlwaysResolvesServerRawPublicKeys, NoServerSessionStorage};
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, PeerIncompatible,
    ServerConfig, SignatureScheme,
};
use zeroize::Zeroizing;

use super::token::{Seeds, Token};

/// PKCS #8 header (RFC 8410) of an Ed25519 key, which precedes the 32 bytes of its seed.
const PKCS8_PREFIX: [u8; 16] =
    [0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20];
const ALPN: &[u8] = b"h2";
const JOB_ALPN_PREFIX: &[u8] = b"xlaunch-job/";
/// Label of the exporter (RFC 8446, 7.5) whose value identifies a channel and is known only to its two ends.
const CHANNEL_LABEL: &[u8] = b"EXPORTER-xlaunch-group-1";

/// The reason why TLS could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// No randomness, or a failure of the key derivation.
    #[error("failed to make keys for TLS: the cryptographic library returned no key")]
    Keys,
    /// The library refuses the configuration.
    #[error("failed to configure TLS: {0}")]
    Configuration(#[from] Error),
}

/// TLS configurations of both roles.
pub struct Tls {
    coordinator: Arc<ServerConfig>,
    agent: Arc<ClientConfig>,
}

/// Value that identifies a TLS channel to both of its ends.
pub(super) type ChannelId = [u8; 32];

impl Tls {
    /// Configures each side to accept exactly the key that the token gives the other role.
    pub(super) fn from_token(token: &Token) -> Result<Self, TlsError> {
        let seeds = token.seeds().ok_or(TlsError::Keys)?;
        let (coordinator, agent) = (certified_key(&seeds.coordinator)?, certified_key(&seeds.agent)?);
        let public = |key: &CertifiedKey| key.key.public_key().map(SubjectPublicKeyInfoDer::into_owned);
        let agent_key = public(&agent).ok_or(TlsError::Keys)?;
        let coordinator_key = public(&coordinator).ok_or(TlsError::Keys)?;
        Self::new(coordinator, agent, Peer::Key(coordinator_key), Peer::Key(agent_key))
    }

    /// Configures keys of this process alone. Both sides accept any key: the peer's identity must be proved over the
    /// channel.
    pub(super) fn ephemeral() -> Result<Self, TlsError> {
        let seeds = Seeds::random().ok_or(TlsError::Keys)?;
        let (coordinator, agent) = (certified_key(&seeds.coordinator)?, certified_key(&seeds.agent)?);
        Self::new(coordinator, agent, Peer::Any, Peer::Any)
    }

    fn new(
        coordinator: CertifiedKey,
        agent: CertifiedKey,
        coordinator_key: Peer,
        agent_key: Peer,
    ) -> Result<Self, TlsError> {
        let provider = Arc::new(provider::default_provider());
        let mut server = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(Arc::new(Verifier::new(agent_key, &provider)))
            .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(Arc::new(coordinator))));
        server.alpn_protocols = vec![ALPN.to_vec()];
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;
        let mut client = ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(Verifier::new(coordinator_key, &provider)))
            .with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(Arc::new(agent))));
        client.alpn_protocols = vec![ALPN.to_vec()];
        client.resumption = Resumption::disabled();
        client.enable_sni = false;
        Ok(Self { coordinator: Arc::new(server), agent: Arc::new(client) })
    }

    /// Restricts the configuration to one of several jobs that may listen on the same ports: each side names its job by
    /// an application protocol (RFC 7301), before it proves anything. A coordinator also accepts callers that name no
    /// job.
    pub(super) fn for_job(&self, run_id: &str) -> Self {
        let id = digest::digest(&digest::SHA256, run_id.as_bytes());
        let id: String = id.as_ref().iter().take(16).map(|byte| format!("{byte:02x}")).collect();
        let protocol = [JOB_ALPN_PREFIX, id.as_bytes()].concat();
        let (mut server, mut client) =
            (ServerConfig::clone(&self.coordinator), ClientConfig::clone(&self.agent));
        server.alpn_protocols = vec![protocol.clone(), ALPN.to_vec()];
        client.alpn_protocols = vec![protocol];
        Self { coordinator: Arc::new(server), agent: Arc::new(client) }
    }

    /// Returns the coordinator's side of a handshake.
    pub(super) fn acceptor_config(&self) -> Arc<ServerConfig> {
        self.coordinator.clone()
    }

    /// Returns an agent's side of a handshake.
    pub(super) fn connector(&self) -> tokio_rustls::TlsConnector {
        self.agent.clone().into()
    }

    /// Returns the server name that the library insists on. It is neither sent nor checked.
    pub(super) fn server_name() -> Result<ServerName<'static>, TlsError> {
        ServerName::try_from("xlaunch").map_err(|_| TlsError::Keys)
    }

    /// Uses the token, but each side presents the key of the other role.
    #[cfg(test)]
    pub(super) fn impostor(token: &Token) -> Self {
        let seeds = token.seeds().unwrap();
        let (coordinator, agent) =
            (certified_key(&seeds.coordinator).unwrap(), certified_key(&seeds.agent).unwrap());
        Self::new(agent, coordinator, Peer::Any, Peer::Any).unwrap()
    }
}

/// Never shows the keys.
impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls")
    }
}

/// Returns the value that identifies a channel. No third process can have a channel with the same value.
pub(super) fn channel_id<D>(connection: &rustls::ConnectionCommon<D>) -> Result<ChannelId, Error> {
    connection.export_keying_material([0; 32], CHANNEL_LABEL, None)
}

fn certified_key(seed: &[u8; 32]) -> Result<CertifiedKey, TlsError> {
    let mut der = Zeroizing::new(Vec::with_capacity(PKCS8_PREFIX.len() + seed.len()));
    der.extend(PKCS8_PREFIX);
    der.extend(seed);
    let key = provider::sign::any_eddsa_type(&PrivatePkcs8KeyDer::from(der.as_slice()))?;
    let public = key.public_key().ok_or(TlsError::Keys)?;
    Ok(CertifiedKey::new(vec![CertificateDer::from(public.as_ref().to_vec())], key))
}

/// The keys that a peer may have.
#[derive(Debug)]
enum Peer {
    Any,
    Key(SubjectPublicKeyInfoDer<'static>),
}

/// Accepts a peer by its raw public key. The library then has the peer prove that key by a signature in the handshake.
#[derive(Debug)]
struct Verifier {
    peer: Peer,
    algorithms: WebPkiSupportedAlgorithms,
}

impl Verifier {
    fn new(peer: Peer, provider: &CryptoProvider) -> Self {
        Self { peer, algorithms: provider.signature_verification_algorithms }
    }

    fn verify_key(&self, key: &CertificateDer<'_>) -> Result<(), Error> {
        match &self.peer {
            Peer::Any => Ok(()),
            Peer::Key(expected) if expected.as_ref() == key.as_ref() => Ok(()),
            Peer::Key(_) => Err(CertificateError::ApplicationVerificationFailure.into()),
        }
    }

    fn verify_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let key = SubjectPublicKeyInfoDer::from(key.as_ref());
        verify_tls13_signature_with_raw_key(message, &key, signature, &self.algorithms)
    }
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        key: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.verify_key(key).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _key: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(PeerIncompatible::ServerTlsVersionIsDisabledByOurConfig.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verify_signature(message, key, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

impl ClientCertVerifier for Verifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        key: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.verify_key(key).map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _key: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(PeerIncompatible::Tls12NotOffered.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verify_signature(message, key, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}
