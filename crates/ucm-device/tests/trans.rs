//! Copies between devices and addresses from callers, over the host and over the software driver.
#![allow(clippy::unwrap_used, reason = "a helper of tests may fail the test")]
#![allow(unsafe_code, reason = "names memory of the test's own")]

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};

use crate::common::{ALLOCATIONS, Driver, Memory, REGISTRATIONS, Random, open};
use ucm_core::ErrorKind;
use ucm_device::trans::{Buffer, Copies, MemoryKind, Pools, Sides, pairs};
use ucm_device::{DeviceSpan, Direction, HostSpan, Transfer};
use ucm_infra::SystemClock;

type Pairs = Vec<(DeviceSpan, HostSpan)>;

/// The driver's counts and failures are global to the process.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The bytes of a buffer on the host.
fn host_bytes(buffer: &Buffer) -> Vec<u8> {
    let first = std::ptr::with_exposed_provenance::<u8>(buffer.address() as usize);
    // SAFETY: the bytes exist, and nothing writes them while the test reads.
    unsafe { std::slice::from_raw_parts(first, buffer.len()) }.to_vec()
}

fn poison(buffer: &Buffer) {
    let first = std::ptr::with_exposed_provenance_mut::<u8>(buffer.address() as usize);
    // SAFETY: the bytes exist, and nothing uses them while the test writes.
    unsafe { first.write_bytes(0xee, buffer.len()) }
}

/// Pieces of `size` bytes, `stride` apart on the device, alternating between two buffers of the
/// host.
fn in_turns(
    memory: &Memory,
    host: [&Buffer; 2],
    size: usize,
    stride: usize,
    count: usize,
) -> Pairs {
    let device: Vec<u64> = (0..count)
        .map(|i| memory.address + (i * stride) as u64)
        .collect();
    let sides: Vec<u64> = (0..count)
        .map(|i| host[i % 2].address() + (i / 2 * (size + 5)) as u64)
        .collect();
    // SAFETY: all are inside, and the test keeps them.
    unsafe { pairs(&device, Sides::Each(&sides), size) }.unwrap()
}

#[test]
fn neighbours_in_allocations_of_their_own_are_not_copied_as_one() {
    let (_alone, driver) = (alone(), Driver::load());
    for transfer in [
        Transfer::Auto,
        Transfer::Dma,
        Transfer::Sm,
        Transfer::Staging,
    ] {
        let device = open(transfer);
        let pools = Pools::new(Arc::clone(&device), SystemClock::shared());
        let mut copies = Copies::new(device.make_stream().unwrap());
        let host = pools.make(MemoryKind::Host, 8 * 4096).unwrap();
        driver.side_by_side(true);
        let memories: Vec<Memory> = (0..8).map(|_| driver.memory(4096)).collect();
        driver.side_by_side(false);
        assert!(
            memories
                .windows(2)
                .all(|two| two[0].address + 4096 == two[1].address)
        );
        let addresses: Vec<u64> = memories.iter().map(|memory| memory.address).collect();
        // SAFETY: all are inside, and the test keeps them.
        let pairs = unsafe { pairs(&addresses, Sides::Together(host.address()), 4096) }.unwrap();
        let bytes = Random::new(11).bytes(8 * 4096);
        for (memory, piece) in memories.iter().zip(bytes.chunks(4096)) {
            memory.fill(piece);
        }
        poison(&host);
        copies.transfer(Direction::ToHost, &pairs).unwrap();
        assert!(host_bytes(&host) == bytes, "{transfer:?}");
        memories.iter().for_each(|memory| memory.fill(&[0; 4096]));
        copies.transfer(Direction::ToDevice, &pairs).unwrap();
        let back: Vec<u8> = memories.iter().flat_map(Memory::bytes).collect();
        assert!(back == bytes, "{transfer:?}");
    }
}

#[test]
fn pieces_in_several_arenas_and_in_none_are_one_transfer() {
    let (_alone, driver) = (alone(), Driver::load());
    let memory = driver.memory(1 << 20);
    for (number, transfer) in [
        Transfer::Auto,
        Transfer::Dma,
        Transfer::Sm,
        Transfer::Staging,
    ]
    .into_iter()
    .enumerate()
    {
        let device = open(transfer);
        let pools = Pools::new(Arc::clone(&device), SystemClock::shared());
        let mut random = Random::new(3 + number as u64);
        let mut copies = Copies::new(device.make_stream().unwrap());
        for size in [1, 7, 64, 1000, 4096, 20_000] {
            let pinned = pools.make(MemoryKind::Host, 400_000).unwrap();
            let mut plain = random.bytes(400_000);
            // SAFETY: the vector is not touched during copies.
            let raw =
                unsafe { HostSpan::new(plain.as_mut_ptr().expose_provenance() as u64, 400_000) };
            let host = Pools::new(crate::common::open(transfer), SystemClock::shared());
            // of another device: not pinned for this one
            let other = host.make(MemoryKind::Host, 400_000).unwrap();
            let stride = size + 13;
            let pairs = in_turns(&memory, [&pinned, &other], size, stride, 20);
            let before = random.bytes(memory.len);
            memory.fill(&before);
            for buffer in [&pinned, &other] {
                poison(buffer);
            }
            copies.transfer(Direction::ToHost, &pairs).unwrap();
            let after = [host_bytes(&pinned), host_bytes(&other)];
            for (i, (_, side)) in pairs.iter().enumerate() {
                let at = (side.addr() - [&pinned, &other][i % 2].address()) as usize;
                let (piece, gap) = after[i % 2][at..at + size + 5].split_at(size);
                assert!(
                    piece == &before[i * stride..i * stride + size],
                    "{transfer:?}, {size}, piece {i}"
                );
                assert_eq!(gap, [0xee; 5], "{transfer:?}, {size}, piece {i}");
            }
            memory.fill(&vec![0; memory.len]);
            copies.transfer(Direction::ToDevice, &pairs).unwrap();
            let mut expected = vec![0; memory.len];
            for i in 0..20 {
                expected[i * stride..i * stride + size]
                    .copy_from_slice(&before[i * stride..i * stride + size]);
            }
            assert!(memory.bytes() == expected, "{transfer:?}, {size}");
            // SAFETY: as above.
            let plain_pair = unsafe { pairs_of_one(&memory, raw) };
            copies.transfer(Direction::ToHost, &plain_pair).unwrap();
            assert!(plain == expected[..400_000]);
        }
    }
}

