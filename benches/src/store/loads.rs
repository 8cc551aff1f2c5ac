//! Loads beside the loop of open, pread and close: to the slot, and on to the caller's memory.

use std::cell::RefCell;
use std::path::PathBuf;

use super::case::{Case, TURNS_OF_OURS};
use super::contest::{Turn, hold};
use super::files::{Place, evict};
use super::memory::Stock;
use super::report::{Direction, Mode, Row};
use super::rig::{Rig, Shape};
use super::{Options, Result, plain};

/// Three rows of one mode: to the slot with and without checksums, to memory with them.
pub(super) fn measure(
    place: &Place,
    shape: &Shape,
    stock: &mut Stock,
    workers: usize,
    mode: Mode,
    options: &Options,
) -> Result<Vec<Row>> {
    let direct = mode == Mode::Direct;
    let root = place.make("load")?;
    // As many staging slots as the default of 256 MiB gives.
    let slots = ((256 << 20) / shape.layout.record_len())
        .min(stock.count())
        .max(4);
    let rig = Rig::open(&root, Shape::of(shape.block)?, workers, direct, slots)?;
    let ids = stock.fresh_ids();
    rig.write(&ids, stock.slots(), true)?;
    let paths: Vec<PathBuf> = ids.iter().map(|&id| rig.path(id)).collect();
    place.sync()?;
    let prepare = || {
        if mode == Mode::Synced {
            evict(&paths)
        } else {
            Ok(())
        }
    };
    let stock = RefCell::new(stock);
    let through_rig = |judge: bool| -> Turn<'_> {
        let (rig, ids, stock) = (&rig, &ids, &stock);
        Box::new(move || {
            prepare()?;
            Ok(rig.read(ids, stock.borrow().slots(), judge)?.0)
        })
    };
    let contenders: [Turn<'_>; 5] = [
        Box::new(|| {
            prepare()?;
            plain::read_to_slots(&paths, &mut stock.borrow().slots(), direct, workers)
        }),
        through_rig(true),
        through_rig(false),
        Box::new(|| {
            prepare()?;
            plain::read_to_memory(&paths, &mut stock.borrow_mut(), direct, workers)
        }),
        Box::new(|| {
            prepare()?;
            let rows = stock.borrow_mut().rows(&ids);
            rig.load(rows)
        }),
    ];
    let times = hold(options.rounds, contenders)?;
    let (count, bytes) = (stock.borrow().count(), stock.borrow().bytes());
    rig.retire(
        &root,
        direct.then_some(count * TURNS_OF_OURS * (options.rounds + 1)),
    )?;
    let case = Case {
        direction: Direction::Load,
        block: shape.block,
        workers,
        mode,
    };
    Ok(case.rows(&times, bytes))
}
