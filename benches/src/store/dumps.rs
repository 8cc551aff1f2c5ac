//! Dumps until published beside the loop of open, pwrite, close and rename: from the slot, and from
//! the caller's memory.

use std::cell::{Cell, RefCell};

use ucm_core::BlockId;

use super::case::{Case, TURNS_OF_OURS};
use super::contest::{Spent, Turn, Watch, hold};
use super::files::{Place, hollow};
use super::memory::Stock;
use super::report::{Direction, Mode, Row};
use super::rig::{Rig, Shape};
use super::{Options, Result, plain};

/// Three rows of one mode: from the slot with and without checksums, from memory with them.
pub(super) fn measure(
    place: &Place,
    shape: &Shape,
    stock: &mut Stock,
    workers: usize,
    mode: Mode,
    options: &Options,
) -> Result<Vec<Row>> {
    let direct = mode == Mode::Direct;
    let root = place.make("dump")?;
    // A part of the slots is never given to dumps, and dumps have half of the pool.
    let slots = stock.count() * 4 / 3 + 4;
    let rig = Rig::open(&root, Shape::of(shape.block)?, workers * 2, direct, slots)?;
    let loop_files = Files(&rig);
    for shard in 0..=u8::MAX {
        let file = rig.path(BlockId([shard; 16]));
        std::fs::create_dir_all(file.parent().unwrap_or(&root))?;
    }
    let stock = RefCell::new(stock);
    // The bytes of one turn are on disk at a time; giving them back is nobody's time.
    let timed = |work: &mut dyn FnMut(&[BlockId]) -> Result<Spent>| -> Result<Spent> {
        let ids = stock.borrow_mut().fresh_ids();
        if mode == Mode::Synced {
            place.sync()?;
        }
        let mut took = work(&ids)?;
        if mode == Mode::Synced {
            let watch = Watch::start();
            place.sync()?;
            let end = watch.stop();
            took.wall += end.wall;
            took.cpu += end.cpu;
        }
        hollow(&ids.iter().map(|&id| rig.path(id)).collect::<Vec<_>>())?;
        Ok(took)
    };
    let timed = &timed;
    let through_rig = |seal: bool| -> Turn<'_> {
        let (rig, stock) = (&rig, &stock);
        Box::new(move || timed(&mut |ids| rig.write(ids, stock.borrow().slots(), seal)))
    };
    let contenders: [Turn<'_>; 5] = [
        Box::new(|| {
            let mut write = |ids: &[BlockId]| {
                let (slots, count) = (stock.borrow().slots(), Cell::new(0));
                plain::share(
                    ids.iter().zip(&slots),
                    std::iter::repeat_with(|| count.replace(count.get() + 1)),
                    workers,
                    |(&id, slot), thread| loop_files.write(id, *thread, direct, slot.as_slice()),
                )
            };
            timed(&mut write)
        }),
        through_rig(true),
        through_rig(false),
        Box::new(|| {
            let mut write = |ids: &[BlockId]| {
                let mut stock = stock.borrow_mut();
                let header = shape.layout.header_len();
                let slots = stock.slots();
                plain::share(
                    ids.iter().zip(stock.caller()),
                    slots.into_iter().enumerate(),
                    workers,
                    |(&id, memory), (thread, slot)| {
                        slot.as_mut_slice()[header..].copy_from_slice(memory);
                        loop_files.write(id, *thread, direct, slot.as_slice())
                    },
                )
            };
            timed(&mut write)
        }),
        Box::new(|| {
            let mut dump = |ids: &[BlockId]| {
                let rows = stock.borrow_mut().rows(ids);
                rig.dump(rows)
            };
            timed(&mut dump)
        }),
    ];
    let times = hold(options.rounds, contenders)?;
    let (count, bytes) = (stock.borrow().count(), stock.borrow().bytes());
    rig.retire(
        &root,
        direct.then_some(count * TURNS_OF_OURS * (options.rounds + 1)),
    )?;
    let case = Case {
        direction: Direction::Dump,
        block: shape.block,
        workers,
        mode,
    };
    Ok(case.rows(&times, bytes))
}

/// The files of the loop. They lie where the store's own do: what a new file costs depends on its
/// directory.
struct Files<'a>(&'a Rig);

impl Files<'_> {
    fn write(&self, id: BlockId, thread: usize, direct: bool, bytes: &[u8]) -> Result<()> {
        let private = self.0.private().join(format!("loop-{thread}"));
        plain::write(&private, &self.0.path(id), direct, bytes)
    }
}
