//! The host platform against plain memory.
#![allow(
    unsafe_code,
    reason = "device spans over the tests' own buffers, which outlive every operation"
)]

use std::sync::mpsc;
use std::time::Duration;

use parking_lot::Mutex;
use ucm_core::ErrorKind;
use ucm_infra::{Clock, ManualClock, MonotonicTime};

use super::*;
use crate::slots::SlotPool;

/// Ordinary memory used as device memory.
struct Memory(Vec<u8>);

impl Memory {
    fn counted(len: usize) -> Self {
        Self((0..len).map(|i| (i * 7 + 3) as u8).collect())
    }

    fn zeroed(len: usize) -> Self {
        Self(vec![0; len])
    }

    /// The span of `len` bytes at `at`.
    fn span(&mut self, at: usize, len: usize) -> DeviceSpan {
        assert!(at + len <= self.0.len());
        let base = self.0.as_mut_ptr().expose_provenance();
        // SAFETY: inside the vector, which the test keeps and does not touch until all operations
        // ended.
        unsafe { DeviceSpan::new((base + at) as u64, len as u64) }
    }
}

/// Pieces that lie one after the other in the host buffer, the first at `at`.
fn end_to_end(mut at: usize, spans: &[DeviceSpan]) -> Vec<Piece> {
    let piece = |&span: &DeviceSpan| {
        let piece = Piece { at, span };
        at += span.len() as usize;
        piece
    };
    spans.iter().map(piece).collect()
}

/// Gathers without progress reports.
fn gather(stream: &mut dyn Stream, src: &[Piece], dst: &mut [u8]) -> Result<()> {
    stream.gather(src, dst, &mut |_, _| {})
}

/// A device on a manual clock.
fn device_with_clock() -> (HostDevice, Arc<ManualClock>) {
    let clock = ManualClock::new();
    let options = QueueOptions {
        clock: Arc::clone(&clock) as Arc<dyn Clock>,
        ..QueueOptions::default()
    };
    (HostDevice::with(options).unwrap(), clock)
}

fn stream() -> Box<dyn Stream> {
    HostDevice::new().make_stream().unwrap()
}

/// A stream whose thread blocks in a callback until the returned sender is used or dropped.
fn held_stream(device: &HostDevice) -> (Box<dyn Stream>, mpsc::Sender<()>) {
    let mut stream = device.make_stream().unwrap();
    let (release, held) = mpsc::channel::<()>();
    let (started, is_running) = mpsc::channel();
    stream
        .callback(Box::new(move || {
            started.send(()).unwrap();
            let _ = held.recv();
        }))
        .unwrap();
    is_running.recv().unwrap();
    (stream, release)
}

#[test]
fn scatter_and_gather_are_inverse() {
    let mut device = Memory::zeroed(1000);
    let spans = [
        device.span(500, 100),
        device.span(10, 300),
        device.span(900, 0),
    ];
    let pieces = end_to_end(0, &spans);
    let source: Vec<u8> = (0..400).map(|i| i as u8).collect();
    let mut stream = stream();
    stream.scatter(&source, &pieces).unwrap();
    let mut back = vec![0; 400];
    gather(&mut *stream, &pieces, &mut back).unwrap();
    assert_eq!(back, source);
    assert_eq!(device.0[500..600], source[..100]);
    assert_eq!(device.0[10..310], source[100..]);
    assert!(device.0[310..500].iter().all(|&byte| byte == 0));
}

#[test]
fn pieces_leave_the_bytes_between_them_alone() {
    let mut device = Memory::counted(64);
    let pieces = [
        Piece {
            at: 64,
            span: device.span(0, 10),
        },
        Piece {
            at: 0,
            span: device.span(32, 20),
        },
    ];
    let mut host = vec![0xEE; 128];
    gather(&mut *stream(), &pieces, &mut host).unwrap();
    assert_eq!(host[..20], device.0[32..52]);
    assert_eq!(host[64..74], device.0[..10]);
    assert!(
        host[20..64]
            .iter()
            .chain(&host[74..])
            .all(|&byte| byte == 0xEE)
    );
    let mut other = Memory::zeroed(64);
    let to = [Piece {
        at: 64,
        span: other.span(5, 10),
    }];
    stream().scatter(&host, &to).unwrap();
    assert_eq!(other.0[5..15], device.0[..10]);
}

