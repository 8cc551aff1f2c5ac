//! Reads pieces of a file, over a kept descriptor if the file never changes.

use std::io::IoSliceMut;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::FileType;
use rustix::io::Errno;
use ucm_core::{Error, Result};

use crate::fd_cache::KeptFile;
use crate::file::{CANNOT_READ, Files, check_read, fits_direct_read, not_regular};
use crate::meta::failed;
use crate::op::ReadPiece;
use crate::op::to_meta;
use crate::probe::stated_align;
use crate::sys::{File, GiveUp, Port, SECTOR, read_into_full, retry};

/// One such read, checked.
struct Stretch<'a, 'b> {
    path: &'a Path,
    pieces: &'a mut [ReadPiece<'b>],
    /// True if direct I/O accepts it as it is.
    fits: bool,
}

impl Files {
    /// Reads pieces of a file, in their order, until one is short; see
    /// [`IoJob::read_into`](crate::IoJob::read_into).
    pub(crate) fn read_into(
        &self,
        path: &Path,
        pieces: &mut [ReadPiece<'_>],
        keep: bool,
    ) -> Result<usize> {
        let mut fits = true;
        for piece in pieces.iter() {
            check_read(path, piece.offset, piece.len, piece.buf.len())?;
            fits &= fits_direct_read(piece.buf, piece.len, piece.offset);
        }
        let mut stretch = Stretch { path, pieces, fits };
        // A descriptor opened for direct I/O does not serve buffered reads, and vice versa.
        let keep = keep && (fits || !self.direct);
        if keep && let Some(file) = self.kept.get(path) {
            match stretch.read_kept(&file) {
                Ok(read) => {
                    self.count_fallback(self.direct && !file.direct);
                    return Ok(read);
                }
                Err(errno) => {
                    self.kept.drop_file(path, &file);
                    if errno == Errno::STALE {
                        return Err(stretch.failed(Errno::NOENT));
                    }
                    // A new open returns the reason.
                }
            }
        }
        self.read_anew(&mut stretch, keep)
    }

    fn read_anew(&self, stretch: &mut Stretch<'_, '_>, keep: bool) -> Result<usize> {
        let mut file = self.open_stretch(stretch)?;
        let stat = retry(|| rustix::fs::fstat(file.fd())).map_err(|e| stretch.failed(e))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(not_regular(stretch.path));
        }
        let dev = to_meta(&stat).dev;
        if file.is_direct() && !self.usable(dev, || stated_align(file.fd())) {
            file.set_direct(false);
        }
        let direct = file.is_direct();
        let read = stretch
            .read(&mut file, direct)
            .map_err(|e| stretch.failed(e))?;
        self.note(&file, dev, self.direct);
        // A file system that reports no link counts would make every file look removed.
        if keep && stat.st_nlink > 0 {
            self.keep(stretch.path, file);
        }
        Ok(read)
    }

    /// Keeps a file open after a read.
    fn keep(&self, path: &Path, file: File) {
        let direct = file.is_direct();
        let (ring, fd) = file.into_parts();
        if let Some(file) = KeptFile::new(ring, fd, direct) {
            self.kept.put(path, file);
        }
    }

    fn open_stretch(&self, stretch: &Stretch<'_, '_>) -> Result<File> {
        let direct = self.direct && stretch.fits;
        let opened = match self.open_for_read(stretch.path, direct, true) {
            Err(Errno::MFILE | Errno::NFILE) if self.kept.give_up() => {
                self.open_for_read(stretch.path, direct, true)
            }
            opened => opened,
        };
        opened
            .map(|file| self.with_ring(file))
            .map_err(|e| stretch.failed(e))
    }
}

impl Stretch<'_, '_> {
    fn failed(&self, errno: Errno) -> Error {
        failed(errno, CANNOT_READ, self.path)
    }

    /// Reads through an open file, adjacent pieces together; fewer bytes than wanted only at its
    /// end.
    fn read(&mut self, port: &mut impl Port, direct: bool) -> rustix::io::Result<usize> {
        let adjacent = |a: &ReadPiece<'_>, b: &ReadPiece<'_>| a.offset + a.len as u64 == b.offset;
        let mut read = 0;
        for run in self.pieces.chunk_by_mut(adjacent) {
            let (offset, last) = (run[0].offset, run.len() - 1);
            let (mut need, mut bufs) = (0, Vec::with_capacity(run.len()));
            for (number, piece) in run.iter_mut().enumerate() {
                need += piece.len;
                // Whole sectors for direct I/O.
                let ask = match direct && number == last {
                    true => piece.len.next_multiple_of(SECTOR),
                    false => piece.len,
                };
                bufs.push(&mut piece.buf[..ask]);
            }
            let got = read_into_full(port, &mut bufs, offset, need)?.min(need);
            read += got;
            if got < need {
                break;
            }
        }
        Ok(read)
    }

