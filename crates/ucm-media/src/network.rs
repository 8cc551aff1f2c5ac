//! What the clients of network media have in common.

/// Has the clients of this process do their cryptography by ring, unless somebody chose otherwise
/// before: rustls takes what the process has chosen, and no one chooses by itself where a build has
/// several.
pub(crate) fn use_ring() {
    let _ = rustls::crypto::ring::default_provider().install_default();
}

/// Half of what may be free before the system gets any of it back: a few answers for each thread
/// that waits for one.
const ANSWERS: usize = 16 << 20;

/// Has the allocator keep the memory of answers for those that come next. glibc gives back to the
/// system what is free beyond twice the largest block that was ever freed (mallopt(3),
/// `M_TRIM_THRESHOLD`), a few hundred kilobytes at first, and each record that a server answers is
/// made of new pages then, which the system clears one by one. It learns of one large block.
pub(crate) fn keep_memory_of_answers() {
    // no one writes there: it costs no memory
    drop(std::hint::black_box(Vec::<u8>::with_capacity(ANSWERS)));
}