#[test]
fn copies_move_within_the_device() {
    let mut device = Memory::counted(100);
    let before = device.0.clone();
    let (a, b, c) = (device.span(0, 10), device.span(50, 10), device.span(55, 10));
    let mut stream = stream();
    stream.copy(a, b).unwrap();
    assert_eq!(device.0[50..60], before[..10]);
    // Overlapping, as when a block moves by a few bytes.
    stream.copy(b, c).unwrap();
    assert_eq!(device.0[55..65], before[..10]);
    let far = device.span(90, 10);
    stream.batch(&[(a, far), (c, c)]).unwrap();
    assert_eq!(device.0[90..], before[..10]);
}

#[test]
fn wrong_lengths_are_refused_before_the_first_byte_moves() {
    let mut device = Memory::counted(100);
    let (short, long) = (device.span(0, 10), device.span(20, 11));
    let mut stream = stream();
    let mut host = vec![0xEE; 20];
    let kind = |result: Result<()>| result.unwrap_err().kind();
    assert_eq!(kind(stream.copy(short, long)), ErrorKind::InvalidInput);
    // SAFETY: refused before it is read.
    let null = unsafe { DeviceSpan::new(0, 20) };
    let wraps = Piece {
        at: usize::MAX,
        span: short,
    };
    for wrong in [
        end_to_end(0, &[short, long]),
        vec![wraps],
        end_to_end(0, &[null]),
    ] {
        let mut none = |_: &mut [u8], landed| panic!("{landed} pieces landed");
        assert_eq!(
            kind(stream.gather(&wrong, &mut host, &mut none)),
            ErrorKind::InvalidInput
        );
        assert_eq!(kind(stream.scatter(&host, &wrong)), ErrorKind::InvalidInput);
    }
    assert!(host.iter().all(|&byte| byte == 0xEE));
    assert_eq!(device.0, Memory::counted(100).0);
}

#[test]
fn async_copies_own_their_slot_and_give_it_back() {
    let mut device = Memory::counted(8192);
    let pool = SlotPool::new(HostArena::new(4096).unwrap(), 4096).unwrap();
    let spans = [device.span(4096, 4000), device.span(0, 96)];
    let mut stream = stream();
    let (send, got) = mpsc::channel();
    let back = send.clone();
    stream.gather_async(
        end_to_end(0, &spans),
        pool.try_acquire().unwrap().into(),
        Box::new(move |buf, result| back.send((buf, result)).unwrap()),
    );
    let (buf, result) = got.recv().unwrap();
    result.unwrap();
    assert_eq!(buf[..4000], device.0[4096..8096]);
    assert_eq!(buf[4000..], device.0[..96]);
    assert_eq!(pool.available(), 0);
    let mut target = Memory::zeroed(4096);
    let to = end_to_end(0, &[target.span(0, 4096)]);
    stream.scatter_async(
        buf,
        to,
        Box::new(move |buf, result| send.send((buf, result)).unwrap()),
    );
    let (buf, result) = got.recv().unwrap();
    result.unwrap();
    assert_eq!(target.0[..], buf[..]);
    drop(buf);
    assert_eq!(pool.available(), 1);
}

#[test]
fn one_stream_keeps_its_order_across_sync_and_async() {
    let mut device = Memory::zeroed(16);
    let span = device.span(0, 16);
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut stream = stream();
    for round in 1..=100u8 {
        let note = Arc::clone(&order);
        stream.scatter_async(
            vec![round; 16].into(),
            end_to_end(0, &[span]),
            Box::new(move |_, result| {
                result.unwrap();
                note.lock().push(round);
            }),
        );
    }
    // A synchronous copy runs after all earlier work.
    let mut host = [0; 16];
    gather(&mut *stream, &end_to_end(0, &[span]), &mut host).unwrap();
    assert_eq!(host, [100; 16]);
    assert_eq!(*order.lock(), (1..=100).collect::<Vec<u8>>());
}

#[test]
fn wrong_async_copies_report_and_return_their_buffer() {
    let mut device = Memory::counted(10);
    let (send, got) = mpsc::channel();
    let mut stream = stream();
    stream.gather_async(
        end_to_end(5, &[device.span(0, 10)]),
        vec![1; 10].into(),
        Box::new(move |buf, result| send.send((buf.to_vec(), result)).unwrap()),
    );
    let (buf, result) = got.recv().unwrap();
    assert_eq!(result.unwrap_err().kind(), ErrorKind::InvalidInput);
    assert_eq!(buf, [1; 10]);
    let (send, got) = mpsc::channel();
    let (a, b) = (device.span(0, 4), device.span(4, 5));
    stream.copy_async(a, b, Box::new(move |result| send.send(result).unwrap()));
    assert_eq!(
        got.recv().unwrap().unwrap_err().kind(),
        ErrorKind::InvalidInput
    );
}

