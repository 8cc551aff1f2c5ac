//! Complete system calls: interrupted calls are repeated, short reads and writes continued, errors
//! of a close returned.

use std::io::IoSliceMut;
use std::os::fd::{IntoRawFd, OwnedFd};

use rustix::fs::OFlags;
use rustix::io::Errno;
use ucm_core::PAGE;

use crate::usrbio::RingFile;

/// Unit of offsets and lengths of direct I/O; a file system with a larger unit is read and written
/// buffered.
pub(crate) const SECTOR: usize = PAGE as usize;

/// Repeats a call that a signal interrupted.
pub(crate) fn retry<T>(mut call: impl FnMut() -> rustix::io::Result<T>) -> rustix::io::Result<T> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}

/// Reasons to stop direct I/O in the middle of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum GiveUp {
    /// The file system refused a call (EINVAL).
    Refused,
    /// The rest starts inside a sector.
    InsideSector,
}

/// Raw positional I/O on one file, as the loops below need it.
pub(crate) trait Port {
    /// As preadv(2).
    fn read(&mut self, bufs: &mut [IoSliceMut<'_>], at: u64) -> rustix::io::Result<usize>;
    /// As pwrite(2).
    fn write(&mut self, buf: &[u8], at: u64) -> rustix::io::Result<usize>;
    /// Switches to the page cache; `false` if it is in use already or not possible.
    fn give_up_direct(&mut self, why: GiveUp) -> bool;
}

/// Most buffers of one call: the minimum that any system accepts.
pub(crate) const MOST_BUFFERS: usize = 1024;

/// As [`read_full`], into several buffers, one after another.
pub(crate) fn read_into_full(
    port: &mut impl Port,
    bufs: &mut [&mut [u8]],
    offset: u64,
    need: usize,
) -> rustix::io::Result<usize> {
    let mut got = 0;
    while got < need {
        let mut skip = got;
        let mut left: Vec<IoSliceMut<'_>> = Vec::with_capacity(bufs.len().min(MOST_BUFFERS));
        for buf in bufs.iter_mut() {
            let from = skip.min(buf.len());
            skip -= from;
            if from < buf.len() && left.len() < MOST_BUFFERS {
                left.push(IoSliceMut::new(&mut buf[from..]));
            }
        }
        match port.read(&mut left, offset + got as u64) {
            Ok(0) => break,
            Ok(n) => {
                got += n;
                if got < need && !got.is_multiple_of(SECTOR) {
                    port.give_up_direct(GiveUp::InsideSector);
                }
            }
            Err(Errno::INTR) => {}
            Err(Errno::INVAL) if port.give_up_direct(GiveUp::Refused) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(got)
}

/// Fills `buf` from `offset` until it has at least `need` bytes or the file ends; returns the
/// number of bytes. A read may return more than `need`, up to the length of `buf` (direct I/O reads
/// whole sectors).
pub(crate) fn read_full(
    port: &mut impl Port,
    buf: &mut [u8],
    offset: u64,
    need: usize,
) -> rustix::io::Result<usize> {
    read_into_full(port, &mut [buf], offset, need)
}

/// Writes all of `buf` at `offset`. A call that writes nothing is an error (EIO), which avoids an
/// endless loop.
pub(crate) fn write_full(port: &mut impl Port, buf: &[u8], offset: u64) -> rustix::io::Result<()> {
    let mut put = 0;
    while put < buf.len() {
        match port.write(&buf[put..], offset + put as u64) {
            Ok(0) => return Err(Errno::IO),
            Ok(n) => {
                put += n;
                if put < buf.len() && !put.is_multiple_of(SECTOR) {
                    port.give_up_direct(GiveUp::InsideSector);
                }
            }
            Err(Errno::INTR) => {}
            Err(Errno::INVAL) if port.give_up_direct(GiveUp::Refused) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// An open file, read and written past the page cache if turned on, until the file system refuses
/// it.
pub(crate) struct File {
    /// The registration with rings; declared before the descriptor so that it is dropped first.
    ring: Option<RingFile>,
    fd: OwnedFd,
    direct: bool,
    refused: bool,
    /// True if a ring has written to it.
    unsettled: bool,
}

impl File {
    /// `direct`: whether the descriptor was opened with O_DIRECT.
    pub(crate) fn new(fd: OwnedFd, direct: bool) -> Self {
        Self {
            ring: None,
            fd,
            direct,
            refused: false,
            unsettled: false,
        }
    }

    /// The same, read and written through rings if there are any.
    pub(crate) fn through(mut self, ring: Option<RingFile>) -> Self {
        self.ring = ring;
        self
    }

    /// The descriptor.
    pub(crate) fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// True if reads and writes bypass the page cache now.
    pub(crate) fn is_direct(&self) -> bool {
        self.direct
    }

    /// Whether the file system refused direct I/O.
    pub(crate) fn refused(&self) -> bool {
        self.refused
    }

    /// As if the file system had refused direct I/O.
    #[cfg(test)]
    pub(crate) fn note_refusal(&mut self) {
        self.refused = true;
    }

    /// Turns O_DIRECT on or off for the descriptor; true on success.
    pub(crate) fn set_direct(&mut self, on: bool) -> bool {
        if on == self.direct {
            return true;
        }
        let set = rustix::fs::fcntl_getfl(&self.fd).and_then(|flags| {
            let flags = if on {
                flags | OFlags::DIRECT
            } else {
                flags - OFlags::DIRECT
            };
            rustix::fs::fcntl_setfl(&self.fd, flags)
        });
        match set {
            Ok(()) => self.direct = on,
            Err(_) => self.refused |= on,
        }
        set.is_ok()
    }

    /// The descriptor, which the caller must close. Its registration with rings is dropped first.
    pub(crate) fn into_parts(self) -> (Option<RingFile>, OwnedFd) {
        (self.ring, self.fd)
    }

    /// Closes and returns the error of the close: network file systems report failed writes there.
    /// On Linux an interrupted close has released the descriptor, but the state of the data is
    /// unknown: that is an error too.
    pub(crate) fn close(self) -> rustix::io::Result<()> {
        // The file's length includes bytes written by a ring only after a sync.
        let settled = match self.unsettled {
            true => retry(|| rustix::fs::fsync(&self.fd)),
            false => Ok(()),
        };
        drop(self.ring);
        close(self.fd).and(settled)
    }
}

impl Port for File {
    fn read(&mut self, bufs: &mut [IoSliceMut<'_>], at: u64) -> rustix::io::Result<usize> {
        match self.ring.as_ref().and_then(|ring| ring.read(bufs, at)) {
            Some(read) => read,
            None => rustix::io::preadv(&self.fd, bufs, at),
        }
    }

    fn write(&mut self, buf: &[u8], at: u64) -> rustix::io::Result<usize> {
        match self.ring.as_ref().and_then(|ring| ring.write(buf, at)) {
            Some(written) => {
                self.unsettled = true;
                written
            }
            None => rustix::io::pwrite(&self.fd, buf, at),
        }
    }

    fn give_up_direct(&mut self, why: GiveUp) -> bool {
        if !self.direct {
            return false;
        }
        self.refused |= why == GiveUp::Refused;
        self.set_direct(false)
    }
}

#[allow(unsafe_code, reason = "the only way to see the error of close")]
fn close(fd: OwnedFd) -> rustix::io::Result<()> {
    // SAFETY: `into_raw_fd` gave up ownership, so this is the one and only close of that
    // descriptor.
    if unsafe { libc::close(fd.into_raw_fd()) } == 0 {
        return Ok(());
    }
    Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO))
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    /// Returns scripted results (then full ones) and records offset and length of each call.
    #[derive(Default)]
    struct Script {
        answers: VecDeque<rustix::io::Result<usize>>,
        calls: Vec<(u64, usize)>,
        /// Lengths of the buffers of each read into several.
        pieces: Vec<Vec<usize>>,
        direct: bool,
        gave_up: Vec<GiveUp>,
    }

    impl Script {
        fn new(direct: bool, answers: &[rustix::io::Result<usize>]) -> Self {
            Self {
                answers: answers.iter().copied().collect(),
                direct,
                ..Self::default()
            }
        }

        fn call(&mut self, at: u64, len: usize) -> rustix::io::Result<usize> {
            self.calls.push((at, len));
            self.answers.pop_front().unwrap_or(Ok(len))
        }
    }

    impl Port for Script {
        fn read(&mut self, bufs: &mut [IoSliceMut<'_>], at: u64) -> rustix::io::Result<usize> {
            self.pieces.push(bufs.iter().map(|buf| buf.len()).collect());
            self.call(at, bufs.iter().map(|buf| buf.len()).sum())
        }

        fn write(&mut self, buf: &[u8], at: u64) -> rustix::io::Result<usize> {
            self.call(at, buf.len())
        }

        fn give_up_direct(&mut self, why: GiveUp) -> bool {
            let was = std::mem::take(&mut self.direct);
            if was {
                self.gave_up.push(why);
            }
            was
        }
    }

    #[test]
    fn interrupted_and_short_reads_are_carried_on() {
        let mut port = Script::new(false, &[Err(Errno::INTR), Ok(3), Err(Errno::INTR), Ok(2)]);
        assert_eq!(read_full(&mut port, &mut [0; 10], 100, 10), Ok(10));
        assert_eq!(
            port.calls,
            [(100, 10), (100, 10), (103, 7), (103, 7), (105, 5)]
        );
    }

    fn into(port: &mut Script, lens: &[usize], need: usize) -> rustix::io::Result<usize> {
        let mut bufs: Vec<Vec<u8>> = lens.iter().map(|&len| vec![0; len]).collect();
        let mut bufs: Vec<&mut [u8]> = bufs.iter_mut().map(Vec::as_mut_slice).collect();
        read_into_full(port, &mut bufs, 100, need)
    }

    #[test]
    fn a_short_read_into_several_goes_on_where_it_stopped() {
        let answers = [Ok(3), Err(Errno::INTR), Ok(1), Ok(6)];
        let mut port = Script::new(false, &answers);
        assert_eq!(into(&mut port, &[4, 0, 4, 4], 12), Ok(12));
        assert_eq!(
            port.pieces,
            [
                vec![4, 4, 4],
                vec![1, 4, 4],
                vec![1, 4, 4],
                vec![4, 4],
                vec![2]
            ]
        );
        assert_eq!(
            port.calls,
            [(100, 12), (103, 9), (103, 9), (104, 8), (110, 2)]
        );
        let mut port = Script::new(false, &[Ok(5), Ok(0)]);
        assert_eq!(into(&mut port, &[4, 4], 8), Ok(5), "the file ends");
        let mut port = Script::new(false, &[Ok(5), Err(Errno::IO)]);
        assert_eq!(into(&mut port, &[4, 4], 8), Err(Errno::IO));
        let mut port = Script::new(true, &[Err(Errno::INVAL), Ok(700)]);
        assert_eq!(into(&mut port, &[4096, 4096], 8192), Ok(8192));
        assert_eq!(port.gave_up, [GiveUp::Refused]);
        let mut port = Script::new(true, &[Ok(700)]);
        assert_eq!(into(&mut port, &[4096, 4096], 8192), Ok(8192));
        assert_eq!(port.gave_up, [GiveUp::InsideSector]);
    }

    #[test]
    fn more_buffers_than_a_call_takes_are_read_in_several() {
        let mut port = Script::default();
        assert_eq!(into(&mut port, &[1; 2500], 2500), Ok(2500));
        let pieces: Vec<usize> = port.pieces.iter().map(Vec::len).collect();
        assert_eq!(pieces, [1024, 1024, 452]);
    }

    #[test]
    fn a_read_ends_at_the_end_of_the_file_or_at_an_error() {
        let mut port = Script::new(false, &[Ok(3), Ok(0)]);
        assert_eq!(read_full(&mut port, &mut [0; 10], 0, 10), Ok(3));
        let mut port = Script::new(false, &[Ok(3), Err(Errno::IO)]);
        assert_eq!(read_full(&mut port, &mut [0; 10], 0, 10), Err(Errno::IO));
    }

    #[test]
    fn a_read_that_has_what_it_needs_requests_no_more() {
        let mut port = Script::new(true, &[Ok(8)]);
        assert_eq!(read_full(&mut port, &mut [0; 16], 0, 7), Ok(8));
        assert_eq!((port.calls.len(), port.direct), (1, true));
    }

    #[test]
    fn what_starts_inside_a_sector_goes_through_the_page_cache() {
        let mut port = Script::new(true, &[Ok(4096), Ok(700)]);
        assert_eq!(read_full(&mut port, &mut [0; 16384], 0, 16384), Ok(16384));
        assert_eq!(port.gave_up, [GiveUp::InsideSector]);
        assert_eq!(port.calls, [(0, 16384), (4096, 12288), (4796, 11588)]);
        let mut port = Script::new(true, &[Ok(4096), Ok(700)]);
        assert_eq!(write_full(&mut port, &[0; 16384], 0), Ok(()));
        assert_eq!(port.gave_up, [GiveUp::InsideSector]);
    }

    #[test]
    fn a_refused_direct_call_is_repeated_without() {
        let mut port = Script::new(true, &[Err(Errno::INVAL)]);
        assert_eq!(write_full(&mut port, &[0; 10], 0), Ok(()));
        assert_eq!(
            (port.calls, port.gave_up),
            (vec![(0, 10), (0, 10)], vec![GiveUp::Refused])
        );
        let mut port = Script::new(false, &[Err(Errno::INVAL)]);
        assert_eq!(write_full(&mut port, &[0; 10], 0), Err(Errno::INVAL));
        let mut port = Script::new(true, &[Err(Errno::INVAL)]);
        assert_eq!(read_full(&mut port, &mut [0; 10], 0, 10), Ok(10));
    }

    #[test]
    fn interrupted_and_short_writes_are_carried_on() {
        let mut port = Script::new(false, &[Ok(4), Err(Errno::INTR), Ok(1)]);
        assert_eq!(write_full(&mut port, &[0; 10], 0), Ok(()));
        assert_eq!(port.calls, [(0, 10), (4, 6), (4, 6), (5, 5)]);
        let mut port = Script::new(false, &[Ok(4)]);
        assert_eq!(write_full(&mut port, &[0; 10], 100), Ok(()));
        assert_eq!(port.calls, [(100, 10), (104, 6)]);
    }

    #[test]
    fn a_write_that_makes_no_progress_is_an_error() {
        let mut port = Script::new(false, &[Ok(4), Ok(0)]);
        assert_eq!(write_full(&mut port, &[0; 10], 0), Err(Errno::IO));
    }

    #[test]
    fn interrupted_calls_are_repeated() {
        let mut script = Script::new(false, &[Err(Errno::INTR), Err(Errno::INTR), Ok(1)]);
        assert_eq!(retry(|| script.call(0, 0)), Ok(1));
        assert_eq!(script.calls.len(), 3);
    }

    #[test]
    fn a_full_medium_is_seen() {
        let full = std::fs::File::options()
            .write(true)
            .open("/dev/full")
            .unwrap();
        let mut file = File::new(full.into(), false);
        assert_eq!(write_full(&mut file, b"x", 0), Err(Errno::NOSPC));
        assert_eq!(file.close(), Ok(()));
    }
}
