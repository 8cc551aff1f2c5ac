//! The collector's grant table: what was counted, what each writer may have written beyond that,
//! and what can be granted.
//!
//! The rule that everything rests on: what was counted, plus what every writer may still write
//! beyond what the count has seen, never exceeds the limit. Totals of a writer only grow, so a
//! table read late grants too little, never too much.

use std::collections::BTreeMap;

use super::documents::{Granted, Grants, Note, hex};
use crate::layout::FORMAT;

/// Most bytes a grant is ahead of what its writer used.
const MOST_AHEAD: u64 = 256 << 20;
/// Part of the limit that one grant may be ahead, and that all may be together.
const ONE_AHEAD: u64 = 16;
const ALL_AHEAD: u64 = 8;

/// How far ahead of its use a writer's grant may be, in bytes.
pub(crate) fn ahead(limit: u64, writers: usize) -> u64 {
    let fair = limit / ALL_AHEAD / (writers.max(1) as u64);
    MOST_AHEAD.min(limit / ONE_AHEAD).min(fair)
}

/// One writer as the collector knows it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Account {
    granted: u64,
    /// The total that the count has seen.
    seen: u64,
    reserved: u64,
    committed: u64,
    /// Bytes of writes that had not ended by its last note.
    in_flight: u64,
    wanted: u64,
    /// It writes no more; a count that begins now sees all it ever wrote.
    gone: bool,
}

impl Account {
    fn unseen(&self) -> u64 {
        self.granted.saturating_sub(self.seen)
    }

    /// Bytes of the writes that were begun and that the count has not seen.
    fn written(&self) -> u64 {
        self.reserved.saturating_sub(self.seen)
    }
}

/// The state of the writers when a count began.
#[derive(Debug, Clone, Default)]
pub struct Snapshot(BTreeMap<u64, (u64, bool)>);

/// See the module.
#[derive(Debug, Clone, Default)]
pub(crate) struct GrantTable {
    pub(crate) limit: u64,
    /// Bytes as last counted, less what was removed since; none where that is void.
    pub(crate) counted: Option<u64>,
    /// Records as last counted.
    pub(crate) records: u64,
    accounts: BTreeMap<u64, Account>,
    /// Something was removed since the last count began, which may have seen it or not.
    pub(crate) in_doubt: bool,
    /// A writer wrote while the last count listed, so that some of it may be counted twice. What a
    /// writer of another process has not noted by then is unknown here until the next count.
    blurred: bool,
}

impl GrantTable {
    /// The grant table a collector left, or an empty one.
    pub(crate) fn taken_over(left: Option<&Grants>) -> Self {
        let Some(left) = left else {
            return Self::default();
        };
        let account = |(id, granted): (&String, &Granted)| {
            let account = Account {
                granted: granted.granted,
                seen: granted.seen,
                reserved: granted.seen,
                committed: granted.seen,
                ..Account::default()
            };
            Some((u64::from_str_radix(id, 16).ok()?, account))
        };
        Self {
            limit: left.limit,
            counted: left.counted,
            records: left.records,
            accounts: left.writers.iter().filter_map(account).collect(),
            in_doubt: false,
            blurred: false,
        }
    }

    /// The grant table as a document.
    pub(crate) fn document(&self) -> Grants {
        let writer = |(id, account): (&u64, &Account)| {
            let granted = Granted {
                granted: account.granted,
                seen: account.seen,
            };
            (hex(*id), granted)
        };
        Grants {
            format: FORMAT,
            limit: self.limit,
            counted: self.counted,
            used: self.used(),
            records: self.records,
            writers: self.accounts.iter().map(writer).collect(),
        }
    }

    /// Ids of all writers.
    pub(crate) fn writers(&self) -> Vec<u64> {
        self.accounts.keys().copied().collect()
    }

    /// Whether there is such a writer.
    pub(crate) fn knows(&self, writer: u64) -> bool {
        self.accounts.contains_key(&writer)
    }

    /// How far ahead a grant may be now.
    pub(crate) fn ahead(&self) -> u64 {
        let living = self.sum(|account| u64::from(!account.gone));
        ahead(self.limit, living as usize)
    }

    fn sum(&self, of: impl Fn(&Account) -> u64) -> u64 {
        self.accounts.values().map(of).sum()
    }

    /// The most that can lie below the root, whatever the writers do with their grants; `None`
    /// before a count.
    pub(crate) fn bound(&self) -> Option<u64> {
        let unseen = self.sum(Account::unseen);
        self.counted.map(|counted| counted.saturating_add(unseen))
    }

    /// What lies below the root as far as is known, without what `writer` wrote (it has newer
    /// figures itself), and the total of that writer that is included.
    pub(crate) fn used_by_others(&self, writer: u64) -> (u64, u64) {
        let own = self.accounts.get(&writer).copied().unwrap_or_default();
        (self.used().saturating_sub(own.written()), own.seen)
    }

