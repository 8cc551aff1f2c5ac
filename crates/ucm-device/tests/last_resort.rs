//! Copy methods with wrong bytes: each is detected at the opening of the device, logged and not
//! used. The next method is used instead, down to plain copies; if those are wrong too, the device
//! is refused.
#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]

use std::ffi::CStr;

use crate::common::{Driver, Random, open};
use ucm_core::{ErrorKind, Result};
use ucm_device::{ArenaOptions, Piece, SlotPool, Transfer, open_device};
use ucm_infra::{SystemClock, log};

const TRANSFERS: [Transfer; 4] = [
    Transfer::Auto,
    Transfer::Dma,
    Transfer::Sm,
    Transfer::Staging,
];

const TO_DEVICE: &CStr = c"cuMemcpyHtoDAsync_v2";
const TO_HOST: &CStr = c"cuMemcpyDtoHAsync_v2";
const PLAIN: [&str; 2] = ["cuMemcpyHtoD_v2", "cuMemcpyDtoH_v2"];

/// The methods disabled since the last call, by the log.
fn said() -> Vec<String> {
    let records = log::take(0).into_iter(); // records without a store
    let wrong = records.filter(|it| it.message.contains("wrong on this device"));
    let mut said: Vec<String> = wrong
        .map(|it| {
            assert_eq!(it.level, log::Level::ERROR);
            let field = |name| {
                it.fields
                    .iter()
                    .find(|(key, _)| *key == name)
                    .unwrap()
                    .1
                    .clone()
            };
            format!("{} {}", field("method"), field("direction"))
        })
        .collect();
    said.sort();
    said
}

/// Moves small and large pieces in both directions by a device on which these methods are wrong;
/// returns the number of plain copies in each direction.
fn moves(driver: &Driver, transfer: Transfer, wrong: &[&CStr]) -> [u64; 2] {
    let memory = driver.memory(3 << 20);
    wrong.iter().for_each(|name| driver.corrupt(name));
    let device = open(transfer);
    let before = PLAIN.map(|call| driver.calls(call));
    let mut stream = device.make_stream().unwrap();
    let arena = device.make_arena(1 << 20, ArenaOptions::default()).unwrap();
    let mut slot = SlotPool::new(arena, 1 << 20)
        .unwrap()
        .try_acquire()
        .unwrap();
    let mut pieces: Vec<Piece> = (0..100)
        .map(|i| Piece {
            at: i * 1000,
            span: memory.span(i * 3000, 1000),
        })
        .collect();
    pieces.push(Piece {
        at: 200_000,
        span: memory.span(1 << 20, 800_000),
    });
    let (bytes, content) = (
        Random::new(1).bytes(memory.len),
        Random::new(2).bytes(slot.len()),
    );
    memory.fill(&bytes);
    slot.as_mut_slice().copy_from_slice(&content);
    stream.scatter(slot.as_slice(), &pieces).unwrap();
    let mut expected = bytes;
    for piece in &pieces {
        let (to, len) = (
            (piece.span.addr() - memory.address) as usize,
            piece.span.len() as usize,
        );
        expected[to..to + len].copy_from_slice(&content[piece.at..piece.at + len]);
    }
    assert!(memory.bytes() == expected, "{transfer:?} without {wrong:?}");
    slot.as_mut_slice().fill(7);
    stream
        .gather(&pieces, slot.as_mut_slice(), &mut |_, _| {})
        .unwrap();
    let mut host = vec![7; slot.len()];
    for piece in &pieces {
        let here = piece.at..piece.at + piece.span.len() as usize;
        host[here.clone()].copy_from_slice(&content[here]);
    }
    assert!(slot.as_slice() == host, "{transfer:?} without {wrong:?}");
    let plain = std::array::from_fn(|i| driver.calls(PLAIN[i]) - before[i]);
    driver.sound();
    plain
}

