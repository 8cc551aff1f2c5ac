//! Effects of faults on the bytes of an operation.

use std::borrow::Cow;

use ucm_core::{Error, Result};
use ucm_io::ReadPiece;

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

    /// As above for pieces of which `read` bytes were read, by the offset behind the first one's.
    pub(super) fn flip_all(&self, pieces: &mut [ReadPiece<'_>], read: usize) {
        let flips = matches!(self.0, Some(Fault::Flip(_) | Fault::FlipRandom(_)));
        let Some(first) = pieces.first().map(|piece| piece.offset).filter(|_| flips) else {
            return;
        };
        let place = |piece: &ReadPiece<'_>| (piece.offset - first) as usize;
        let wanted: usize = pieces.iter().map(|piece| piece.len).sum();
        let end = pieces.last().map_or(0, |piece| place(piece) + piece.len);
        let mut bytes = vec![0; end];
        for piece in pieces.iter() {
            bytes[place(piece)..][..piece.len].copy_from_slice(&piece.buf[..piece.len]);
        }
        self.flip(&mut bytes[..end - (wanted - read)]);
        for piece in pieces {
            let flipped = &bytes[place(piece)..][..piece.len];
            piece.buf[..piece.len].copy_from_slice(flipped);
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
