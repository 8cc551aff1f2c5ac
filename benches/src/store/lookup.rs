//! What asking for the blocks of a prompt costs, and what memory a published block takes in the
//! process.

use std::path::PathBuf;
use std::time::Duration;

use rustix::fs::{AtFlags, CWD};
use ucm_core::BlockId;
use ucm_store::engine::{Hint, Row};

use super::contest::{Spent, Turn, Watch, hold};
use super::files::Place;
use super::idle::status_kib;
use super::memory::{Stock, ids};
use super::report::Lookup;
use super::rig::{Rig, Shape};
use super::{Options, Result};

/// Threads of the store, as in production.
pub(super) const IO_THREADS: usize = 8;
/// Blocks dumped at once.
const PIECE: usize = 128;
/// A lookup is short: it has this many times the rounds of a load.
const MORE_ROUNDS: usize = 10;

/// The rows of lookups, and the bytes that one published block takes.
pub(super) fn measure(place: &Place, options: &Options) -> Result<(Vec<Lookup>, f64)> {
    let root = place.make("lookup")?;
    let rig = Rig::open(&root, Shape::small()?, IO_THREADS, false, PIECE * 4 / 3 + 4)?;
    let mut stock = Stock::new(&Shape::small()?, PIECE)?;
    let present = publish(&rig, &mut stock, options.prefix)?;
    let absent = ids(u64::MAX / 2, options.prefix);
    let half = options.prefix / 2;
    let prefix_then_gap: Vec<BlockId> = present[..half]
        .iter()
        .chain(&absent[half..])
        .copied()
        .collect();
    let mix = |(number, pair): (usize, (&BlockId, &BlockId))| {
        if number % 2 == 0 { *pair.0 } else { *pair.1 }
    };
    let alternating: Vec<BlockId> = present.iter().zip(&absent).enumerate().map(mix).collect();
    let rounds = options.rounds * MORE_ROUNDS;
    let mut rows = Vec::new();
    for (what, ids, hits) in [
        ("hit", &present, options.prefix),
        ("miss", &absent, 0),
        ("mixed", &prefix_then_gap, half),
    ] {
        let ours = || expect(rig.engine.lookup_on_prefix(ids)?, hits);
        rows.push(row(
            &rig,
            "lookup_on_prefix",
            what,
            ids,
            true,
            rounds,
            &ours,
        )?);
    }
    for (what, ids, hits) in [
        ("hit", &present, options.prefix),
        ("miss", &absent, 0),
        ("mixed", &alternating, half),
    ] {
        let ours = || {
            expect(
                rig.engine
                    .lookup(ids)?
                    .into_iter()
                    .filter(|&hit| hit)
                    .count(),
                hits,
            )
        };
        rows.push(row(&rig, "lookup", what, ids, false, rounds, &ours)?);
    }
    let before = status_kib("RssAnon")?;
    publish(&rig, &mut stock, options.cached)?;
    let grown = status_kib("RssAnon")?.saturating_sub(before);
    Ok((rows, grown as f64 * 1024.0 / options.cached as f64))
}

/// Publishes so many blocks, as the connector does.
fn publish(rig: &Rig, stock: &mut Stock, count: usize) -> Result<Vec<BlockId>> {
    let mut published = Vec::with_capacity(count);
    while published.len() < count {
        let ids = stock.fresh_ids();
        rig.engine
            .describe(ids.iter().map(|&id| (id, Hint::default())))?;
        let rows: Vec<Row> = stock.rows(&ids);
        rig.dump(rows)?;
        rig.engine
            .touch(&ids.iter().map(|&id| (id, 0)).collect::<Vec<_>>())?;
        published.extend(ids);
    }
    published.truncate(count);
    Ok(published)
}

fn expect(found: usize, hits: usize) -> Result<()> {
    if found == hits {
        return Ok(());
    }
    Err(format!("a lookup found {found} blocks of {hits}").into())
}

/// One way of asking beside a loop of stat on one thread.
fn row(
    rig: &Rig,
    call: &'static str,
    what: &'static str,
    ids: &[BlockId],
    stop: bool,
    rounds: usize,
    ours: &dyn Fn() -> Result<()>,
) -> Result<Lookup> {
    let paths: Vec<PathBuf> = ids.iter().map(|&id| rig.path(id)).collect();
    let plain = || {
        let missing = |path: &PathBuf| rustix::fs::statat(CWD, path, AtFlags::empty()).is_err();
        if stop {
            std::hint::black_box(paths.iter().position(missing));
        } else {
            std::hint::black_box(paths.iter().filter(|path| missing(path)).count());
        }
        Ok(())
    };
    let turns: [Turn<'_>; 2] = [Box::new(|| timed(ours)), Box::new(|| timed(&plain))];
    let [own, stat] = hold(rounds, turns)?;
    let us = |time: Duration| time.as_secs_f64() * 1e6;
    Ok(Lookup::new(
        call,
        what,
        ids.len(),
        us(own.fastest()),
        us(stat.fastest()),
    ))
}

fn timed(work: &dyn Fn() -> Result<()>) -> Result<Spent> {
    let watch = Watch::start();
    work()?;
    Ok(watch.stop())
}
