//! What the clients of network media have in common.

/// Has the clients of this process do their cryptography by ring, unless somebody chose otherwise before: rustls takes what
/// the process has chosen, and nobody chooses by itself where a build has several.
pub(crate) fn use_ring() {
    let _ = rustls::crypto::ring::default_provider().install_default();
}