/// # Safety
/// As [`HostSpan::new`].
unsafe fn pairs_of_one(memory: &Memory, raw: HostSpan) -> Pairs {
    vec![(memory.span(0, raw.len() as usize), raw)]
}

#[test]
fn a_stream_of_kernels_makes_no_plain_copy_of_what_is_registered() {
    let (_alone, driver) = (alone(), Driver::load());
    let device = open(Transfer::Auto);
    let pools = Pools::new(Arc::clone(&device), SystemClock::shared());
    let memory = driver.memory(12 << 20);
    let mut host = vec![1_u8; 12 << 20];
    // SAFETY: registered until the pools end, which is before the vector does, and touched only
    // between copies.
    let span = unsafe { HostSpan::new(host.as_mut_ptr().expose_provenance() as u64, 12 << 20) };
    let registrations = driver.live(REGISTRATIONS);
    pools.register(span).unwrap();
    assert_eq!(driver.live(REGISTRATIONS), registrations + 1);
    let pair = [(memory.span(0, 12 << 20), span)];
    let mut copies = Copies::new(device.make_stream_by(Transfer::Sm).unwrap());
    let copied = driver.calls("cuMemcpyDtoHAsync_v2");
    copies.transfer(Direction::ToHost, &pair).unwrap();
    assert_eq!(driver.calls("cuMemcpyDtoHAsync_v2"), copied);
    assert!(host == memory.bytes());
    assert_eq!(
        pools.register(span).unwrap_err().kind(),
        ErrorKind::InvalidInput
    );
    let registrations = driver.live(REGISTRATIONS);
    pools.unregister(span.addr()).unwrap();
    assert_eq!(driver.live(REGISTRATIONS), registrations - 1);
    assert_eq!(
        pools.unregister(span.addr()).unwrap_err().kind(),
        ErrorKind::InvalidInput
    );
    copies.transfer(Direction::ToHost, &pair).unwrap();
    assert!(
        driver.calls("cuMemcpyDtoHAsync_v2") > copied,
        "unregistered memory uses another method"
    );
}

#[test]
fn a_failed_copy_is_told_at_the_next_wait_and_once() {
    let (_alone, driver) = (alone(), Driver::load());
    let device = open(Transfer::Dma);
    let memory = driver.memory(4096);
    let pools = Pools::new(Arc::clone(&device), SystemClock::shared());
    let host = Arc::new(pools.make(MemoryKind::Host, 4096).unwrap());
    // SAFETY: the copies below keep the buffer.
    let span = unsafe { HostSpan::new(host.address(), 4096) };
    let mut copies = Copies::new(device.make_stream().unwrap());
    let pair = vec![(memory.span(0, 4096), span)];
    copies.transfer(Direction::ToDevice, &pair).unwrap();
    let (told, tell) = mpsc::channel();
    let submit = |copies: &mut Copies| {
        copies
            .transfer_async(Direction::ToDevice, pair.clone(), Arc::clone(&host))
            .unwrap();
        let told = told.clone();
        copies
            .callback(move |well| told.send(well).unwrap())
            .unwrap();
    };
    driver.fail("cuMemcpyHtoDAsync_v2", 1, 719);
    submit(&mut copies);
    submit(&mut copies);
    assert_eq!([tell.recv().unwrap(), tell.recv().unwrap()], [false, false]);
    assert_eq!(copies.synchronize(None).unwrap_err().kind(), ErrorKind::Io);
    submit(&mut copies);
    assert!(tell.recv().unwrap());
    copies.synchronize(None).unwrap();
    assert_eq!(Arc::strong_count(&host), 1, "finished copies keep nothing");
    driver.mend();
}

#[test]
fn memory_of_a_device_is_freed_when_its_last_user_ends() {
    let (_alone, driver) = (alone(), Driver::load());
    let device = open(Transfer::Auto);
    let before = driver.live(ALLOCATIONS);
    let pools = Pools::new(Arc::clone(&device), SystemClock::shared());
    let alone = pools.make(MemoryKind::Device, 100).unwrap();
    pools.fill(MemoryKind::Device, 1 << 20, 3).unwrap();
    assert_eq!(driver.live(ALLOCATIONS), before + 2);
    let of_pool = pools.get(MemoryKind::Device, 1 << 20, None).unwrap();
    drop((alone, pools));
    assert_eq!(driver.live(ALLOCATIONS), before + 1);
    drop(of_pool);
    assert_eq!(driver.live(ALLOCATIONS), before);
}