#[test]
fn a_full_queue_is_busy_and_everything_comes_back() {
    let device = HostDevice::with(QueueOptions {
        queue: 1,
        ..QueueOptions::default()
    })
    .unwrap();
    let (mut stream, release) = held_stream(&device);
    stream.callback(Box::new(|| ())).unwrap();
    assert_eq!(
        stream.callback(Box::new(|| ())).unwrap_err().kind(),
        ErrorKind::Busy
    );
    assert_eq!(stream.record().err().unwrap().kind(), ErrorKind::Busy);
    let (send, got) = mpsc::channel();
    stream.gather_async(
        Vec::new(),
        vec![9].into(),
        Box::new(move |buf, result| send.send((buf.to_vec(), result)).unwrap()),
    );
    let (buf, result) = got.recv().unwrap();
    assert_eq!(
        (buf, result.unwrap_err().kind()),
        (vec![9], ErrorKind::Busy)
    );
    drop(release);
    stream.synchronize(None).unwrap();
    stream.callback(Box::new(|| ())).unwrap();
    assert!(
        HostDevice::with(QueueOptions {
            queue: 0,
            ..QueueOptions::default()
        })
        .is_err()
    );
}

#[test]
fn waits_end_at_their_deadline_on_the_injected_clock() {
    let (device, clock) = device_with_clock();
    let (mut stream, release) = held_stream(&device);
    let event = stream.record().unwrap();
    assert!(!event.done());
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| event.wait(Some(MonotonicTime(5))));
        clock.await_sleepers(1);
        clock.advance(Duration::from_nanos(5));
        assert_eq!(
            waiter.join().unwrap().unwrap_err().kind(),
            ErrorKind::Timeout
        );
    });
    // The clock is at the deadline, so these do not wait.
    assert_eq!(
        stream.synchronize(Some(clock.now())).unwrap_err().kind(),
        ErrorKind::Timeout
    );
    drop(release);
    stream.synchronize(None).unwrap();
    assert!(event.done());
    event.wait(Some(MonotonicTime(0))).unwrap();
}

#[test]
fn a_synchronous_copy_gives_up_on_a_stalled_stream() {
    let device = HostDevice::with(QueueOptions {
        drain: Duration::ZERO,
        clock: ManualClock::new(),
        ..QueueOptions::default()
    })
    .unwrap();
    let (mut stream, release) = held_stream(&device);
    let mut memory = Memory::counted(4);
    let mut host = [0; 4];
    let pieces = end_to_end(0, &[memory.span(0, 4)]);
    let error = gather(&mut *stream, &pieces, &mut host).unwrap_err();
    assert_eq!((error.kind(), host), (ErrorKind::Timeout, [0; 4]));
    drop(release);
    stream.synchronize(None).unwrap();
    gather(&mut *stream, &pieces, &mut host).unwrap();
    assert_eq!(host[..], memory.0);
}

#[test]
fn one_stream_waits_for_the_event_of_another() {
    let device = HostDevice::new();
    let (mut first, release) = held_stream(&device);
    let mut memory = Memory::zeroed(8);
    let span = memory.span(0, 8);
    first.scatter_async(
        vec![5; 8].into(),
        end_to_end(0, &[span]),
        Box::new(|_, result| result.unwrap()),
    );
    let event = first.record().unwrap();
    let mut second = device.make_stream().unwrap();
    second
        .wait_event(Arc::clone(&event), MonotonicTime::NEVER)
        .unwrap();
    let (send, got) = mpsc::channel();
    second.gather_async(
        end_to_end(0, &[span]),
        vec![0; 8].into(),
        Box::new(move |buf, result| {
            result.unwrap();
            send.send(buf.to_vec()).unwrap();
        }),
    );
    assert!(got.try_recv().is_err());
    drop(release);
    assert_eq!(got.recv().unwrap(), [5; 8]);
    assert!(event.done());
    // An event that is done adds no wait.
    second.wait_event(event, MonotonicTime(0)).unwrap();
    gather(&mut *second, &[], &mut []).unwrap();
}

