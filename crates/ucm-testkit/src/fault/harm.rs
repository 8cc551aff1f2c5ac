//! Effects of faults on the bytes of an operation.

use std::borrow::Cow;

use ucm_core::{Error, Result};

use super::rule::draw;
use super::{Fault, Tail, errno};

/// The faults that apply to the bytes of one operation, and a pseudo-random number for them.
pub(super) struct Harm(pub(super) Option<Fault>, pub(super) u64);

impl Harm {
    /// The bytes that reach the medium.
    pub(super) fn written<'a>(&self, bytes: &'a [u8]) -> Cow<'a, [u8]> {
        let kept = |keep: usize| &bytes[..keep.min(bytes.len())];
        match self.0 {
            Some(Fault::Flip(_) | Fault::FlipRandom(_)) => {
                let mut bytes = bytes.to_vec();
                self.flip(&mut bytes);
                bytes.into()
            }
            Some(
                Fault::Torn {
                    keep,
                    tail: Tail::Cut,
                }
                | Fault::Killed { keep },
            ) => kept(keep).into(),
            Some(Fault::Torn {
                keep,
                tail: Tail::Zeros,
            }) => {
                let mut torn = kept(keep).to_vec();
                torn.resize(bytes.len(), 0);
                torn.into()
            }
            _ => bytes.into(),
        }
    }

    /// Changes bytes that were read.
    pub(super) fn flip(&self, bytes: &mut [u8]) {
        match &self.0 {
            Some(Fault::Flip(at)) => flip_at(bytes, at),
            Some(Fault::FlipRandom(count)) => flip_random(bytes, *count, self.1),
            _ => {}
        }
    }

    /// As above for `read` bytes in several buffers, treated as one.
    pub(super) fn flip_all(&self, into: &mut [(&mut [u8], usize)], read: usize) {
        if !matches!(self.0, Some(Fault::Flip(_) | Fault::FlipRandom(_))) {
            return;
        }
        let pieces = into.iter().flat_map(|(buf, len)| &buf[..*len]);
        let mut bytes: Vec<u8> = pieces.copied().collect();
        self.flip(&mut bytes[..read]);
        let mut rest = bytes.as_slice();
        for (buf, len) in into {
            let (piece, others) = rest.split_at(*len);
            buf[..*len].copy_from_slice(piece);
            rest = others;
        }
    }

    /// Number of bytes that arrive out of `read`.
    pub(super) fn arriving(&self, read: usize) -> usize {
        match self.0 {
            Some(Fault::ShortRead(most)) => read.min(most),
            _ => read,
        }
    }

    /// Whether the writer dies.
    pub(super) fn kills(&self) -> bool {
        matches!(self.0, Some(Fault::Killed { .. }))
    }

    /// Number of reads, stats and lists for which a new name stays invisible.
    pub(super) fn hides(&self) -> u64 {
        match self.0 {
            Some(Fault::LateVisible(looks)) => looks,
            _ => 0,
        }
    }
}

/// A failure with an error number of the operating system.
pub(super) fn os_error(code: i32) -> Error {
    Error::from_io(std::io::Error::from_raw_os_error(code), "scripted fault")
}

/// The end of an operation whose writer died.
pub(super) fn died<T>() -> Result<T> {
    Err(os_error(errno::EIO))
}

fn flip_at(bytes: &mut [u8], at: &[usize]) {
    for &at in at {
        if let Some(byte) = bytes.get_mut(at) {
            *byte ^= 0xFF;
        }
    }
}

/// Changes exactly `count` bytes (all if there are fewer).
fn flip_random(bytes: &mut [u8], count: usize, seed: u64) {
    let mut places: Vec<usize> = (0..bytes.len()).collect();
    for i in 0..count.min(places.len()) {
        let with = i + draw(seed, i as u64, 7) as usize % (places.len() - i);
        places.swap(i, with);
        // Never zero, so that the byte really changes.
        bytes[places[i]] ^= (draw(seed, i as u64, 8) % 255 + 1) as u8;
    }
}
