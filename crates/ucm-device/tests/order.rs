//! Order, over streams that are held or lag. Memory of queued work stays unchanged, transfers stay
//! within their memory, and a copy begins after all its events.
#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::sync::mpsc;

use crate::common::{
    Caller, Driver, Memory, REGISTRATIONS, Random, eventually, gather, open_named, slot, while_held,
};
use ucm_device::{Piece, Transfer};

const MIB: usize = 1 << 20;

/// Bytes that are pinned at once.
const PART: usize = 64 * MIB;

/// Bytes that are staged at once.
const STAGED: usize = 8 * MIB;

/// Every device with its call that queries an event.
const DEVICES: [(&str, &str); 5] = [
    ("cuda", "cuEventQuery"),
    ("hip", "hipEventQuery"),
    ("musa", "musaEventQuery"),
    ("maca", "mcEventQuery"),
    ("ascend", "aclrtQueryEventStatus"),
];

/// Pieces of these lengths, from `at` on in the host buffer; `gaps` are the bytes between two of
/// them there and on the device.
fn pieces(memory: &Memory, at: usize, lens: &[usize], gaps: [usize; 2]) -> Vec<Piece> {
    let (mut at, mut address) = (at, 0);
    let mut pieces = Vec::new();
    for &len in lens {
        let span = memory.span(address, len);
        pieces.push(Piece { at, span });
        at += len + gaps[0];
        address += len + gaps[1];
    }
    pieces
}

/// Copies pieces from their places in `from` to their places in `into`: from the device to the host
/// if `to_host`. The slice of the host buffer begins at its byte `first`.
fn moved(
    pieces: &[Piece],
    memory: &Memory,
    first: usize,
    to_host: bool,
    from: &[u8],
    into: &mut [u8],
) {
    for piece in pieces {
        let (device, len) = (
            (piece.span.addr() - memory.address) as usize,
            piece.span.len() as usize,
        );
        let (source, target) = if to_host {
            (device, piece.at - first)
        } else {
            (piece.at - first, device)
        };
        into[target..target + len].copy_from_slice(&from[source..source + len]);
    }
}

/// Gathers and scatters pieces of a slot, which lie behind its byte `first`. The streams are held
/// at first and then lag.
fn move_held(
    driver: &Driver,
    name: &str,
    transfer: Transfer,
    slot_len: usize,
    memory: &Memory,
    pieces: &[Piece],
    first: usize,
) {
    let device = open_named(name, transfer);
    let (mut stream, mut slot) = (device.make_stream().unwrap(), slot(&*device, slot_len));
    let mut random = Random::new(pieces.len() as u64);
    let what = format!("{name}, {transfer:?}, {} pieces", pieces.len());
    let launched = driver.calls("cuLaunchKernel");
    for seed in 1..3 {
        driver.jitter(seed, 300);
        let (on_device, on_host) = (random.bytes(memory.len), random.bytes(slot.len() - first));
        memory.fill(&on_device);
        slot.as_mut_slice()[first..].copy_from_slice(&on_host);
        let mut right = on_host.clone();
        moved(pieces, memory, first, true, &on_device, &mut right);
        while_held(driver, name, || {
            gather(&mut *stream, pieces, slot.as_mut_slice())
        })
        .unwrap();
        assert!(slot.as_slice()[first..] == right, "{what}: gathered");

        slot.as_mut_slice()[first..].copy_from_slice(&on_host);
        let mut right = on_device;
        moved(pieces, memory, first, false, &on_host, &mut right);
        while_held(driver, name, || stream.scatter(slot.as_slice(), pieces)).unwrap();
        assert!(memory.bytes() == right, "{what}: scattered");
    }
    driver.jitter(1, 0);
    // A method found wrong at the opening of the device would not be used.
    if matches!(transfer, Transfer::Sm | Transfer::Staging) {
        assert!(
            driver.calls("cuLaunchKernel") >= launched + 4,
            "{what}: not by kernels"
        );
    }
}

/// Descriptors are copied in rounds of 16384 from one buffer, which the device reads later.
#[test]
fn descriptors_of_a_round_are_left_alone_until_the_device_has_them() {
    const COUNT: usize = 16_400;
    let driver = Driver::load();
    let memory = driver.memory(COUNT * 48);
    for transfer in [Transfer::Sm, Transfer::Staging] {
        let all = pieces(&memory, 0, &[16; COUNT], [0, 16]);
        move_held(&driver, "cuda", transfer, COUNT * 16, &memory, &all, 0);
    }
}