#[test]
fn what_landed_is_told_while_a_gather_goes_on() {
    let mut device = Memory::counted(96);
    let spans = [device.span(64, 32), device.span(0, 32), device.span(32, 32)];
    let pieces = end_to_end(8, &spans);
    let (mut host, mut told) = (vec![0; 128], 0);
    let mut landed = |host: &mut [u8], count: usize| {
        let bytes = |piece: &Piece| host[piece.at..piece.at + 32].to_vec();
        let there: Vec<u8> = pieces[..count].iter().flat_map(bytes).collect();
        assert_eq!(
            there,
            [&device.0[64..], &device.0[..64]].concat()[..32 * count]
        );
        host[0] += 1; // the callback may write beside the pieces
        told = count;
    };
    stream().gather(&pieces, &mut host, &mut landed).unwrap();
    assert_eq!(told, 3, "finally all are copied");
    assert!(host[0] >= 1);
}

#[test]
fn a_synchronous_copy_waits_for_an_event_that_is_recorded_later() {
    let (device, clock) = device_with_clock();
    let event = device.make_event().unwrap();
    let mut memory = Memory::zeroed(8);
    let pieces = end_to_end(0, &[memory.span(0, 8)]);
    let (mut stream, mut other) = (device.make_stream().unwrap(), device.make_stream().unwrap());
    stream
        .wait_event(Arc::clone(&event), MonotonicTime::NEVER)
        .unwrap();
    std::thread::scope(|scope| {
        let pieces = &pieces;
        let gathered = scope.spawn(move || {
            let mut host = [0; 8];
            gather(&mut *stream, pieces, &mut host).map(|()| host)
        });
        clock.await_sleepers(2); // the stream's thread, and the thread that waits for it
        other.scatter(&[7; 8], pieces).unwrap();
        event.record();
        assert_eq!(gathered.join().unwrap().unwrap(), [7; 8]);
    });
    assert!(event.done());
}

#[test]
fn a_stream_whose_event_comes_too_late_copies_nothing_more() {
    let (device, clock) = device_with_clock();
    let event = device.make_event().unwrap();
    let mut memory = Memory::counted(8);
    let pieces = end_to_end(0, &[memory.span(0, 8)]);
    let mut stream = device.make_stream().unwrap();
    stream
        .wait_event(Arc::clone(&event), MonotonicTime(5))
        .unwrap();
    let (send, got) = mpsc::channel();
    let (back, called) = (send.clone(), send.clone());
    stream.gather_async(
        pieces.clone(),
        vec![0xEE; 8].into(),
        Box::new(move |buf, result| back.send((buf.to_vec(), result)).unwrap()),
    );
    let after = Box::new(move || called.send((Vec::new(), Ok(()))).unwrap());
    stream.callback(after).unwrap();
    clock.await_sleepers(1);
    assert!(got.try_recv().is_err(), "nothing moves before");
    clock.advance(Duration::from_nanos(5));
    let (buf, result) = got.recv().unwrap();
    assert_eq!(
        (buf, result.unwrap_err().kind()),
        (vec![0xEE; 8], ErrorKind::Timeout)
    );
    assert!(got.recv().unwrap().1.is_ok(), "callbacks are called");
    event.record();
    let mut host = [0; 8];
    let error = gather(&mut *stream, &pieces, &mut host).unwrap_err();
    assert_eq!((error.kind(), host), (ErrorKind::Timeout, [0; 8]));
    gather(&mut *device.make_stream().unwrap(), &pieces, &mut host).unwrap();
    assert_eq!(host[..], memory.0);
}

#[test]
fn a_panicking_callback_does_not_stop_the_stream() {
    let mut stream = stream();
    stream
        .callback(Box::new(|| {
            panic!("a callback's own panic (expected in this test)")
        }))
        .unwrap();
    let (send, got) = mpsc::channel();
    stream
        .callback(Box::new(move || send.send(1).unwrap()))
        .unwrap();
    assert_eq!(got.recv().unwrap(), 1);
    stream.synchronize(None).unwrap();
}

#[test]
fn a_dropped_stream_finishes_what_it_was_given() {
    let (mut stream, release) = held_stream(&HostDevice::new());
    let (send, got) = mpsc::channel();
    for i in 0..3 {
        let send = send.clone();
        stream
            .callback(Box::new(move || send.send(i).unwrap()))
            .unwrap();
    }
    drop((stream, send));
    drop(release);
    assert_eq!(got.iter().collect::<Vec<_>>(), [0, 1, 2]);
}

#[test]
fn events_and_waits_of_an_idle_stream_are_done() {
    let device = HostDevice::new();
    assert_eq!(device.name(), "host");
    let mut stream = device.make_stream().unwrap();
    assert!(stream.record().unwrap().done());
    stream.synchronize(Some(MonotonicTime(0))).unwrap();
    let arena = device.make_arena(4096, ArenaOptions::default()).unwrap();
    assert_eq!(arena.len(), 4096);
}
