//! Converts addresses from callers to pairs of spans.
#![allow(
    unsafe_code,
    reason = "the callers of these functions vouch for the addresses"
)]

use std::ptr::with_exposed_provenance;

use ucm_core::{Error, Result};

use crate::span::{DeviceSpan, HostSpan};

/// The host's side of each piece.
#[derive(Clone, Copy, Debug)]
pub enum Sides<'a> {
    /// Each at an address of its own.
    Each(&'a [u64]),
    /// All in one buffer that begins at this address, one behind the other.
    Together(u64),
}

/// Pieces of `size` bytes at these addresses of a device, each with its side on the host.
/// `InvalidInput`, with the piece, for a null address, an end that wraps around, no pieces, zero
/// bytes, or different numbers of addresses on the two sides.
///
/// # Safety
/// The conditions of [`DeviceSpan::new`] and [`HostSpan::new`] hold for the `size` bytes
/// at each address.
pub unsafe fn pairs(
    device: &[u64],
    host: Sides<'_>,
    size: usize,
) -> Result<Vec<(DeviceSpan, HostSpan)>> {
    if size == 0 || size > isize::MAX as usize || device.is_empty() {
        return Err(Error::invalid(
            "a copy has at least one piece, of one byte to the address space",
        )
        .with("pieces", device.len())
        .with("size", size));
    }
    if let Sides::Each(host) = host
        && host.len() != device.len()
    {
        return Err(
            Error::invalid("source and destination must be equally many addresses")
                .with("device", device.len())
                .with("host", host.len()),
        );
    }
    let size = size as u64;
    let mut pairs = Vec::with_capacity(device.len());
    for (piece, &address) in device.iter().enumerate() {
        let at = match host {
            Sides::Each(host) => Some(host[piece]),
            Sides::Together(0) => Some(0),
            Sides::Together(first) => size
                .checked_mul(piece as u64)
                .and_then(|at| first.checked_add(at)),
        };
        let at = at.ok_or_else(|| {
            let wraps = Error::invalid("the host buffer wraps around the address space");
            wraps.with("piece", piece).with("size", size)
        })?;
        // SAFETY: the caller vouches for both.
        let pair = unsafe { (DeviceSpan::new(address, size), HostSpan::new(at, size)) };
        let checked = pair.0.check().map_err(|error| error.with("side", "device"));
        checked
            .and_then(|()| pair.1.check().map_err(|error| error.with("side", "host")))
            .map_err(|error| error.with("piece", piece))?;
        pairs.push(pair);
    }
    Ok(pairs)
}

/// The `count` addresses of an array at `array`. `InvalidInput` for a null address, a count of
/// zero, or one beyond the address space.
///
/// # Safety
/// `count` words of 8 bytes are readable there and are not written during the call; they
/// need no alignment.
pub unsafe fn addresses_at(array: u64, count: usize) -> Result<Vec<u64>> {
    let bytes = (count as u64)
        .checked_mul(8)
        .filter(|&bytes| bytes <= isize::MAX as u64);
    let end = bytes.and_then(|bytes| array.checked_add(bytes));
    if array == 0 || count == 0 || end.is_none() {
        return Err(
            Error::invalid("an array of addresses has an address and at least one item")
                .with("array", format_args!("{array:#x}"))
                .with("count", count),
        );
    }
    let first = with_exposed_provenance::<u64>(array as usize);
    // SAFETY: the caller vouches for that many words.
    Ok((0..count)
        .map(|i| unsafe { first.add(i).read_unaligned() })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(device: &[u64], host: Sides<'_>, size: usize) -> String {
        // SAFETY: nothing is read or written.
        let result = unsafe { pairs(device, host, size) };
        result.unwrap_err().to_string()
    }

    #[test]
    fn sides_one_behind_the_other_and_each_for_itself() {
        // SAFETY: nothing is read or written.
        let (together, each) = unsafe {
            (
                pairs(&[4096, 64], Sides::Together(1000), 16).unwrap(),
                pairs(&[4096, 64], Sides::Each(&[5, 6]), 16).unwrap(),
            )
        };
        let sides = |pairs: &[(DeviceSpan, HostSpan)]| -> Vec<(u64, u64, u64)> {
            pairs
                .iter()
                .map(|(device, host)| (device.addr(), host.addr(), host.len()))
                .collect()
        };
        assert_eq!(sides(&together), [(4096, 1000, 16), (64, 1016, 16)]);
        assert_eq!(sides(&each), [(4096, 5, 16), (64, 6, 16)]);
    }

    #[test]
    fn what_cannot_be_copied_is_refused_by_name() {
        let null = refused(&[4096, 0], Sides::Together(1000), 16);
        assert!(
            null.contains("piece=1") && null.contains("side=device"),
            "{null}"
        );
        let null = refused(&[4096], Sides::Each(&[0]), 16);
        assert!(
            null.contains("piece=0") && null.contains("side=host"),
            "{null}"
        );
        let null = refused(&[4096, 8192], Sides::Together(0), 16);
        assert!(null.contains("side=host"), "{null}");
        assert!(refused(&[4096, 1], Sides::Each(&[1]), 16).contains("equally many"));
        for size in [0, usize::MAX / 2 + 1] {
            assert!(refused(&[4096], Sides::Each(&[1]), size).contains("of one byte to"));
        }
        assert!(refused(&[], Sides::Together(1), 1).contains("pieces=0"));
        assert!(refused(&[1, 2], Sides::Together(u64::MAX - 4), 16).contains("wraps around"));
        assert!(refused(&[u64::MAX], Sides::Together(1), 16).contains("wraps around"));
    }

    #[test]
    fn an_array_is_read_wherever_it_begins() {
        let mut bytes = vec![0_u8; 1];
        bytes.extend([7_u64, u64::MAX].into_iter().flat_map(u64::to_ne_bytes));
        let array = bytes[1..].as_ptr().expose_provenance() as u64;
        // SAFETY: two words are there.
        assert_eq!(unsafe { addresses_at(array, 2) }.unwrap(), [7, u64::MAX]);
        // SAFETY: refused before anything is read.
        unsafe {
            assert!(addresses_at(0, 2).is_err());
            assert!(addresses_at(array, 0).is_err());
            assert!(addresses_at(array, usize::MAX).is_err());
        }
    }
}