/// Small pieces go through a buffer on the device. No byte behind its end is used.
#[test]
fn what_is_staged_at_once_fits_the_buffer() {
    const LEN: usize = 8 << 10;
    let driver = Driver::load();
    let memory = driver.memory(STAGED + 20 * LEN);
    for (short, gap) in [(LEN, 0), (LEN - 200, 8)] {
        // The long one ends one byte behind the end of the buffer.
        let mut lens = vec![short; STAGED / LEN - 1];
        lens.extend([LEN + 1, LEN, LEN, 1]);
        let all = pieces(&memory, 0, &lens, [gap, 16]);
        move_held(
            &driver,
            "cuda",
            Transfer::Staging,
            STAGED + 20 * LEN,
            &memory,
            &all,
            0,
        );
    }
}

/// No copy crosses the border of two parts of pinned memory, and kernels use the address of each
/// part: for a piece that crosses the border, and for two pieces that meet there.
#[test]
fn transfers_respect_the_parts_that_host_memory_is_pinned_in() {
    let driver = Driver::load();
    let memory = driver.memory(MIB);
    for (name, _) in DEVICES {
        let transfers = match name {
            "cuda" => &[
                Transfer::Auto,
                Transfer::Dma,
                Transfer::Sm,
                Transfer::Staging,
            ][..],
            _ => &[Transfer::Auto][..],
        };
        for &transfer in transfers {
            for from in [PART - 2000, PART - 2500] {
                let all = pieces(&memory, from, &[1000; 8], [0, 24]);
                let registered = driver.live(REGISTRATIONS);
                move_held(
                    &driver,
                    name,
                    transfer,
                    PART + MIB,
                    &memory,
                    &all,
                    PART - MIB,
                );
                assert_eq!(
                    driver.live(REGISTRATIONS),
                    registered,
                    "{name}: everything is released"
                );
            }
        }
    }
}

/// Both parts are pinned, and no third.
#[test]
fn a_transfer_pins_the_parts_that_it_reaches() {
    let driver = Driver::load();
    let memory = driver.memory(4000);
    for (name, _) in DEVICES {
        let device = open_named(name, Transfer::Auto);
        let mut stream = device.make_stream().unwrap();
        let mut slot = slot(&*device, 3 * PART);
        let registered = driver.live(REGISTRATIONS);
        for (count, at) in [(1, 0), (2, PART - 2000)] {
            let all = pieces(&memory, at, &[4000], [0, 0]);
            let end = at + 4000;
            gather(&mut *stream, &all, &mut slot.as_mut_slice()[..end]).unwrap();
            let pinned = driver.live(REGISTRATIONS) - registered;
            assert_eq!(pinned, count, "{name}");
        }
    }
}

/// Two streams of the caller's write a half of the source each. The copy begins after both events,
/// whichever is done first.
#[test]
fn a_copy_after_two_events_has_what_both_streams_wrote() {
    const LEN: usize = 4096;
    let driver = Driver::load();
    let memory = driver.memory(LEN);
    for (name, asked) in DEVICES {
        for first in [0, 1] {
            let device = open_named(name, Transfer::Auto);
            memory.fill(&[1; LEN]);
            let callers = [0, 1].map(|number| {
                let caller = Caller::held(&driver);
                caller.set(&memory, number * LEN / 2, LEN / 2, 7 + number as u8);
                caller
            });
            let events = [0, 1].map(|number: usize| {
                let recorded: u64 = callers[number].record();
                device.event_of(recorded).unwrap()
            });
            let whole = pieces(&memory, 0, &[LEN], [0, 0]);
            let (done, told) = mpsc::channel();
            let (mut stream, mut slot) = (device.make_stream().unwrap(), slot(&*device, LEN));
            std::thread::spawn(move || {
                let waited = events.iter().try_for_each(|event| event.wait(None));
                let result =
                    waited.and_then(|()| gather(&mut *stream, &whole, slot.as_mut_slice()));
                done.send((slot, result)).unwrap();
            });
            driver.jitter(first as u64 + 1, 300);
            callers[first].go();
            callers[first].synchronize();
            // One query may still be of the completed event. Further ones are of the other event.
            let before = driver.calls(asked);
            let mut early = None;
            eventually("the other event is queried", || {
                early = early.take().or_else(|| told.try_recv().ok());
                early.is_some() || driver.calls(asked) > before + 2
            });
            assert!(
                early.is_none(),
                "{name}: copied before event {} was done",
                1 - first
            );
            callers[1 - first].go();
            let (slot, result) = told.recv().unwrap();
            result.unwrap();
            let halves = [[7; LEN / 2], [8; LEN / 2]].concat();
            assert!(
                slot.as_slice() == halves,
                "{name}: copied before its events were done"
            );
            driver.jitter(1, 0);
        }
    }
}