    /// Bytes below the root, as far as is known.
    pub(crate) fn used(&self) -> u64 {
        let written = self.sum(Account::written);
        self.counted.unwrap_or(0).saturating_add(written)
    }

    /// Whether the last count may have seen some of what is charged beyond it too, and another one
    /// would see that for sure.
    pub(crate) fn is_blurred(&self) -> bool {
        self.blurred && self.since_count() > 0
    }

    /// Bytes of all writes that were begun.
    pub(crate) fn reserved(&self) -> u64 {
        self.sum(|account| account.reserved)
    }

    /// Bytes written since the last count.
    pub(crate) fn since_count(&self) -> u64 {
        self.sum(|account| account.committed.saturating_sub(account.seen))
    }

    /// Enters the note of a writer.
    pub(crate) fn note(&mut self, writer: u64, note: &Note) {
        let account = self.accounts.entry(writer).or_default();
        if account.gone {
            return; // it took another id when it returned
        }
        account.reserved = account.reserved.max(note.reserved);
        account.committed = account.committed.max(note.committed);
        account.in_flight = note.reserved.saturating_sub(note.committed);
        // It may know of a grant that we do not: the directory was emptied.
        account.granted = account.granted.max(note.granted);
        account.wanted = note.wanted;
        if note.closed {
            account.granted = account.granted.min(note.reserved).max(account.seen);
            account.gone = true;
        }
    }

    /// A writer has ended.
    pub(crate) fn gone(&mut self, writer: u64) {
        if let Some(account) = self.accounts.get_mut(&writer) {
            account.gone = true;
            account.wanted = 0;
        }
    }

    /// Whether a writer is known to have ended.
    pub(crate) fn is_gone(&self, writer: u64) -> bool {
        let account = self.accounts.get(&writer);
        account.is_some_and(|account| account.gone)
    }

    /// Whether a writer has ended whose writes the last count may have missed: only another count
    /// finds what it wrote, and frees the rest of its grant.
    pub(crate) fn has_gone_unseen(&self) -> bool {
        let mut accounts = self.accounts.values();
        accounts.any(|account| account.gone && account.unseen() > 0)
    }

    /// Before a count: what it will see for sure.
    pub(crate) fn begin_count(&mut self) -> Snapshot {
        self.in_doubt = false;
        let seen = |(id, account): (&u64, &Account)| {
            let seen = match account.gone {
                true => account.granted,
                false => account.committed,
            };
            (*id, (seen, account.gone))
        };
        Snapshot(self.accounts.iter().map(seen).collect())
    }

    /// A count that began with `before` found this. The answer: writers that are in it whole and
    /// forgotten now.
    pub(crate) fn end_count(&mut self, before: &Snapshot, total: u64, records: u64) -> Vec<u64> {
        self.counted = Some(total);
        self.records = records;
        let mut forgotten = Vec::new();
        // One that turned up since is charged with all it wrote, until the next count.
        self.accounts.retain(|id, account| match before.0.get(id) {
            Some((_, true)) => {
                forgotten.push(*id);
                false
            }
            Some((seen, false)) => {
                account.seen = *seen;
                true
            }
            None => true,
        });
        let wrote = |account: &Account| account.committed > account.seen || account.in_flight > 0;
        self.blurred = self.accounts.values().any(wrote);
        forgotten
    }

    /// Records were removed.
    pub(crate) fn removed(&mut self, records: u64, bytes: u64) {
        self.counted = self.counted.map(|counted| counted.saturating_sub(bytes));
        self.records = self.records.saturating_sub(records);
    }

