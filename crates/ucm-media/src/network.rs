//! What the clients of network media have in common.

/// Makes the clients of this process use ring for cryptography, unless a provider was chosen
/// before. rustls uses the provider that the process chose; in a build with several it has no
/// default.
pub(crate) fn use_ring() {
    let _ = rustls::crypto::ring::default_provider().install_default();
}

/// Half of what may be free before the system gets any of it back: a few answers for each thread
/// that waits for one.
const ANSWERS: usize = 16 << 20;

/// Has the allocator keep the memory of answers for those that come next. glibc gives back to the
/// system what is free beyond twice the largest block that was ever freed (mallopt(3),
/// `M_TRIM_THRESHOLD`), a few hundred kilobytes at first, and each record that a server answers is
/// made of new pages then, which the system clears one by one. One large block raises it.
pub(crate) fn keep_memory_of_answers() {
    // never written to: it costs no memory
    drop(std::hint::black_box(Vec::<u8>::with_capacity(ANSWERS)));
}
