//! Checks of the arguments of copies, before the first byte moves.

use ucm_core::{Error, Result};

use crate::span::{DeviceSpan, HostSpan, Piece};

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