    /// Grants what is needed and free. Whether a writer got less than it needs at once.
    pub(crate) fn grant(&mut self) -> bool {
        let Some(bound) = self.bound() else {
            return true;
        };
        let (ahead, mut room) = (self.ahead(), self.limit.saturating_sub(bound));
        let mut short = false;
        let accounts = self.accounts.values_mut();
        for account in accounts.filter(|account| account.wanted > 0 && !account.gone) {
            let target = account.reserved.saturating_add(ahead.max(account.wanted));
            let needed = account.reserved.saturating_add(account.wanted);
            let give = target.saturating_sub(account.granted).min(room);
            if account.granted + give < needed {
                short = true;
                continue; // too little to be of use
            }
            account.granted += give;
            room -= give;
        }
        short
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn note(reserved: u64, committed: u64, wanted: u64) -> Note {
        Note {
            reserved,
            committed,
            wanted,
            ..Note::default()
        }
    }

    fn counted(limit: u64, total: u64) -> GrantTable {
        let mut table = GrantTable {
            limit,
            ..GrantTable::default()
        };
        let before = table.begin_count();
        table.end_count(&before, total, 1);
        table
    }

    #[test]
    fn nothing_is_granted_before_a_count_nor_beyond_the_limit() {
        let mut table = GrantTable {
            limit: 1600,
            ..GrantTable::default()
        };
        table.note(1, &note(0, 0, 10));
        assert!(table.grant() && table.bound().is_none());
        let mut table = counted(1600, 1000);
        table.note(1, &note(0, 0, 10));
        assert!(!table.grant());
        assert_eq!(table.bound(), Some(1100), "a sixteenth ahead");
        let mut table = counted(1600, 1595);
        table.note(1, &note(0, 0, 10));
        assert!(table.grant(), "too little to be of use");
        assert_eq!(table.bound(), Some(1595));
    }

    #[test]
    fn another_count_is_wanted_only_where_it_would_see_more() {
        let mut table = counted(1600, 0);
        let count = |table: &mut GrantTable, meanwhile: Option<Note>, total| {
            let before = table.begin_count();
            meanwhile.iter().for_each(|note| table.note(1, note));
            table.end_count(&before, total, 1);
        };
        table.note(1, &note(64, 0, 0)); // a segment is open
        count(&mut table, None, 64);
        assert!(!table.is_blurred(), "nothing has ended since");
        table.note(1, &note(10, 10, 0)); // and was sealed with less in it
        assert!(table.is_blurred());
        count(&mut table, None, 10);
        assert!(!table.is_blurred(), "though it had been granted more");
        count(&mut table, Some(note(20, 20, 0)), 20);
        assert!(table.is_blurred() && table.used() > 20);
        count(&mut table, None, 20);
        assert!(!table.is_blurred());
    }

    #[test]
    fn a_count_sees_what_was_committed_before_it_and_all_of_the_gone() {
        let mut table = counted(1600, 0);
        table.note(1, &note(0, 0, 10));
        table.note(2, &note(0, 0, 10));
        table.grant();
        table.note(1, &note(60, 40, 0));
        table.gone(2);
        let before = table.begin_count();
        table.note(1, &note(80, 80, 0));
        let granted = table.document().writers[&hex(1)].granted;
        assert_eq!(table.end_count(&before, 50, 5), [2]);
        assert_eq!(table.bound(), Some(50 + granted - 40));
        assert_eq!(table.writers(), [1]);
    }

    #[test]
    fn the_next_collector_goes_on_from_the_document() {
        let mut table = counted(1600, 300);
        table.note(1, &note(0, 0, 10));
        table.grant();
        let next = GrantTable::taken_over(Some(&table.document()));
        assert_eq!((next.bound(), next.limit), (table.bound(), 1600));
        // A document that was lost: the writer knows of its grant.
        let mut lost = counted(1600, 300);
        lost.note(
            1,
            &Note {
                granted: 100,
                ..note(70, 70, 0)
            },
        );
        assert_eq!(lost.bound(), Some(400));
    }

    proptest! {
        /// Writers use what they were granted, in any order and as late as may be: what lies there
        /// never exceeds the limit, with counts and another collector at any time.
        #[test]
        fn the_limit_holds(acts in prop::collection::vec((0..4u64, 0..4u8, 1..200u64), 1..200)) {
            let limit = 2000;
            let mut table = counted(limit, 0);
            let mut written: BTreeMap<u64, u64> = BTreeMap::new();
            let mut known: BTreeMap<u64, u64> = BTreeMap::new();
            for (writer, act, bytes) in acts {
                let total = written.entry(writer).or_default();
                match act {
                    0 => {
                        let granted = known.get(&writer).copied().unwrap_or(0);
                        *total = (*total + bytes).min(granted.max(*total));
                    }
                    1 => {
                        table.note(writer, &note(*total, *total, bytes));
                        table.grant();
                        let account = table.document().writers[&hex(writer)];
                        known.insert(writer, account.granted);
                    }
                    2 => {
                        let before = table.begin_count();
                        table.end_count(&before, written.values().sum(), 1);
                    }
                    _ => table = GrantTable::taken_over(Some(&table.document())),
                }
                prop_assert!(written.values().sum::<u64>() <= limit);
                prop_assert!(table.bound().is_some_and(|bound| written.values().sum::<u64>() <= bound));
            }
        }
    }

    #[test]
    fn who_is_gone_with_something_unseen_asks_for_a_count() {
        let mut table = counted(1000, 0);
        table.note(1, &note(0, 0, 10));
        table.grant();
        let before = table.begin_count();
        table.end_count(&before, 0, 0);
        assert!(!table.has_gone_unseen(), "it may still write");
        table.gone(1);
        assert!(table.has_gone_unseen());
        let before = table.begin_count();
        assert_eq!(table.end_count(&before, 0, 0), [1]);
        assert!(!table.has_gone_unseen(), "it is forgotten");
    }
}
