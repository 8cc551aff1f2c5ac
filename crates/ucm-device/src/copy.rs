//! Byte moves of the host platform: all arguments are checked before the first byte moves.
#![allow(
    unsafe_code,
    reason = "reads and writes the memory that device spans name; their maker vouched for it"
)]

use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};

use ucm_core::{Error, Result};

use crate::device::Landed;
use crate::span::{DeviceSpan, HostSpan, Piece};
use crate::transfer::Direction;

/// Checks the pieces of a gather or scatter: sound spans that lie inside the host buffer.
pub(crate) fn check_pieces(pieces: &[Piece], host: usize) -> Result<()> {
    for (i, piece) in pieces.iter().enumerate() {
        if !piece.span.is_sound() {
            return piece.span.check().map_err(|e| e.with("piece", i));
        }
        let end = (piece.at as u64).checked_add(piece.span.len());
        if end.is_none_or(|end| end > host as u64) {
            return Err(Error::invalid("a piece lies outside of the host buffer")
                .with("piece", i)
                .with("at", piece.at)
                .with("len", piece.span.len())
                .with("host", host));
        }
    }
    Ok(())
}

/// Checks pairs of device and host: sound spans, equal lengths.
pub(crate) fn check_host_pairs(pairs: &[(DeviceSpan, HostSpan)]) -> Result<()> {
    for (i, (device, host)) in pairs.iter().enumerate() {
        if !(device.is_sound() && host.is_sound()) {
            let checked = device.check().and_then(|()| host.check());
            return checked.map_err(|e| e.with("pair", i));
        }
        if device.len() != host.len() {
            return Err(
                Error::invalid("the sides of device and host differ in length")
                    .with("pair", i)
                    .with("device", device.len())
                    .with("host", host.len()),
            );
        }
    }
    Ok(())
}

/// Checks a range that is to be registered.
pub(crate) fn check_registered(host: HostSpan) -> Result<()> {
    if host.is_empty() {
        return Err(Error::invalid("a registered range has at least one byte"));
    }
    host.check()
}

/// Copies device pieces into the host buffer and reports each at once.
pub(crate) fn gather(src: &[Piece], dst: &mut [u8], landed: &mut Landed<'_>) -> Result<()> {
    check_pieces(src, dst.len())?;
    for (piece, count) in src.iter().zip(1..) {
        let to = &mut dst[piece.at..piece.at + piece.span.len() as usize];
        // SAFETY: the maker of the span promised that it can be read until this operation ends;
        // `to` is a slice of exactly that length; `copy` allows overlap, should the span name
        // memory of the same arena.
        unsafe {
            std::ptr::copy(
                with_exposed_provenance::<u8>(piece.span.addr() as usize),
                to.as_mut_ptr(),
                to.len(),
            );
        }
        landed(dst, count);
    }
    Ok(())
}

/// Copies the host buffer into device pieces.
pub(crate) fn scatter(src: &[u8], dst: &[Piece]) -> Result<()> {
    check_pieces(dst, src.len())?;
    for piece in dst {
        let from = &src[piece.at..piece.at + piece.span.len() as usize];
        // SAFETY: the maker of the span promised that it can be written until this operation ends
        // and that no reference to it is in use; `from` has exactly its length.
        unsafe {
            std::ptr::copy(
                from.as_ptr(),
                with_exposed_provenance_mut::<u8>(piece.span.addr() as usize),
                from.len(),
            );
        }
    }
    Ok(())
}

/// Copies pairs of device and host in one direction.
pub(crate) fn transfer(direction: Direction, pairs: &[(DeviceSpan, HostSpan)]) -> Result<()> {
    check_host_pairs(pairs)?;
    for (device, host) in pairs {
        let (from, to) = match direction {
            Direction::ToDevice => (host.addr(), device.addr()),
            Direction::ToHost => (device.addr(), host.addr()),
        };
        // SAFETY: the makers of both spans promised that they can be read and written until this
        // operation ends, without interference; the lengths are equal; `copy` allows overlap,
        // should both lie in one buffer.
        unsafe {
            std::ptr::copy(
                with_exposed_provenance::<u8>(from as usize),
                with_exposed_provenance_mut::<u8>(to as usize),
                device.len() as usize,
            );
        }
    }
    Ok(())
}
