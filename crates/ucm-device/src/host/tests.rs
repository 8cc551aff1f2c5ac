//! The host platform against plain memory.
use std::sync::mpsc;
use std::time::Duration;

use ucm_core::ErrorKind;
use ucm_core::sync::Mutex;
use ucm_infra::{Clock, ManualClock, MonotonicTime};

use super::*;

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

/// The pieces with their parts of a host buffer, which the test keeps until all operations ended.
fn pairs(pieces: &[Piece], host: &mut [u8]) -> Vec<(DeviceSpan, HostSpan)> {
    let base = host.as_mut_ptr().expose_provenance();
    let pair = |piece: &Piece| {
        // SAFETY: the test keeps the buffer, and does not touch it during the copy.
        let host = unsafe { HostSpan::new((base + piece.at) as u64, piece.span.len()) };
        (piece.span, host)
    };
    pieces.iter().map(pair).collect()
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
    (HostDevice::with(options), clock)
}

fn stream() -> Box<dyn Stream> {
    HostDevice::default().make_stream().unwrap()
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
fn wrong_lengths_are_refused_before_the_first_byte_moves() {
    let mut device = Memory::counted(100);
    let (short, long) = (device.span(0, 10), device.span(20, 11));
    let mut stream = stream();
    let mut host = vec![0xEE; 20];
    let kind = |result: Result<()>| result.unwrap_err().kind();
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
        let mut none = |_: &mut [u8], copied| panic!("{copied} pieces were copied");
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
fn one_stream_keeps_its_order_across_sync_and_async() {
    let mut device = Memory::zeroed(16);
    let span = end_to_end(0, &[device.span(0, 16)]);
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut stream = stream();
    let mut sources: Vec<_> = (1..=100u8).map(|round| [round; 16]).collect();
    for source in &mut sources {
        let (note, round) = (Arc::clone(&order), source[0]);
        let done = Box::new(move |result: Result<()>| {
            result.unwrap();
            note.lock().push(round);
        });
        let pairs = pairs(&span, source);
        stream
            .transfer_async(Direction::ToDevice, pairs, done)
            .unwrap();
    }
    // A synchronous copy runs after all earlier work.
    let mut host = [0; 16];
    gather(&mut *stream, &span, &mut host).unwrap();
    assert_eq!(host, [100; 16]);
    assert_eq!(*order.lock(), (1..=100).collect::<Vec<u8>>());
}

#[test]
fn wrong_async_copies_report() {
    let mut device = Memory::counted(10);
    let (send, got) = mpsc::channel();
    let mut host = [1; 10];
    let wrong = vec![(
        device.span(0, 9),
        pairs(&end_to_end(0, &[device.span(0, 10)]), &mut host)[0].1,
    )];
    let done = Box::new(move |result| send.send(result).unwrap());
    stream()
        .transfer_async(Direction::ToHost, wrong, done)
        .unwrap();
    let result: Result<()> = got.recv().unwrap();
    assert_eq!(result.unwrap_err().kind(), ErrorKind::InvalidInput);
    assert_eq!(host, [1; 10]);
}

#[test]
fn a_full_queue_is_busy_and_everything_comes_back() {
    let device = HostDevice::with(QueueOptions {
        queue: 1,
        ..QueueOptions::default()
    });
    let (mut stream, release) = held_stream(&device);
    stream.callback(Box::new(|| ())).unwrap();
    assert_eq!(
        stream.callback(Box::new(|| ())).unwrap_err().kind(),
        ErrorKind::Busy
    );
    let dropped = Box::new(|_| panic!("called though it was refused"));
    let refused = stream.transfer_async(Direction::ToHost, Vec::new(), dropped);
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Busy);
    drop(release);
    stream.synchronize(None).unwrap();
    stream.callback(Box::new(|| ())).unwrap();
}

#[test]
fn waits_end_at_their_deadline_on_the_injected_clock() {
    let (device, clock) = device_with_clock();
    let (mut stream, release) = held_stream(&device);
    let event = device.make_event().unwrap();
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
    event.record();
    assert!(event.done());
    event.wait(Some(MonotonicTime(0))).unwrap();
}

#[test]
fn a_synchronous_copy_gives_up_on_a_stalled_stream() {
    let device = HostDevice::with(QueueOptions {
        drain: Duration::ZERO,
        clock: ManualClock::new(),
        ..QueueOptions::default()
    });
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
fn a_gather_reports_the_pieces_that_it_has_copied() {
    let mut device = Memory::counted(96);
    let spans = [device.span(64, 32), device.span(0, 32), device.span(32, 32)];
    let pieces = end_to_end(8, &spans);
    let (mut host, mut told) = (vec![0; 128], 0);
    let mut copied = |host: &mut [u8], count: usize| {
        let bytes = |piece: &Piece| host[piece.at..piece.at + 32].to_vec();
        let there: Vec<u8> = pieces[..count].iter().flat_map(bytes).collect();
        assert_eq!(
            there,
            [&device.0[64..], &device.0[..64]].concat()[..32 * count]
        );
        host[0] += 1; // the callback may write beside the pieces
        told = count;
    };
    stream().gather(&pieces, &mut host, &mut copied).unwrap();
    assert_eq!(told, 3, "finally all are copied");
    assert!(host[0] >= 1);
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
    let (mut stream, release) = held_stream(&HostDevice::default());
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
fn waits_of_an_idle_stream_are_done() {
    let device = HostDevice::default();
    assert_eq!(device.name(), "host");
    let mut stream = device.make_stream().unwrap();
    stream.synchronize(Some(MonotonicTime(0))).unwrap();
    let arena = device.make_arena(4096, ArenaOptions::default()).unwrap();
    assert_eq!(arena.len(), 4096);
}