    /// Reads through a kept descriptor. `STALE` if its file was removed; after any other error the
    /// descriptor cannot be used any more.
    fn read_kept(&mut self, file: &Arc<KeptFile>) -> rustix::io::Result<usize> {
        if retry(|| rustix::fs::fstat(file.fd()))?.st_nlink == 0 {
            return Err(Errno::STALE);
        }
        self.read(&mut &**file, file.direct)
    }
}

impl Port for &KeptFile {
    fn read(&mut self, bufs: &mut [IoSliceMut<'_>], at: u64) -> rustix::io::Result<usize> {
        KeptFile::read(self, bufs, at)
    }

    /// It was opened for reading.
    fn write(&mut self, _buf: &[u8], _at: u64) -> rustix::io::Result<usize> {
        Err(Errno::BADF)
    }

    /// Other threads read it at the same time, so reads that do not fit it open the file
    /// themselves.
    fn give_up_direct(&mut self, _why: GiveUp) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::path::PathBuf;

    use ucm_core::ErrorKind;

    use super::*;
    use crate::bounce_buffer::page_slots;

    const PIECE: usize = 8192;

    struct Place {
        _dir: tempfile::TempDir,
        path: PathBuf,
        bytes: Vec<u8>,
        files: Files,
    }

    impl Place {
        fn new(direct: bool) -> Self {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("file");
            let bytes: Vec<u8> = (0..4 * PIECE + 100).map(|i| (i ^ (i >> 8)) as u8).collect();
            std::fs::write(&path, &bytes).unwrap();
            Self {
                _dir: dir,
                path,
                bytes,
                files: Files::new(direct),
            }
        }

        /// Reads three pieces from the second on and compares the bytes.
        fn read(&self, keep: bool) -> Result<usize> {
            let mut slots: [_; 3] = page_slots(PIECE).unwrap();
            let into = slots.iter_mut().map(|slot| (slot.as_mut_slice(), PIECE));
            let into = into.collect();
            let mut pieces = ReadPiece::adjacent(8192, into);
            let read = self.files.read_into(&self.path, &mut pieces, keep);
            let got: Vec<u8> = slots
                .iter()
                .flat_map(|slot| slot.as_slice()[..PIECE].to_vec())
                .collect();
            if let Ok(read) = read {
                assert_eq!(got[..read], self.bytes[PIECE..PIECE + read]);
            }
            read
        }
    }

    /// Descriptors of this process that are open on a file.
    fn open_on(path: &Path) -> usize {
        let fds = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        fds.filter(|fd| {
            std::fs::read_link(fd.path())
                .is_ok_and(|to| to.to_string_lossy().starts_with(&*path.to_string_lossy()))
        })
        .count()
    }

    #[test]
    fn one_descriptor_is_kept_and_only_if_wanted() {
        for direct in [false, true] {
            let place = Place::new(direct);
            assert_eq!(place.read(false).unwrap(), 3 * PIECE);
            assert_eq!((open_on(&place.path), place.files.kept.count()), (0, 0));
            for _ in 0..3 {
                assert_eq!(place.read(true).unwrap(), 3 * PIECE);
                assert_eq!((open_on(&place.path), place.files.kept.count()), (1, 1));
            }
            drop(place.files.kept.take(&[], true));
            assert_eq!(place.files.kept.count(), 1, "it was used");
            drop(place.files.kept.take(&[], true));
            assert_eq!(open_on(&place.path), 0);
        }
    }

    #[test]
    fn a_removed_file_is_not_found_and_not_held() {
        let place = Place::new(false);
        place.read(true).unwrap();
        std::fs::remove_file(&place.path).unwrap();
        assert_eq!(open_on(&place.path), 1);
        assert_eq!(place.read(true).unwrap_err().kind(), ErrorKind::NotFound);
        assert_eq!((open_on(&place.path), place.files.kept.count()), (0, 0));
        std::fs::write(&place.path, &place.bytes).unwrap();
        assert_eq!(
            place.read(true).unwrap(),
            3 * PIECE,
            "another one of that name"
        );
    }

    #[test]
    fn a_short_file_fills_what_it_can() {
        for (direct, keep) in [(false, false), (false, true), (true, false), (true, true)] {
            let place = Place::new(direct);
            for len in [3 * PIECE + 100, 2 * PIECE, PIECE] {
                let file = std::fs::File::options()
                    .write(true)
                    .open(&place.path)
                    .unwrap();
                file.set_len(len as u64).unwrap();
                assert_eq!(
                    place.read(keep).unwrap(),
                    len - PIECE,
                    "{direct} {keep} {len}"
                );
            }
        }
    }

    #[test]
    fn what_direct_io_does_not_take_is_read_all_the_same() {
        let place = Place::new(true);
        place.read(true).unwrap();
        for (offset, lens) in [(0, [100, 200]), (5, [4096, 4096]), (4096, [4096, 77])] {
            let mut slots: [_; 2] = page_slots(PIECE).unwrap();
            let into = slots.iter_mut().map(|slot| slot.as_mut_slice()).zip(lens);
            let mut pieces = ReadPiece::adjacent(offset, into.collect());
            let got = place
                .files
                .read_into(&place.path, &mut pieces, true)
                .unwrap();
            let at = offset as usize;
            assert_eq!(got, lens[0] + lens[1]);
            assert_eq!(
                slots[0].as_slice()[..lens[0]],
                place.bytes[at..at + lens[0]]
            );
            assert_eq!(
                slots[1].as_slice()[..lens[1]],
                place.bytes[at + lens[0]..at + got]
            );
        }
    }

    #[test]
    fn parts_go_to_their_places_and_nothing_else_is_touched() {
        for (direct, keep) in [(false, true), (true, true), (true, false)] {
            let place = Place::new(direct);
            for parts in [
                vec![0..4096, 8192..12288],
                vec![100..200, 300..4000],
                vec![],
            ] {
                let [mut slot] = page_slots(2 * PIECE).unwrap();
                slot.as_mut_slice().fill(0xee);
                let buf = slot.as_mut_slice();
                let mut pieces = ReadPiece::of_parts(4096, &parts, buf).unwrap();
                let read = place.files.read_into(&place.path, &mut pieces, keep);
                assert_eq!(read.unwrap(), parts.iter().map(Range::len).sum::<usize>());
                let mut expected = vec![0xee; 2 * PIECE];
                for part in &parts {
                    let from = &place.bytes[4096 + part.start..4096 + part.end];
                    expected[part.clone()].copy_from_slice(from);
                }
                assert!(*slot.as_slice() == expected, "{direct} {keep} {parts:?}");
            }
        }
    }

    #[test]
    fn parts_behind_the_end_are_not_there_and_wrong_ones_are_refused() {
        let place = Place::new(false);
        let read = |parts: &[Range<usize>]| {
            let mut buf = vec![0; 4 * PIECE];
            let pieces = ReadPiece::of_parts(PIECE as u64, parts, &mut buf);
            let read =
                pieces.and_then(|mut pieces| place.files.read_into(&place.path, &mut pieces, true));
            read.map_err(|error| error.kind())
        };
        assert_eq!(read(&[0..10, 3 * PIECE..3 * PIECE + 200]), Ok(110));
        for wrong in [[5..10, 0..5], [0..5, 9..4 * PIECE + 1]] {
            assert_eq!(read(&wrong), Err(ErrorKind::InvalidInput));
        }
    }

    #[test]
    fn what_does_not_fit_or_cannot_be_read_says_why() {
        let place = Place::new(false);
        let read = |path: &Path, offset, len| {
            let (mut one, mut other) = ([0; 10], [0; 10]);
            let into = vec![(&mut one[..], 10), (&mut other[..], len)];
            let mut pieces = ReadPiece::adjacent(offset, into);
            let read = place.files.read_into(path, &mut pieces, true);
            read.map_err(|error| error.kind())
        };
        assert_eq!(read(&place.path, 0, 10), Ok(20));
        assert_eq!(read(&place.path, 0, 11), Err(ErrorKind::InvalidInput));
        assert_eq!(read(&place.path, u64::MAX, 1), Err(ErrorKind::InvalidInput));
        let absent = place.path.with_file_name("absent");
        assert_eq!(read(&absent, 0, 10), Err(ErrorKind::NotFound));
        let dir = place.path.parent().unwrap();
        assert_eq!(read(dir, 0, 10), Err(ErrorKind::Foreign));
        assert_eq!(place.files.kept.count(), 1);
    }
}