#[test]
fn a_method_that_is_wrong_is_said_and_the_next_one_taken() {
    log::keep();
    let driver = Driver::load();
    driver.model(true);
    let _loaded = open(Transfer::Auto); // its kernels can be named
    assert!(said().is_empty());
    for transfer in TRANSFERS {
        let run = |wrong: &[&CStr], off: &[&str]| {
            let plain = moves(&driver, transfer, wrong);
            if transfer == Transfer::Auto {
                assert_eq!(said(), off); // the log limits lines a minute
            }
            plain
        };
        assert_eq!(run(&[], &[]), [0, 0]);
        assert_eq!(run(&[c"ucm_gather"], &["staging ToHost"]), [0, 0]);
        assert_eq!(run(&[c"ucm_scatter"], &["staging ToDevice"]), [0, 0]);
        let direct = ["sm ToDevice", "sm ToHost"];
        assert_eq!(run(&[c"ucm_batch"], &direct), [0, 0]);
        let kernels = [direct.as_slice(), &["staging ToDevice", "staging ToHost"]].concat();
        assert_eq!(
            run(&[c"ucm_gather", c"ucm_scatter", c"ucm_batch"], &kernels),
            [0, 0]
        );
        // Copies of streams to the host are wrong: kernels that write there remain, and plain
        // copies for the rest.
        let plain = run(&[TO_HOST], &["dma ToHost", "staging ToHost"]);
        let alone = transfer == Transfer::Dma; // every piece by itself
        assert_eq!((plain[0], plain[1] > 0), (0, alone), "{transfer:?}");
        // And to the device, which also affects descriptors of kernels.
        let to_device = [&["dma ToDevice"], kernels.as_slice()].concat();
        assert_eq!(run(&[TO_DEVICE], &to_device), [101, 0], "a piece each");
        let all = [&["dma ToDevice", "dma ToHost"], kernels.as_slice()].concat();
        assert_eq!(run(&[TO_DEVICE, TO_HOST], &all), [101, 101]);
    }
}

#[test]
fn a_device_whose_plain_copies_are_wrong_too_is_refused() {
    let driver = Driver::load();
    driver.model(true);
    let refused = |wrong: &[&CStr]| -> Result<()> {
        wrong.iter().for_each(|name| driver.corrupt(name));
        let opened = open_device("cuda", Transfer::Auto, SystemClock::shared());
        driver.sound();
        opened.map(drop)
    };
    refused(&[c"cuMemcpyHtoD_v2", c"cuMemcpyDtoH_v2"]).unwrap(); // never used
    for plain in [c"cuMemcpyHtoD_v2", c"cuMemcpyDtoH_v2"] {
        let error = refused(&[TO_HOST, plain]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    }
}

#[test]
fn runtimes_of_other_vendors_have_plain_copies_too() {
    let driver = Driver::load();
    let memory = driver.memory(1 << 20);
    let names = [
        ("hip", ["hipMemcpy", "hipMemcpyAsync"]),
        ("musa", ["musaMemcpy", "musaMemcpyAsync"]),
        ("maca", ["mcMemcpy", "mcMemcpyAsync"]),
        ("ascend", ["aclrtMemcpy", "aclrtMemcpyAsync"]),
    ];
    for (name, calls) in names {
        // The faults apply to every vendor: the copies below their names are the same.
        [TO_DEVICE, TO_HOST]
            .iter()
            .for_each(|name| driver.corrupt(name));
        let device = open_device(name, Transfer::Auto, SystemClock::shared()).unwrap();
        let before = calls.map(|call| driver.calls(call));
        let mut stream = device.make_stream().unwrap();
        let pieces: Vec<Piece> = (0..7)
            .map(|i| Piece {
                at: i * 1000,
                span: memory.span(i * 3000, 1000),
            })
            .collect();
        let content = Random::new(5).bytes(7000);
        stream.scatter(&content, &pieces).unwrap();
        let mut back = vec![0; 7000];
        stream.gather(&pieces, &mut back, &mut |_, _| {}).unwrap();
        assert!(back == content, "{name}");
        let made: Vec<u64> = (0..2).map(|i| driver.calls(calls[i]) - before[i]).collect();
        assert_eq!(
            made,
            [14, 0],
            "{name}: a plain copy for each piece each way"
        );
        driver.corrupt(c"cuMemcpyHtoD_v2");
        let refused = open_device(name, Transfer::Auto, SystemClock::shared());
        driver.sound();
        assert_eq!(refused.err().unwrap().kind(), ErrorKind::Corrupt, "{name}");
    }
}
