//! Moving a block between the host device and a slot, in one transfer of many pieces, beside one
//! memcpy of as many bytes: parts of its speed, taken in turns, from and to memory that no cache
//! holds.
#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    unsafe_code,
    reason = "a bench prints its table, fails where it must, and names its own memory"
)]

use ucm_benches::{asked_for, in_turns};
use ucm_core::Geometry;
use ucm_device::{Device, DeviceSpan, HostArena, HostDevice, Piece, Slot, SlotPool};
use ucm_record::RecordLayout;

/// Bytes on each side that take turns: more than the caches of most processors.
const BYTES: usize = 128 << 20;
/// Bytes of a block.
const BLOCK: usize = 1 << 20;
/// Blocks moved in one turn.
const AT_ONCE: usize = 16;
/// Alignment of the device's memory, as tensors have it: some processors copy to memory a few bytes
/// off far more slowly.
const ALIGN: usize = 64;

/// The pieces of the block at this address, of `len` bytes each, and where they lie in the record.
fn pieces(first: u64, len: usize, layout: &RecordLayout) -> Vec<Piece> {
    let piece = |layer: u32| Piece {
        at: layout.layer_data(layer).start,
        // SAFETY: inside the memory, which outlives every copy and is touched by nothing else
        // meanwhile.
        span: unsafe { DeviceSpan::new(first + u64::from(layer) * len as u64, len as u64) },
    };
    (0..layout.layers()).map(piece).collect()
}

fn main() {
    if !asked_for("copies") {
        return;
    }
    println!(
        "| piece | memcpy GB/s | gather | scatter | gather, checksum as it lands | the same, a \
         call for each layer | gather, then checksum |\n\
         |---|---|---|---|---|---|---|"
    );
    let mut stream = HostDevice::new().make_stream().unwrap();
    let mut memory = vec![1u8; BYTES + ALIGN];
    let start = memory.as_ptr().align_offset(ALIGN);
    let base = memory[start..].as_mut_ptr() as u64;
    for kib in [8usize, 32, 256] {
        let len = kib << 10;
        let layers = (BLOCK / len) as u32;
        let layout = RecordLayout::new(&Geometry::new(vec![len as u64], layers, layers).unwrap());
        let record = layout.record_len();
        let pool =
            SlotPool::new(HostArena::new(record * (BYTES / BLOCK)).unwrap(), record).unwrap();
        let mut slots: Vec<Slot> = std::iter::from_fn(|| pool.try_acquire()).collect();
        slots
            .iter_mut()
            .for_each(|slot| slot.as_mut_slice().fill(2));
        let header = layout.header_len();
        let stream = std::cell::RefCell::new(&mut stream);
        let slots = std::cell::RefCell::new(slots);
        let next = std::cell::Cell::new(0);
        let each = |work: &mut dyn FnMut(usize, &mut [u8])| {
            for _ in 0..AT_ONCE {
                let number = next.replace((next.get() + 1) % (BYTES / BLOCK));
                work(number * BLOCK, slots.borrow_mut()[number].as_mut_slice());
            }
        };
        let fastest = in_turns([
            &mut || {
                each(&mut |at, slot| {
                    let source = std::hint::black_box(&memory[start + at..start + at + BLOCK]);
                    slot[header..header + BLOCK].copy_from_slice(source);
                });
            },
            &mut || {
                each(&mut |at, slot| {
                    let pieces = pieces(base + at as u64, len, &layout);
                    stream
                        .borrow_mut()
                        .gather(&pieces, slot, &mut |_, _| {})
                        .unwrap();
                });
            },
            &mut || {
                each(&mut |at, slot| {
                    let pieces = pieces(base + at as u64, len, &layout);
                    stream.borrow_mut().scatter(slot, &pieces).unwrap();
                });
            },
            &mut || {
                each(&mut |at, slot| {
                    let pieces = pieces(base + at as u64, len, &layout);
                    let mut seal = |slot: &mut [u8], landed: usize| {
                        std::hint::black_box(layout.seal_layer(slot, landed as u32 - 1));
                    };
                    stream
                        .borrow_mut()
                        .gather(&pieces, slot, &mut seal)
                        .unwrap();
                });
            },
            &mut || {
                each(&mut |at, slot| {
                    for (piece, layer) in pieces(base + at as u64, len, &layout).iter().zip(0..) {
                        let mut stream = stream.borrow_mut();
                        stream.gather(&[*piece], slot, &mut |_, _| {}).unwrap();
                        std::hint::black_box(layout.seal_layer(slot, layer));
                    }
                });
            },
            &mut || {
                each(&mut |at, slot| {
                    let pieces = pieces(base + at as u64, len, &layout);
                    stream
                        .borrow_mut()
                        .gather(&pieces, slot, &mut |_, _| {})
                        .unwrap();
                    for layer in 0..layers {
                        std::hint::black_box(layout.seal_layer(slot, layer));
                    }
                });
            },
        ]);
        let memcpy = fastest[0].as_secs_f64();
        let parts = fastest[1..].iter().map(|time| memcpy / time.as_secs_f64());
        let parts: Vec<String> = parts.map(|part| format!("{part:.2}")).collect();
        let gbps = (AT_ONCE * BLOCK) as f64 / memcpy / 1e9;
        println!("| {kib} KiB | {gbps:.1} | {} |", parts.join(" | "));
    }
}
